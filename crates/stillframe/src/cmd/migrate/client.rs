//! Has the `watch` of a VM migrate it: the watch is attached, so no other process can be.

use std::time::Duration;

use stillframe_engine::control_socket::{self, Peer};
use stillframe_engine::migration::MigrateReport;
use stillframe_engine::{Process, Selector};

use super::Reporter;
use super::message::{ANSWER_BYTES_MAX, Answer, MessageError, Receiver, Request, send};
use super::perform::Notice;
use crate::cmd::Context;
use crate::error::CommandError;

/// A watch sends and answers a request within this time, also while it takes a checkpoint.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Time for a watch that has closed the connection to end.
const END_LIMIT: Duration = Duration::from_secs(10);

/// Has the watch of this VM migrate it. `None` if the VM has none, or if it ended before the migration began.
///
/// # Errors
/// The watch refuses, fails, does not answer, or has ended.
pub fn migrate(
    context: &Context,
    selector: &Selector,
    request: &Request,
) -> anyhow::Result<Option<MigrateReport>> {
    let Some(Peer { stream, pid }) = control_socket::connect(selector) else {
        return Ok(None);
    };
    // If it cannot be sent, there is no answer.
    let _ = send(&stream, request, ANSWER_LIMIT);
    let mut answers = Receiver::new(stream, ANSWER_BYTES_MAX);
    let mut reporter = Reporter::new(context);
    let (mut limit, mut begun) = (Some(ANSWER_LIMIT), false);
    loop {
        let answer = match answers.receive(limit) {
            Ok(answer) => answer,
            Err(MessageError::Closed) if !begun => {
                ended(context, pid);
                return Ok(None);
            }
            Err(error) => {
                return Err(anyhow::Error::new(error).context(match begun {
                    true => CommandError::WatchLost { pid },
                    false => CommandError::WatchSilent { pid },
                }));
            }
        };
        match answer {
            Answer::Accepted => {
                limit = None;
                context.console.note(&format!(
                    "process {pid} watches the VM: it migrates the VM when its checkpoint in progress is done"
                ));
            }
            Answer::Begun => begun = true,
            Answer::Event(event) => reporter.report(&Notice::Event(event)),
            Answer::Rehearsed => reporter.report(&Notice::Rehearsed),
            Answer::Report(report) => return Ok(Some(report)),
            Answer::Failed { error, exit_code } => {
                return Err(CommandError::ByWatch { error, exit_code }.into());
            }
        }
    }
}

/// A watch ended, and the VM is as it was. Waits until that process is gone, and with it its attachment.
fn ended(context: &Context, pid: i32) {
    context.console.note(&format!(
        "process {pid}, which watched the VM, has ended before the migration began; this process migrates the VM"
    ));
    if let Ok(process) = Process::open(pid) {
        process.wait_exit(END_LIMIT);
    }
}
