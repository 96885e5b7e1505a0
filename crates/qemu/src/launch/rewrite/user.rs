//! Options by which a QEMU that was started as root gives up its rights. A new QEMU that starts as the VM's user
//! has none to give up.

use super::{Argument, LaunchError, Properties, Rewriter};
use crate::credentials::Credentials;

impl Rewriter<'_> {
    /// Drops `-runas` and `-run-with user=`. An option that only root may use is refused.
    pub(super) fn drop_change_of_user(&mut self, owner: &Credentials) -> Result<(), LaunchError> {
        let mut kept = Vec::new();
        for option in std::mem::take(&mut self.line.options) {
            let with = option.value().filter(|_| option.is("run-with"));
            let mut with = with.map(|value| Properties::parse(value, ""));
            let confined = with
                .as_ref()
                .is_some_and(|with| with.get("chroot").is_some());
            if option.is("chroot") || confined {
                return Err(LaunchError::NeedsRoot {
                    option: option.words(),
                    uid: owner.uid,
                });
            }
            let changes_user = with.as_mut().is_some_and(|with| with.remove("user"));
            if !changes_user && !option.is("runas") {
                kept.push(option);
                continue;
            }
            self.note(format!(
                "`{}` left out: QEMU starts as user {}; --as-root starts it as before",
                option.words(),
                owner.uid
            ));
            let rest = with.filter(|with| with.pairs().next().is_some());
            kept.extend(rest.map(|with| Argument::new("run-with", with.render(""))));
        }
        self.line.options = kept;
        Ok(())
    }
}
