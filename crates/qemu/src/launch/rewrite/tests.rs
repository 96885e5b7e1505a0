//! Command lines before and after.

mod disks;

use super::*;

const ADDED: &str = "-monitor none -qmp unix:/new.qmp,server=on,wait=off -S -incoming defer";

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn options(serial: Option<&str>) -> LaunchOptions {
    LaunchOptions {
        serial: serial.map(str::to_owned),
        ..LaunchOptions::new("/new.qmp".into(), "/new.log".into())
    }
}

/// In use, for these tests: `/busy`, port 5901 and the file `/p`.
fn busy(endpoint: &Endpoint) -> bool {
    match endpoint {
        Endpoint::Unix(path) => path == Path::new("/busy"),
        Endpoint::Tcp(_, port) => *port == 5901,
        Endpoint::PidFile(path) => path == Path::new("/p"),
    }
}

fn run(before: &str, serial: Option<&str>) -> Result<Rewritten, LaunchError> {
    let argv = words(&format!("qemu {before}"));
    rewrite_as(&argv, &options(serial), None)
}

fn rewrite_as(
    argv: &[String],
    options: &LaunchOptions,
    run_as: Option<&Credentials>,
) -> Result<Rewritten, LaunchError> {
    let settings = Settings {
        options,
        run_as,
        disks: &[],
    };
    rewrite(argv, Path::new("/"), &settings, &busy)
}

/// A disk of this device and node.
fn disk((device, node): (&str, &str), path: &str, format: &str) -> Disk {
    Disk {
        device: device.to_owned(),
        node: node.to_owned(),
        path: path.into(),
        format: format.to_owned(),
        read_only: false,
        temporary: false,
        flash: false,
        unchecked: false,
        bytes: 1 << 20,
        identity: None,
    }
}

/// Each row: the command line before, and after without the options that are always added.
fn check(serial: Option<&str>, table: &[(&str, &str)]) {
    for (before, after) in table {
        let rewritten = run(before, serial).expect(before);
        let expected = words(&format!("qemu {after} {ADDED}"));
        assert_eq!(rewritten.arguments, expected, "{before}");
    }
}

#[test]
fn what_belongs_to_the_old_process_goes() {
    check(
        None,
        &[
            (
                "-nodefaults -display none -S -daemonize -pidfile /p -incoming defer -loadvm x -s -gdb tcp::1",
                "-nodefaults -display none",
            ),
            (
                "-nodefaults -display none -qmp unix:/q,server=on --qmp-pretty stdio -monitor stdio -m 64",
                "-nodefaults -display none -m 64",
            ),
            (
                "-nodefaults -display none -D /log -d cpu",
                "-nodefaults -display none -D /log -d cpu",
            ),
        ],
    );
}

#[test]
fn devices_of_monitors_go_unless_another_option_uses_them() {
    check(
        None,
        &[
            (
                "-nodefaults -display none -chardev socket,id=m,path=/q,server=on,wait=off -mon chardev=m,mode=control",
                "-nodefaults -display none",
            ),
            (
                "-nodefaults -display none -chardev socket,id=m,fd=30,server=on -mon m,mode=control",
                "-nodefaults -display none",
            ),
            (
                "-nodefaults -display none -chardev socket,id=m,path=/q,server=on -qmp chardev:m",
                "-nodefaults -display none",
            ),
            (
                "-nodefaults -display none -chardev stdio,id=c,mux=on -mon c -device virtconsole,chardev=c",
                "-nodefaults -display none -chardev null,id=c,mux=on -device virtconsole,chardev=c",
            ),
            (
                "-nodefaults -display none -chardev pty,id=c,mux=on -mon c -parallel chardev:c",
                "-nodefaults -display none -chardev pty,id=c,mux=on -parallel chardev:c",
            ),
        ],
    );
}

