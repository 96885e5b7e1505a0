//! Statistics for the evaluations of papers.

use stillframe_harness::results::percentile;

/// The statistics of samples that a paper's tables have.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// Their mean.
    pub mean: f64,
    /// Their standard deviation, as of a sample of more.
    pub stdev: f64,
    /// Their median.
    pub median: f64,
    /// How many they are.
    pub count: usize,
}

/// A straight line.
#[derive(Debug, Clone, Copy)]
pub struct Line {
    /// Its value at 0.
    pub offset: f64,
    /// The gain for one unit of the horizontal axis.
    pub slope: f64,
}

impl Spread {
    /// Of these samples; no number where there are too few.
    pub fn of(samples: &[f64]) -> Spread {
        Spread {
            mean: mean(samples),
            stdev: stdev(samples),
            median: percentile(samples, 0.5),
            count: samples.len(),
        }
    }

    /// Mean, standard deviation, median and count as cells of a table, with this many digits.
    pub fn cells(&self, digits: usize) -> [String; 4] {
        [
            cell(self.mean, digits),
            cell(self.stdev, digits),
            cell(self.median, digits),
            self.count.to_string(),
        ]
    }
}

impl Line {
    /// Its value at `x`.
    pub fn at(&self, x: f64) -> f64 {
        self.offset + self.slope * x
    }
}

/// A number as a cell of a table; a dash where there is none.
pub fn cell(number: f64, digits: usize) -> String {
    match number.is_finite() {
        true => format!("{number:.digits$}"),
        false => "-".to_owned(),
    }
}

/// The mean; no number of no samples.
pub fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

/// The standard deviation, as of a sample of more; no number of fewer than two samples.
pub fn stdev(samples: &[f64]) -> f64 {
    let mean = mean(samples);
    let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
    match samples.len() {
        0 | 1 => f64::NAN,
        count => (squares / (count - 1) as f64).sqrt(),
    }
}

/// How far the mean of these is likely to be from that of many more; no number of fewer than two.
pub fn standard_error(samples: &[f64]) -> f64 {
    stdev(samples) / (samples.len() as f64).sqrt()
}

/// The line with the least squares of vertical distances; none where the points do not tell one.
pub fn least_squares(points: &[(f64, f64)]) -> Option<Line> {
    let count = points.len() as f64;
    let (x, y) = points
        .iter()
        .fold((0.0, 0.0), |(x, y), point| (x + point.0, y + point.1));
    let (x, y) = (x / count, y / count);
    let of = |what: fn(f64, f64) -> f64| -> f64 {
        let parts = points.iter().map(|point| what(point.0 - x, point.1 - y));
        parts.sum()
    };
    let slope = of(|x, y| x * y) / of(|x, _| x * x);
    slope.is_finite().then_some(Line {
        offset: y - slope * x,
        slope,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_of_few_and_of_some() {
        let some = Spread::of(&[2.0, 4.0, 9.0]);
        assert_eq!((some.mean, some.median, some.count), (5.0, 4.0, 3));
        assert!((some.stdev - 13.0_f64.sqrt()).abs() < 1e-9);
        assert!((standard_error(&[1.0, 1.0, 3.0, 3.0]) - (1.0_f64 / 3.0).sqrt()).abs() < 1e-9);
        assert_eq!(Spread::of(&[7.0]).cells(1), ["7.0", "-", "7.0", "1"]);
        assert_eq!(Spread::of(&[]).cells(1), ["-", "-", "-", "0"]);
    }

    #[test]
    fn a_line_through_its_points() {
        let line = least_squares(&[(0.0, 1.0), (2.0, 5.0), (1.0, 3.0)]).unwrap();
        assert!((line.offset - 1.0).abs() < 1e-9 && (line.slope - 2.0).abs() < 1e-9);
        assert!((line.at(10.0) - 21.0).abs() < 1e-9);
        assert!(least_squares(&[(1.0, 1.0), (1.0, 2.0)]).is_none());
        assert!(least_squares(&[]).is_none());
    }
}
