//! Bad input and bad surroundings: each gives one clear error and the documented exit code, leaves
//! the VM running as before, and loses no committed checkpoint.

mod changes;
mod copied_disks;
mod damage;
mod deaths;
mod disks;
mod hangs;
mod host;
mod liars;
mod links;
mod locks;
mod migrations;
mod others;
mod owner;
mod post_copy;
mod pressure;
mod repository;
mod rights;
mod space;
mod strangers;
mod tags;
mod victims;
mod writers;
