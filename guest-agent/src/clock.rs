//! The system clock.

use std::io;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, Timespec, clock_settime};

const NS_A_SECOND: i64 = 1_000_000_000;

/// Nanoseconds since 1970.
pub fn time_ns() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |time| i64::try_from(time.as_nanos()).unwrap_or(i64::MAX))
}

/// Sets it. The hardware's clock is QEMU's, which keeps the host's time by itself.
pub fn set_ns(time_ns: i64) -> io::Result<()> {
    let time = Timespec {
        tv_sec: time_ns.div_euclid(NS_A_SECOND),
        tv_nsec: time_ns.rem_euclid(NS_A_SECOND),
    };
    Ok(clock_settime(ClockId::Realtime, time)?)
}
