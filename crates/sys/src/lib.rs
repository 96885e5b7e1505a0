//! The kernel boundary of Stillframe: the only crate that may contain `unsafe`.
//!
//! Everything here works on *another* process, from outside: its identity ([`process`]), its bytes ([`memory`]),
//! and its write tracking ([`uffd`], [`pagemap`]). One system call has to be made inside it ([`infect`]).
//! [`private_dir`] is for the files that this process itself leaves on the host. [`credentials`], [`control_group`]
//! and [`security_label`] are for a process that is about to become another program. Nothing here knows QEMU,
//! checkpoints or repositories.
//!
//! Rules of the crate:
//! 1. Every `unsafe` block carries a `SAFETY:` note that names why it cannot mislead the kernel or the compiler.
//!    Every structure and number shared with the kernel is checked at compile time.
//! 2. A process is named by its pidfd and its `/proc` directory, never by a bare number that another process could
//!    have got in the meantime.
//! 3. An errno that has a meaning is turned into an error that states it.

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
compile_error!(
    "stillframe works on Linux on x86_64 only: it changes registers and reads page tables"
);

pub mod affinity;
pub mod control_group;
pub mod credentials;
pub mod fdpass;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod infect;
pub mod memfd;
pub mod memory;
pub mod pagemap;
pub mod private_dir;
pub mod probe;
pub mod process;
pub mod security_label;
pub mod system;
pub mod uffd;
