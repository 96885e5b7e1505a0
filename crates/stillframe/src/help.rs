//! The examples and exit codes below each command's options.

/// The same words under every command.
macro_rules! exit_codes {
    () => {
        "\
Exit codes:
  0  done
  1  failed, or interrupted before it was done
  2  wrong usage
  3  the repository is damaged
  4  wrong password
  5  the VM was not found, or cannot be checkpointed right
  6  the repository is locked by another process"
    };
}

/// `stillframe --help`
pub const TOP: &str = concat!(
    "\
Examples:
  export STILLFRAME_REPOSITORY=/srv/checkpoints STILLFRAME_PASSWORD_FILE=/etc/stillframe.password
  stillframe init
  stillframe checkpoint web1
  stillframe watch web1 --every 30s
  stillframe list
  stillframe restore latest --vm web1 --qmp /run/web1-again.qmp

The password is read from --password-file or --password-command; else from one of the environment's
STILLFRAME_PASSWORD, STILLFRAME_PASSWORD_FILE and STILLFRAME_PASSWORD_COMMAND; else it is asked for.
Results go to standard output, everything else to standard error. With --json both are JSON, one object a line: a
result, {\"note\": ...}, {\"warning\": ...}, or {\"error\": ..., \"exit_code\": ...}.

",
    exit_codes!()
);

/// `stillframe init --help`
pub const INIT: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints init
  stillframe -r /srv/checkpoints init --password-file /etc/stillframe.password

Keep the password: without it nothing in the repository can be read again.

",
    exit_codes!()
);

/// `stillframe key --help`
pub const KEY: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints key list
  stillframe -r /srv/checkpoints key add --new-password-file /etc/stillframe.other
  stillframe -r /srv/checkpoints key passwd
  stillframe -r /srv/checkpoints --password-file /etc/stillframe.other key remove 1a2b3c4d

Every password opens the same master key, each by a file of its own. A password must be given in any case,
also where the repository is unlocked; that one's own key is not removed, so one that works is always left.

Removing or changing a password encrypts nothing anew. An older copy of its key file (a backup, say) together
with that password still gives the master key, and so does a key that `unlock` keeps. Where that may be
in wrong hands, make a new repository, `copy` the checkpoints there, and remove the old one.

",
    exit_codes!()
);

/// `stillframe checkpoint --help`
pub const CHECKPOINT: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints checkpoint --vm web1
  stillframe -r /srv/checkpoints checkpoint --pid 4711 --json
  stillframe -r /srv/checkpoints checkpoint --qmp /run/web1.qmp --verify
  stillframe -r /srv/checkpoints checkpoint --vm web1 --tag before-upgrade --note 'kernel 6.12 is next'

The VM runs on, except for the pause the result tells of. A pause that overruns its limit ends, and
the checkpoint with it. With --verify the pause lasts as long as reading all memory takes. Ctrl-C
gives the checkpoint up. TIME is a number and its unit: 500ms, 2s, 5m. SIZE too: 64M, 1.5G.

A tag is a word of letters, digits and ._-:/+@=, up to 64 bytes; a checkpoint has up to 32. A note is one line
of up to 1024 bytes. Both are encrypted with the checkpoint, and cannot be changed later.

",
    exit_codes!()
);

/// `stillframe watch --help`
pub const WATCH: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints watch --vm web1 --every 30s
  stillframe -r /srv/checkpoints watch --pid 4711 --every 2s --count 100 --json
  stillframe -r /srv/checkpoints watch --vm web1 --every 10m --tag auto

One checkpoint is stored while the next is captured; an interval that cannot be kept is lengthened, and
told. --schedule auto takes what suits the VM, and says why: stop-copy (all in the pause), pre-copy
(before it, as far as possible), or copy-on-write (after it). With copy-on-write the guest waits for this
process at some of its first writes: should it hang for some seconds, a stop signal included, it is
killed for the guest's sake. Where the host's KSM or the balloon takes pages before they are copied, that
checkpoint is taken once more by pre-copy.

