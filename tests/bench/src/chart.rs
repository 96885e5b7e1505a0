//! Pictures for result pages: SVG charts, drawn by plotters.

use std::ops::Range;
use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::chart::SeriesAnno;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

const SIZE: (u32, u32) = (900, 480);
const FONT: &str = "sans-serif";
/// Part of a group's width that its bars fill.
const BARS_SHARE: f64 = 0.8;

/// The legend beside the picture.
#[derive(Debug, Clone, Copy)]
pub struct Labels<'a> {
    /// Above it.
    pub title: &'a str,
    /// Below the horizontal axis.
    pub x: &'a str,
    /// Beside the vertical axis.
    pub y: &'a str,
}

/// How the points of a series are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Joined.
    Line,
    /// Each by itself.
    Dots,
}

/// Points that belong together.
#[derive(Debug, Clone)]
pub struct Series {
    /// For the legend.
    pub name: String,
    /// How they are shown.
    pub shape: Shape,
    /// The points.
    pub points: Vec<(f64, f64)>,
}

impl Series {
    /// Values of one after the other, which are numbered from 1.
    pub fn numbered(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Series {
        Series {
            name: name.into(),
            shape: Shape::Line,
            points: (1u32..).map(f64::from).zip(values).collect(),
        }
    }
}

/// Draws series of points; both axes begin at 0.
pub fn points(path: &Path, labels: Labels<'_>, series: &[Series]) -> Result<()> {
    let all = || series.iter().flat_map(|series| &series.points);
    let x = 0.0..above(all().map(|point| point.0));
    let y = 0.0..above(all().map(|point| point.1));
    let draw = |chart: &mut Chart<'_, '_>| {
        for (
            number,
            Series {
                name,
                shape,
                points,
            },
        ) in series.iter().enumerate()
        {
            let colour = colour(number);
            let drawn = match shape {
                Shape::Line => chart.draw_series(LineSeries::new(
                    points.iter().copied(),
                    colour.stroke_width(2),
                )),
                Shape::Dots => chart.draw_series(
                    points
                        .iter()
                        .map(|&point| Circle::new(point, 2, colour.filled())),
                ),
            };
            label(drawn.map_err(failed)?, name, colour);
        }
        Ok(())
    };
    chart(path, labels, x, y, None, draw)
}

/// Draws a group of bars for each of `groups`, one bar of each series in it. The series have one value
/// for each group.
pub fn bars(
    path: &Path,
    labels: Labels<'_>,
    groups: &[impl AsRef<str>],
    series: &[(&str, Vec<f64>)],
) -> Result<()> {
    let x = 0.0..groups.len() as f64;
    let y = 0.0..above(series.iter().flat_map(|(_, values)| values).copied());
    let width = BARS_SHARE / series.len() as f64;
    let draw = |chart: &mut Chart<'_, '_>| {
        for (number, (name, values)) in series.iter().enumerate() {
            let colour = colour(number);
            let bars = values.iter().enumerate().map(|(group, &value)| {
                let left = group as f64 + (1.0 - BARS_SHARE) / 2.0 + number as f64 * width;
                Rectangle::new([(left, 0.0), (left + width, value)], colour.filled())
            });
            label(chart.draw_series(bars).map_err(failed)?, name, colour);
        }
        Ok(())
    };
    let groups: Vec<&str> = groups.iter().map(AsRef::as_ref).collect();
    chart(path, labels, x, y, Some(&groups), draw)
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Axes and legend around what `draw` draws. With `groups` the horizontal axis names those.
fn chart(
    path: &Path,
    labels: Labels<'_>,
    x: Range<f64>,
    y: Range<f64>,
    groups: Option<&[&str]>,
    draw: impl FnOnce(&mut Chart<'_, '_>) -> Result<()>,
) -> Result<()> {
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    area.fill(&WHITE).map_err(failed)?;
    let mut chart = ChartBuilder::on(&area)
        .caption(labels.title, (FONT, 20))
        .margin(12)
        .x_label_area_size(44)
        .y_label_area_size(70)
        .build_cartesian_2d(x, y)
        .map_err(failed)?;
    let name_of = |at: &f64| name_of_group(groups.unwrap_or_default(), *at);
    let mut mesh = chart.configure_mesh();
    mesh.x_desc(labels.x).y_desc(labels.y).disable_x_mesh();
    if let Some(groups) = groups {
        // Labels are at multiples of a half: those between two groups stay empty.
        mesh.x_labels(2 * groups.len() + 1)
            .x_label_formatter(&name_of);
    }
    mesh.draw().map_err(failed)?;
    drop(mesh);
    draw(&mut chart)?;
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()
        .map_err(failed)?;
    area.present().map_err(failed)
}

fn name_of_group(groups: &[&str], at: f64) -> String {
    let group = at.floor();
    match at - group == 0.5 {
        true => groups
            .get(group as usize)
            .copied()
            .unwrap_or_default()
            .to_owned(),
        false => String::new(),
    }
}

fn label(drawn: &mut SeriesAnno<'_, SVGBackend<'_>>, name: &str, colour: RGBColor) {
    drawn
        .label(name)
        .legend(move |(x, y)| Rectangle::new([(x, y - 5), (x + 12, y + 5)], colour.filled()));
}

/// A little above the largest, so that nothing touches the frame.
fn above(values: impl Iterator<Item = f64>) -> f64 {
    match values.fold(0.0, f64::max) * 1.1 {
        0.0 => 1.0,
        top => top,
    }
}

fn colour(number: usize) -> RGBColor {
    let (red, green, blue) = [
        (31, 119, 180),
        (255, 127, 14),
        (44, 160, 44),
        (214, 39, 40),
        (148, 103, 189),
        (140, 86, 75),
    ][number % 6];
    RGBColor(red, green, blue)
}

/// Errors of plotters borrow the picture.
fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw: {error}")
}
