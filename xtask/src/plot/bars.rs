//! Bars as SVG.
//!
//! A bar is as long as its median; the line over it goes from the smallest to the largest figure, and the number
//! follows. Cases whose figures are far apart get separate scales, because on one scale the small ones would be
//! invisible. There is no background, and the colours are readable on white and on black.

use anyhow::Result;
use plotters::coord::Shift;
use plotters::coord::types::{RangedCoordf64, RangedCoordi32};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::Spread;

/// Size of the picture, in pixels.
const WIDTH: u32 = 960;
/// Where text begins.
const MARGIN: i32 = 24;
/// Where bars begin.
const LEFT: i32 = 210;
/// Where the longest may end: the number needs the rest.
const RIGHT: i32 = 850;
/// Where the first case begins.
const TOP: i32 = 100;
const BAR: i32 = 15;
/// From one bar to the next.
const STEP: i32 = 20;
/// For the name of a case.
const NAME: i32 = 22;
/// Between two cases, and more of it where the scale changes.
const GAP: i32 = 10;
const SCALE_GAP: i32 = 26;

/// Cases whose largest figures differ by more than this factor have separate scales.
const FAR: f64 = 3.0;

const TEXT: RGBColor = RGBColor(0x73, 0x7d, 0x89);
const RANGE: RGBColor = RGBColor(0x56, 0x61, 0x6e);
/// One for each way of doing it, the plain one first.
const WAYS: [RGBColor; 4] =
    [RGBColor(0x9a, 0xa5, 0xb1), RGBColor(0x2f, 0x83, 0xc5), RGBColor(0xe0, 0x8a, 0x1e), RGBColor(0x4c, 0x9f, 0x70)];

/// One bar.
#[derive(Debug)]
pub(super) struct Bar {
    pub(super) label: String,
    /// The colour by its index, the plain way's first; all beyond the last have the last.
    pub(super) colour: usize,
    pub(super) spread: Spread,
}

/// A case, and a bar for each way of doing it, the plain one first.
#[derive(Debug)]
pub(super) struct Row {
    /// May be empty.
    pub(super) label: String,
    pub(super) bars: Vec<Bar>,
}

impl Row {
    fn largest(&self) -> f64 {
        self.bars.iter().map(|bar| bar.spread.max).fold(0.0, f64::max)
    }

    /// Pixels, without the gap that follows.
    fn height(&self) -> i32 {
        self.name_height() + i32::try_from(self.bars.len()).unwrap_or(0) * STEP
    }

    fn name_height(&self) -> i32 {
        if self.label.is_empty() { 0 } else { NAME }
    }
}

/// The data of the picture.
#[derive(Debug)]
pub(super) struct Picture<'p> {
    pub(super) title: &'p str,
    /// Lines under the title.
    pub(super) notes: &'p [String],
    pub(super) unit: &'p str,
    pub(super) rows: &'p [Row],
}

type Root<'s> = DrawingArea<SVGBackend<'s>, Shift>;
/// Figures from left to right, pixels from top to bottom.
type Panel<'s> = DrawingArea<SVGBackend<'s>, Cartesian2d<RangedCoordf64, RangedCoordi32>>;