One result a checkpoint. A checkpoint that fails is reported, and tried again at the next interval;
10 failures in a row end the watch with exit code 1. The first Ctrl-C (or SIGTERM) finishes the
running checkpoint and detaches, the second gives the checkpoint up, the third exits at once; the VM
runs on in every case. Exit code 0 when ended by a signal or by the VM's end, but 1 when --count was
given and not reached. TIME is a number and its unit: 500ms, 2s, 5m. Every checkpoint has the tags and the note.

",
    exit_codes!()
);

/// `stillframe list --help`
pub const LIST: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints list
  stillframe -r /srv/checkpoints list --vm web1 --json
  stillframe -r /srv/checkpoints list --tag nightly --since 7d --last 3
  stillframe -r /srv/checkpoints list --since 2026-11-01 --until 2026-11-24T13:00:00+01:00

A checkpoint is listed if all options allow it. TIME is a date of this host's time zone (all of that day), a date
with time and zone as RFC 3339 has it, or an age: whole numbers with the units s, min, h, d, w, mo and y, such as
2h, 3d or 1y6mo. What the table shows as a time can be given as one, in quotes. With --json times are UTC.

",
    exit_codes!()
);

/// `stillframe show --help`
pub const SHOW: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints show 1a2b3c4d
  stillframe -r /srv/checkpoints show latest --vm web1 --json

",
    exit_codes!()
);

/// `stillframe restore --help`
pub const RESTORE: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints restore latest --vm web1
  stillframe -r /srv/checkpoints restore latest --vm web1 --qmp /run/web1-again.qmp --replace /srv/web1.img=/srv/copy.img --disks-as-they-are
  stillframe -r /srv/checkpoints restore 1a2b3c4d --qmp /run/x.qmp --serial file:/run/x.serial --paused
  stillframe -r /srv/checkpoints restore latest --qmp /run/x.qmp --print-command
  stillframe -r /srv/checkpoints restore latest --qmp /run/x.qmp --lazy
  stillframe -r /srv/checkpoints restore --resume --qmp /run/x.qmp

The new QEMU runs in the background with the command line the checkpoint recorded, in the recorded
directory, and every change of it is reported. Its monitor, its listening serial port and its -pidfile are
where the VM had them, if no living process uses them; --qmp, --serial and --pidfile name others. --replace has
another word in the command line, such as the path of a disk's copy: the VM runs beside its original then. It
returns when the guest runs, and prints the new QEMU's process id. The checkpoint holds memory and device state, not the contents of disks: with
--disks-as-they-are the guest goes on with disks that were written to since, or (snapshot=on) lost
what it wrote, and may damage what is on them. It is refused where the processors lack what the guest was
started with; a guest that runs has its network cards tell the network where it is now, and its clock
set, where its command line has a channel to a guest agent (org.qemu.guest_agent.0, a unix socket).

As root, QEMU starts as the user, with the groups, that the VM ran as; that user must be able to make the
socket of --qmp and to open the disks. It starts in the VM's control group (cgroup v2) where this host has
it, else in that of this command, which is reported; --without-group leaves the group out. It starts with the
security label that confined the VM (SELinux, AppArmor), or not at all; --without-label starts it without,
on a host that has no such label. --as-root starts it as root, without both. The recorded program is run only if
nobody but root can exchange it; --qemu names another. Programs that the recorded command line names run
with --allow-commands only, or when a person at a terminal says yes. What would stand in the way of a
restore is known at the checkpoint, and shown by `list` and `show`.

With --lazy the guest runs within milliseconds and gets each page of its memory when it touches it, the
others in the background; the command returns when memory is complete. Until then the VM needs this
process and the repository: when a page cannot be read the VM is paused until it can, and when this
process is killed it is paused until `restore --resume` goes on, which sets the guest's clock too. Both are
told.

QEMU's log and the files of an unfinished lazy restore lie in /run/stillframe (root), or
$XDG_RUNTIME_DIR/stillframe (other users); STILLFRAME_RUNTIME_DIR names another directory. It must be its owner's
alone. The log of a VM that has ended is removed by a later restore: at once where it is empty, else after a week.

