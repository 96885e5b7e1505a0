//! A QEMU whose guest's memory kernel threads write (vhost): `checkpoint` warns of it.

use std::fs::{self, File};

use anyhow::{Result, ensure};
use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Kind, Setup};

use crate::alone;

/// Stands for a device that this kernel may not have; QEMU has it open all the same.
struct Device(String);

impl Drop for Device {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn an_open_vhost_device_is_warned_of() -> Result<()> {
    let _alone = alone();
    let device = Device(format!("/dev/vhost-stillframe-e2e-{}", std::process::id()));
    File::create(&device.0)?;
    let backend = format!("file,id=open,path={}", device.0);
    let guest = Setup::small(Kind::Private, "vhost")
        .with(&["-chardev", &backend])
        .boot()?;
    let stillframe = Stillframe::init(&guest.folder().join("repo"))?;
    let output = stillframe.run(&["checkpoint", "--vm", "vhost", "--verify"])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    let warnings = said.lines().filter(|line| line.starts_with("warning: "));
    let warnings: Vec<_> = warnings.filter(|line| line.contains(&device.0)).collect();
    ensure!(warnings.len() == 1, "{said}");
    ensure!(warnings[0].contains("never tested"), "{said}");

    let other = Setup::small(Kind::Private, "plain").boot()?;
    let output = stillframe.run(&["checkpoint", "--pid", &other.pid_text()])?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && !said.contains("vhost"), "{said}");
    Ok(())
}
