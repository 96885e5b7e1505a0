//! `checkpoint`: attaches, takes one checkpoint, detaches.

use stillframe_engine::checkpoint::CheckpointWriter;
use stillframe_engine::pipeline::WorkControl as _;

use super::{Context, capture};
use crate::args::CheckpointArgs;

/// Takes one checkpoint.
pub fn run(context: &Context, args: &CheckpointArgs) -> anyhow::Result<()> {
    let selector = capture::selector(&args.vm)?;
    let mut options = capture::options(&args.capture)?;
    // None follows that could be stored as changes of this one.
    options.delta_cache_bytes = 0;
    let mut repository = context.open()?;
    repository.limit_writes(args.capture.limit_write);
    let first = "interrupted: discarding the checkpoint (again: exit at once)";
    let interrupts = context.listen(1, first)?;
    let mut vm = capture::attach(context, &selector, args.capture.schedule)?;
    let control = capture::Control::new(context, interrupts);
    let taken = control.run(true, |progress| {
        vm.checkpoint(
            &mut CheckpointWriter::default(),
            &mut repository,
            &options,
            progress,
        )
    });
    capture::detach(context, vm);
    let report = taken??;
    capture::report_obstacles(context, &report, &mut Vec::new());
    capture::print(context, &report)
}