",
    exit_codes!()
);

/// `stillframe clone --help`
pub const CLONE: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints clone latest --vm web1 -n 10 --qmp /run/web1-{}.qmp
  stillframe -r /srv/checkpoints clone 1a2b3c4d -n 2 --first 11 --qmp /run/x-{}.qmp --serial file:/tmp/x-{}.log
  stillframe -r /srv/checkpoints clone latest -n 3 --qmp /run/x-{}.qmp --replace tap0=tap{} --replace tcp::2200=tcp::220{}
  stillframe clone --drop-templates

The first time, the memory of the checkpoint is written to --base-dir, as a memory template; each clone maps
it, and has only those pages to itself that it writes. A template is in the clear: keep the directory in
memory, or on a disk that is encrypted. It must be its owner's alone. Templates of checkpoints that are forgotten
go with them from the default directory; --templates lists them, --drop-templates removes them. Each clone has a monitor and a name of its own (web1-3), sockets that it listens on
with its number behind (/run/web1.agent-3), a new generation id where the machine has one, and what it
writes to disks goes into a temporary file of its own. What else the host has only once (a tap, a port)
is replaced with --replace. Inside, clones are twins until they are told otherwise: same MAC addresses, same
keys, same random state.

",
    exit_codes!()
);

/// `stillframe rewind --help`
pub const REWIND: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints rewind latest --vm web1
  stillframe -r /srv/checkpoints rewind 1a2b3c4d --pid 4711 --paused --json

The VM goes back to what it was at the checkpoint, in the QEMU that it runs in: same process, same monitor,
same connections. What differs is sought while the guest runs; it is paused for writing that and for loading
the device state. The checkpoint holds no disks: one that was written to since is refused, unless told
--disks-as-they-are, which may damage what is on it. So is a VM with other devices than it had then.

If anything fails, the VM goes on as it was. If this process is killed while memory is exchanged, the VM stays
paused, and has to be rewound again before it is resumed. A VM that was paused stays so.

",
    exit_codes!()
);

/// `stillframe unlock --help`
pub const UNLOCK: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints unlock --for 12h
  stillframe -r /srv/checkpoints unlock --end

The repository's key lies in the kernel's keyring of this user: processes of this user, and root, need no
password for the repository until the time is over, and no command spends a tenth of a second on
deriving the key from it. Nothing is written to disk; the machine's next start ends it.

",
    exit_codes!()
);

/// `stillframe export --help`
pub const EXPORT: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints export latest --vm web1 --format mapped-ram -o web1.mapped
  stillframe -r /srv/checkpoints export 1a2b3c4d --format migration -o - | ssh other 'cat > web1.stream'
  stillframe -r /srv/checkpoints export latest --vm web1 --format elf -o web1.core

mapped-ram and migration are QEMU's own files; the command that loads them is printed. raw is main RAM,
each byte at its physical address, with a hole below 4 GiB where the machine has one. elf is a core for
gdb and crash: main RAM by physical address and by the addresses of the guest's kernel, and the
registers of its vCPUs. Zero pages are holes, but in migration. The file holds all secrets that the
guest had in memory, unencrypted; it is for its owner alone (0600).

",
    exit_codes!()
);

/// `stillframe import --help`
pub const IMPORT: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints import web1.mapped -- qemu-system-x86_64 -machine pc-q35-10.0 -m 4G ...
  stillframe -r /srv/checkpoints import web1.stream --vm web1 -- qemu-system-x86_64 ...

The command line is that of the QEMU that wrote the file, with its versioned machine type; relative
paths in it are taken from here. QEMU is started with it, asked, and ended before the guest runs. What
the disks held is not in the file: restore asks for --disks-as-they-are.

",
    exit_codes!()
);

/// `stillframe copy --help`
pub const COPY: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints copy latest --vm web1 --to /mnt/other
  stillframe -r /srv/checkpoints copy 1a2b3c4d latest --vm web1 --to /mnt/other --to-password-file /etc/other.password

