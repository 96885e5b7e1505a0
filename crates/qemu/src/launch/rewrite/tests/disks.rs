//! Disks of clones: each word that names an image is left with something that only this clone writes to.

use std::path::Path;

use super::{ADDED, busy, disk, options, words};
use crate::launch::rewrite::{Rewritten, Settings, rewrite};
use crate::launch::{CloneOptions, LaunchOptions, NewFormat, NewImage};
use crate::monitor::Disk;

/// Clone 3 of a VM with the disk `/d` at device `d0`, which the node `top` is, if the command line has nodes.
fn clone_of(before: &str, images: Vec<NewImage>) -> Rewritten {
    clone_with(&[disk(("d0", "top"), "/d", "qcow2")], before, images)
}

fn clone_with(disks: &[Disk], before: &str, images: Vec<NewImage>) -> Rewritten {
    let argv = words(&format!("qemu -nodefaults -display none {before}"));
    let options = LaunchOptions {
        clone: Some(CloneOptions {
            number: 3,
            memory: Vec::new(),
        }),
        images,
        ..options(None)
    };
    let settings = Settings {
        options: &options,
        run_as: None,
        disks,
    };
    rewrite(&argv, Path::new("/"), &settings, &busy).expect(before)
}

fn expect(before: &str, images: &[NewImage], after: &str) {
    let rewritten = clone_of(before, images.to_vec());
    let made: Vec<String> = rewritten
        .overlays
        .iter()
        .map(|one| one.path.display().to_string())
        .collect();
    let mut line = rewritten.arguments.join(" ");
    for (number, path) in made.iter().enumerate() {
        line = line.replace(path, &format!("OVERLAY{number}"));
    }
    let expected = format!("qemu -nodefaults -display none {after}{ADDED}");
    assert_eq!(line, expected, "{before}");
}

/// The image that holds the disk.
fn whole() -> Vec<NewImage> {
    vec![NewImage {
        device: "d0".to_owned(),
        path: "/new,1".into(),
        format: NewFormat::Raw,
    }]
}

const OVER: &str = "-blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=OVERLAY0,backing=clone-base-0";

#[test]
fn nodes_that_clones_would_share_are_below_overlays() {
    let table = [
        (
            "-blockdev driver=file,node-name=top,filename=/d",
            format!(
                "-blockdev driver=file,node-name=clone-base-0,filename=/d,read-only=on {OVER} "
            ),
        ),
        (
            r#"-blockdev {"driver":"file","node-name":"f","filename":"/d","auto-read-only":true} -blockdev {"node-name":"top","driver":"qcow2","file":"f","backing":null}"#,
            format!(
                "-blockdev driver=file,filename=/d,node-name=f,read-only=on \
                 -blockdev backing=,driver=qcow2,file=f,node-name=clone-base-0,read-only=on {OVER} "
            ),
        ),
        (
            "-blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=/d,read-only=on",
            "-blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=/d,read-only=on "
                .to_owned(),
        ),
        // Of no device.
        (
            "-blockdev driver=file,node-name=spare,filename=/s",
            "-blockdev driver=file,node-name=spare,filename=/s,read-only=on ".to_owned(),
        ),
    ];
    for (before, after) in table {
        expect(before, &[], &after);
    }
    // The monitor has put a snapshot over it, whose node has a name of its own.
    let chain = [("over", "/over", "qcow2"), ("", "/d", "raw")];
    let chain = chain.map(|(node, path, format)| disk(("d0", node), path, format));
    let line =
        "-blockdev driver=file,node-name=f,filename=/d -blockdev driver=raw,node-name=top,file=f";
    let rewritten = clone_with(&chain, line, Vec::new());
    assert_eq!(rewritten.overlays.len(), 1);
    let line = rewritten.arguments.join(" ");
    let base = "node-name=f,filename=/over,read-only=on -blockdev driver=qcow2,node-name=clone-base-0,file=f,read-only=on";
    assert!(line.contains(base), "{line}");
    let line = "-blockdev driver=file,node-name=top,filename=/d";
    let made = clone_of(line, Vec::new()).overlays;
    assert_eq!((made.len(), made[0].bytes), (1, 1 << 20));
}

