//! Events, the shared socket, and the end of QEMU as its client sees it.

use std::io::Write;
use std::os::unix::net::UnixStream;

use serde_json::Value;
use stillframe_qemu::qmp::QmpError;

use crate::vm::{Vm, wait_until};

const SMALL: &[&str] = &["-machine", "q35", "-m", "64", "-display", "none"];

#[test]
fn stop_and_resume_are_told_as_events() {
    let vm = Vm::start(SMALL);
    let (_, mut monitor) = vm.connect();
    monitor.client().take_events().expect("events");
    monitor.stop().expect("stopped");
    let state = monitor.run_state().expect("state");
    assert_eq!((state.running, state.status.as_str()), (false, "paused"));
    monitor.cont().expect("resumed");
    let events = monitor.client().take_events().expect("events");
    let names: Vec<&str> = events.iter().map(|event| event.name.as_str()).collect();
    assert_eq!(names, ["STOP", "RESUME"]);
    assert!(events[0].at <= events[1].at);
    assert!(events[0].at.as_secs() > 1_600_000_000);
}

/// Another process may hold the socket too and resume the VM by it. Its replies do not confuse the client, not even
/// when it begins in the middle of a line.
#[test]
fn a_guardian_on_the_same_socket() {
    let vm = Vm::start(SMALL);
    let (_, mut monitor) = vm.connect();
    let socket = monitor
        .client()
        .socket()
        .try_clone_to_owned()
        .expect("cloned");
    let mut guardian = UnixStream::from(socket);
    monitor.stop().expect("stopped");
    monitor.client().take_events().expect("events");
    guardian
        .write_all(b"\n{\"execute\":\"cont\",\"id\":\"guardian\"}\n")
        .expect("written");
    wait_until("the guardian has resumed the VM", || {
        monitor.run_state().expect("state").running
    });
    let events = monitor.client().take_events().expect("events");
    assert!(events.iter().any(|event| event.name == "RESUME"));
    assert_eq!(
        monitor
            .client()
            .execute("query-status", Value::Null)
            .expect("answered")["status"],
        "running"
    );
}

#[test]
fn the_end_of_qemu() {
    let mut vm = Vm::start(SMALL);
    let (target, mut monitor) = vm.connect();
    vm.end();
    assert!(!target.process.is_alive());
    assert!(matches!(
        monitor.client().execute("query-status", Value::Null),
        Err(QmpError::Closed)
    ));
}

#[test]
fn a_descriptor_set_does_not_outlive_its_use() {
    let vm = Vm::start(SMALL);
    let (_, mut monitor) = vm.connect();
    let file = tempfile::tempfile().expect("temporary file");
    let state = monitor
        .begin_device_state(std::os::fd::AsFd::as_fd(&file))
        .expect("lent");
    let sets = |monitor: &mut stillframe_qemu::monitor::Monitor| {
        let sets = monitor.client().execute("query-fdsets", Value::Null);
        sets.expect("answered").as_array().expect("a list").len()
    };
    assert_eq!(sets(&mut monitor), 1);
    monitor.end_device_state(state).expect("taken back");
    assert_eq!(sets(&mut monitor), 0);
}
