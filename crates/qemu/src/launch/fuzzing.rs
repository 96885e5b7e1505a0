//! What the fuzz targets reach of the launch's inside.

use std::path::Path;

use super::rewrite::rewrite;
use super::{CloneOptions, LaunchOptions};

/// The command line of a VM that is started again, its monitor at `/q`, no serial port asked for; of a clone,
/// or where a living process listens everywhere. `None` where it is refused.
pub fn rewritten(arguments: &[String], is_clone: bool, is_busy: bool) -> Option<Vec<String>> {
    let options = LaunchOptions {
        qmp: "/q".into(),
        serial: None,
        disks_as_they_are: false,
        log: "/l".into(),
        clone: is_clone.then(CloneOptions::default),
    };
    let rewritten = rewrite(arguments, Path::new("/vms"), &options, &|_| is_busy);
    rewritten.ok().map(|rewritten| rewritten.arguments)
}
