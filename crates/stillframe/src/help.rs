//! The examples, explanations and exit codes below each command's options.

/// The list below the options of every command.
macro_rules! exit_codes {
    () => {
        "\
Exit codes:
  0  done
  1  failed, or interrupted before it was done
  2  wrong usage
  3  the repository is damaged
  4  wrong password
  5  the VM was not found, or cannot be checkpointed correctly
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

The password comes from --password-file or --password-command, or from one of the environment variables
STILLFRAME_PASSWORD, STILLFRAME_PASSWORD_FILE and STILLFRAME_PASSWORD_COMMAND; otherwise stillframe prompts for it.
Results go to standard output, everything else to standard error. With --json both are JSON, one value per line: a
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

Keep the password: without it nothing in the repository can be read.

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

Each password opens the same master key, through a key file of its own. Every key command needs a password, even
while the repository is unlocked. `key remove` refuses to remove the key whose password was given, so a working one
always remains.

Removing or changing a password re-encrypts nothing. An old copy of its key file (in a backup, say) with that
password still opens the master key, and so does a key that `unlock` keeps. If either may be in the wrong hands,
create a new repository, `copy` the checkpoints into it, and delete the old one.

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
  stillframe -r /srv/checkpoints checkpoint --vm web1 --disks capture,scratch=none

The VM runs on, except during the pause that the result reports. If the pause exceeds --pause-limit, the VM resumes
and the checkpoint is discarded. With --verify the pause lasts as long as reading all guest memory takes. Ctrl-C
discards the checkpoint. `watch --help` explains the schedules. TIME is a number with its unit: 500ms, 2s, 5m. So is
SIZE: 64M, 1.5G.

The checkpoint holds the content of all disks that the guest can write to, of the same moment as memory. They are read
while the VM runs on, by `watch` what was written since its last checkpoint; --copy-buffer limits what the guest may
overwrite of each meanwhile. With --disks auto, the default, a disk that cannot be captured is left out, with a warning;
with capture this is an error. The files of a disk that is left out, or has reference, must not change until the
checkpoint is restored. With none they may: the restored VM gets the disk as it is then. DISK is a name as in `show`.

A tag consists of letters, digits and ._-:/+@=, up to 64 bytes; a checkpoint has up to 32 tags. A note is one line
of up to 1024 bytes. Both are encrypted with the checkpoint and cannot be changed later.

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

One checkpoint is stored while the next is captured. An interval that cannot be kept is lengthened, and this is
reported. All checkpoints get the same tags and note. TIME is a number with its unit: 500ms, 2s, 5m.

Schedules:
  stop-copy      copies the written pages in the pause
  pre-copy       copies most of them before the pause
  copy-on-write  copies them after the pause; some first writes of the guest wait for this process
  auto           measures the VM, chooses one of these, and reports the choice
With copy-on-write, a watch that hangs for 2.5 seconds (also by SIGSTOP) is killed, so that the guest runs on. If the
host's KSM or the balloon takes pages before they are copied, that checkpoint is taken again with pre-copy.

--balloon takes memory from the guest before each checkpoint of all memory: the first, and those after a failure that
lost track. Increments are taken without it.

Each checkpoint prints one result. A checkpoint that fails is reported and tried again at the next interval; 10
failures in a row end the watch with exit code 1. The first Ctrl-C (or SIGTERM) finishes the current checkpoint and
detaches, the second discards that checkpoint, the third exits at once; the VM runs on in each case. The exit code
is 0 after a signal, a migration or the end of the VM, but 1 if --count was given and not reached.

`stillframe migrate` of this VM requests the migration from this process. It begins after the checkpoint in progress. When
the VM runs at the destination, this process ends. If the migration fails, the next checkpoint reads all memory.

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

A checkpoint is listed if it matches all options. TIME is a date in this host's time zone (the whole day), a date
with time and zone (RFC 3339), or an age: whole numbers with the units s, min, h, d, w, mo and y, such as 2h, 3d or
1y6mo. A time from the table is also accepted, in quotes. With --json times are UTC.

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
  stillframe -r /srv/checkpoints restore latest --qmp /run/x.qmp --disks new=/srv/restored
  stillframe -r /srv/checkpoints restore latest --qmp /run/x.qmp --lazy
  stillframe -r /srv/checkpoints restore --resume --qmp /run/x.qmp

The new QEMU runs in the background, with the recorded command line and in the recorded directory; each change of
the command line is reported. Monitor, listening serial port and -pidfile are where the VM had them, if no living
process uses them; --qmp, --serial and --pidfile name others. To run the VM beside its original, use --replace, for
example with the path of a disk's copy. The command returns when the guest runs, and prints QEMU's process id.

A checkpoint holds the disks that the guest can write to, unless --disks said otherwise. --disks new=DIR writes
them into new files in DIR, each in the format and with the name that it had, and has the VM use these. The guest runs
when they are complete, also with --lazy. Any other checkpoint needs the disks unchanged. With --disks as-they-are, or
--disks-as-they-are, the guest runs on with disks that were written to since, or that lost its writes (snapshot=on);
this may damage the data on them. With --disks none it finds empty disks, which vanish with it: to look at its memory.

A restore is refused if the processors lack features that the guest was started with. When the guest runs, its
network cards announce themselves. Its clock is set by its guest agent, if the command line has a channel to one
(org.qemu.guest_agent.0 or org.stillframe.agent.0 on a unix socket). --verify with --lazy needs --paused.

As root, QEMU starts as the user and groups that the VM ran as. That user must be able to create the socket of --qmp
and to open the disks. QEMU joins the VM's control group (cgroup v2) if this host has it; otherwise it stays in that
of this command, and this is reported. --without-group skips the group. QEMU starts with the security label that
confined the VM (SELinux, AppArmor), or not at all; --without-label is for a host that has no such label. --as-root
starts QEMU as root, without label and group. The recorded QEMU program is started only if no user but root can
replace it, or if only the VM's user can, it is still the program that the VM ran, and the VM ran without sandbox,
label and container; --qemu names another. Programs that the recorded command line names are started only with
--allow-commands, or after a confirmation on the terminal. `list` and `show` report the obstacles to a restore that
were known at the checkpoint.

With --lazy the guest runs before its memory is filled: a page is read when the guest first touches it, all others
in the background. The command returns when all memory is filled. Until then the VM needs this process and the
repository. If a page cannot be read, the VM is paused until it can. If this process is killed, the VM is paused
until `restore --resume` continues, which also sets the guest's clock. Each of these is reported.

QEMU's log and the files of an unfinished lazy restore are in /run/stillframe (root) or $XDG_RUNTIME_DIR/stillframe
(other users); STILLFRAME_RUNTIME_DIR names another directory. Only its owner may have access to it. The log of a VM
that has ended is removed by a later restore: at once if it is empty, else after a week.

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
  stillframe -r /srv/checkpoints clone latest --vm web1 -n 4 --qmp /run/web1-{}.qmp --disks new=/srv/clones
  stillframe clone --drop-templates

The first clone of a checkpoint writes its memory to --template-dir, as a memory template. Every clone maps the
template, and uses memory of its own only for pages that it writes. A template is not encrypted: keep the directory
in memory or on an encrypted disk. Only its owner may have access to it. Templates in the default directory are
removed when their checkpoint is forgotten.

Clones only read the recorded disks, which must not change while they run. With --disks new=DIR the first clone of a
checkpoint writes the disks that it holds to DIR, and all clones read these images; so the VM may run on with its own.
They stay for later clones: `clone --drop-templates --template-dir DIR` removes them. They are not encrypted.

Each clone has a monitor and a name of its own (web1-3), listening sockets with its number appended
(/run/web1.agent-3), a new generation id if the machine has one, and a temporary file for its disk writes. Use
--replace for other resources that exist only once on the host (a tap, a port). Inside the guests, everything else
is the same: MAC addresses, keys, random state.

",
    exit_codes!()
);

/// `stillframe rewind --help`
pub const REWIND: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints rewind latest --vm web1
  stillframe -r /srv/checkpoints rewind 1a2b3c4d --pid 4711 --paused --json

The VM returns to the state of the checkpoint in the QEMU that it runs in: same process, same monitor, same
connections. Memory is compared while the guest runs; the guest is paused while differing pages are written and the
device state is loaded. So is it with the disks that the checkpoint holds: they are read and compared while the guest
runs, and what differs is written into their images in the pause. Of other disks none may have been written to since.
--disks-as-they-are leaves all disks as they are, which may damage the data on them. A rewind is also refused if the
VM has other devices now.

If the rewind fails, the VM runs on as it was. If this process is killed while memory and disks are exchanged, the VM
stays paused and must be rewound again before it can run. A VM that was paused stays paused. With --verify the pause lasts
as long as reading all guest memory takes.

",
    exit_codes!()
);

