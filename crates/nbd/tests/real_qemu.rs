//! The server with QEMU's own clients: `qemu-img`, `qemu-io`, `qemu-nbd`, and a QEMU that copies a disk while it is open.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Arc;
use std::thread;

use stillframe_nbd::{Export, Extent, Server};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 64 * MIB + 512;
/// Ranges of the disk with data. The rest are holes.
const DATA: [Range<u64>; 4] = [
    0..MIB,
    3 * MIB + 4096..20 * MIB,
    40 * MIB..40 * MIB + 512,
    64 * MIB..DISK_BYTES,
];
/// Of the export `bad`: bytes that cannot be read.
const BAD: Range<u64> = 5 * MIB..5 * MIB + 512;

/// A disk in memory.
struct Disk {
    content: Vec<u8>,
    bad: Range<u64>,
}

fn disk(bad: Range<u64>) -> Disk {
    let mut content = vec![0; DISK_BYTES as usize];
    for range in DATA {
        let place = &mut content[range.start as usize..range.end as usize];
        for (at, byte) in range.zip(place) {
            *byte = byte_at(at);
        }
    }
    Disk { content, bad }
}

/// The data at an offset. It is no zero, and differs from sector to sector.
fn byte_at(at: u64) -> u8 {
    ((at / 512) % 255) as u8 + 1
}

impl Export for Disk {
    fn bytes(&self) -> u64 {
        DISK_BYTES
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let range = offset..offset + into.len() as u64;
        if self.bad.start < range.end && range.start < self.bad.end {
            return Err(io::Error::other("a bad block"));
        }
        into.copy_from_slice(&self.content[range.start as usize..range.end as usize]);
        Ok(())
    }

    fn allocation(&self, range: Range<u64>) -> io::Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let mut at = range.start;
        for data in DATA.into_iter().filter(|data| data.end > range.start) {
            if at < data.start {
                extents.push(Extent {
                    bytes: at..data.start,
                    flags: Extent::HOLE | Extent::ZERO,
                });
            }
            at = at.max(data.start);
            extents.push(Extent {
                bytes: at..data.end,
                flags: 0,
            });
            at = data.end;
        }
        Ok(extents)
    }
}

/// A server that listens, until the test ends.
struct Listening {
    folder: TempDir,
}

impl Listening {
    fn new() -> Listening {
        let folder = tempfile::tempdir().expect("folder");
        let listener = UnixListener::bind(folder.path().join("socket")).expect("listening");
        let (good, bad): (Arc<dyn Export>, Arc<dyn Export>) =
            (Arc::new(disk(0..0)), Arc::new(disk(BAD)));
        let exports = [("disk-0".to_owned(), good), ("bad".to_owned(), bad)];
        let server = Arc::new(Server::new(BTreeMap::from(exports)));
        thread::spawn(move || {
            for socket in listener.incoming() {
                let server = Arc::clone(&server);
                thread::spawn(move || server.serve(socket.expect("a client")));
            }
        });
        Listening { folder }
    }