#[test]
fn an_image_of_a_checkpoint_is_opened_as_raw() {
    let table = [
        (
            "-drive file=/d,format=qcow2,if=none,id=d0,l2-cache-size=1M,discard=unmap",
            "-drive file=/new,,1,format=raw,if=none,id=d0,discard=unmap,snapshot=on ".to_owned(),
        ),
        (
            "-drive driver=qcow2,file.driver=host_device,file.filename=/d,id=d0",
            "-drive file.driver=file,file.filename=/new,,1,id=d0,format=raw,snapshot=on "
                .to_owned(),
        ),
        (
            "-hdc /d",
            "-drive file=/new,,1,format=raw,media=disk,index=2,snapshot=on ".to_owned(),
        ),
        (
            "/d",
            "-drive file=/new,,1,format=raw,media=disk,index=0,snapshot=on ".to_owned(),
        ),
        (
            "-sd /d",
            "-drive file=/new,,1,format=raw,media=disk,if=sd,snapshot=on ".to_owned(),
        ),
        (
            "-blockdev driver=qcow2,node-name=top,file.driver=file,file.filename=/d,backing.driver=raw",
            format!(
                "-blockdev driver=raw,node-name=clone-base-0,file.driver=file,file.filename=/new,,1,read-only=on {OVER} "
            ),
        ),
        // The files below it are not needed any more, but for one that another disk has.
        (
            "-blockdev driver=file,node-name=bf,filename=/b,read-only=on \
             -blockdev driver=qcow2,node-name=b,file=bf,backing=shared,read-only=on \
             -blockdev driver=file,node-name=shared,filename=/s,read-only=on \
             -blockdev driver=qcow2,node-name=other,backing=shared,file.driver=file,file.filename=/o,read-only=on \
             -blockdev driver=file,node-name=f,filename=/d \
             -blockdev driver=qcow2,node-name=top,file=f,backing=b",
            format!(
                "-blockdev driver=file,node-name=shared,filename=/s,read-only=on \
                 -blockdev driver=qcow2,node-name=other,backing=shared,file.driver=file,file.filename=/o,read-only=on \
                 -blockdev driver=file,node-name=f,filename=/new,,1,read-only=on \
                 -blockdev driver=raw,node-name=clone-base-0,file=f,read-only=on {OVER} "
            ),
        ),
    ];
    for (before, after) in table {
        expect(before, &whole(), &after);
    }
}

#[test]
fn an_image_that_lacks_content_is_opened_as_qcow2_and_finds_its_backing_file_itself() {
    let table = [
        (
            "raw",
            "-drive file=/d,format=raw,if=none,id=d0,cache=none",
            "-drive file=/o,format=qcow2,if=none,id=d0,cache=none",
        ),
        (
            "raw",
            "-hda /d",
            "-drive file=/o,format=qcow2,media=disk,index=0",
        ),
        // What is said of a qcow2 image holds for this one, too.
        (
            "qcow2",
            "-drive file=/d,format=qcow2,l2-cache-size=1M,backing.driver=raw",
            "-drive file=/o,format=qcow2,l2-cache-size=1M",
        ),
        (
            "vdi",
            "-blockdev driver=file,node-name=f,filename=/d -blockdev driver=vdi,node-name=top,file=f",
            "-blockdev driver=file,node-name=f,filename=/o -blockdev driver=qcow2,node-name=top,file=f",
        ),
        (
            "qcow2",
            r#"-blockdev {"node-name":"top","driver":"qcow2","file":{"driver":"file","filename":"/d"},"backing":null}"#,
            "-blockdev driver=qcow2,file.driver=file,file.filename=/o,node-name=top",
        ),
        // A device that has the file itself.
        (
            "file",
            "-blockdev driver=file,node-name=top,filename=/d,aio=native,cache.direct=on,discard=unmap",
            "-blockdev driver=qcow2,file.driver=file,node-name=top,file.filename=/o,file.aio=native,cache.direct=on,discard=unmap",
        ),
    ];
    for (format, before, after) in table {
        let options = LaunchOptions {
            images: vec![NewImage {
                device: "d0".to_owned(),
                path: "/o".into(),
                format: NewFormat::Overlay("nbd".to_owned()),
            }],
            ..options(None)
        };
        let disks = [disk(("d0", "top"), "/d", format)];
        assert_eq!(options.disks(&disks)[0].format, "qcow2");
        let settings = Settings {
            options: &options,
            run_as: None,
            disks: &disks,
        };
        let argv = words(&format!("qemu -nodefaults -display none {before}"));
        let rewritten = rewrite(&argv, Path::new("/"), &settings, &busy).expect(before);
        let line = rewritten.arguments.join(" ");
        let expected = format!("qemu -nodefaults -display none {after} {ADDED}");
        assert_eq!(line, expected, "{before}");
    }
}
