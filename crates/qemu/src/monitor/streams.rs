//! A disk whose image lacks content that a backing file has: QEMU copies it into the image while the VM runs, and needs the
//! backing file no more.
//!
//! Source: QEMU, `qapi/block-core.json` (`block-stream`).

use std::num::NonZeroU64;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;

use super::disks::SET_ACTIVE;
use super::{HUMAN, Monitor, MonitorError, STOP_LIMIT_SECONDS, image_of, typed};

/// The job's name. There is one at a time.
const JOB: &str = "stillframe-stream";
/// Its state when all is copied, and the image still has its backing file.
const PENDING: &str = "pending";

/// How far the content of one disk is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Streamed {
    /// The image has all of it.
    Complete,
    /// QEMU copies it.
    Copying {
        /// Bytes of the disk that were gone through.
        done: u64,
        /// All its bytes.
        total: u64,
    },
    /// QEMU has copied all, and keeps a part of the image's tables in its memory: see [`Monitor::finish_stream`].
    Copied,
    /// QEMU has given up, with these words. The guest reads from the backing file what is missing.
    Failed(String),
    /// No device has the disk any more.
    Gone,
}

impl Monitor {
    /// Has QEMU complete the image of this device, at no more than `bytes_per_s`. To be called until that is done; one that was
    /// begun by another process is gone on with, and one that has failed is begun again.
    ///
    /// # Errors
    /// QEMU refuses the job.
    pub fn stream_disk(
        &mut self,
        device: &str,
        bytes_per_s: Option<NonZeroU64>,
    ) -> Result<Streamed, MonitorError> {
        let Some(job) = self.job(JOB)? else {
            return self.begin_stream(device, bytes_per_s);
        };
        if job.status == PENDING {
            return Ok(Streamed::Copied);
        }
        if !job.has_ended() {
            let (done, total) = (job.done, job.total);
            return Ok(Streamed::Copying { done, total });
        }
        self.client.execute("job-dismiss", json!({ "id": JOB }))?;
        match job.error {
            Some(error) => Ok(Streamed::Failed(error)),
            None => self.begin_stream(device, bytes_per_s),
        }
    }

    /// Has QEMU write out the image of this device, and only then forget its backing file. QEMU itself does the latter first: the
    /// image of a QEMU that is killed in between would have zeros where tables were not written. Returns QEMU's words if it
    /// cannot write.
    ///
    /// # Errors
    /// QEMU refuses a command.
    pub fn finish_stream(&mut self, device: &str) -> Result<Option<String>, MonitorError> {
        let disks = self.disks()?;
        if let Some(disk) = image_of(&disks, device) {
            let line = format!("qemu-io {} flush", disk.node);
            let ticket = self.client.send(HUMAN, json!({ "command-line": line }))?;
            let limit = Duration::from_secs(STOP_LIMIT_SECONDS);
            let words: String = typed(HUMAN, self.client.wait(ticket, limit)?)?;
            if !words.trim().is_empty() {
                return Ok(Some(words.trim().to_owned()));
            }
        }
        self.client.execute("job-finalize", json!({ "id": JOB }))?;
        Ok(None)
    }

    fn begin_stream(
        &mut self,
        device: &str,
        bytes_per_s: Option<NonZeroU64>,
    ) -> Result<Streamed, MonitorError> {
        let disks = self.disks()?;
        let Some(disk) = image_of(&disks, device) else {
            return Ok(Streamed::Gone);
        };
        let Some(is_active) = self.backed(&disk.node)? else {
            return Ok(Streamed::Complete);
        };
        if !is_active {
            // That of a VM which was restored and has not run yet. `cont` does the same.
            let arguments = json!({ "node-name": disk.node, "active": true });
            self.slow_with(SET_ACTIVE, arguments)?;
        }
        let arguments = json!({
            "job-id": JOB, "device": disk.node, "speed": bytes_per_s.map_or(0, NonZeroU64::get),
            // So that its error can be read.
            "auto-dismiss": false,
            "auto-finalize": false,
        });
        self.client.execute("block-stream", arguments)?;
        let (done, total) = (0, disk.bytes);
        Ok(Streamed::Copying { done, total })
    }

    /// Whether a node that has a backing file is active: QEMU may write it. None if it has no backing file.
    fn backed(&mut self, node: &str) -> Result<Option<bool>, MonitorError> {
        #[derive(Deserialize)]
        struct Node {
            #[serde(rename = "node-name", default)]
            name: String,
            backing_file: Option<String>,
            // QEMU 10.
            active: Option<bool>,
        }
        let nodes: Vec<Node> = self.run("query-named-block-nodes", json!({ "flat": true }))?;
        let backed = |one: &Node| one.name == node && one.backing_file.is_some();
        let mut nodes = nodes.into_iter();
        let node = nodes.find(backed);
        Ok(node.map(|node| node.active.unwrap_or(true)))
    }
}
