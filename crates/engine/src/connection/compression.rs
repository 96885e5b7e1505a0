//! How pages are compressed that go over a connection: as the user says, or as is quickest at the time.
//!
//! Of a choice between a processor that is busy and a network that is, measurements decide. A window of pages says
//! where the time goes: into compressing, into all else that the processor does, and into waiting for the network. A few
//! groups of pages of the window are compressed in the neighbouring ways too. From both follows how long the window would
//! have taken so.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use stillframe_page::encoding::{Compression, Encoder, EncodingError, Kind};
use thiserror::Error;

/// What can be chosen by itself, from the quickest to the smallest. Above it, levels of Zstandard gain 1 to 4 % for three to
/// ten times the work (`cargo bench -p stillframe-page --bench codec`).
const LADDER: [Compression; 4] = [
    Compression::None,
    Compression::Lz4,
    Compression::Zstd(1),
    Compression::Zstd(3),
];
/// Where it begins.
const FIRST: usize = 2;

/// Bytes to compress in a window.
const WINDOW_BYTES: u64 = 8 << 20;
/// Bytes for which the neighbouring ways are tried once: at 64 KiB a group, that takes about a fiftieth of the time.
const TRIAL_EVERY: u64 = 2 << 20;
/// A neighbour is taken if a window would take at most this share of its time.
const GAIN: f64 = 0.9;
/// Seconds for a byte that is copied or encrypted, at most; more is waiting.
const EACH_MAX: f64 = 4e-9;
/// By how much more a network is expected to take with each window in which it was not the limit.
const HOPE: f64 = 1.03;
/// The network is the limit if more than this share of a window was spent waiting for it.
const WAITS: f64 = 0.1;

/// Levels of Zstandard that can be chosen.
const LEVELS: RangeInclusive<i32> = -7..=19;

/// How the user wants pages to be compressed. In words: `auto`, `none`, `lz4`, `zstd` or `zstd:LEVEL`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum CompressionChoice {
    /// As is quickest; this changes while pages move.
    #[default]
    Auto,
    /// In this way.
    Always(Compression),
}

/// Words that are no way of compression.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "{0:?} is no way of compression: say auto, none, lz4, zstd, or zstd:LEVEL with a level from -7 to 19"
)]
pub struct UnknownCompression(String);

impl FromStr for CompressionChoice {
    type Err = UnknownCompression;

    fn from_str(words: &str) -> Result<CompressionChoice, UnknownCompression> {
        let level = |level: &str| level.parse().ok().filter(|level| LEVELS.contains(level));
        Ok(CompressionChoice::Always(match words.split_once(':') {
            None if words == "auto" => return Ok(CompressionChoice::Auto),
            None if words == "none" => Compression::None,
            None if words == "lz4" => Compression::Lz4,
            None if words == "zstd" => Compression::Zstd(1),
            Some(("zstd", number)) if level(number).is_some() => {
                Compression::Zstd(level(number).unwrap_or_default())
            }
            _ => return Err(UnknownCompression(words.to_owned())),
        }))
    }
}

impl fmt::Display for CompressionChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CompressionChoice::Auto => f.write_str("auto"),
            CompressionChoice::Always(Compression::None) => f.write_str("none"),
            CompressionChoice::Always(Compression::Lz4) => f.write_str("lz4"),
            CompressionChoice::Always(Compression::Zstd(level)) => write!(f, "zstd:{level}"),
        }
    }
}

impl TryFrom<String> for CompressionChoice {
    type Error = UnknownCompression;

    fn try_from(words: String) -> Result<CompressionChoice, UnknownCompression> {
        words.parse()
    }
}

impl From<CompressionChoice> for String {
    fn from(choice: CompressionChoice) -> String {
        choice.to_string()
    }
}

/// Compresses groups of pages. One for each connection.
pub struct GroupCompressor {
    encoder: Encoder,
    compression: Compression,
    picker: Option<Picker>,
}

