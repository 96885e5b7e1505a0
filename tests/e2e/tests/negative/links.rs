//! Connections between hosts that do not come about: one clear error on each side, and the receiver waits on.

use std::fs;
use std::io::Write;
use std::net::TcpStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::running::Running;

/// Makes an authority and the certificate of a host; the host's directory.
fn host(stillframe: &Stillframe, folder: &Path, name: &str) -> Result<String> {
    let path = |part: &str| folder.join(format!("{name}-{part}")).display().to_string();
    let (authority, host) = (path("authority"), path("host"));
    stillframe.ok(&["certs", "authority", &authority])?;
    let line = ["certs", "host", "127.0.0.1", "a.example"];
    let more = ["--authority", &authority, "--output", &host];
    stillframe.ok(&[&line[..], &more].concat())?;
    // Neither is written over.
    let said = stillframe.fails(&["certs", "authority", &authority], 1)?;
    ensure!(said.contains("File exists"), "{said}");
    let said = stillframe.fails(&[&line[..], &more].concat(), 1)?;
    ensure!(said.contains("File exists"), "{said}");
    Ok(host)
}

fn receiver(stillframe: &Stillframe, folder: &Path, more: &[&str]) -> Result<(Running, String)> {
    let qmp = folder.join("qmp").display().to_string();
    let line = [
        "receive",
        "--json",
        "--listen",
        "127.0.0.1:0",
        "--qmp",
        &qmp,
    ];
    let mut receiver = Running::start(stillframe.command(&[&line[..], more].concat())?)?;
    let listening = &receiver.wait_results(1)?[0]["listening"];
    let at = listening.as_str().context("no address")?.to_owned();
    Ok((receiver, at))
}

#[test]
fn a_host_that_is_not_let_in_gets_the_reason_and_the_receiver_waits_on() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let folder = folder.path();
    let stillframe = Stillframe::init(&folder.join("repo"))?;
    let own = host(&stillframe, folder, "own")?;
    let other = host(&stillframe, folder, "other")?;
    let refused = |at: &str, more: &[&str], words: &str| -> Result<()> {
        // No VM is needed: nothing is attached before there is a connection.
        let line = ["migrate", "--pid", "1", "--to", at];
        let said = stillframe.fails(&[&line[..], more].concat(), 1)?;
        ensure!(said.contains(words), "{more:?}: {said}");
        Ok(())
    };
    let with = |certs: &str| ["--certs".to_owned(), certs.to_owned()];
    let (own, other) = (with(&own), with(&other));
    let (own, other) = (
        own.each_ref().map(String::as_str),
        other.each_ref().map(String::as_str),
    );
    let plain = ["--plain-text"];

    let (mut tls, at) = receiver(&stillframe, folder, &own)?;
    refused(&at, &plain, "wants encryption")?;
    tls.wait_words("does not speak TLS")?;
    refused(&at, &other, "another authority has signed it")?;
    tls.wait_words("refuses this host's certificate")?;
    TcpStream::connect(&at)?.write_all(b"GET / HTTP/1.1\r\n\r\n")?;
    tls.wait_words_times("does not speak TLS", 2)?;
    ensure!(!tls.has_ended()?, "{}", tls.err());
    tls.kill()?;

    let (mut strict, at) = receiver(&stillframe, folder, &[&own[..], &["--allow", "b"]].concat())?;
    refused(&at, &own, "does not let this host in")?;
    strict.wait_words("its certificate is for a.example")?;
    strict.kill()?;

    let (mut open, at) = receiver(&stillframe, folder, &plain)?;
    refused(&at, &own, "does not speak TLS")?;
    open.wait_words("wants encryption")?;
    open.kill()?;
    open.wait_exit()?;
    refused(&at, &plain, "cannot connect to")?;

    for (line, code, words) in [
        (&["--to", "x:y:1"][..], 2, "is no address"),
        (&["--to", &at], 2, "--certs"),
        (
            &["--to", &at, "--plain-text", "--certs", "/x"],
            2,
            "cannot be used with",
        ),
        (
            &["--to", &at, "--certs", "/nowhere"],
            1,
            "cannot read /nowhere/ca-cert.pem",
        ),
    ] {
        let line = [&["migrate", "--pid", "1"], line].concat();
        let said = stillframe.fails(&line, code)?;
        ensure!(said.contains(words), "{line:?}: {said}");
    }
    let key = Path::new(own[1]).join("key.pem");
    fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
    refused(&at, &own, "other users have access to the key")
}