#[test]
fn displays() {
    check(
        None,
        &[
            (
                "-nodefaults -nographic -m 64",
                "-nodefaults -m 64 -machine graphics=off -display none",
            ),
            ("-nodefaults", "-nodefaults -display none"),
            (
                "-nodefaults -display gtk,gl=on",
                "-nodefaults -display none",
            ),
            ("-nodefaults -display none", "-nodefaults -display none"),
            (
                "-nodefaults -display egl-headless",
                "-nodefaults -display egl-headless",
            ),
            ("-nodefaults -vnc :1", "-nodefaults -display none"),
            (
                "-nodefaults -vnc :2,password=on",
                "-nodefaults -vnc :2,password=on -display none",
            ),
            ("-nodefaults -vnc unix:/busy", "-nodefaults -display none"),
            (
                "-nodefaults -vnc none",
                "-nodefaults -vnc none -display none",
            ),
            (
                "-nodefaults -display vnc=localhost:1",
                "-nodefaults -display none",
            ),
        ],
    );
}

#[test]
fn the_first_serial_port_without_a_wish() {
    check(
        None,
        &[
            ("-display none", "-display none -serial null"),
            (
                "-display none -serial file:/old",
                "-display none -serial null",
            ),
            (
                "-display none -serial mon:stdio",
                "-display none -serial null",
            ),
            (
                "-display none -serial none -serial file:/a -serial file:/b",
                "-display none -serial none -serial null -serial null",
            ),
            ("-display none -serial none", "-display none -serial none"),
            (
                "-display none -nodefaults -chardev pty,id=s -device isa-serial,chardev=s",
                "-display none -nodefaults -chardev null,id=s -device isa-serial,chardev=s",
            ),
            (
                "-nographic",
                "-machine graphics=off -display none -serial null",
            ),
            (
                "-display none -chardev stdio,mux=on,id=c -mon chardev=c -serial chardev:c",
                "-display none -chardev null,id=c,mux=on -serial null",
            ),
        ],
    );
}

#[test]
fn the_first_serial_port_as_wished() {
    check(
        Some("file:/new,log"),
        &[
            ("-display none", "-display none -serial file:/new,log"),
            (
                "-display none -serial null",
                "-display none -serial file:/new,log",
            ),
            (
                "-nographic -serial mon:stdio",
                "-serial file:/new,log -machine graphics=off -display none",
            ),
            (
                "-display none -nodefaults -chardev socket,id=s,path=/p,server=on -device pci-serial,chardev=s,id=p",
                "-display none -nodefaults -chardev file,path=/new,,log,id=s -device pci-serial,chardev=s,id=p",
            ),
            (
                r#"-display none -nodefaults -chardev pty,id=s -device {"driver":"isa-serial","chardev":"s"}"#,
                r#"-display none -nodefaults -chardev file,path=/new,,log,id=s -device {"driver":"isa-serial","chardev":"s"}"#,
            ),
        ],
    );
    for before in ["-nodefaults", "-serial none", "-nodefaults -serial none"] {
        assert!(
            matches!(
                run(before, Some("pty")),
                Err(LaunchError::NoSerialPort { .. })
            ),
            "{before}"
        );
    }
    for spec in ["", "none", "stdio", "mon:stdio", "mon:pty", "chardev:x"] {
        assert!(
            matches!(run("-m 64", Some(spec)), Err(LaunchError::Serial { .. })),
            "{spec}"
        );
    }
}

#[test]
fn other_character_devices() {
    check(
        None,
        &[
            (
                "-nodefaults -display none -parallel file:/old -debugcon stdio",
                "-nodefaults -display none -parallel null -debugcon null",
            ),
            (
                "-nodefaults -display none -serial null -serial mon:pty -serial mon:mon:udp::1",
                "-nodefaults -display none -serial null -serial pty -serial udp::1",
            ),
            (
                "-nodefaults -display none -serial null -serial unix:/busy,server=on,wait=off",
                "-nodefaults -display none -serial null -serial null",
            ),
            (
                "-nodefaults -display none -serial null -serial unix:/free,server=on,wait=off",
                "-nodefaults -display none -serial null -serial unix:/free,server=on,wait=off",
            ),
            (
                "-nodefaults -display none -serial null -serial tcp::5901,server=on,wait=off",
                "-nodefaults -display none -serial null -serial null",
            ),
            (
                "-nodefaults -display none -chardev socket,path=busy,server=on,wait=off,id=agent",
                "-nodefaults -display none -chardev null,id=agent",
            ),
            (
                "-nodefaults -display none -chardev socket,path=/busy,id=client",
                "-nodefaults -display none -chardev socket,path=/busy,id=client",
            ),
            (
                "-nodefaults -display none -chardev pty,id=a,logfile=/l -chardev pty,id=b,logfile=/l,logappend=on",
                "-nodefaults -display none -chardev pty,id=a -chardev pty,id=b,logfile=/l,logappend=on",
            ),
        ],
    );
}