/// `stillframe migrate --help`
pub const MIGRATE: &str = concat!(
    "\
Examples:
  stillframe migrate web1 --to host2 --certs /etc/stillframe/certs
  stillframe migrate web1 --to host2 --certs /etc/stillframe/certs --resume

On the other host `stillframe receive` waits for the VM. No repository is needed. Memory is sent while the VM runs;
it is stopped for the rest and for its device state, runs there, and its QEMU here ends. Disks are not copied: both
hosts must reach them under the same path, or under one that `receive --replace` names. QEMU has to be version 10 or
newer if the VM has disks.

Each round sends the pages that were written in the one before. Rounds end when the rest can be sent in the time of
--downtime-limit, or a second after they have stopped getting shorter. The expected pause is printed after each round. If
it is longer than --pause-limit, the VM runs on here. Of a page that changed little only the changes are sent, as long
as --delta-cache has its old content. A page that the guest has written again before it is sent waits for the next round
(--skip-fake); with `auto` a page that changes in each round waits until only such pages are left. A page that has the
content that was sent last is not sent (--page-ids).

Much of a VM's memory is a copy of what is on its disk. --shared-image names a file that both hosts reach: the disk itself, its
golden image or backing file. It is read once, and of a page that it has only the place is sent; the destination, which must
name the file, too, reads its own, compares it with the page's id, and has the page sent if it differs.

--rehearse has the destination start QEMU and load an early device state first. A device, a disk's path or a tap that
would make the hand-over fail is found out before any page is sent; the VM is stopped for that about as long as for the
hand-over. `receive` then waits for the VM itself.

A VM that `stillframe watch` takes checkpoints of is migrated by that process, because only one can be attached. This
command requests it there and prints what that process reports. Both must run as the same user, and with the same
STILLFRAME_RUNTIME_DIR if it is set. If this command ends early, the migration is cancelled.

The VM never runs on both hosts. Until it is handed over, any failure lets it run on here: an error, Ctrl-C, the end
of the connection or of either process. If the connection is lost while it is handed over, the VM may be paused on
both; this command tries to connect again, and then says what to do. --resume asks the destination. --take-back has
the VM run here, unless it runs there. If the destination does not answer, --take-back takes your word that the VM will
never run there. It is refused if another process uses a disk of the VM, or if a disk was written to.

",
    exit_codes!()
);

