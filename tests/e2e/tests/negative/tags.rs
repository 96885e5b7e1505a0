//! Tags, notes, times and ages that are none: refused before anything is touched.

use anyhow::{Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};
use stillframe_harness::health::{checkpoints, expect_untouched, expect_whole};

#[test]
fn what_is_no_tag_note_time_or_age_is_refused_and_nothing_is_lost() -> Result<()> {
    let guest = Setup::small(Kind::Private, "annotated").booted()?;
    let mut monitor = guest.second_monitor()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let pid = guest.pid_text();
    stillframe.ok(&["checkpoint", "--pid", &pid, "--tag", "kept"])?;
    let ids = checkpoints(&stillframe)?;

    let (long_tag, long_note) = ("x".repeat(65), "ü".repeat(513));
    let bad_annotations: [(&[&str], &str); 8] = [
        (&["--tag", "a,b"], "an option of its own"),
        (&["--tag", "a b"], "' '"),
        (&["--tag", "a\nb"], "'\\n'"),
        (&["--tag", ""], "the tag is empty"),
        (&["--tag", "/a"], "begin it with a letter or a digit"),
        (&["--tag", &long_tag], "at most 64"),
        (&["--note", &long_note], "1026 bytes, at most 1024"),
        (&["--note", "two\nlines"], "control character"),
    ];
    let watch = ["watch", "--pid", &pid, "--every", "1s", "--count", "1"];
    for command in [&["checkpoint", "--pid", &pid][..], &watch] {
        for (options, words) in &bad_annotations {
            let line = [command, options].concat();
            let said = stillframe.fails(&line, 2)?;
            ensure!(said.contains(words), "{line:?}: {said}");
        }
        let many: Vec<String> = (0..33).map(|number| format!("--tag={number}")).collect();
        let many = many.iter().map(String::as_str);
        let line: Vec<&str> = command.iter().copied().chain(many).collect();
        let said = stillframe.fails(&line, 2)?;
        ensure!(said.contains("at most 32 tags, these are 33"), "{said}");
    }

    let bad_choices: [(&[&str], &str); 9] = [
        (&["list", "--since", "yesterday"], "is not a point in time"),
        (&["list", "--until", "2026-02-30"], "is not a point in time"),
        (&["list", "--until", "2026-11-24T13:00:00"], "+01:00"),
        (&["list", "--since", "5m"], "write min or mo"),
        (&["list", "--last", "0"], "--last"),
        (&["list", "--tag", "a b"], "' '"),
        (&["forget", "--keep-within", "5m"], "write min or mo"),
        (&["forget", "--keep-within", "0d"], "is zero"),
        (&["forget", "--keep-tag", "a,b"], "an option of its own"),
    ];
    for (line, words) in bad_choices {
        let said = stillframe.fails(line, 2)?;
        ensure!(said.contains(words), "{line:?}: {said}");
    }
    expect_whole(&stillframe, &ids)?;
    expect_untouched(&guest, &mut monitor)
}

/// A filter is no request, and a misspelt tag costs nothing.
#[test]
fn rules_that_would_keep_nothing_forget_nothing() -> Result<()> {
    let guest = Setup::small(Kind::Private, "spared").booted()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let watch = ["watch", "--vm", "spared", "--every", "50ms", "--count", "3"];
    stillframe.ok(&[&watch[..], &["--tag", "nightly"]].concat())?;
    let ids = checkpoints(&stillframe)?;
    let said = stillframe.fails(&["forget", "--keep-tag", "nihgtly", "--prune"], 2)?;
    ensure!(said.contains("no checkpoint of VM 'spared'"), "{said}");
    stillframe.fails(&["forget", "latest", "--tag", "other"], 2)?;
    stillframe.fails(&["forget", "--tag", "nightly"], 2)?;
    expect_whole(&stillframe, &ids)?;
    // No checkpoint has the tag, so the rule looks at none.
    stillframe.ok(&["forget", "--tag", "nihgtly", "--keep-last", "1"])?;
    expect_whole(&stillframe, &ids)
}
