//! The command line of the workload.

use crate::pattern::Pattern;
use std::path::PathBuf;
use std::str::FromStr;

/// How to call the program.
pub const USAGE: &str = "\
usage: workload --mib N --pattern random|sequential|silent|toggle|copy|idle|mixed|quicksort
                --tick-ms N --writes-per-tick N
                [--seed S] [--share D] [--full-every K] [--scroll-lines L] [--ticks N]
       workload disk --file PATH --mib N --tick-ms N --steps N [--seed S] [--ticks N]

  --mib N              MiB of memory to watch
  --pattern P          how to write; mixed draws one of the others for each write, and quicksort
                       sorts an array over and over again
  --tick-ms N          a tick starts every N milliseconds (0: at once)
  --writes-per-tick N  writes a tick: words (random; visited words: quicksort) or whole pages (the
                       others)
  --seed S             what is written follows from it (default 1)
  --share D            each tick checks one D-th of the memory (default 8)
  --full-every K       every K-th tick checks all of it and the sum (default 16)
  --scroll-lines L     lines a tick on the text console /dev/tty0, read back from /dev/vcs
  --ticks N            end well after N ticks (default: never)

Each tick prints `tick N sum S`. The sums follow from the arguments alone, not from time.";

/// The parsed command line of `workload disk`.
#[derive(Debug, PartialEq, Eq)]
pub struct DiskArguments {
    pub file: PathBuf,
    pub mib: u64,
    pub tick_ms: u64,
    /// Changes a tick.
    pub steps: usize,
    pub seed: u64,
    pub ticks: Option<u64>,
}

impl DiskArguments {
    /// Parses it, as [`Arguments::parse`] does.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut given = Given::collect(words)?;
        let arguments = Self {
            file: given.take("--file")?.ok_or("--file is missing")?,
            mib: given.take("--mib")?.ok_or("--mib is missing")?,
            tick_ms: given.take("--tick-ms")?.ok_or("--tick-ms is missing")?,
            steps: given.take("--steps")?.ok_or("--steps is missing")?,
            seed: given.take("--seed")?.unwrap_or(1),
            ticks: given.take("--ticks")?,
        };
        given.finish()?;
        match arguments.mib {
            0 => Err("--mib must not be 0".to_owned()),
            _ => Ok(arguments),
        }
    }
}

/// The parsed command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Arguments {
    pub mib: usize,
    pub pattern: Pattern,
    pub tick_ms: u64,
    pub writes_per_tick: usize,
    pub seed: u64,
    pub share: usize,
    pub full_every: u64,
    pub scroll_lines: u64,
    pub ticks: Option<u64>,
}

impl Arguments {
    /// Parses `--name value` and `--name=value`. Unknown, missing and repeated names are errors.
    pub fn parse(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut given = Given::collect(words)?;
        let arguments = Self {
            mib: given.take("--mib")?.ok_or("--mib is missing")?,
            pattern: given.take("--pattern")?.ok_or("--pattern is missing")?,
            tick_ms: given.take("--tick-ms")?.ok_or("--tick-ms is missing")?,
            writes_per_tick: given
                .take("--writes-per-tick")?
                .ok_or("--writes-per-tick is missing")?,
            seed: given.take("--seed")?.unwrap_or(1),
            share: given.take("--share")?.unwrap_or(8),
            full_every: given.take("--full-every")?.unwrap_or(16),
            scroll_lines: given.take("--scroll-lines")?.unwrap_or(0),
            ticks: given.take("--ticks")?,
        };
        given.finish()?;
        if arguments.mib == 0 || arguments.share == 0 || arguments.full_every == 0 {
            return Err("--mib, --share and --full-every must not be 0".to_owned());
        }
        Ok(arguments)
    }
}

/// Names and values in the order given.
struct Given(Vec<(String, String)>);

impl Given {
    fn collect(words: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut words = words.into_iter();
        let mut given = Vec::new();
        while let Some(word) = words.next() {
            let pair = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), value.to_owned()),
                None => {
                    let value = words.next().ok_or(format!("{word} lacks its value"))?;
                    (word, value)
                }
            };
            given.push(pair);
        }
        Ok(Self(given))
    }

    fn take<T: FromStr>(&mut self, name: &str) -> Result<Option<T>, String>
    where
        T::Err: std::fmt::Display,
    {
        let Some(place) = self.0.iter().position(|(given, _)| given == name) else {
            return Ok(None);
        };
        let (_, value) = self.0.remove(place);
        value
            .parse()
            .map(Some)
            .map_err(|error| format!("{name} {value}: {error}"))
    }

    fn finish(self) -> Result<(), String> {
        match self.0.first() {
            None => Ok(()),
            Some((name, _)) => Err(format!("{name} is unknown or given twice")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn both_forms_are_read_and_the_rest_has_defaults() {
        let line = "--mib=64 --pattern toggle --tick-ms 100 --writes-per-tick=9";
        let arguments = parse(line).unwrap();
        assert_eq!((arguments.mib, arguments.tick_ms), (64, 100));
        assert_eq!(arguments.pattern, Pattern::Toggle);
        assert_eq!((arguments.seed, arguments.ticks), (1, None));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let good = "--mib 1 --pattern idle --tick-ms 1 --writes-per-tick 1";
        for (line, said) in [
            ("--mib 1".to_owned(), "--pattern is missing"),
            (format!("{good} --speed 3"), "--speed is unknown"),
            (format!("{good} --mib 2"), "--mib is unknown or given twice"),
            (format!("{good} --seed"), "--seed lacks its value"),
            (format!("{good} --seed x"), "--seed x: invalid digit"),
            (format!("{good} --share 0"), "must not be 0"),
        ] {
            let error = parse(&line).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
