//! Fuzz target: the command line of a VM that is started again. It is the old process' word.
#![no_main]

use stillframe_qemu::arguments::{Backend, BackendWord, CommandLine, Properties};
use stillframe_qemu::launch::fuzzing::rewritten;

const MONITORS: &[&str] = &["mon", "monitor", "qmp", "qmp-pretty"];
const NEVER: &[&str] = &["daemonize", "gdb", "loadvm", "nographic", "s", "add-fd"];
const OVERWRITES: &[&str] = &["file", "pipe", "stdio"];
const DESCRIPTORS: &[&str] = &["fd", "fds", "vhostfd", "vhostfds"];

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((&way, bytes)) = bytes.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(bytes);
    let arguments: Vec<String> = text.split('\0').map(str::to_owned).collect();
    let Some(found) = rewritten(&arguments, way & 1 == 1, way & 2 == 2) else {
        return;
    };
    let line = CommandLine::parse(&found);
    assert_eq!(line.to_argv(), found);
    let monitors = line
        .options
        .iter()
        .filter(|option| option.name().is_some_and(|name| MONITORS.contains(&name)));
    let monitors: Vec<_> = monitors.filter_map(|option| option.value()).collect();
    assert_eq!(monitors, ["none", "unix:/q,server=on,wait=off"]);
    assert_eq!(line.values("incoming").collect::<Vec<_>>(), ["defer"]);
    for name in NEVER {
        assert!(!line.has(name), "{name}");
    }
    // Kept where it is this VM's and no living process is named in it.
    let pid_files = line.values("pidfile").count();
    assert!(
        pid_files <= usize::from(way & 3 == 0),
        "{pid_files} pid files"
    );
    for value in line.values("chardev") {
        let backend = Backend::from_chardev(value);
        assert!(!OVERWRITES.contains(&backend.kind()), "{value}");
        let keeps_log =
            backend.property("logfile").is_none() || backend.property("logappend") == Some("on");
        assert!(keeps_log, "{value}");
        let descriptor = DESCRIPTORS.iter().find_map(|key| backend.property(key));
        assert_eq!(descriptor, None, "{value}");
    }
    for name in ["serial", "parallel", "debugcon"] {
        for value in line.values(name) {
            if let BackendWord::Own {
                backend,
                with_monitor,
            } = BackendWord::parse(value)
            {
                assert!(
                    !with_monitor && !OVERWRITES.contains(&backend.kind()),
                    "{value}"
                );
            }
        }
    }
    for name in ["netdev", "nic", "net", "device"] {
        for value in line.values(name) {
            let properties = Properties::parse(value, "type");
            let descriptor = DESCRIPTORS.iter().find_map(|key| properties.get(key));
            assert_eq!(descriptor, None, "{value}");
        }
    }
});