    fn url(&self, export: &str) -> String {
        let socket = self.file("socket");
        format!("nbd+unix:///{export}?socket={}", socket.display())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

fn output(program: &str, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    let output = command.args(arguments).stdin(Stdio::null()).output();
    output.unwrap_or_else(|error| panic!("{program}, which `cargo xtask setup` installs: {error}"))
}

/// Runs a program that must succeed, and returns what it prints.
fn run(program: &str, arguments: &[&str]) -> String {
    let output = output(program, arguments);
    let (out, error) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {out}{error}");
    out
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn words(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// The start, length and kind of each extent in the output of `qemu-img map`, which has one line for each.
fn extents(map: &str) -> Vec<(u64, u64, bool)> {
    let number = |line: &str, key: &str| {
        let (_, rest) = line.split_once(&format!("\"{key}\": ")).expect(key);
        let end = rest.find(|letter: char| !letter.is_ascii_digit());
        rest[..end.expect("an end")].parse().expect("a number")
    };
    let lines = map.lines().filter(|line| line.contains("\"start\""));
    lines
        .map(|line| {
            let zero = line.contains("\"zero\": true");
            (number(line, "start"), number(line, "length"), zero)
        })
        .collect()
}

#[test]
fn qemu_img_copies_maps_and_compares() {
    let listening = Listening::new();
    let url = listening.url("disk-0");
    // Two clients at once.
    let copies = ["one", "two"].map(|name| listening.file(name));
    thread::scope(|scope| {
        for copy in &copies {
            let arguments = ["convert", "-f", "raw", "-O", "raw", &url, words(copy)];
            scope.spawn(move || run("qemu-img", &arguments));
        }
    });
    let expected = disk(0..0).content;
    for copy in &copies {
        assert!(std::fs::read(copy).expect("a copy") == expected);
        let comparison = run(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", &url, words(copy)],
        );
        assert!(comparison.contains("identical"), "{comparison}");
    }
    let map = run("qemu-img", &["map", "-f", "raw", "--output=json", &url]);
    let mut found = Vec::new();
    let mut at = 0;
    for data in DATA {
        if at < data.start {
            found.push((at, data.start - at, true));
        }
        found.push((data.start, data.end - data.start, false));
        at = data.end;
    }
    assert_eq!(extents(&map), found, "{map}");
    let other = listening.url("nothing");
    let refused = output("qemu-img", &["info", "-f", "raw", &other]);
    let error = text(&refused.stderr);
    assert!(
        !refused.status.success() && error.contains("nothing"),
        "{error}"
    );
}

#[test]
fn qemu_nbd_lists_the_exports() {
    let listening = Listening::new();
    let socket = listening.file("socket");
    let list = run("qemu-nbd", &["--list", "-k", words(&socket)]);
    let described = [
        "exports available: 2".to_owned(),
        "'disk-0'".to_owned(),
        format!("size:  {DISK_BYTES}"),
        "( readonly flush multi )".to_owned(),
        "base:allocation".to_owned(),
    ];
    for words in described {
        assert!(list.contains(&words), "{words}: {list}");
    }
}

#[test]
fn qemu_io_reads_and_cannot_write() {
    let listening = Listening::new();
    let url = listening.url("disk-0");
    let read = |offset: u64, length: u64, byte: u8| format!("read -P {byte} {offset} {length}");
    let reads = [
        read(0, 512, byte_at(0)),
        read(40 * MIB, 512, byte_at(40 * MIB)),
        read(40 * MIB + 512, 24 * MIB - 512, 0),
        read(64 * MIB, 512, byte_at(64 * MIB)),
        read(MIB, 2 * MIB, 0),
        // Not at a sector.
        read(3 * MIB + 4096 + 5, 100, byte_at(3 * MIB + 4096)),
        "flush".to_owned(),
    ];
    let mut arguments = vec!["-r", "-f", "raw"];
    arguments.extend(reads.iter().flat_map(|read| ["-c", read]));
    arguments.push(&url);
    let out = run("qemu-io", &arguments);
    assert!(!out.contains("failed"), "{out}");
    assert_eq!(out.matches("bytes at offset").count(), 6, "{out}");
    let writing = output("qemu-io", &["-f", "raw", "-c", "write 0 512", &url]);
    let out = text(&writing.stdout) + &text(&writing.stderr);
    assert!(!writing.status.success(), "{out}");
}

#[test]
fn a_block_that_cannot_be_read_is_an_error_to_qemu_and_the_others_are_read() {
    let listening = Listening::new();
    let url = listening.url("bad");
    let bad = format!("read {} 4096", BAD.start - 1024);
    let good = format!("read -P {} {} 512", byte_at(BAD.end), BAD.end);
    let arguments = ["-r", "-f", "raw", "-c", &bad, "-c", &good, &url];
    let output = output("qemu-io", &arguments);
    let out = text(&output.stdout) + &text(&output.stderr);
    assert!(out.contains("Input/output error"), "{out}");
    assert!(out.contains("read 512/512 bytes"), "{out}");
}

/// A QEMU without a machine, and its monitor.
struct Qemu {
    process: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Qemu {
    fn start() -> Qemu {
        let process = Command::new("qemu-system-x86_64")
            .args(["-machine", "none", "-nodefaults", "-display", "none"])
            .args(["-qmp", "stdio"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut process = process.expect("qemu-system-x86_64, which `cargo xtask setup` installs");
        let answers = BufReader::new(process.stdout.take().expect("piped"));
        let mut qemu = Qemu { process, answers };
        qemu.command("qmp_capabilities", "{}");
        qemu
    }

    fn command(&mut self, name: &str, arguments: &str) {
        let line = format!("{{\"execute\": \"{name}\", \"arguments\": {arguments}}}\n");
        let input = self.process.stdin.as_mut().expect("piped");
        input.write_all(line.as_bytes()).expect("sent");
        self.wait("\"return\"");
    }

    /// Waits for a line with this text, and returns it.
    fn wait(&mut self, text: &str) -> String {
        loop {
            let mut line = String::new();
            let bytes = self.answers.read_line(&mut line).expect("a line");
            assert!(bytes > 0, "QEMU has ended");
            assert!(!line.contains("\"error\""), "{line}");
            if line.contains(text) {
                return line;
            }
        }
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn an_overlay_gets_the_rest_of_the_disk_by_block_stream() {
    let listening = Listening::new();
    let url = listening.url("disk-0");
    let overlay = listening.file("overlay");
    let overlay = words(&overlay);
    run(
        "qemu-img",
        &[
            "create", "-q", "-f", "qcow2", "-b", &url, "-F", "raw", overlay,
        ],
    );
    let write = format!("write -P 99 {} 4096", 4 * MIB);
    run("qemu-io", &["-f", "qcow2", "-c", &write, overlay]);
    let mut qemu = Qemu::start();
    let node = format!(
        "{{\"driver\": \"qcow2\", \"node-name\": \"disk\", \"file\": \
         {{\"driver\": \"file\", \"filename\": \"{overlay}\"}}}}"
    );
    qemu.command("blockdev-add", &node);
    qemu.command(
        "block-stream",
        "{\"job-id\": \"copy\", \"device\": \"disk\"}",
    );
    let event = qemu.wait("BLOCK_JOB_COMPLETED");
    assert!(event.contains(&format!("\"len\": {DISK_BYTES}")), "{event}");
    qemu.command("blockdev-del", "{\"node-name\": \"disk\"}");
    drop(qemu);
    // It needs the export no more.
    let described = run("qemu-img", &["info", overlay]);
    assert!(!described.contains("backing"), "{described}");
    let raw = listening.file("raw");
    run("qemu-img", &["convert", "-O", "raw", overlay, words(&raw)]);
    let mut expected = disk(0..0).content;
    expected[4 * MIB as usize..4 * MIB as usize + 4096].fill(99);
    assert!(std::fs::read(raw).expect("the disk") == expected);
}