#[test]
fn inherited_descriptors_are_refused() {
    let refused = [
        "-netdev tap,id=n,fd=3",
        "-netdev tap,id=n,fds=3:4,vhostfds=5:6",
        r#"-netdev {"type":"tap","fd":"3"}"#,
        "-netdev stream,id=n,addr.type=fd,addr.str=3",
        "-chardev socket,id=agent,fd=7,server=on",
        "-add-fd fd=3,set=2",
        "-drive file=/dev/fdset/2",
        r#"-blockdev {"driver":"file","filename":"/dev/fdset/2"}"#,
        "-object iommufd,id=i,fd=9",
    ];
    for before in refused {
        assert!(
            matches!(
                run(before, None),
                Err(LaunchError::InheritedDescriptor { .. })
            ),
            "{before}"
        );
    }
    let fine = [
        "-append fd=3",
        "-netdev user,id=n",
        "-device virtio-net-pci,netdev=fd",
    ];
    for before in fine {
        assert!(run(before, None).is_ok(), "{before}");
    }
    assert!(matches!(
        run("--preconfig", None),
        Err(LaunchError::Preconfig)
    ));
}

#[test]
fn every_change_is_told() {
    let rewritten = run(
        "-display gtk -serial file:/old -monitor stdio -parallel file:/p",
        None,
    )
    .expect("rewritten");
    let notes = rewritten.changes.join("\n");
    for part in ["gtk", "file:/old", "-monitor stdio", "file:/p"] {
        assert!(notes.contains(part), "{part} is missing in:\n{notes}");
    }
    let untouched = run("-nodefaults -display none -m 64", None).expect("rewritten");
    assert_eq!(untouched.changes, Vec::<String>::new());
}

#[test]
fn commas_in_the_monitor_path() {
    let mut options = options(None);
    options.qmp = "/a,b".into();
    let argv = words("qemu -nodefaults");
    let rewritten = rewrite_as(&argv, &options, None).expect("rewritten");
    let qmp = "unix:/a,,b,server=on,wait=off".to_owned();
    assert!(rewritten.arguments.contains(&qmp));
}

/// A clone of number 3, whose memory `mem` (or what the machine makes by itself) lies in a file.
fn clone_of(before: &str, block: &str) -> Result<Vec<String>, LaunchError> {
    let memory = crate::launch::CloneMemory {
        block: block.to_owned(),
        bytes: 1 << 20,
        file: "/base/0.ram".into(),
    };
    let mut options = options(None);
    options.clone = Some(crate::launch::CloneOptions {
        number: 3,
        memory: vec![memory],
    });
    options.replace = vec![("tap0".to_owned(), "tap3".to_owned())];
    let argv = words(&format!("qemu -netdev tap,ifname=tap0 {before}"));
    Ok(rewrite_as(&argv, &options, None)?.arguments)
}

#[test]
fn a_clone_has_its_own_ends() {
    const VIEW: &str = "size=1048576,mem-path=/base/0.ram,share=off,readonly=on,rom=off";
    let table = [
        (
            "pc.ram",
            "-nodefaults -display none -m 1",
            format!(
                "-nodefaults -display none -m 1 -machine memory-backend=pc.ram -object \
                 memory-backend-file,id=pc.ram,x-use-canonical-path-for-ramblock-id=off,{VIEW}"
            ),
        ),
        (
            "/objects/mem",
            "-nodefaults -display none -machine q35,memory-backend=mem -mem-prealloc -object \
             memory-backend-memfd,id=mem,size=1M,share=on,merge=off",
            format!(
                "-nodefaults -display none -machine q35,memory-backend=mem -object \
                 memory-backend-file,id=mem,{},merge=off,mem-path=/base/0.ram,share=off,readonly=on,rom=off",
                "size=1048576"
            ),
        ),
        (
            "pc.ram",
            "-nodefaults -display none -name guest=a,process=p -drive file=d,format=raw -drive \
             file=c,media=cdrom -device vmgenid,guid=1 -chardev socket,id=c,path=/s,server=on",
            format!(
                "-nodefaults -display none -name a-3,process=p -drive file=d,format=raw,snapshot=on -drive \
                 file=c,media=cdrom -device vmgenid,guid=auto -chardev socket,id=c,path=/s-3,server=on \
                 -machine memory-backend=pc.ram -object \
                 memory-backend-file,id=pc.ram,x-use-canonical-path-for-ramblock-id=off,{VIEW}"
            ),
        ),
    ];
    for (block, before, after) in table {
        let expected = words(&format!("qemu -netdev tap,ifname=tap3 {after} {ADDED}"));
        assert_eq!(clone_of(before, block).expect(before), expected, "{before}");
    }
}