/// `stillframe receive --help`
pub const RECEIVE: &str = concat!(
    "\
Examples:
  stillframe receive --listen 0.0.0.0 --certs /etc/stillframe/certs --allow host1 --qmp /run/web1.qmp
  stillframe receive --listen 0.0.0.0 --certs /etc/stillframe/certs --qmp /run/web1.qmp --resume

Waits for one VM that `stillframe migrate` sends, starts QEMU as the VM was started, and ends when the VM runs. The
first line of the output says where it listens (port 7411, unless you name another). Any host with a certificate of the
same authority is let in, or only those named by --allow. --replace (or --map) changes words of the VM's command line,
such as paths of disks, taps and bridges. --into QMP starts no QEMU, but fills one that a manager has started with
`-incoming defer`, and with the VM's machine and devices; if the migration fails, that QEMU is ended.

--shared-image names a file of this host that the source may refer to in place of sending pages. No other file is read for a
source. What is read is compared with the id that the source sends.

If the migration fails, the new QEMU is ended. If the connection is lost while the VM is handed over, this command waits
for the source to connect again: ten minutes if the VM is not running yet, two if it is. If it was killed, --resume
takes its place.

",
    exit_codes!()
);

/// `stillframe certs --help`
pub const CERTS: &str = concat!(
    "\
Examples:
  stillframe certs authority /root/stillframe-authority
  stillframe certs host host1 10.0.0.1 --authority /root/stillframe-authority --output /tmp/host1
  stillframe certs host host2 10.0.0.2 --authority /root/stillframe-authority --output /tmp/host2

Hosts trust each other by certificates of one authority. Move each host's directory to that host, for --certs of
`migrate` and `receive`, and keep the authority's directory where no host reaches it. A certificate has to have the
name or address by which the other host is called with --to.

",
    exit_codes!()
);

/// `stillframe unlock --help`
pub const UNLOCK: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints unlock --for 12h
  stillframe -r /srv/checkpoints unlock --end

The repository's key is kept in this user's keyring in the kernel. Until the time is over, processes of this user
and of root need no password for the repository, and no command spends a tenth of a second on deriving the key.
Nothing is written to disk; a reboot ends it.

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
  stillframe -r /srv/checkpoints export latest --vm web1 --disk virtio0 -o web1-disk.raw

A disk becomes a raw image with holes for zeros, or with --disk-format an image of another format that qemu-img
writes; `show` lists the disks that a checkpoint holds.

