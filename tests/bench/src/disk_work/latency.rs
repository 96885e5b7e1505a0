//! How long a guest's writes take, by QEMU's own account at the device: `block-latency-histogram-set`, `query-blockstats`.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use stillframe_harness::qmp::Qmp;

/// From 10 us to 20 s, each a tenth more than the one before.
fn boundaries_ns() -> Vec<u64> {
    std::iter::successors(Some(10_000u64), |last| Some(last + last / 10))
        .take_while(|boundary| *boundary < 20_000_000_000)
        .collect()
}

/// Begins an account of the writes of a device, without those before.
pub(super) fn begin(monitor: &mut Qmp, device: &str) -> Result<()> {
    let arguments = json!({ "id": device, "boundaries-write": boundaries_ns() });
    monitor.execute("block-latency-histogram-set", arguments)?;
    Ok(())
}

/// Writes of a drive that have ended.
pub(super) fn writes(monitor: &mut Qmp, drive: &str) -> Result<u64> {
    let stats = stats(monitor, drive)?;
    stats["wr_operations"].as_u64().context("no writes")
}

/// The time in milliseconds that this share of the writes of a drive does not exceed.
pub(super) fn percentile_ms(monitor: &mut Qmp, drive: &str, share: f64) -> Result<f64> {
    let stats = stats(monitor, drive)?;
    let histogram = &stats["wr_latency_histogram"];
    let numbers = |name: &str| -> Result<Vec<u64>> {
        let list = histogram[name].as_array();
        let list = list.with_context(|| format!("no {name} of the writes"))?;
        Ok(list.iter().filter_map(Value::as_u64).collect())
    };
    let (boundaries, bins) = (numbers("boundaries")?, numbers("bins")?);
    bound(&boundaries, &bins, share).context("no writes were counted")
}

/// The upper bound, in milliseconds, of the bin with this share; of the last, which has none, its lower one.
fn bound(boundaries: &[u64], bins: &[u64], share: f64) -> Option<f64> {
    let wanted = (bins.iter().sum::<u64>() as f64 * share).ceil() as u64;
    let mut counted = 0;
    let bin = bins.iter().position(|count| {
        counted += count;
        counted >= wanted && counted > 0
    })?;
    let boundary = boundaries.get(bin).or(boundaries.last())?;
    Some(*boundary as f64 / 1e6)
}

fn stats(monitor: &mut Qmp, drive: &str) -> Result<Value> {
    let all = monitor.execute("query-blockstats", json!({}))?;
    let mut all = all.as_array().into_iter().flatten();
    let found = all.find(|known| known["device"] == drive);
    let stats = found.map(|known| known["stats"].clone());
    stats.with_context(|| format!("QEMU has no drive {drive}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bin_of_a_share_is_found() {
        let boundaries = [1_000_000, 2_000_000];
        assert_eq!(bound(&boundaries, &[98, 1, 1], 0.99), Some(2.0));
        assert_eq!(bound(&boundaries, &[100, 0, 0], 0.99), Some(1.0));
        assert_eq!(bound(&boundaries, &[0, 0, 5], 0.99), Some(2.0));
        assert_eq!(bound(&boundaries, &[0, 0, 0], 0.99), None);
    }

    #[test]
    fn boundaries_ascend() {
        assert!(boundaries_ns().is_sorted_by(|one, next| one < next));
    }
}
