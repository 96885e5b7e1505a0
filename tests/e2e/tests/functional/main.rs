//! Functional tests of the command line: what scripts may rely on. JSON fields, names of checkpoints,
//! streams, exit codes, signals, and what becomes of the VM in each case.

mod asleep;
mod balloon;
mod captured_disks;
mod clock;
mod clones;
mod compression;
mod contents;
mod copied_disks;
mod cuts;
mod first_day;
mod free_pages;
mod holes;
mod hotplug;
mod indexed_images;
mod interchange;
mod keep;
mod kept_bitmaps;
mod lazy;
mod lazy_disks;
mod migrate;
mod names;
mod post_copy;
mod rehearsal;
mod restore;
mod restored_disks;
mod rewind;
mod rewound_disks;
mod seeding;
mod shape;
mod stats;
mod tags;
mod unlock;
mod usage;
mod watch;
mod watched_migration;
