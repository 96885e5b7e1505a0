//! Draws statistics as SVG: a histogram, or bars of several parts.

use plotters::coord::ranged1d::SegmentValue;
use plotters::prelude::*;
use stillframe_engine::statistics::{Range, Statistics};
use thiserror::Error;

const SIZE: (u32, u32) = (900, 480);

/// The picture could not be drawn.
#[derive(Debug, Error)]
#[error("cannot draw the picture: {0}")]
pub struct PictureError(String);

/// Dirty pages by number of changed bytes, as the text of an SVG file.
pub fn histogram(title: &str, statistics: &Statistics) -> Result<String, PictureError> {
    let mut svg = String::new();
    draw(&mut svg, title, statistics).map_err(|error| PictureError(error.to_string()))?;
    Ok(svg)
}

/// Bars with the same parts, from the bottom upwards, as the text of an SVG file. Each has a name.
pub fn stacked<const PARTS: usize>(
    title: &str,
    parts: [&str; PARTS],
    bars: &[(String, [u64; PARTS])],
) -> Result<String, PictureError> {
    let mut svg = String::new();
    draw_stacked(&mut svg, title, parts, bars).map_err(|error| PictureError(error.to_string()))?;
    Ok(svg)
}

fn draw_stacked<const PARTS: usize>(
    svg: &mut String,
    title: &str,
    parts: [&str; PARTS],
    bars: &[(String, [u64; PARTS])],
) -> Result<(), Box<dyn std::error::Error>> {
    let highest = bars.iter().map(|(_, bar)| bar.iter().sum::<u64>()).max();
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(80)
        .build_cartesian_2d(
            (0..bars.len()).into_segmented(),
            0..highest.unwrap_or(0).max(1),
        )?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(bars.len())
        .x_label_formatter(&|at| match at {
            SegmentValue::CenterOf(index) => bars
                .get(*index)
                .map_or_else(String::new, |bar| bar.0.clone()),
            _ => String::new(),
        })
        .y_desc("pages")
        .draw()?;
    for (part, name) in parts.into_iter().enumerate() {
        let color = Palette99::pick(part).mix(0.7);
        let series = chart.draw_series((0..).zip(bars).map(|(index, (_, bar))| {
            let below: u64 = bar[..part].iter().sum();
            let from = (SegmentValue::Exact(index), below);
            let to = (SegmentValue::Exact(index + 1), below + bar[part]);
            let mut rectangle = Rectangle::new([from, to], color.filled());
            rectangle.set_margin(0, 0, 4, 4);
            rectangle
        }))?;
        let sample = move |(x, y)| Rectangle::new([(x, y - 5), (x + 10, y + 5)], color.filled());
        series.label(name).legend(sample);
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .draw()?;
    area.present()?;
    drop(chart);
    drop(area);
    Ok(())
}

fn draw(
    svg: &mut String,
    title: &str,
    statistics: &Statistics,
) -> Result<(), Box<dyn std::error::Error>> {
    let ranges = &statistics.histogram;
    let most = ranges.iter().map(|range| range.pages).max().unwrap_or(0);
    let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
    area.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(title, ("sans-serif", 18))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(80)
        .build_cartesian_2d((0..ranges.len()).into_segmented(), 0..most.max(1))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(ranges.len())
        .x_label_formatter(&|at| match at {
            SegmentValue::CenterOf(index) => ranges.get(*index).map(name).unwrap_or_default(),
            _ => String::new(),
        })
        .x_desc("changed bytes in a page")
        .y_desc("pages")
        .draw()?;
    chart.draw_series((0..).zip(ranges).map(|(index, range)| {
        let from = (SegmentValue::Exact(index), 0);
        let to = (SegmentValue::Exact(index + 1), range.pages);
        let mut bar = Rectangle::new([from, to], BLUE.mix(0.6).filled());
        bar.set_margin(0, 0, 4, 4);
        bar
    }))?;
    area.present()?;
    drop(chart);
    drop(area);
    Ok(())
}

/// The range as in FITDOC's table: above the first number, up to the second.
pub fn name(range: &Range) -> String {
    format!("({},{}]", range.above, range.up_to)
}