Formats of memory:
  mapped-ram  QEMU's migration file with the capability mapped-ram
  migration   QEMU's migration stream
  raw         main RAM by physical address, with a hole below 4 GiB if the machine has one
  elf         a core for gdb and crash: main RAM by physical address and by the addresses of the guest's kernel,
              and the registers of its vCPUs
The command that loads the file is printed. Zero pages are holes in the file, except in a migration stream. The file
holds all secrets in the guest's memory, unencrypted; only its owner can read it (mode 0600).

",
    exit_codes!()
);

/// `stillframe import --help`
pub const IMPORT: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints import web1.mapped -- qemu-system-x86_64 -machine pc-q35-10.0 -m 4G ...
  stillframe -r /srv/checkpoints import web1.stream --vm web1 -- qemu-system-x86_64 ...

Give the command line of the QEMU that wrote the file, with its versioned machine type; relative paths in it are
resolved from the current directory. QEMU is started with it, queried, and ended before the guest runs. The file does
not describe the contents of disks: restore such a checkpoint with --disks-as-they-are.

",
    exit_codes!()
);

/// `stillframe copy --help`
pub const COPY: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints copy latest --vm web1 --to /mnt/other
  stillframe -r /srv/checkpoints copy 1a2b3c4d latest --vm web1 --to /mnt/other --to-password-file /etc/other.password

Every byte is read, verified, and stored under the key of the other repository; pages that it already has are not
stored again. A copy depends neither on the source repository nor on other checkpoints. It records its original, so
a checkpoint is not copied twice.

",
    exit_codes!()
);

/// `stillframe check --help`
pub const CHECK: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints check
  stillframe -r /srv/checkpoints check --read-data --json

Without --read-data, this verifies that all files exist, are consistent, and hold what the checkpoints need. Problems
are listed, and the exit code is 3.

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

The rules apply to each VM separately. A checkpoint that any rule keeps stays, the others are forgotten. No
checkpoint needs another one to be restored. Hours, days, weeks (from Monday), months and years are in UTC. AGE is
whole numbers with the units s, min, h, d, w, mo and y, such as 12h, 7d or 1y6mo; it counts back from the VM's newest
checkpoint that the rules apply to and that is not in the future. --keep-tag as the only rule is refused if no
checkpoint of a VM has the tag. Checkpoints that no rule applies to stay: they are counted, not listed; --json lists
them all.

",
    exit_codes!()
);

/// `stillframe prune --help`
pub const PRUNE: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints prune --dry-run
  stillframe -r /srv/checkpoints prune

A pack is rewritten when a fifth of it or more is unused; a smaller part stays for a later prune. Prune can be
interrupted at any time; the next prune frees the rest.

",
    exit_codes!()
);

/// `stillframe index --help`
pub const INDEX: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints index /srv/images/debian-12.qcow2
  stillframe -r /srv/checkpoints index --list
  stillframe -r /srv/checkpoints index --remove /srv/images/debian-12.qcow2

An image is any file whose content stays: a golden image, the backing file of many disks. It is read once, and never
copied or changed. Later checkpoints refer to it where memory or a disk has a page of 4 KiB that it has, too; `show`
names the images that a checkpoint may need. Raw images and uncompressed qcow2 images serve; compressed ones have
nothing to find.

Whoever restores needs the image at the same path. Each page is verified when it is read. An image that was changed
counts as absent: no further checkpoint refers to it, and `check` names what older ones miss. After it was moved, index
it again where it is. `copy` stores the content in the other repository, and a checkpoint taken with --no-images does not
refer to images: what it has it stores. An increment, or a disk of which only changes were read, still needs what the
checkpoint before needs.

",
    exit_codes!()
);

/// `stillframe rebuild-index --help`
pub const REBUILD_INDEX: &str = concat!(
    "\
Examples:
  stillframe -r /srv/checkpoints rebuild-index
  stillframe -r /srv/checkpoints check --read-data

The packs hold the data; the index only locates it. Run this if `check` reports files in index/.

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

Row [0] counts the pages that are the same in both checkpoints, row (8,16] those in which 9 to 16 bytes differ. 8B
dirty bytes are in aligned 8-byte words of which every byte changed. Delta bytes are the size of the changes as
deltas, positions included. With --over, two checkpoints are taken into a temporary repository in TMPDIR, which is
removed afterwards; it needs about the size of the VM's memory, compressed.

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

Each ability is tested once, on processes that stillframe starts for this. The exit code is 1 if a required ability is
missing.

",
    exit_codes!()
);
