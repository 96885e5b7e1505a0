//! Options of a command line by which QEMU runs other programs or writes files of the host.
//!
//! A recorded command line comes from the memory of a QEMU process. A guest that broke into its QEMU could rewrite
//! it there. The restoring user would then run the guest's programs: outside QEMU's sandbox, without its security
//! label, as root for a VM that ran as root. Therefore no program that a command line names runs without the user's
//! consent. Programs that QEMU itself has by default (`/etc/qemu-ifup`) were put there by the host's root. Files
//! are written with the rights of the user that the VM ran as, so they are shown. Consent is needed only if the new
//! VM has more rights than the VM had.

use crate::arguments::{Argument, CommandLine, Properties};

/// The effects of a command line on the host. Each entry is an option as a person would write it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct HostAccess {
    /// Options that run a program, load code, or read more options from a file.
    pub programs: Vec<String>,
    /// Options that write a file, other than disks, sockets and RAM.
    pub files: Vec<String>,
}

/// Network backends that run a script, except with `no`.
const SCRIPTS: &[&str] = &["script", "downscript", "helper"];
/// Options that run code of a file, or let the guest run programs.
const CODE: &[&str] = &["plugin", "readconfig", "semihosting", "semihosting-config"];
/// Options whose whole value is a file that is written.
const WRITTEN: &[&str] = &["D", "qtest-log", "dump-vmstate"];

pub(super) fn survey(line: &CommandLine) -> HostAccess {
    let mut access = HostAccess::default();
    for option in &line.options {
        if runs_program(option) {
            access.programs.push(option.words());
        } else if writes_file(option) {
            access.files.push(option.words());
        }
    }
    access
}

fn runs_program(option: &Argument) -> bool {
    let Some(name) = option.name() else {
        return false;
    };
    if CODE.contains(&name) {
        return true;
    }
    let value = option.value().unwrap_or_default();
    match name {
        "incoming" => value.starts_with("exec:"),
        "netdev" | "nic" | "net" => network_runs_program(&Properties::parse(value, "type")),
        _ => false,
    }
}

fn network_runs_program(properties: &Properties) -> bool {
    let kind = properties.get("type").unwrap_or_default();
    properties.pairs().any(|(key, value)| match key {
        // `-nic passt,path=` names the program.
        "path" => kind == "passt",
        // The host's smbd runs with a configuration made of this.
        "smb" => true,
        // Addresses with a scheme are plugins, one of which runs commands.
        "sock" => kind == "vde" && value.contains("://"),
        _ if SCRIPTS.contains(&key) => value != "no",
        // `guestfwd=tcp:10.0.2.1:80-cmd:COMMAND`, in JSON a list.
        _ if key.starts_with("guestfwd") => value.contains("-cmd:"),
        _ => false,
    })
}

fn writes_file(option: &Argument) -> bool {
    let Some(name) = option.name() else {
        return false;
    };
    if WRITTEN.contains(&name) {
        return true;
    }
    let value = option.value().unwrap_or_default();
    let parse = |implied| Properties::parse(value, implied);
    match name {
        "trace" => parse("enable").get("file").is_some(),
        "chardev" => {
            let properties = parse("backend");
            let kind = properties.get("backend").unwrap_or_default();
            matches!(kind, "file" | "pipe") || properties.get("logfile").is_some()
        }
        "serial" | "parallel" | "debugcon" => {
            value.starts_with("file:") || value.starts_with("pipe:")
        }
        "fsdev" | "virtfs" => !parse("fsdriver").is_on("readonly"),
        "audiodev" | "audio" => parse("driver").get("path").is_some(),
        "icount" => parse("shift").get("rr") == Some("record"),
        "tpmdev" => parse("type").get("type") == Some("passthrough"),
        "object" => parse("qom-type").get("qom-type") == Some("filter-dump"),
        "device" => {
            let properties = parse("driver");
            properties.get("driver") == Some("usb-mtp") && !properties.is_on("readonly")
        }
        "drive" | "blockdev" => is_writable_folder(&parse("")),
        _ => false,
    }
}

/// A folder shown to the guest as a disk that it may write to.
fn is_writable_folder(properties: &Properties) -> bool {
    properties.pairs().any(|(key, value)| {
        let last = key.rsplit('.').next().unwrap_or(key);
        (value.starts_with("fat:") && value.contains(":rw:")) || (last == "rw" && value == "on")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survey_of(words: &str) -> HostAccess {
        let argv: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        survey(&CommandLine::parse(&argv))
    }

    #[test]
    fn programs_that_a_command_line_names() {
        for option in [
            "-netdev tap,id=n,script=/tmp/x",
            "-netdev tap,id=n,script=no,downscript=x",
            "-netdev bridge,id=n,helper=/tmp/x",
            r#"-netdev {"type":"tap","id":"n","downscript":"x"}"#,
            "-nic tap,script=x",
            "-net tap,script=x",
            "-nic user,guestfwd=tcp:10.0.2.1:80-cmd:cat",
            r#"-netdev {"type":"user","id":"n","guestfwd":[{"str":"tcp:10.0.2.1:80-cmd:cat"}]}"#,
            "-netdev user,id=n,smb=/srv",
            "-netdev passt,id=n,path=/tmp/x",
            "-netdev vde,id=n,sock=cmd://x",
            "-incoming exec:x",
            "-plugin /tmp/x.so",
            "-readconfig /tmp/x",
            "-semihosting",
        ] {
            let access = survey_of(&format!("q {option}"));
            assert_eq!(access.programs, [option], "{option}");
        }
        for option in [
            "-netdev tap,id=n,script=no,downscript=no",
            // QEMU's own default, which is the host's.
            "-netdev tap,id=n",
            "-netdev bridge,id=n,br=br0",
            "-netdev user,id=n,hostfwd=tcp::1-:2",
            "-netdev vde,id=n,sock=/run/vde",
            "-append script=/tmp/x",
        ] {
            assert_eq!(survey_of(&format!("q {option}")), HostAccess::default());
        }
    }

    #[test]
    fn files_that_a_command_line_writes() {
        for option in [
            "-D /tmp/log",
            "-trace enable=x,file=/tmp/trace",
            "-chardev file,id=c,path=/tmp/x",
            "-chardev socket,id=c,path=/tmp/s,server=on,logfile=/tmp/x",
            "-serial file:/tmp/x",
            "-fsdev local,id=f,path=/srv,security_model=none",
            "-virtfs local,path=/srv,mount_tag=t,security_model=none",
            "-audiodev wav,id=a,path=/tmp/x",
            "-icount shift=1,rr=record,rrfile=/tmp/x",
            "-object filter-dump,id=d,netdev=n,file=/tmp/x",
            "-drive file=fat:rw:/srv,if=virtio",
        ] {
            let access = survey_of(&format!("q {option}"));
            assert_eq!(access.files, [option], "{option}");
            assert!(access.programs.is_empty(), "{option}");
        }
        for option in [
            "-fsdev local,id=f,path=/srv,security_model=none,readonly=on",
            "-trace enable=x",
            "-drive file=/a.qcow2,if=virtio",
            "-serial null",
        ] {
            assert_eq!(survey_of(&format!("q {option}")), HostAccess::default());
        }
    }
}
