//! How much work the guest loses while it is watched.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};

use stillframe_harness::cli::Stillframe;
use stillframe_harness::guest::{Guest, Kind, Setup, Workload};

const WINDOW: Duration = Duration::from_secs(12);

/// Ticks a second of a guest that works as fast as it can, in turns alone and watched.
#[derive(Debug)]
pub struct Slowdown {
    /// Alone.
    pub alone: Vec<f64>,
    /// Watched every 2 s.
    pub watched: Vec<f64>,
}

impl Slowdown {
    /// Lost work in percent, of the means.
    pub fn percent(&self) -> f64 {
        let mean = |samples: &[f64]| samples.iter().sum::<f64>() / samples.len() as f64;
        (1.0 - mean(&self.watched) / mean(&self.alone)) * 100.0
    }

    /// Returns it as raw data.
    pub fn raw(&self) -> Value {
        json!({"ticks_per_s_alone": self.alone, "ticks_per_s_watched": self.watched})
    }
}

/// Measures `rounds` windows of each kind, in turns.
pub fn measure(rounds: u32) -> Result<Slowdown> {
    let folder = tempfile::Builder::new()
        .prefix("stillframe-slowdown-")
        .tempdir()?;
    let stillframe = Stillframe::init(&folder.path().join("repo"))?;
    let workload = Workload {
        mib: 64,
        pattern: "random",
        tick_ms: 0,
        writes_per_tick: 400,
        share: 256,
    };
    let guest = Setup {
        ram_mib: 1024,
        workload,
        ..Setup::new(Kind::Private)
    }
    .boot()?;
    let mut slowdown = Slowdown {
        alone: Vec::new(),
        watched: Vec::new(),
    };
    for _ in 0..rounds {
        slowdown.alone.push(rate(&guest)?);
        let watch = [
            "watch",
            "--pid",
            &guest.pid_text(),
            "--every",
            "2s",
            "--quiet",
        ];
        let mut engine = stillframe.spawn(&watch)?;
        // The first checkpoint reads all memory; only the steady state counts here.
        wait_checkpoints(&stillframe)?;
        slowdown.watched.push(rate(&guest)?);
        std::process::Command::new("kill")
            .arg(engine.id().to_string())
            .status()?;
        engine.wait()?;
    }
    Ok(slowdown)
}

fn rate(guest: &Guest) -> Result<f64> {
    let begin = Instant::now();
    let first = guest.serial.ticks()?.len();
    std::thread::sleep(WINDOW);
    let last = guest.serial.ticks()?.len();
    Ok((last - first) as f64 / begin.elapsed().as_secs_f64())
}

/// Waits for two more manifests.
fn wait_checkpoints(stillframe: &Stillframe) -> Result<()> {
    let manifests = stillframe.repository().join("manifests");
    let count = || std::fs::read_dir(&manifests).map_or(0, Iterator::count);
    let first = count();
    let begin = Instant::now();
    while count() < first + 2 && begin.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}
