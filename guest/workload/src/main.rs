//! The self-checking program inside the test guests.
//!
//! It keeps memory with known content (see [`memory`]), writes it in a given pattern and checks it again and again. One
//! pattern sorts an array instead (see [`sorting`]). `workload disk` does the same with a disk (see [`disk`]).
//! Each tick prints one line on standard output, the guest's serial port:
//!
//! - `tick N sum S` when all checked memory is as it must be. `S` follows from the arguments and `N` alone, so the
//!   same arguments give the same lines on any machine;
//! - `CORRUPT ... tick N` otherwise, and from then on every tick.

mod arguments;
mod disk;
mod memory;
mod pattern;
mod random;
mod screen;
mod sorting;

use arguments::{Arguments, DiskArguments, USAGE};
use memory::{Corruption, Memory, PAGE_BYTES, PAGE_WORDS};
use pattern::{Pattern, Writer};
use screen::Screen;
use sorting::Sorting;
use std::io::{self, Write};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1).peekable();
    let usage = |error| {
        eprintln!("workload: {error}\n\n{USAGE}");
        ExitCode::from(2)
    };
    let right = if words.next_if_eq("disk").is_some() {
        match DiskArguments::parse(words) {
            // Not locked: several write to one port.
            Ok(arguments) => disk::run(&arguments, &mut io::stdout()),
            Err(error) => return usage(error),
        }
    } else {
        match Arguments::parse(words) {
            Ok(arguments) => {
                run(&arguments, &mut io::stdout().lock()).map(|damage| damage.is_none())
            }
            Err(error) => return usage(error),
        }
    };
    match right {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("workload: {error}");
            ExitCode::from(3)
        }
    }
}

/// Ticks until `--ticks` have gone by; gives the first damage found.
fn run(arguments: &Arguments, out: &mut dyn Write) -> io::Result<Option<Corruption>> {
    let mut guest = Guest::new(arguments)?;
    let mut damage = None;
    let mut tick = 0;
    while arguments.ticks.is_none_or(|last| tick < last) {
        let began = Instant::now();
        tick += 1;
        // After the first damage memory is left alone, as it was found.
        if damage.is_none() {
            damage = guest.live(tick, arguments)?.err();
        }
        let line = match &damage {
            None => format!("tick {tick} sum {:016x}\n", guest.work.sum()),
            Some(damage) => format!("CORRUPT {damage} tick {tick}\n"),
        };
        // A whole line reaches the port by one write, so that the kernel's own lines do not cut it.
        out.write_all(line.as_bytes())?;
        out.flush()?;
        // However long the machine stood still, the next tick comes at most one period later.
        let period = Duration::from_millis(arguments.tick_ms);
        thread::sleep(period.saturating_sub(began.elapsed()));
    }
    Ok(damage)
}

/// The memory that is written and checked.
enum Work {
    Pages { memory: Memory, writer: Writer },
    Array(Sorting),
}

impl Work {
    fn new(pages: usize, arguments: &Arguments) -> Self {
        match arguments.pattern {
            Pattern::Quicksort => Self::Array(Sorting::new(pages * PAGE_WORDS, arguments.seed)),
            pattern => Self::Pages {
                memory: Memory::new(pages, arguments.seed),
                writer: Writer::new(pattern, arguments.seed),
            },
        }
    }

    /// The number in the line of a tick.
    fn sum(&self) -> u64 {
        match self {
            Self::Pages { memory, .. } => memory.sum(),
            Self::Array(sorting) => sorting.digest(),
        }
    }

    fn write(&mut self, writes: usize) -> Result<(), Corruption> {
        match self {
            Self::Pages { memory, writer } => writer.write(memory, writes),
            Self::Array(sorting) => sorting.advance(writes),
        }
    }

    /// Checks one of `share` equal parts.
    fn check(&self, turn: usize, share: usize) -> Result<(), Corruption> {
        match self {
            Self::Pages { memory, .. } => {
                let pages = memory.pages();
                let part = pages.div_ceil(share);
                memory.check((turn * part).min(pages)..((turn + 1) * part).min(pages))
            }
            Self::Array(sorting) => sorting.check(turn, share),
        }
    }

    fn check_all(&self) -> Result<(), Corruption> {
        match self {
            Self::Pages { memory, .. } => memory.check_all(),
            Self::Array(sorting) => sorting.check_all(),
        }
    }
}

struct Guest {
    work: Work,
    screen: Option<Screen>,
}

impl Guest {
    fn new(arguments: &Arguments) -> io::Result<Self> {
        let pages = arguments
            .mib
            .checked_mul((1 << 20) / PAGE_BYTES)
            .ok_or_else(|| io::Error::other("more memory than an address can name"))?;
        let screen = match arguments.scroll_lines {
            0 => None,
            _ => Some(Screen::open(arguments.seed)?),
        };
        Ok(Self {
            work: Work::new(pages, arguments),
            screen,
        })
    }

    /// One tick: write, then check this tick's share of the memory, or all of it.
    fn live(&mut self, tick: u64, arguments: &Arguments) -> io::Result<Result<(), Corruption>> {
        if let Some(screen) = &mut self.screen
            && let Err(corruption) = screen.scroll(arguments.scroll_lines)?
        {
            return Ok(Err(corruption));
        }
        Ok(self.write_and_check(tick, arguments))
    }

    fn write_and_check(&mut self, tick: u64, arguments: &Arguments) -> Result<(), Corruption> {
        self.work.write(arguments.writes_per_tick)?;
        if tick.is_multiple_of(arguments.full_every) {
            return self.work.check_all();
        }
        let turn = (tick % arguments.share as u64) as usize;
        self.work.check(turn, arguments.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Arguments {
        Arguments::parse(line.split_whitespace().map(str::to_owned)).unwrap()
    }

    #[test]
    fn a_run_without_damage_ends_well() {
        for pattern in ["mixed", "quicksort"] {
            let line =
                format!("--mib 1 --pattern {pattern} --tick-ms 0 --writes-per-tick 50 --ticks 40");
            let mut out = Vec::new();
            assert_eq!(run(&arguments(&line), &mut out).unwrap(), None);
            let out = String::from_utf8(out).unwrap();
            assert_eq!(out.lines().count(), 40);
            assert!(out.lines().all(|line| line.starts_with("tick ")), "{out}");
        }
    }

    /// Whichever page is damaged, an idle guest finds it within one round of shares.
    #[test]
    fn damage_is_found_within_one_round() {
        let line = "--mib 1 --pattern idle --tick-ms 0 --writes-per-tick 0 --share 3 \
                    --full-every 1000";
        let arguments = arguments(line);
        for page in 0..256 {
            let mut guest = Guest::new(&arguments).unwrap();
            let Work::Pages { memory, .. } = &mut guest.work else {
                panic!("the idle pattern has pages");
            };
            memory.spoil(page);
            let found = (1..=3).any(|tick| guest.live(tick, &arguments).unwrap().is_err());
            assert!(found, "page {page}");
        }
    }
}
