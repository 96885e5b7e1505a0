//! The command lines of `migrate` and `receive`.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use stillframe_engine::migration::{
    CONNECTIONS_MAX, CompressionChoice, CopyDisks, LocalImage, Mode, PageHash, SkipFake,
};
use stillframe_link::Address;

use super::{LaunchArgs, LockArgs, VmSelector};
use crate::{durations, sizes};

/// How a connection between two hosts is protected; exactly one of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct SecurityArgs {
    /// Directory with this host's certificate and key, as `stillframe certs host` makes it
    #[arg(long, value_name = "DIR")]
    pub certs: Option<PathBuf>,
    /// Neither encrypt nor authenticate; the other side has to say the same
    #[arg(long)]
    pub plain_text: bool,
}

/// When the pages of a VM move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeChoice {
    /// Stop-copy for a VM that is paused; else pre-copy, and hybrid if the VM would be stopped for long or writes a
    /// third of its memory meanwhile
    Auto,
    /// While the VM runs; the rest while it is stopped
    PreCopy,
    /// Once while the VM runs; the rest while it runs at the destination. If either host or QEMU is lost meanwhile, so is
    /// the VM
    Hybrid,
    /// While the VM runs at the destination: the same risk, for longer
    PostCopy,
    /// All while the VM is stopped: the least to send, and the longest downtime
    StopCopy,
}

impl ModeChoice {
    /// The engine's; `None` leaves it to the engine.
    pub fn mode(self) -> Option<Mode> {
        match self {
            ModeChoice::Auto => None,
            ModeChoice::PreCopy => Some(Mode::PreCopy),
            ModeChoice::Hybrid => Some(Mode::Hybrid),
            ModeChoice::PostCopy => Some(Mode::PostCopy),
            ModeChoice::StopCopy => Some(Mode::StopCopy),
        }
    }
}

/// How pages are found that need not be sent in this round.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SkipFakeChoice {
    /// Not at all: send all that was written when the round began
    Off,
    /// A thread that looks at all memory again and again (D-Track, first version)
    Thread,
    /// The same, with pauses (D-Track, second version)
    ThreadDelayed,
    /// A look at each batch right before it is read
    Exact,
    /// The same, and pages that keep changing are sent late
    Auto,
}

impl From<SkipFakeChoice> for SkipFake {
    fn from(choice: SkipFakeChoice) -> SkipFake {
        match choice {
            SkipFakeChoice::Off => SkipFake::Off,
            SkipFakeChoice::Thread => SkipFake::Thread,
            SkipFakeChoice::ThreadDelayed => SkipFake::ThreadDelayed,
            SkipFakeChoice::Exact => SkipFake::Exact,
            SkipFakeChoice::Auto => SkipFake::Auto,
        }
    }
}

/// How unchanged pages are recognized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PageIds {
    /// Not at all; they are counted
    Off,
    /// The fastest
    Xxh3,
    /// The strongest
    Blake3,
    /// Only to compare with: a guest that makes two contents with one id spoils a page of its own
    Sha1,
    /// The same
    Md5,
    /// The same
    Murmur3,
}

impl PageIds {
    /// The engine's.
    pub fn hash(self) -> Option<PageHash> {
        match self {
            PageIds::Off => None,
            PageIds::Xxh3 => Some(PageHash::Xxh3),
            PageIds::Blake3 => Some(PageHash::Blake3),
            PageIds::Sha1 => Some(PageHash::Sha1),
            PageIds::Md5 => Some(PageHash::Md5),
            PageIds::Murmur3 => Some(PageHash::Murmur3),
        }
    }
}

/// `migrate`
#[derive(Debug, Args)]
pub struct MigrateArgs {
    /// The running VM.
    #[command(flatten)]
    pub vm: VmSelector,
    /// Address of the destination, where `stillframe receive` listens
    #[arg(long, value_name = "HOST[:PORT]")]
    pub to: Address,
    /// How the connection is protected.
    #[command(flatten)]
    pub security: SecurityArgs,
    /// When the VM's pages move
    #[arg(long, value_enum, default_value_t = ModeChoice::Auto)]
    pub mode: ModeChoice,
    /// First have the destination load an early device state into a QEMU that it ends again: what would fail at the
    /// hand-over fails then. The VM is stopped for it about as long as for the hand-over
    #[arg(long)]
    pub rehearse: bool,
    /// Compare all memory with the destination's before the VM runs there; it is stopped meanwhile
    #[arg(long)]
    pub verify: bool,
    /// Resume the VM here if it is stopped for longer and not yet handed over
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "1m")]
    pub pause_limit: Duration,
    /// Send at most so many bytes a second while the VM runs
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_positive)]
    pub bandwidth: Option<NonZeroU64>,
    /// Send pages while the VM runs until the rest can be sent in this time
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "10ms")]
    pub downtime_limit: Duration,
    /// Upper bound on copies of guest memory by which changes are found; 0: send whole pages
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "512M")]
    pub delta_cache: u64,
    /// Number of connections for pages [default: one a processor, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=CONNECTIONS_MAX as i64))]
    pub connections: Option<u8>,
    /// How pages are compressed: auto, none, lz4, zstd or zstd:LEVEL. auto measures what is quickest, again and again;
    /// each connection compresses in its own thread
    #[arg(long, value_name = "HOW", default_value_t = CompressionChoice::Auto)]
    pub compression: CompressionChoice,
    /// How to find pages that need not be sent now, because the guest has written them again
    #[arg(long, value_enum, default_value_t = SkipFakeChoice::Auto, value_name = "HOW")]
    pub skip_fake: SkipFakeChoice,
    /// How to find pages that were written and have their old content, beyond the delta cache
    #[arg(long, value_enum, default_value_t = PageIds::Xxh3, value_name = "HASH")]
    pub page_ids: PageIds,
    /// Copy these disks to the destination, which does not reach them: all that the guest can write to, or those of these
    /// devices
    #[arg(long, value_name = "DEVICE", num_args = 0.., value_delimiter = ',', require_equals = true)]
    pub copy_disks: Option<Vec<String>>,
    /// A file that both hosts reach, such as the VM's disk or its golden image: of pages of memory that are in it, only the
    /// place is sent; the destination reads its own (with pre-copy and hybrid; may be given several times)
    #[arg(long = "shared-image", value_name = "PATH")]
    pub shared_images: Vec<PathBuf>,
    /// If the connection is lost, try to connect again for this long; until the hand-over the VM runs on here
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "1m")]
    pub reconnect: Duration,
    /// Go on with a hand-over that was interrupted: ask the destination where the VM runs
    #[arg(long, conflicts_with_all = ["mode", "rehearse", "verify", "take_back"])]
    pub resume: bool,
    /// As --resume, but have the VM run here, unless it runs there; if the destination does not answer, you thereby
    /// say that it never will run there
    #[arg(long, conflicts_with_all = ["mode", "rehearse", "verify"])]
    pub take_back: bool,
}