impl GroupCompressor {
    /// Compresses as is chosen.
    ///
    /// # Errors
    /// There is no memory for it, or Zstandard has no such level.
    pub fn new(choice: CompressionChoice) -> Result<GroupCompressor, EncodingError> {
        let (compression, picker) = match choice {
            CompressionChoice::Auto => (LADDER[FIRST], Some(Picker::default())),
            CompressionChoice::Always(compression) => (compression, None),
        };
        Ok(GroupCompressor {
            encoder: Encoder::new(compression)?,
            compression,
            picker,
        })
    }

    /// How pages are compressed now.
    pub fn compression(&self) -> Compression {
        self.compression
    }

    /// Whether everything is left as it is, from beginning to end.
    pub fn leaves_as_is(&self) -> bool {
        self.picker.is_none() && self.compression == Compression::None
    }

    /// Appends the payload of `plain` to `out`, and returns its kind.
    ///
    /// # Errors
    /// The compressor failed.
    pub fn encode(&mut self, plain: &[u8], out: &mut Vec<u8>) -> Result<Kind, EncodingError> {
        let Some(picker) = &mut self.picker else {
            return self.encoder.encode(plain, out);
        };
        let before = (out.len(), processor_time());
        let kind = self.encoder.encode(plain, out)?;
        let time = processor_time().saturating_sub(before.1);
        let cost = Cost {
            time,
            bytes: (out.len() - before.0) as u64,
        };
        if picker.compressed(plain.len() as u64, cost) {
            let mut tried = [None; 2];
            for (tried, step) in tried.iter_mut().zip(picker.neighbours()) {
                let Some(compression) = step.map(|step| LADDER[step]) else {
                    continue;
                };
                let (before, begun) = (out.len(), processor_time());
                self.encoder.set(compression)?;
                self.encoder.encode(plain, out)?;
                *tried = Some(Cost {
                    time: processor_time().saturating_sub(begun),
                    bytes: (out.len() - before) as u64,
                });
                out.truncate(before);
            }
            self.encoder.set(self.compression)?;
            picker.tried(cost, tried);
        }
        Ok(kind)
    }

    /// Pages have left: `bytes` on the network, in all this time, of which the network was waited for in `sending`.
    ///
    /// # Errors
    /// Zstandard does not know a level.
    pub fn sent(
        &mut self,
        bytes: u64,
        sending: Duration,
        whole: Duration,
    ) -> Result<(), EncodingError> {
        let Some(picker) = &mut self.picker else {
            return Ok(());
        };
        if let Some(compression) = picker.sent(bytes, sending, whole) {
            self.compression = compression;
            self.encoder.set(compression)?;
        }
        Ok(())
    }
}

/// Of this thread. What else runs on the processor says nothing about a compressor.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    // It is never negative.
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What it takes to compress some bytes, and how many they are then.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Cost {
    time: Duration,
    bytes: u64,
}

impl Cost {
    fn add(&mut self, more: Cost) {
        self.time += more.time;
        self.bytes += more.bytes;
    }
}

/// What was measured since the way was last looked at.
#[derive(Debug, Default)]
struct Window {
    /// Bytes that were compressed, and what that took.
    plain: u64,
    compressing: Cost,
    /// Bytes that have left, with all that is not compressed here.
    sent: u64,
    sending: Duration,
    whole: Duration,
    /// Seconds that a byte takes to leave at least, where the network takes it at once.
    each: Option<f64>,
    /// The same groups as now, and in the way below and above.
    tried_now: Cost,
    tried: [Option<Cost>; 2],
    trying: Duration,
}

/// Picks from [`LADDER`].
#[derive(Debug)]
struct Picker {
    step: usize,
    window: Window,
    untried: u64,
    /// Bytes a second of the network, when it was last the limit.
    network: Option<f64>,
}

impl Default for Picker {
    fn default() -> Picker {
        Picker {
            step: FIRST,
            window: Window::default(),
            // A thread may wait for the first pages.
            untried: 0,
            network: None,
        }
    }
}

impl Picker {
    fn neighbours(&self) -> [Option<usize>; 2] {
        let above = (self.step + 1 < LADDER.len()).then_some(self.step + 1);
        [self.step.checked_sub(1), above]
    }

    /// Whether this group is to be tried.
    fn compressed(&mut self, plain: u64, cost: Cost) -> bool {
        self.window.plain += plain;
        self.window.compressing.add(cost);
        self.untried += plain;
        let tried = self.untried >= TRIAL_EVERY;
        if tried {
            self.untried = 0;
        }
        tried
    }