/// A VM that was restored before is started again without a word about that.
#[test]
fn our_own_monitor_goes_unseen() {
    let own = crate::arguments::own_monitor(3).join(" ");
    let plain = "-nodefaults -display none";
    check(None, &[(&format!("{plain} {own}"), plain)]);
    let rewritten = run(&format!("{plain} {own}"), None).expect("a plan");
    assert_eq!(rewritten.changes, [""; 0]);
    // One of the user's on a descriptor is refused as ever.
    let theirs = own.replace("stillframe-monitor", "theirs");
    let theirs = format!("{plain} {theirs} -device virtserialport,chardev=theirs");
    assert!(run(&theirs, None).is_err());
}

#[test]
fn a_vm_that_starts_as_its_user_has_no_user_to_change_to() {
    let owner = Credentials::of_user(7);
    let run = |before: &str| {
        let argv = words(&format!("qemu -nodefaults -display none {before}"));
        rewrite_as(&argv, &options(None), Some(&owner))
    };
    let table = [
        ("-runas nobody", ""),
        ("-run-with user=nobody", ""),
        (
            "-run-with async-teardown=on,user=nobody",
            "-run-with async-teardown=on",
        ),
        ("-run-with async-teardown=on", "-run-with async-teardown=on"),
    ];
    for (before, after) in table {
        let expected = words(&format!("qemu -nodefaults -display none {after} {ADDED}"));
        assert_eq!(run(before).expect(before).arguments, expected, "{before}");
    }
    for before in ["-chroot /x", "-run-with chroot=/x,user=nobody"] {
        assert!(matches!(
            run(before),
            Err(LaunchError::NeedsRoot { uid: 7, .. })
        ));
    }
    check(
        None,
        &[(
            "-nodefaults -display none -runas nobody",
            "-nodefaults -display none -runas nobody",
        )],
    );
}

#[test]
fn an_overlay_takes_the_place_of_its_disk() {
    let chain = [("/ov,1", "qcow2"), ("/base", "raw")];
    let chain = chain.map(|(path, format)| disk(("d0", ""), path, format));
    let run = |before: &str| {
        let argv = words(&format!("qemu -nodefaults -display none {before}"));
        let options = options(None);
        let settings = Settings {
            options: &options,
            run_as: None,
            disks: &chain,
        };
        let rewritten = rewrite(&argv, Path::new("/"), &settings, &busy).expect(before);
        let all = rewritten.arguments.join(" ");
        let after = all.strip_prefix("qemu -nodefaults -display none ");
        after
            .and_then(|after| after.strip_suffix(ADDED))
            .expect("as ever")
            .trim_end()
            .to_owned()
    };
    let table = [
        (
            "-drive file=base,format=raw,if=virtio",
            "-drive file=/ov,,1,format=qcow2,if=virtio",
        ),
        (
            "-drive driver=raw,file.driver=file,file.filename=/base,if=none",
            "-drive driver=qcow2,file.driver=file,file.filename=/ov,,1,if=none",
        ),
        ("-hda /base", "-hda /ov,1"),
        ("base", "/ov,1"),
        (
            "-blockdev driver=file,node-name=f,filename=/base -blockdev raw,node-name=n,file=f",
            "-blockdev driver=file,node-name=f,filename=/ov,,1 -blockdev driver=qcow2,node-name=n,file=f",
        ),
        (
            r#"-blockdev {"driver":"raw","file":{"driver":"file","filename":"/base"},"node-name":"n"}"#,
            "-blockdev driver=qcow2,file.driver=file,file.filename=/ov,,1,node-name=n",
        ),
        // The overlay is there already, or the command line names the backing of the image.
        (
            "-drive file=/ov,,1,if=virtio",
            "-drive file=/ov,,1,if=virtio",
        ),
        (
            "-blockdev driver=qcow2,node-name=n,file.filename=/base,backing=b",
            "-blockdev driver=qcow2,node-name=n,file.filename=/base,backing=b",
        ),
        (
            "-drive file=/other,if=virtio",
            "-drive file=/other,if=virtio",
        ),
    ];
    for (before, after) in table {
        assert_eq!(run(before), after, "{before}");
    }
}