impl Picture<'_> {
    /// The picture, a complete SVG document.
    pub(super) fn svg(&self) -> Result<String> {
        let panels: Vec<&[Row]> = panels(self.rows);
        let height = |panel: &&[Row]| panel.iter().map(|row| row.height() + GAP).sum::<i32>() + SCALE_GAP;
        let total = TOP + panels.iter().map(height).sum::<i32>() - if panels.is_empty() { 0 } else { SCALE_GAP };
        let mut svg = String::new();
        {
            let size = (WIDTH, total.unsigned_abs());
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            root.draw(&Text::new(self.title, (MARGIN, 28), text(17, HPos::Left, FontStyle::Bold)))?;
            for (line, note) in (0..).zip(self.notes) {
                root.draw(&Text::new(
                    note.as_str(),
                    (MARGIN, 52 + line * 18),
                    text(12, HPos::Left, FontStyle::Normal),
                ))?;
            }
            let mut top = TOP;
            for panel in panels {
                self.panel(&root, panel, top)?;
                top += height(&panel);
            }
            root.present()?;
        }
        Ok(svg)
    }

    /// Cases of one scale, from `top` on.
    fn panel(&self, root: &Root<'_>, rows: &[Row], mut top: i32) -> Result<()> {
        let largest = rows.iter().map(Row::largest).fold(0.0, f64::max);
        let figures = 0.0..if largest > 0.0 { largest } else { 1.0 };
        let bottom = i32::try_from(root.dim_in_pixel().1)?;
        let spec = Cartesian2d::<RangedCoordf64, RangedCoordi32>::new(figures, 0..bottom, (LEFT..RIGHT, 0..bottom));
        let panel = root.apply_coord_spec(spec);
        for row in rows {
            let name = text(13, HPos::Left, FontStyle::Bold);
            root.draw(&Text::new(row.label.as_str(), (MARGIN, top + BAR / 2), name))?;
            let first = top + row.name_height();
            for (bar, y) in row.bars.iter().zip((first..).step_by(STEP.unsigned_abs() as usize)) {
                self.bar(root, &panel, bar, y)?;
            }
            let end = top + row.height() - STEP + BAR;
            root.draw(&PathElement::new(vec![(LEFT, first - 3), (LEFT, end + 3)], TEXT.mix(0.7)))?;
            top += row.height() + GAP;
        }
        Ok(())
    }

    fn bar(&self, root: &Root<'_>, panel: &Panel<'_>, bar: &Bar, top: i32) -> Result<()> {
        let Spread { min, median, max } = bar.spread;
        let (middle, bottom) = (top + BAR / 2, top + BAR);
        let label = text(12, HPos::Right, FontStyle::Normal);
        root.draw(&Text::new(bar.label.as_str(), (LEFT - 8, middle), label))?;
        let colour = WAYS.get(bar.colour).or(WAYS.last()).copied().unwrap_or(TEXT);
        panel.draw(&Rectangle::new([(0.0, top), (median, bottom)], colour.filled()))?;
        if max > min {
            panel.draw(&PathElement::new(vec![(min, middle), (max, middle)], RANGE))?;
            for end in [min, max] {
                let tick = PathElement::new(vec![(0, -3), (0, 4)], RANGE);
                panel.draw(&(EmptyElement::at((end, middle)) + tick))?;
            }
        }
        let number = Text::new(self.number(median), (8, 0), text(12, HPos::Left, FontStyle::Normal));
        panel.draw(&(EmptyElement::at((max.max(median), middle)) + number))?;
        Ok(())
    }

    /// `213 ms`, `4.3 s`; or with the unit there is.
    fn number(&self, value: f64) -> String {
        let (value, unit) = if self.unit == "s" && value < 1.0 { (value * 1000.0, "ms") } else { (value, self.unit) };
        let digits = match value {
            large if large >= 100.0 => 0,
            middle if middle >= 10.0 => 1,
            _ => 2,
        };
        format!("{value:.digits$} {unit}")
    }
}

/// Rows cut into runs that are shown on one scale each.
fn panels(mut rows: &[Row]) -> Vec<&[Row]> {
    let mut panels = Vec::new();
    while !rows.is_empty() {
        let (panel, rest) = rows.split_at(same_scale(rows));
        panels.push(panel);
        rows = rest;
    }
    panels
}

/// How many of the first rows are shown on one scale.
fn same_scale(rows: &[Row]) -> usize {
    let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
    let fits = |row: &&Row| {
        (least, most) = (least.min(row.largest()), most.max(row.largest()));
        most <= least * FAR
    };
    rows.iter().take_while(fits).count().max(1)
}

/// Text of this height in pixels, with its middle line at the given place.
fn text(pixels: u8, side: HPos, style: FontStyle) -> TextStyle<'static> {
    // plotters makes a font smaller by this factor.
    let size = f64::from(pixels) * 1.24;
    let family = FontFamily::Name("system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif");
    let font = TextStyle::from(FontDesc::new(family, size, style));
    font.color(&TEXT).pos(Pos::new(side, VPos::Center))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(label: &str, medians: &[f64]) -> Row {
        let spread = |median: f64| Spread { min: median * 0.9, median, max: median * 1.1 };
        let bars = medians.iter().map(|median| Bar { label: "a".into(), colour: 0, spread: spread(*median) }).collect();
        Row { label: label.into(), bars }
    }

    #[test]
    fn cases_far_apart_have_scales_of_their_own() {
        let rows = [row("a", &[1.0, 2.0]), row("b", &[2.5]), row("c", &[40.0]), row("d", &[0.0])];
        let lengths: Vec<usize> = panels(&rows).iter().map(|panel| panel.len()).collect();
        assert_eq!(lengths, [2, 1, 1]);
        let svg = Picture { title: "t", notes: &[], unit: "s", rows: &rows }.svg().unwrap();
        // The range of the largest of each scale ends where bars end.
        assert_eq!(svg.matches(&format!("{RIGHT},")).count(), 2 * 3, "{svg}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn numbers_have_the_digits_that_people_read() {
        let number = |unit, value| Picture { title: "", notes: &[], unit, rows: &[] }.number(value);
        assert_eq!(number("s", 0.2134), "213 ms");
        assert_eq!(number("s", 0.0213), "21.3 ms");
        assert_eq!(number("s", 4.312), "4.31 s");
        assert_eq!(number("ns", 0.5), "0.50 ns");
    }

    #[test]
    fn a_picture_is_well_formed() {
        let rows = [row("e", &[1.0])];
        let svg = Picture { title: "a <b> & \"c\"", notes: &["d".into()], unit: "s", rows: &rows }.svg().unwrap();
        assert!(
            svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("a &lt;b&gt; &amp; &quot;c&quot;")
        );
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }
}
