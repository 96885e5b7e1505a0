//! QEMU's jobs: how far one is, and that none of ours is left.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Monitor, MonitorError, STOP_LIMIT_SECONDS, unexpected};

/// Time for a job to end that was cancelled. A request of its disk may be in progress.
const END_LIMIT: Duration = Duration::from_secs(30);
/// Pause between two checks whether a job has ended, which takes about a millisecond.
const LOOK_AGAIN: Duration = Duration::from_micros(300);

/// A job, an element of `query-jobs`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Job {
    /// Its name.
    pub id: String,
    /// `running`, `ready`, `concluded` and others.
    pub status: String,
    /// How much is done, in a unit of the job's own: bytes for a block job.
    #[serde(rename = "current-progress", default)]
    pub done: u64,
    /// How much there is to do, as far as is known.
    #[serde(rename = "total-progress", default)]
    pub total: u64,
    /// Why it failed.
    pub error: Option<String>,
}

impl Job {
    /// Whether it has ended. It stays until it is dismissed.
    pub fn has_ended(&self) -> bool {
        self.status == "concluded"
    }

    /// Whether it has stopped because of an error; it goes on by no command of ours. One that was ready is `standby` then
    /// (QEMU, `qapi/job.json`, `JobStatus`).
    pub fn has_failed(&self) -> bool {
        matches!(&*self.status, "paused" | "standby")
    }

    /// Whether it ends or has ended, and cannot be cancelled any more (QEMU, `JobVerbTable` in its job.c).
    fn is_ending(&self) -> bool {
        self.has_ended() || self.status == "aborting"
    }

    /// Whether it can be ended without an error at any time.
    pub fn is_ready(&self) -> bool {
        self.status == "ready"
    }
}

impl Monitor {
    /// The job of this name, if there is one.
    pub fn job(&mut self, id: &str) -> Result<Option<Job>, MonitorError> {
        Ok(self.jobs()?.into_iter().find(|job| job.id == id))
    }

    fn jobs(&mut self) -> Result<Vec<Job>, MonitorError> {
        self.query("query-jobs")
    }

    /// Has a block job end: one that is ready without an error, unless `force` is given, and any other one with an error.
    /// Returns QEMU's words about what went wrong, if anything did. The job is dismissed. One that fails at its end is ended by
    /// force: no write that it mirrors may be in progress then.
    ///
    /// # Errors
    /// QEMU refuses a command, or the job does not end.
    pub fn end_job(&mut self, id: &str, force: bool) -> Result<Option<String>, MonitorError> {
        let deadline = Instant::now() + END_LIMIT;
        // How it was cancelled: with force or without.
        let mut cancelled = None;
        let mut failed = None;
        loop {
            let job = self.job(id)?;
            let job = job.ok_or_else(|| unexpected("query-jobs", format!("no job {id}")))?;
            if job.has_ended() {
                self.client.execute("job-dismiss", json!({ "id": id }))?;
                return Ok(job.error.or(failed));
            }
            if Instant::now() >= deadline {
                return Err(unexpected("query-jobs", format!("{id} is {}", job.status)));
            }
            if job.has_failed() && !force {
                failed = Some("a write to its target failed".to_owned());
            }
            let by_force = force || failed.is_some();
            if cancelled == Some(by_force) || job.is_ending() {
                std::thread::sleep(LOOK_AGAIN);
                continue;
            }
            cancelled = Some(by_force);
            let arguments = json!({ "device": id, "force": by_force });
            let ended = self.client.execute("block-job-cancel", arguments);
            // It may have come to its end by itself in the meantime, which the next round sees.
            if self.job(id)?.is_some_and(|job| !job.is_ending()) {
                ended?;
            }
        }
    }

    /// Ends all jobs and removes all nodes whose names begin like this.
    ///
    /// The jobs are cancelled while the VM is stopped for a moment. One that ends beside a write that it mirrors frees memory that
    /// this write uses still, and QEMU dies (`mirror_run` and `active_write_settle` in its block/mirror.c, seen with 10.0.2). Once
    /// it is cancelled it mirrors no more writes.
    ///
    /// # Errors
    /// The errors of [`Monitor::end_job`]; a node is in use.
    pub fn remove_jobs_and_nodes(&mut self, prefix: &str) -> Result<(), MonitorError> {
        #[derive(Deserialize)]
        struct Node {
            #[serde(rename = "node-name", default)]
            name: String,
        }
        let jobs = self.jobs()?.into_iter().map(|job| job.id);
        let jobs: Vec<String> = jobs.filter(|id| id.starts_with(prefix)).collect();
        if !jobs.is_empty() {
            self.cancel_at_rest(&jobs)?;
        }
        for job in &jobs {
            self.end_job(job, true)?;
        }
        let nodes: Vec<Node> = self.run("query-named-block-nodes", json!({ "flat": true }))?;
        for node in nodes.iter().filter(|node| node.name.starts_with(prefix)) {
            self.remove_node(&node.name)?;
        }
        Ok(())
    }

    /// Cancels jobs that write to nodes of their own names, while no write of the guest is in progress.
    fn cancel_at_rest(&mut self, jobs: &[String]) -> Result<(), MonitorError> {
        for job in jobs {
            // A write that waits for the other side would keep the VM from being stopped. The connection may be gone.
            let node = json!({ "type": "block-node", "node-name": job });
            let _ = self.client.execute("yank", json!({ "instances": [node] }));
        }
        let runs = self.run_state()?.running;
        let mut commands = Vec::new();
        if runs {
            commands.push(("stop", Value::Null));
        }
        for job in jobs {
            let arguments = json!({ "device": job, "force": true });
            commands.push(("block-job-cancel", arguments));
        }
        if runs {
            commands.push(("cont", Value::Null));
        }
        let limit = Duration::from_secs(STOP_LIMIT_SECONDS);
        let mut replies = Vec::new();
        for ticket in self.client.send_surviving(commands)? {
            replies.push(self.client.wait(ticket, limit));
        }
        // Those between do not matter: a job that has ended by itself cannot be cancelled.
        let resumed = runs.then(|| replies.pop()).flatten();
        let stopped = runs.then(|| replies.swap_remove(0));
        for reply in [resumed, stopped].into_iter().flatten() {
            reply?;
        }
        Ok(())
    }

    /// Removes a block node that is not in use.
    ///
    /// # Errors
    /// QEMU refuses it.
    pub fn remove_node(&mut self, node: &str) -> Result<(), MonitorError> {
        let arguments = json!({ "node-name": node });
        self.client.execute("blockdev-del", arguments)?;
        Ok(())
    }
}
