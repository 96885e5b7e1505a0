//! The measurements of FITDOC's authors. In each row one number a guest, in the order of [`DebianWorkload::OF_PAPERS`]:
//! underload, Dbench, K-Compile, NPB LU.B, Hadoop, TPC-W.

use stillframe_harness::debian::DebianWorkload;

/// Rows of Table I above the histogram.
pub const ZERO_PAGES: [f64; 6] = [1303.0, 220_807.0, 2001.0, 2389.0, 13_239.0, 4157.0];
/// `[0]`.
pub const UNCHANGED_PAGES: [f64; 6] = [
    261_342.0, 239_183.0, 234_930.0, 131_122.0, 94_927.0, 251_882.0,
];
/// Upper ends of the histogram's ranges, in changed bytes a page, and the pages in each.
pub const HISTOGRAM: [(u32, [f64; 6]); 13] = [
    (1, [23.0, 40.0, 93.0, 16.0, 900.0, 176.0]),
    (2, [22.0, 289.0, 65.0, 26.0, 1126.0, 317.0]),
    (4, [18.0, 384.0, 531.0, 23.0, 1606.0, 573.0]),
    (8, [59.0, 588.0, 253.0, 54.0, 1627.0, 646.0]),
    (16, [60.0, 570.0, 237.0, 58.0, 1316.0, 558.0]),
    (32, [76.0, 1000.0, 398.0, 71.0, 1024.0, 426.0]),
    (64, [41.0, 887.0, 415.0, 43.0, 593.0, 383.0]),
    (128, [37.0, 1921.0, 334.0, 44.0, 553.0, 385.0]),
    (256, [33.0, 4821.0, 200.0, 55.0, 859.0, 446.0]),
    (512, [85.0, 5514.0, 425.0, 93.0, 1119.0, 515.0]),
    (1024, [26.0, 5080.0, 903.0, 208.0, 2903.0, 567.0]),
    (2048, [1.0, 691.0, 4258.0, 1654.0, 12_432.0, 1367.0]),
    (4096, [1.0, 854.0, 18_186.0, 128_357.0, 139_486.0, 3579.0]),
];
/// Pages with changed bytes.
pub const DIRTY_PAGES: [f64; 6] = [482.0, 22_639.0, 26_298.0, 130_702.0, 165_544.0, 9938.0];
/// Changed bytes.
pub const DIRTY_BYTES: [f64; 6] = [
    67_660.0,
    11_475_425.0,
    78_848_380.0,
    450_396_692.0,
    536_244_749.0,
    12_407_963.0,
];
/// Of these, in words of eight.
pub const DIRTY_WORD_BYTES: [f64; 6] = [
    40_888.0,
    4_043_960.0,
    68_428_456.0,
    108_190_080.0,
    416_419_512.0,
    3_745_856.0,
];
/// Dirty pages of all, in percent.
pub const DIRTY_PAGE_RATE: [f64; 6] = [0.18, 8.65, 10.07, 49.92, 63.62, 3.80];
/// Dirty bytes of the bytes of dirty pages, in percent.
pub const DIRTY_BYTES_RATE: [f64; 6] = [3.43, 12.38, 73.20, 84.13, 80.03, 30.48];
/// 8B dirty bytes of the dirty bytes, in percent.
pub const DIRTY_WORD_RATE: [f64; 6] = [60.43, 35.24, 86.78, 24.02, 77.65, 30.19];

/// Figure 7: percent less time for scanning the dirty bitmap.
pub const SCAN_REDUCTION: [f64; 6] = [91.13, 91.24, 91.23, 91.03, 91.13, 91.05];
/// Figure 8: percent less time than Xen's save, at 1 GiB.
pub const TIME_REDUCTION: [f64; 6] = [91.90, 84.52, 77.26, 45.52, 40.41, 83.81];
/// Their mean, as the paper gives it.
pub const TIME_REDUCTION_MEAN: f64 = 70.54;
/// Figure 9: percent fewer bytes than Xen's save.
pub const FULL_REDUCTION: [f64; 6] = [99.99, 98.93, 92.63, 58.00, 49.74, 98.84];
/// Their mean.
pub const FULL_REDUCTION_MEAN: f64 = 83.02;
/// Figure 9: percent fewer bytes than Remus.
pub const REMUS_REDUCTION: [f64; 6] = [96.57, 87.62, 26.80, 15.87, 20.92, 69.52];
/// Their mean.
pub const REMUS_REDUCTION_MEAN: f64 = 52.88;
/// Figure 10: compression's share of the time, in percent.
pub const COMPRESSION_SHARE: [f64; 6] = [34.71, 32.19, 33.40, 38.23, 35.66, 31.18];

/// The number of the guest that does this work.
pub fn of(numbers: &[f64; 6], workload: DebianWorkload) -> f64 {
    let place = DebianWorkload::OF_PAPERS
        .iter()
        .position(|&other| other == workload);
    place.map_or(f64::NAN, |place| numbers[place])
}