Every byte is read and verified, and stored there under that repository's key; pages that it has already are
not stored again. A copy needs nothing of the repository that it comes from, and no other checkpoint. It names its
original, so the same checkpoint is not copied twice.

",
    exit_codes!()
);

/// `stillframe check --help`
pub const CHECK: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints check
  stillframe -r /srv/checkpoints check --read-data --json

Without --read-data: that all files are there, fit together, and hold what the checkpoints need.
Problems found are listed, and the exit code is 3.

",
    exit_codes!()
);

/// `stillframe forget --help`
pub const FORGET: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints forget --keep-last 10 --keep-hourly 24 --keep-daily 7 --prune
  stillframe -r /srv/checkpoints forget 1a2b3c4d 5e6f7a8b
  stillframe -r /srv/checkpoints forget --vm web1 --keep-last 1 --dry-run
  stillframe -r /srv/checkpoints forget --keep-within 7d --keep-monthly 12 --keep-yearly 5 --keep-tag before-upgrade
  stillframe -r /srv/checkpoints forget --tag auto --keep-within 1d

The rules hold for each VM by itself, and a checkpoint that any rule keeps stays. No checkpoint needs another one
to be restored. Hours, days, weeks (from Monday), months and years are those of UTC. AGE is whole numbers with
the units s, min, h, d, w, mo and y, such as 12h, 7d or 1y6mo; it counts back from the newest checkpoint of the VM
that the rules look at and that is not of the future. --keep-tag by itself is refused if no checkpoint of a VM has
the tag. Checkpoints that no rule looks at stay: they are counted, not listed; --json has all of them.

",
    exit_codes!()
);

/// `stillframe prune --help`
pub const PRUNE: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints prune --dry-run
  stillframe -r /srv/checkpoints prune

Can be interrupted at any point; what was not freed is freed the next time.

",
    exit_codes!()
);

/// `stillframe rebuild-index --help`
pub const REBUILD_INDEX: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints rebuild-index
  stillframe -r /srv/checkpoints check --read-data

The data is in the packs; the index only tells where. Run it when check names files in index/.

",
    exit_codes!()
);

/// `stillframe inspect --help`
pub const INSPECT: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints inspect latest
  stillframe -r /srv/checkpoints inspect /srv/checkpoints
  stillframe -r /srv/checkpoints inspect /srv/checkpoints/config --json

",
    exit_codes!()
);

/// `stillframe stats --help`
pub const STATS: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints stats latest~1 latest
  stillframe -r /srv/checkpoints stats 1a2b 3c4d --svg changes.svg --json
  stillframe stats --vm web1 --over 3m

[0] counts the pages that are the same in both checkpoints, (8,16] those of which 9 to 16 bytes differ.
8B dirty bytes lie in aligned words of eight bytes that changed altogether. Delta bytes are what the
changes would take as differences, positions included. With --over, two
checkpoints are taken into a temporary repository in TMPDIR, and removed again; it needs about as much
room as the VM's memory, compressed.

",
    exit_codes!()
);

/// `stillframe completions --help`
pub const COMPLETIONS: &str = concat!(
    "\
Examples:
  stillframe completions bash > /etc/bash_completion.d/stillframe
  stillframe completions zsh > /usr/local/share/zsh/site-functions/_stillframe
  stillframe completions fish > ~/.config/fish/completions/stillframe.fish

",
    exit_codes!()
);

/// `stillframe man --help`
pub const MAN: &str = concat!(
    "\
Examples:
  stillframe man /usr/local/share/man/man1
  stillframe man . && man -l stillframe-restore.1

",
    exit_codes!()
);

/// `stillframe probe --help`
pub const PROBE: &str = concat!(
    "\
Examples:
  stillframe probe
  stillframe probe --json

Each ability is tried once, on processes of stillframe's own. Exit code 1 when a required one is
missing.

",
    exit_codes!()
);
