//! Random numbers that come again with the same seed.

/// A small deterministic generator (xorshift64*), so that a run can be repeated.
#[derive(Debug)]
pub struct Random(u64);

impl Random {
    /// Seeded; the seed must not be 0.
    pub fn new(seed: u64) -> Random {
        Random(seed.max(1))
    }

    /// Uniform in `0..below`.
    pub fn below(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % below.max(1)
    }
}
