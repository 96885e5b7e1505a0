//! A child process that takes checkpoints, forgets and prunes, killed at random moments.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::support::{Dice, Vm, forget_ids, init, open, test_dir};
use crate::CheckpointId;

const DIR: &str = "STILLFRAME_REPO_KILL_TEST_DIR";
const ROUND: &str = "STILLFRAME_REPO_KILL_TEST_ROUND";

/// The child is this program with the same test; these variables select the child's part.
const THIS_TEST: &str = "tests::kill::a_killed_process_leaves_every_committed_checkpoint";

fn vm_of_round(round: u64) -> Vm {
    Vm::new(&format!("vm-{round}"), 900)
}

fn run_step(vm: &mut Vm, round: u64, step: u64) {
    let writes = if step == 0 { 600 } else { 40 };
    vm.run(&mut Dice(round * 1_000_000 + step), writes);
}

/// The child, until it is killed.
fn victim(dir: &Path, round: u64) -> ! {
    let mut repo = open(dir);
    let mut vm = vm_of_round(round);
    let mut mine = Vec::new();
    let mut step = 0;
    loop {
        run_step(&mut vm, round, step);
        let id = vm.checkpoint(&mut repo).unwrap();
        println!("\ncommitted {step} {id}");
        mine.push(id);
        if step % 5 == 4 {
            let gone = mine.remove(0);
            println!("\nforgetting {step} {gone}");
            repo.forget(&forget_ids(vec![gone])).unwrap();
            repo.prune(false, &mut |_| {}).unwrap();
        }
        step += 1;
    }
}

/// The checkpoints that the child reported before it was killed: after `steps` steps and a further moment.
fn run_victim(dir: &Path, round: u64, steps: u64, moment: Duration) -> Vec<(u64, CheckpointId)> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", THIS_TEST, "--nocapture"])
        .env(DIR, dir)
        .env(ROUND, round.to_string())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut committed = Vec::new();
    let mut note = |line: String| {
        let words: Vec<&str> = line.split(' ').collect();
        if let [what, step, id] = words[..]
            && let Some(id) = CheckpointId::from_hex(id)
        {
            match what {
                "committed" => committed.push((step.parse().unwrap(), id)),
                _ => committed.retain(|(_, other)| *other != id),
            }
        }
        words[0] == "committed"
    };
    let mut seen = 0;
    while seen < steps {
        seen += u64::from(note(output.next().unwrap().unwrap()));
    }
    std::thread::sleep(moment);
    child.kill().unwrap();
    child.wait().unwrap();
    for line in output {
        note(line.unwrap());
    }
    committed
}

#[test]
fn a_killed_process_leaves_every_committed_checkpoint() {
    if let (Ok(dir), Ok(round)) = (std::env::var(DIR), std::env::var(ROUND)) {
        victim(Path::new(&dir), round.parse().unwrap());
    }
    let dir = test_dir();
    drop(init(dir.path()));
    let mut dice = Dice(99);
    let mut survivors: Vec<(CheckpointId, Vm)> = Vec::new();
    for round in 0..20 {
        let (steps, moment) = (dice.below(12), Duration::from_micros(dice.below(30_000)));
        let committed = run_victim(dir.path(), round, steps, moment);
        let mut vm = vm_of_round(round);
        let last = committed.last().map_or(0, |(step, _)| step + 1);
        for step in 0..last {
            run_step(&mut vm, round, step);
            if let Some((_, id)) = committed.iter().find(|(at, _)| *at == step) {
                survivors.push((*id, vm.clone()));
            }
        }
        let mut repo = open(dir.path());
        let report = repo.check(true, &mut |_| {}).unwrap();
        assert_eq!(report.problems, [], "round {round}");
        for (id, vm) in survivors.iter().rev().take(12) {
            assert!(vm.compare(&mut repo, id).unwrap(), "round {round}");
        }
        if round % 4 == 3 {
            // Its lock is stale now; prune must remove it and clean up.
            repo.prune(false, &mut |_| {}).unwrap();
            assert_eq!(
                std::fs::read_dir(dir.path().join("tmp")).unwrap().count(),
                0
            );
            assert_eq!(repo.check(true, &mut |_| {}).unwrap().problems, []);
        }
    }
    assert!(survivors.len() > 20, "{}", survivors.len());
    let mut repo = open(dir.path());
    for (id, vm) in &survivors {
        assert!(vm.compare(&mut repo, id).unwrap());
    }
}