impl MigrateArgs {
    /// The disks to copy.
    pub fn copied(&self) -> CopyDisks {
        match &self.copy_disks {
            None => CopyDisks::No,
            Some(devices) if devices.is_empty() => CopyDisks::All,
            Some(devices) => CopyDisks::These(devices.clone()),
        }
    }
}

/// `PATH`, or `NAME=PATH`. A name is an absolute path, so a `=` in a path is none of ours where no path follows it.
fn shared_image(text: &str) -> Result<LocalImage, String> {
    let (name, path) = match text.split_once("=/") {
        Some((name, _)) if name.starts_with('/') => (name.to_owned(), &text[name.len() + 1..]),
        _ => (text.to_owned(), text),
    };
    match Path::new(&name).is_absolute() && Path::new(path).is_absolute() {
        true => Ok(LocalImage {
            name,
            path: path.into(),
        }),
        false => Err("expected an absolute path, or two as in /there.img=/here.img".to_owned()),
    }
}

/// `receive`
#[derive(Debug, Args)]
pub struct ReceiveArgs {
    /// Address to listen at; port 0 is a free one
    #[arg(long, value_name = "ADDR[:PORT]")]
    pub listen: Address,
    /// How the connection is protected.
    #[command(flatten)]
    pub security: SecurityArgs,
    /// Let only a host in whose certificate has this name (repeatable)
    #[arg(long, value_name = "NAME", conflicts_with = "plain_text")]
    pub allow: Vec<String>,
    /// Unix socket for the new QEMU's QMP monitor
    #[arg(long, value_name = "PATH", required_unless_present = "into")]
    pub qmp: Option<PathBuf>,
    /// Receive into the QEMU with this monitor, which was started with `-incoming defer`, and has the VM's machine and
    /// devices [default: start one as the VM was started]
    #[arg(long, value_name = "QMP", conflicts_with_all = ["qmp", "serial", "resume", "LaunchArgs"])]
    pub into: Option<PathBuf>,
    /// First serial port, as for QEMU's -serial [default: as recorded if it listens, else null]
    #[arg(long, value_name = "SPEC")]
    pub serial: Option<String>,
    /// Leave the guest paused; `cont` on its monitor runs it
    #[arg(long)]
    pub paused: bool,
    /// Begin with the last checkpoint of the VM in the repository, or with this one: only pages that differ are sent. A VM
    /// that has none there comes whole. Of a VM that a `watch` with the same repository migrates only the last increment
    /// comes; it reads the rest from there while it runs
    #[arg(long, value_name = "CHECKPOINT", num_args = 0..=1, require_equals = true, default_missing_value = "latest")]
    pub seed: Option<String>,
    /// Waiting for the repository.
    #[command(flatten)]
    pub lock: LockArgs,
    /// If the connection is lost while the VM runs at the source, keep what came, and wait for the source for this long
    #[arg(long, value_name = "TIME", value_parser = durations::parse_positive, default_value = "1m")]
    pub reconnect: Duration,
    /// A file that the source may have pages read from (`migrate --shared-image`); NAME is its path there, if it is another
    /// (may be given several times)
    #[arg(long = "shared-image", value_name = "[NAME=]PATH", value_parser = shared_image, conflicts_with = "resume")]
    pub shared_images: Vec<LocalImage>,
    /// Copy disks over images that exist here; without it they are made
    #[arg(long)]
    pub overwrite_disks: bool,
    /// Take a VM into a newer QEMU than it ran under (with --qemu, or the program of the same name), once the source has
    /// rehearsed it (`migrate --rehearse`)
    #[arg(long, conflicts_with_all = ["into", "resume"])]
    pub newer_qemu: bool,
    /// Go on for a `receive` that was killed: answer the source about the VM with this monitor
    #[arg(long, conflicts_with_all = ["serial", "paused"])]
    pub resume: bool,
    /// How QEMU is started.
    #[command(flatten)]
    pub launch: LaunchArgs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_image_has_one_path_or_two() {
        let of = |text: &str| shared_image(text).map(|image| (image.name, image.path));
        let both = |name: &str, path: &str| Ok((name.to_owned(), PathBuf::from(path)));
        assert_eq!(of("/a.img"), both("/a.img", "/a.img"));
        assert_eq!(of("/a.img=/mnt/b.img"), both("/a.img", "/mnt/b.img"));
        assert_eq!(of("/a=b.img"), both("/a=b.img", "/a=b.img"));
        for wrong in ["", "a.img", "a.img=/b.img", "./a"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
