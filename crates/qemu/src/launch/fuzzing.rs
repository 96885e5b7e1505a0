//! The parts of the launch that the fuzz targets reach.

use std::path::Path;

use super::rewrite::{Settings, rewrite};
use super::{CloneOptions, LaunchOptions};

/// The command line of a VM that is started again, its monitor at `/q`, without a serial port. The VM may be a
/// clone, or a living process may listen everywhere. `None` if it is refused.
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
