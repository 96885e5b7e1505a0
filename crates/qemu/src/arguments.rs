//! QEMU's command line as data: its options, which of them take a value, and the way back to words. Every read or
//! change of a command line goes through here.
//!
//! Rules (QEMU: `system/vl.c`, `qemu-options.hx`): an option begins with one or two dashes and is never
//! abbreviated. Its name decides whether it takes a value, so a value may itself begin with a dash. A word without
//! a dash is the image of the first disk.

mod backend;
mod own_monitor;
mod properties;

pub use backend::{Backend, BackendWord, MONITOR};
pub(crate) use own_monitor::{
    chardev_is, is_own_monitor, monitor_device, own_monitor, without_own_monitor,
};
pub use properties::Properties;

/// Options that take no value. Every other option takes exactly one.
const OPTIONS_WITHOUT_VALUE: &[&str] = &[
    "S",
    "alt-grab",
    "async-teardown",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-hax",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "old-param",
    "one-insn-per-tb",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "s",
    "sdl",
    "semihosting",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// One option of a command line, its name without dashes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    /// An option without a value.
    Flag(String),
    /// An option with its value.
    Valued {
        /// Name without dashes.
        name: String,
        /// The value as it was written.
        value: String,
    },
    /// A word without a dash: the image file of the first disk.
    Image(String),
}

impl Argument {
    /// An option with a value.
    pub fn new(name: &str, value: impl Into<String>) -> Argument {
        Argument::Valued {
            name: name.to_owned(),
            value: value.into(),
        }
    }

    /// The option's name without dashes; an image file has none.
    pub fn name(&self) -> Option<&str> {
        match self {
            Argument::Flag(name) | Argument::Valued { name, .. } => Some(name),
            Argument::Image(_) => None,
        }
    }

    /// The option's value, or the image file.
    pub fn value(&self) -> Option<&str> {
        match self {
            Argument::Flag(_) => None,
            Argument::Valued { value, .. } | Argument::Image(value) => Some(value),
        }
    }

    /// Whether this is the option `name`, with or without a value.
    pub fn is(&self, name: &str) -> bool {
        self.name() == Some(name)
    }

    /// The option as a person would write it, for messages.
    pub fn words(&self) -> String {
        match self {
            Argument::Flag(name) => format!("-{name}"),
            Argument::Valued { name, value } => format!("-{name} {value}"),
            Argument::Image(path) => path.clone(),
        }
    }
}

/// A whole command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    /// `argv[0]`; empty when there was none.
    pub program: String,
    /// The options in their order, which QEMU gives a meaning (serial ports, later options win).
    pub options: Vec<Argument>,
}

impl CommandLine {
    /// Splits `argv`. Never fails: words that QEMU itself would refuse are kept as they are. A last option without
    /// its value gets an empty one. Otherwise an option that is added behind it later would become its value.
    pub fn parse(argv: &[String]) -> CommandLine {
        let mut words = argv.iter();
        let program = words.next().cloned().unwrap_or_default();
        let mut options = Vec::new();
        while let Some(word) = words.next() {
            let Some(name) = word.strip_prefix("--").or_else(|| word.strip_prefix('-')) else {
                options.push(Argument::Image(word.clone()));
                continue;
            };
            options.push(match OPTIONS_WITHOUT_VALUE.contains(&name) {
                true => Argument::Flag(name.to_owned()),
                false => Argument::new(name, words.next().cloned().unwrap_or_default()),
            });
        }
        CommandLine { program, options }
    }

    /// The command line as words, `argv[0]` first.
    pub fn to_argv(&self) -> Vec<String> {
        let mut argv = vec![self.program.clone()];
        for option in &self.options {
            match option {
                Argument::Flag(name) => argv.push(dashed(name)),
                Argument::Valued { name, value } => {
                    argv.push(dashed(name));
                    argv.push(value.clone());
                }
                Argument::Image(path) => argv.push(path.clone()),
            }
        }
        argv
    }

    /// Adds an option at the end.
    pub(crate) fn push(&mut self, name: &str, value: &str) {
        self.options.push(Argument::new(name, value));
    }

    /// Whether the option `name` stands in the command line.
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|option| option.is(name))
    }

    /// The values of every option `name`, in order.
    pub fn values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.options
            .iter()
            .filter(move |option| option.is(name))
            .filter_map(Argument::value)
    }

    /// The guest's name: `-name foo` or `-name guest=foo,...`; the last one wins.
    pub fn guest_name(&self) -> Option<String> {
        let properties = Properties::parse(self.values("name").last()?, "guest");
        let name = properties.get("guest")?;
        (!name.is_empty()).then(|| name.to_owned())
    }

    /// The character device `-chardev ...,id=ID`.
    pub fn character_device(&self, id: &str) -> Option<Backend> {
        self.values("chardev")
            .map(Backend::from_chardev)
            .find(|backend| backend.id() == Some(id))
    }
}

/// The word for an option of this name. One that begins with a dash was written with three; with two it would
/// be another option.
fn dashed(name: &str) -> String {
    match name.starts_with('-') {
        true => format!("--{name}"),
        false => format!("-{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn argv(words: &str) -> Vec<String> {
        words.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn options_are_told_from_values_by_name() {
        let line = CommandLine::parse(&argv(
            "qemu -S --nographic -append -quiet disk.img -m 64 -snapshot --name foo",
        ));
        assert_eq!(
            line.options,
            [
                Argument::Flag("S".into()),
                Argument::Flag("nographic".into()),
                Argument::new("append", "-quiet"),
                Argument::Image("disk.img".into()),
                Argument::new("m", "64"),
                Argument::Flag("snapshot".into()),
                Argument::new("name", "foo"),
            ]
        );
        assert_eq!(
            line.to_argv(),
            argv("qemu -S -nographic -append -quiet disk.img -m 64 -snapshot -name foo")
        );
    }

    /// QEMU refuses both; but a process may have changed what it shows as its command line.
    #[test]
    fn an_option_never_becomes_another_one() {
        let line = CommandLine::parse(&argv("qemu ---qmp unix:/x -name"));
        assert!(!line.has("qmp"));
        let mut words = argv("qemu ---qmp unix:/x -name");
        words.push(String::new());
        assert_eq!(line.to_argv(), words);
        assert_eq!(CommandLine::parse(&words), line);
    }

    #[test]
    fn guest_names() {
        let table = [
            ("-name foo", Some("foo")),
            ("-name guest=foo,debug-threads=on", Some("foo")),
            ("--name foo,process=bar", Some("foo")),
            ("-name a,,b", Some("a,b")),
            ("-name debug-threads=on", None),
            ("-name first -name second", Some("second")),
            ("-m 64", None),
            ("-name", None),
        ];
        for (words, expected) in table {
            let line = CommandLine::parse(&argv(&format!("qemu {words}")));
            assert_eq!(line.guest_name().as_deref(), expected, "{words}");
        }
    }

    #[test]
    fn an_empty_command_line_is_no_error() {
        let line = CommandLine::parse(&[]);
        assert_eq!(line.program, "");
        assert!(line.options.is_empty());
    }
}
