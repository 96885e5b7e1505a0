//! `key`: manages the passwords of a repository.

use serde_json::{Value, json};
use stillframe_repo::{KeyInfo, Keyring};

use super::{Context, local_time, short};
use crate::args::{KeyArgs, KeyCommand};
use crate::password;
use crate::table::{Align, Table};

/// The note on access that remains after a password was removed.
const NOT_REENCRYPTED: &str = "nothing was re-encrypted: an old copy of the removed key file with its password, or a key \
     kept by `unlock`, still opens the repository; if either may be in the wrong hands, `copy` to a new repository";

/// Runs the subcommand.
pub fn run(context: &Context, args: &KeyArgs) -> anyhow::Result<()> {
    let directory = context.directory()?;
    // Required also while the repository is unlocked: to change passwords, a user must know one.
    let password = password::of_existing(&context.global.password)?;
    let keyring = Keyring::open(directory, &password)?;
    match &args.command {
        KeyCommand::List => list(context, &keyring),
        KeyCommand::Add(new) => {
            let added = keyring.add(&password::of_new_key(&new.password())?)?;
            let words = || format!("added key {}", short(&added));
            context.console.result(&json!({ "added": added }), words)?;
            Ok(())
        }
        KeyCommand::Remove(name) => {
            let removed = keyring.remove(&name.key)?;
            let words = || format!("removed key {}", short(&removed));
            context
                .console
                .result(&json!({ "removed": removed }), words)?;
            context.console.note(NOT_REENCRYPTED);
            Ok(())
        }
        KeyCommand::Passwd(new) => {
            let (added, removed) = keyring.change(&password::of_new_key(&new.password())?)?;
            let object = json!({ "added": added, "removed": removed });
            context.console.result(&object, || {
                format!(
                    "changed the password: key {} replaces key {}",
                    short(&added),
                    short(&removed)
                )
            })?;
            context.console.note(NOT_REENCRYPTED);
            Ok(())
        }
    }
}

fn list(context: &Context, keyring: &Keyring) -> anyhow::Result<()> {
    let keys = keyring.list()?;
    let objects: Vec<Value> = keys.iter().map(object).collect();
    context.console.result(&objects, || words(&keys))?;
    Ok(())
}

fn object(key: &KeyInfo) -> Value {
    let label = key.label.as_ref();
    json!({
        "key": key.id,
        "created": label.map(|label| label.created.to_string()),
        "host": label.map(|label| &label.host),
        "user": label.map(|label| &label.user),
        "used": key.used,
        "damage": key.damage,
    })
}

fn words(keys: &[KeyInfo]) -> String {
    let columns = ["", "KEY", "CREATED", "BY", ""].map(|name| (name, Align::Left));
    let mut table = Table::new(&columns);
    for key in keys {
        let unknown = || "-".to_owned();
        let label = key.label.as_ref();
        table.row([
            if key.used { "*" } else { "" }.to_owned(),
            short(&key.id).to_owned(),
            label.map_or_else(unknown, |label| local_time(label.created)),
            label.map_or_else(unknown, |label| format!("{}@{}", label.user, label.host)),
            key.damage.clone().unwrap_or_default(),
        ]);
    }
    format!(
        "{}\n* this key's password opened the repository",
        table.render().trim_end()
    )
}

#[cfg(test)]
mod tests {
    use stillframe_repo::Label;

    use super::*;

    #[test]
    fn the_key_in_use_is_marked() {
        let key = |digits: &str, used: bool| KeyInfo {
            id: digits.repeat(8),
            label: used.then(|| Label {
                created: jiff::Timestamp::UNIX_EPOCH,
                host: "h\u{1b}[2J".to_owned(),
                user: "root".to_owned(),
            }),
            used,
            damage: None,
        };
        let text = words(&[key("1a2b3c4d", true), key("5e6f7a8b", false)]);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("*  1a2b3c4d  "), "{text}");
        assert!(lines[2].starts_with("   5e6f7a8b  "), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }
}
