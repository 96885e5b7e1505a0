//! The pages that a Linux guest calls free, read by its agent from `/proc/kpageflags`: eight bytes of flags a page
//! frame, in the order of physical addresses. Our own agent makes a bit a page frame of them, in the guest.
//!
//! Format: Linux `Documentation/admin-guide/mm/pagemap.rst` and `fs/proc/page.c`. The kernel takes no lock for an answer.
//! It may see a page frame in the middle of a change, and then the flag of its neighbours. So frames count as free only
//! in aligned groups of [`GROUP`], each of which has the flag of free memory and no other.

use std::ops::Range;
use std::time::Instant;

use serde_json::json;

use super::channel::AgentError;
use super::files::{FileRead, left};
use super::{GuestAgent, Kind};

/// The guest's file of flags.
const FLAGS: &str = "/proc/kpageflags";
/// Bytes of flags for a page frame.
const FLAGS_BYTES: u64 = 8;
/// The flags of free memory: `KPF_BUDDY` alone.
const FREE: u64 = 1 << 10;
/// Page frames that are free together or not at all.
pub const GROUP: u64 = 8;
/// Bytes of an answer, which are 43 KiB of text.
const ANSWER_BYTES: u64 = 32 << 10;
/// A command of our own agent: the free ones among page frames, a bit each. The answer is that of a read file.
const BITS: &str = "stillframe-free-pages";

/// What a guest said about its page frames.
#[derive(Debug)]
pub struct NamedFree {
    /// Page frames that it calls free, ascending.
    pub frames: Vec<Range<u64>>,
    /// Why it said no more.
    pub error: Option<AgentError>,
}

impl GuestAgent {
    /// Which page frames of `wanted` (ascending) the guest calls free, until `deadline`. A whole group or answer may be
    /// named beyond what was wanted.
    pub fn free_pages(&mut self, wanted: &[Range<u64>], deadline: Instant) -> NamedFree {
        let mut frames = Vec::new();
        let error = match self.kind {
            Kind::Qemu => self.read_flags(wanted, deadline, &mut frames).err(),
            Kind::Own => self.read_bits(wanted, deadline, &mut frames).err(),
        };
        NamedFree { frames, error }
    }

    /// Upper bound on the guest's page frames, if the agent would take too long for more. QEMU's sends eleven bytes of text a
    /// page frame.
    pub fn frames_max(&self) -> Option<u64> {
        match self.kind {
            Kind::Qemu => Some(1 << 20),
            Kind::Own => None,
        }
    }

    fn read_bits(
        &mut self,
        wanted: &[Range<u64>],
        deadline: Instant,
        frames: &mut Vec<Range<u64>>,
    ) -> Result<(), AgentError> {
        for part in parts(wanted, ANSWER_BYTES * GROUP) {
            let count = part.end - part.start;
            let question = json!({ "first": part.start, "count": count });
            let limit = left(deadline, BITS)?;
            let FileRead(bits) = self.channel.execute(BITS, &question, limit)?;
            let bits = &bits[..bits.len().min((count / GROUP) as usize)];
            add_free_bits(part.start, bits, frames);
            // Behind the guest's last page frame there is nothing.
            if (bits.len() as u64) < count / GROUP {
                break;
            }
        }
        Ok(())
    }

    fn read_flags(
        &mut self,
        wanted: &[Range<u64>],
        deadline: Instant,
        frames: &mut Vec<Range<u64>>,
    ) -> Result<(), AgentError> {
        self.read_file(FLAGS, deadline, |file| {
            for part in parts(wanted, ANSWER_BYTES / FLAGS_BYTES) {
                let bytes = (part.end - part.start) * FLAGS_BYTES;
                let flags = file.read_at(part.start * FLAGS_BYTES, bytes)?;
                add_free(part.start, &flags, frames);
                // Behind the guest's last page frame there is nothing.
                if (flags.len() as u64) < bytes {
                    break;
                }
            }
            Ok(())
        })
    }
}

/// The answers of this number of page frames that cover `wanted`, none of them twice, each aligned.
fn parts(wanted: &[Range<u64>], frames: u64) -> Vec<Range<u64>> {
    let mut numbers: Vec<u64> = Vec::new();
    for range in wanted.iter().filter(|range| !range.is_empty()) {
        let first = range.start / frames;
        let next = numbers.last().map_or(first, |last| first.max(last + 1));
        numbers.extend(next..range.end.div_ceil(frames));
    }
    let part = |number: u64| number * frames..(number + 1) * frames;
    numbers.into_iter().map(part).collect()
}

/// Adds the groups that are free by these flags, the first of which are those of page frame `first`, which is aligned.
pub(crate) fn add_free(first: u64, flags: &[u8], frames: &mut Vec<Range<u64>>) {
    let group_bytes = (GROUP * FLAGS_BYTES) as usize;
    let is_free = |flags: &[u8; 8]| u64::from_le_bytes(*flags) == FREE;
    let groups = flags.chunks_exact(group_bytes);
    let free = groups.map(|group| group.as_chunks().0.iter().all(is_free));
    add_groups(first, free, frames);
}

/// The same by bits, eight of which are a group.
pub(crate) fn add_free_bits(first: u64, bits: &[u8], frames: &mut Vec<Range<u64>>) {
    add_groups(first, bits.iter().map(|&bits| bits == 0xff), frames);
}

fn add_groups(first: u64, free: impl Iterator<Item = bool>, frames: &mut Vec<Range<u64>>) {
    for (number, _) in (0..).zip(free).filter(|(_, free)| *free) {
        let start = first + number * GROUP;
        match frames.last_mut() {
            Some(last) if last.end == start => last.end += GROUP,
            _ => frames.push(start..start + GROUP),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(frames: &[u64]) -> Vec<u8> {
        frames
            .iter()
            .flat_map(|flags| flags.to_le_bytes())
            .collect()
    }

    #[test]
    fn a_group_is_free_whole_or_not_at_all() {
        let mut frames = vec![FREE; 40];
        frames[9] = 0;
        frames[31] = FREE | 1 << 16;
        let mut found = Vec::new();
        add_free(4096, &flags(&frames), &mut found);
        assert_eq!(found, [4096..4104, 4112..4120, 4128..4136]);
        // Half a group at the end of an answer.
        let mut found = Vec::new();
        add_free(0, &flags(&frames[..15])[..119], &mut found);
        assert_eq!(found, std::slice::from_ref(&(0..8)));
    }

    #[test]
    fn bits_say_what_flags_do() {
        let mut flags_of = vec![FREE; 40];
        (flags_of[9], flags_of[31]) = (0, FREE | 1 << 16);
        let (mut by_flags, mut by_bits) = (Vec::new(), Vec::new());
        add_free_bits(0, &[0xff], &mut by_bits);
        add_free(4096, &flags(&flags_of), &mut by_flags);
        add_free_bits(4096, &[0xff, 0xfd, 0xff, 0x7f, 0xff], &mut by_bits);
        assert_eq!(by_bits[0], 0..8);
        assert_eq!(by_bits[1..], by_flags);
    }

    #[test]
    fn parts_cover_what_is_wanted_once() {
        assert_eq!(parts(&[], 4096), []);
        let wanted = [5..6, 4095..4097, 8191..8191, 12288..12289];
        assert_eq!(parts(&wanted, 4096), [0..4096, 4096..8192, 12288..16384]);
        assert_eq!(
            parts(std::slice::from_ref(&(0..8192)), 4096),
            [0..4096, 4096..8192]
        );
    }
}