    fn tried(&mut self, now: Cost, others: [Option<Cost>; 2]) {
        self.window.tried_now.add(now);
        for (all, one) in self.window.tried.iter_mut().zip(others) {
            if let Some(one) = one {
                all.get_or_insert_default().add(one);
                self.window.trying += one.time;
            }
        }
    }

    /// Returns the way to take from here on, at the end of a window, if it is another one.
    fn sent(&mut self, bytes: u64, sending: Duration, whole: Duration) -> Option<Compression> {
        let window = &mut self.window;
        window.sent += bytes;
        window.sending += sending;
        window.whole += whole;
        if bytes > 0 {
            let each = (sending.as_secs_f64() / bytes as f64).min(EACH_MAX);
            window.each = Some(window.each.map_or(each, |least| least.min(each)));
        }
        if window.plain < WINDOW_BYTES {
            return None;
        }
        let window = std::mem::take(window);
        let network = window.network(self.network);
        self.network = network;
        let now = window.expected([window.tried_now; 2], network);
        let neighbours = self.neighbours().into_iter().zip(window.tried);
        let expected = neighbours.filter_map(|(step, cost)| {
            let expected = window.expected([window.tried_now, cost?], network);
            Some((step?, expected))
        });
        let best = expected.min_by(|a, b| a.1.total_cmp(&b.1));
        let (step, _) = best.filter(|(_, expected)| *expected < now * GAIN)?;
        self.step = step;
        Some(LADDER[step])
    }
}

impl Window {
    /// Bytes a second that the network takes, if that is known: now, or from `before`. It takes at least what it took. And
    /// while it is not the limit, it may have become faster.
    fn network(&self, before: Option<f64>) -> Option<f64> {
        let whole = self.whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let rate = self.sent as f64 / whole;
        let waited = self.sending.as_secs_f64() - self.each.unwrap_or_default() * self.sent as f64;
        match waited > whole * WAITS {
            true => Some(rate),
            false => before.map(|before| rate.max(before * HOPE)),
        }
    }

    /// Seconds that it would take at another cost.
    fn expected(&self, [now, other]: [Cost; 2], network: Option<f64>) -> f64 {
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 1.0 };
        let work = ratio(other.time.as_secs_f64(), now.time.as_secs_f64());
        let size = ratio(other.bytes as f64, now.bytes as f64);
        let compressing = self.compressing.time.as_secs_f64();
        let trying = self.trying.as_secs_f64();
        let rest = self.whole.as_secs_f64() - compressing - self.sending.as_secs_f64() - trying;
        let other_bytes = self.sent.saturating_sub(self.compressing.bytes) as f64;
        let bytes = other_bytes + self.compressing.bytes as f64 * size;
        let processor = rest.max(0.0) + compressing * work + bytes * self.each.unwrap_or_default();
        network.map_or(processor, |network| processor.max(bytes / network))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: f64 = 1e-3;

    /// Costs of 2 MiB in each way: milliseconds and KiB.
    const COSTS: [(f64, u64); 4] = [(0.2, 2048), (2.0, 900), (4.0, 660), (6.0, 640)];

    /// Windows of a connection that takes `network` bytes a second, and whose thread has `other_work` for each 2 MiB, in ms.
    fn run(network: f64, other_work: f64, windows: usize, picker: &mut Picker) -> Compression {
        let cost = |step: usize| {
            let (ms, kib): (f64, u64) = COSTS[step];
            Cost {
                time: Duration::from_secs_f64(ms * MS),
                bytes: kib << 10,
            }
        };
        for _ in 0..windows * 4 {
            let now = cost(picker.step);
            picker.compressed(2 << 20, now);
            let others = picker.neighbours().map(|step| step.map(cost));
            picker.tried(now, others);
            let tried: Duration = others.iter().flatten().map(|one| one.time).sum();
            let work = now.time.as_secs_f64() + other_work * MS + tried.as_secs_f64();
            // Now and then the network's buffer has room.
            let copied = now.bytes as f64 / 4e9;
            picker.sent(4096, Duration::from_secs_f64(4096.0 / 4e9), Duration::ZERO);
            let sending = (now.bytes as f64 / network - work).max(copied);
            let sending = Duration::from_secs_f64(sending);
            picker.sent(now.bytes, sending, Duration::from_secs_f64(work) + sending);
        }
        LADDER[picker.step]
    }

