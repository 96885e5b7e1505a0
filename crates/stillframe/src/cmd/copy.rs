//! `copy`: copies checkpoints to another repository.

use serde_json::{Value, json};
use stillframe_repo::{Copied, Copies, Progress, Repository};

use super::{Context, short};
use crate::args::CopyArgs;
use crate::password;
use crate::progress::Meter;
use crate::table;
use crate::unlocked;

/// Copies one checkpoint after the other. The first error ends the command; finished copies stay.
pub fn run(context: &Context, args: &CopyArgs) -> anyhow::Result<()> {
    let mut source = context.open()?;
    let mut target = open_target(args)?;
    let vm = args.vm.as_deref();
    // All names are resolved first, because one may be wrong.
    let ids = args.ids.iter().map(|name| source.resolve(name, vm));
    let ids = ids.collect::<Result<Vec<_>, _>>()?;
    let interrupts = context.listen(
        1,
        "interrupted: discarding the current copy; finished copies stay",
    )?;
    let mut meter = Meter::new(context.console);
    let mut copies = Copies::of(&target)?;
    for (id, _) in ids {
        let copied = interrupts.interruptible(|| {
            let mut show = |progress: Progress| {
                meter.show(progress.into());
                interrupts.step();
            };
            let wait = args.lock.lock_wait;
            source.copy_to(&id, &mut target, &mut copies, wait, &mut show)
        })??;
        let words = || words(&id.to_string(), &copied);
        context
            .console
            .result(&object(&id.to_string(), &copied), words)?;
    }
    Ok(())
}

/// Opens the repository to copy to, as [`Context::open`] opens the other one.
fn open_target(args: &CopyArgs) -> anyhow::Result<Repository> {
    if let Ok(id) = Repository::id_of(&args.to)
        && let Some(key) = unlocked::find(id)
    {
        return Ok(Repository::open_with(&args.to, &key)?);
    }
    let password = password::of_target(&args.to_password())?;
    Ok(Repository::open(&args.to, &password)?)
}

fn object(from: &str, copied: &Copied) -> Value {
    json!({
        "checkpoint": from,
        "copy": copied.id.to_string(),
        "known": copied.known,
        "original": copied.original,
        "pages": copied.pages,
        "bytes_stored": copied.bytes_stored,
    })
}

fn words(from: &str, copied: &Copied) -> String {
    let (from, copy) = (short(from), copied.id.to_string());
    match copied.known {
        true => format!(
            "the other repository already has {from}, as {}",
            short(&copy)
        ),
        false => format!(
            "copied {from} as {}: {}, {} stored",
            short(&copy),
            table::count(copied.pages.total, "page"),
            table::bytes(copied.bytes_stored),
        ),
    }
}

#[cfg(test)]
mod tests {
    use stillframe_repo::{CheckpointId, Original, PageCounts};

    use super::*;

    #[test]
    fn a_copy_has_its_own_id() {
        let id = |digits: &str| CheckpointId::from_hex(&digits.repeat(8)).unwrap();
        let mut copied = Copied {
            original: Original {
                repository: "r".to_owned(),
                checkpoint: id("1a2b3c4d"),
            },
            id: id("5e6f7a8b"),
            known: false,
            pages: PageCounts {
                total: 7,
                ..PageCounts::default()
            },
            bytes_stored: 1 << 20,
        };
        let from = copied.original.checkpoint.to_string();
        let text = words(&from, &copied);
        assert_eq!(text, "copied 1a2b3c4d as 5e6f7a8b: 7 pages, 1.0 MiB stored");
        let object = object(&from, &copied);
        assert_eq!(object["original"]["checkpoint"], from);
        copied.known = true;
        assert_eq!(
            words(&from, &copied),
            "the other repository already has 1a2b3c4d, as 5e6f7a8b"
        );
    }
}
