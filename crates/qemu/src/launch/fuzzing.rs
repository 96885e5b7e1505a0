//! What the fuzz targets reach of the launch's inside.

use std::path::Path;

use super::rewrite::{Settings, rewrite};
use super::{CloneOptions, LaunchOptions};

/// The command line of a VM that is started again, its monitor at `/q`, no serial port asked for; of a clone,
/// or where a living process listens everywhere. `None` where it is refused.
pub fn rewritten(arguments: &[String], is_clone: bool, is_busy: bool) -> Option<Vec<String>> {
    let options = LaunchOptions {
        clone: is_clone.then(CloneOptions::default),
        ..LaunchOptions::new("/q".into(), "/l".into())
    };
    let settings = Settings {
        options: &options,
        run_as: None,
        disks: &[],
    };
    let rewritten = rewrite(arguments, Path::new("/vms"), &settings, &|_| is_busy);
    rewritten.ok().map(|rewritten| rewritten.arguments)
}