    #[test]
    fn a_slow_network_keeps_what_is_small() {
        let picker = &mut Picker::default();
        assert_eq!(run(12e6, 1.0, 10, picker), Compression::Zstd(1));
        // From the quickest way it comes back.
        picker.step = 0;
        assert_eq!(run(12e6, 1.0, 10, picker), Compression::Zstd(1));
    }

    #[test]
    fn a_fast_network_gets_what_is_quick() {
        let picker = &mut Picker::default();
        assert_eq!(run(1.2e9, 1.0, 10, picker), Compression::None);
        // It is noticed that it has become slow, and that it is fast again.
        assert_eq!(run(12e6, 1.0, 10, picker), Compression::Zstd(1));
        assert_eq!(run(1.2e9, 1.0, 100, picker), Compression::None);
    }

    #[test]
    fn what_the_compressor_is_little_of_is_left_as_it_is() {
        assert_eq!(
            run(1.2e9, 60.0, 10, &mut Picker::default()),
            Compression::Zstd(1)
        );
    }

    #[test]
    fn between_both_the_way_seldom_changes() {
        let picker = &mut Picker::default();
        for network in [120e6, 200e6, 300e6, 400e6] {
            run(network, 1.0, 50, picker);
            let mut steps = vec![picker.step];
            for _ in 0..100 {
                run(network, 1.0, 1, picker);
                steps.push(picker.step);
            }
            let changes = steps.windows(2).filter(|pair| pair[0] != pair[1]).count();
            assert!(changes <= 16, "{network}: {steps:?}");
        }
    }

    #[test]
    fn what_the_user_chose_stays() {
        let mut out = Vec::new();
        let plain = vec![7; 1 << 16];
        for (words, kind) in [
            ("none", Kind::Raw),
            ("lz4", Kind::Lz4),
            ("zstd:9", Kind::Zstd),
        ] {
            let choice = words.parse().unwrap();
            let mut compressor = GroupCompressor::new(choice).unwrap();
            let before = compressor.compression();
            for _ in 0..300 {
                out.clear();
                assert_eq!(compressor.encode(&plain, &mut out).unwrap(), kind);
                let time = Duration::from_millis(1);
                compressor.sent(out.len() as u64, time, time).unwrap();
            }
            assert_eq!(compressor.compression(), before);
        }
    }

    #[test]
    fn a_choice_is_read_as_it_is_written() {
        let all = [
            "auto", "none", "lz4", "zstd:-7", "zstd:-1", "zstd:1", "zstd:19",
        ];
        for words in all {
            let choice: CompressionChoice = words.parse().unwrap();
            assert_eq!(choice.to_string(), words);
            GroupCompressor::new(choice).unwrap();
            let json = serde_json::to_string(&choice).unwrap();
            assert_eq!(json, format!("{words:?}"));
            assert_eq!(
                serde_json::from_str::<CompressionChoice>(&json).unwrap(),
                choice
            );
        }
        assert_eq!("zstd".parse(), "zstd:1".parse::<CompressionChoice>());
        for words in ["", "gzip", "zstd:", "zstd:20", "zstd:-8", "lz4:1", "Auto"] {
            assert!(words.parse::<CompressionChoice>().is_err(), "{words}");
        }
    }

    #[test]
    fn what_is_tried_leaves_no_trace() {
        let plain: Vec<u8> = (0..1 << 16).map(|at: u32| (at / 9) as u8).collect();
        let mut auto = GroupCompressor::new(CompressionChoice::Auto).unwrap();
        let mut fixed =
            GroupCompressor::new(CompressionChoice::Always(Compression::Zstd(1))).unwrap();
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let kinds = (auto.encode(&plain, &mut a), fixed.encode(&plain, &mut b));
            assert_eq!(kinds.0.unwrap(), kinds.1.unwrap());
            assert!(a == b);
        }
    }
}