#[test]
fn a_serial_port_that_listens_goes_on_listening() {
    let begin = "-nodefaults -display none";
    let same = [
        "-serial unix:/console,server=on,wait=off",
        "-chardev socket,id=s,path=/console,server=on,wait=off -serial chardev:s",
        "-chardev socket,id=s,path=/console,server=on,wait=off -device isa-serial,chardev=s",
    ];
    for words in same {
        let line = format!("{begin} {words}");
        check(None, &[(&line, &line)]);
    }
    let busy = format!("{begin} -serial unix:/busy,server=on,wait=off");
    check(None, &[(&busy, &format!("{begin} -serial null"))]);
    // A peer is not called by two VMs.
    let client = format!("{begin} -serial unix:/console");
    check(None, &[(&client, &format!("{begin} -serial null"))]);
    let asked = format!("{begin} {}", same[0]);
    check(Some("pty"), &[(&asked, &format!("{begin} -serial pty"))]);
}

#[test]
fn words_are_replaced_where_they_stand_and_nowhere_else() {
    let argv = words("qemu -drive file=/a/root.img,if=virtio -netdev tap,id=n,ifname=tap0");
    let replace = |old: &str, new: &str| {
        let mut options = options(None);
        options.replace = vec![(old.to_owned(), new.to_owned())];
        rewrite_as(&argv, &options, None).map(|rewritten| rewritten.arguments.join(" "))
    };
    let replaced = replace("/a/root.img", "/b/root.img").expect("it stands there");
    assert!(replaced.contains("file=/b/root.img,if=virtio") && replaced.contains("ifname=tap0"));
    assert!(matches!(
        replace("tap7", "tap8"),
        Err(LaunchError::NothingToReplace { word }) if word == "tap7"
    ));
    // Names of options are no values.
    assert!(replace("drive", "x").is_err());
}

#[test]
fn a_pid_file_stays_the_vms_unless_another_process_has_it() {
    let pid_file = |before: &str, change: fn(&mut LaunchOptions), run_as: Option<&Credentials>| {
        let mut options = options(None);
        change(&mut options);
        let argv = words(&format!("qemu {before}"));
        let rewritten = rewrite_as(&argv, &options, run_as).expect("planned");
        let line = CommandLine::parse(&rewritten.arguments);
        line.values("pidfile")
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let as_it_was = |_: &mut LaunchOptions| {};
    assert_eq!(
        pid_file("-pidfile /run/vm.pid", as_it_was, None),
        ["/run/vm.pid"]
    );
    assert_eq!(pid_file("-pidfile vm.pid", as_it_was, None), ["/vm.pid"]);
    assert!(pid_file("-pidfile /p", as_it_was, None).is_empty());
    assert!(pid_file("-m 1G", as_it_was, None).is_empty());
    let named = |options: &mut LaunchOptions| options.pidfile = Some("/other".into());
    assert_eq!(pid_file("-pidfile /run/vm.pid", named, None), ["/other"]);
    let as_root = |options: &mut LaunchOptions| options.as_root = true;
    assert!(pid_file("-pidfile /run/vm.pid", as_root, None).is_empty());
    let clone = |options: &mut LaunchOptions| options.clone = Some(Default::default());
    assert!(pid_file("-pidfile /run/vm.pid", clone, None).is_empty());
}
