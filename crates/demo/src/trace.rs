//! The course of a live migration as a picture.
//!
//! Law: a picture shows what was measured and nothing between. The memory that is left falls from what a round began
//! with to what it had not sent when the next one began; rates are steps as long as their round; the pause is as long
//! as the guest itself has measured it. There is no background, and the colours are readable on white and on black.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Size of the picture, in pixels.
const SIZE: (u32, u32) = (960, 560);
/// Where the panel of the memory ends and that of the rates begins.
const BETWEEN: u32 = 345;
/// Where text begins.
const MARGIN: i32 = 24;
/// Where the panels begin and end.
const LEFT: i32 = 84;
const RIGHT: i32 = 920;
/// The upper edge of the upper panel.
const TOP: i32 = 104;

const TEXT: RGBColor = RGBColor(0x73, 0x7d, 0x89);
const GRID: RGBAColor = RGBAColor(0x8a, 0x94, 0xa0, 0.28);
const MARK: RGBColor = RGBColor(0x8a, 0x94, 0xa0);
const SENT: RGBColor = RGBColor(0x2f, 0x83, 0xc5);
const DIRTIED: RGBColor = RGBColor(0xe0, 0x8a, 0x1e);
const PAUSE: RGBColor = RGBColor(0xd1, 0x49, 0x5b);
const POSTCOPY: RGBColor = RGBColor(0x4c, 0x9f, 0x70);

/// One round of a migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceRound {
    /// When it began, in milliseconds since the migration did.
    pub begin_ms: f64,
    /// When it ended.
    pub end_ms: f64,
    /// Bytes left to send when it began.
    pub left: u64,
    /// Bytes of those that were not sent when it ended.
    pub unsent: u64,
    /// Bytes of memory that the guest dirtied a second; `None` until it is known.
    pub dirtied: Option<f64>,
    /// Bytes of the stream sent a second; `None` for a round that is not drawn: what goes into buffers while the guest
    /// is paused says nothing about the connection.
    pub bandwidth: Option<f64>,
}

/// An event.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Milliseconds since the migration began.
    pub at_ms: f64,
    /// The event, in a word or two.
    pub what: String,
}

/// The data of the picture.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// The guest.
    pub title: String,
    /// The outcome.
    pub summary: String,
    /// The rounds, by time.
    pub rounds: Vec<TraceRound>,
    /// From when to when the guest was paused, in milliseconds since the migration began.
    pub pause: Option<(f64, f64)>,
    /// From when the pages followed that the guest ran ahead of, to when the last one was there.
    pub postcopy: Option<(f64, f64)>,
    /// Bytes that were left when postcopy began.
    pub postcopy_left: u64,
    /// Moments of note.
    pub marks: Vec<Mark>,
}

type Panel<'s> = DrawingArea<SVGBackend<'s>, Shift>;
type Chart<'c, 's> = ChartContext<'c, SVGBackend<'s>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
type Drawn = Result<(), PictureError>;

/// A picture could not be drawn.
#[derive(Debug, thiserror::Error)]
#[error("drawing a picture: {0}")]
pub struct PictureError(String);

impl<E: std::error::Error + Send + Sync> From<DrawingAreaErrorKind<E>> for PictureError {
    fn from(error: DrawingAreaErrorKind<E>) -> Self {
        Self(error.to_string())
    }
}

impl Trace {
    /// The picture, a complete SVG document.
    ///
    /// # Errors
    /// The drawing library's.
    pub fn svg(&self) -> Result<String, PictureError> {
        let mut svg = String::with_capacity(16 << 10);
        {
            let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            root.draw(&Text::new(self.title.as_str(), (MARGIN, 28), bold(17, TEXT)))?;
            root.draw(&Text::new(self.summary.as_str(), (MARGIN, 52), text(12)))?;
            let (upper, lower) = root.split_vertically(BETWEEN);
            let time = 0.0..self.end();
            self.memory(&upper, time.clone())?;
            self.rates(&lower, time)?;
            root.present()?;
        }
        Ok(svg)
    }

    /// The last moment that is drawn.
    fn end(&self) -> f64 {
        let rounds = self.rounds.iter().map(|round| round.end_ms);
        let spans = self.pause.iter().chain(&self.postcopy).map(|(_, end)| *end);
        let last = rounds.chain(spans).chain(self.marks.iter().map(|mark| mark.at_ms)).fold(0.0, f64::max);
        (last * 1.02).max(1.0)
    }

    /// The upper panel: memory that is left, falling within each round.
    fn memory(&self, panel: &Panel<'_>, time: Range<f64>) -> Drawn {
        panel.draw(&Text::new("Memory still to send, MiB", (MARGIN, TOP - 20), bold(13, TEXT)))?;
        let most = self.rounds.iter().map(|round| round.left).max().unwrap_or(0).max(self.postcopy_left);
        let most = mebibytes(most).max(1.0);
        let mut chart = ChartBuilder::on(panel)
            .margin_top(TOP)
            .margin_right(SIZE.0.cast_signed() - RIGHT)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, 24)
            .build_cartesian_2d(time, 0.0..most)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().disable_x_axis().y_labels(7).y_label_formatter(&|value| number(*value));
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).axis_style(GRID).label_style(small()).draw()?;
        self.bands(&mut chart)?;
        for round in &self.rounds {
            let line = [(round.begin_ms, mebibytes(round.left)), (round.end_ms, mebibytes(round.unsent))];
            chart.draw_series(AreaSeries::new(line, 0.0, SENT.mix(0.2)))?;
            chart.draw_series(LineSeries::new(line, SENT.stroke_width(2)))?;
        }
        if let Some((from, to)) = self.postcopy {
            let line = [(from, mebibytes(self.postcopy_left)), (to, 0.0)];
            chart.draw_series(AreaSeries::new(line, 0.0, SENT.mix(0.2)))?;
            chart.draw_series(DashedLineSeries::new(line, 5, 4, SENT.stroke_width(2)))?;
        }
        self.round_numbers(panel, &chart)?;
        self.captions(panel, &mut chart, most)
    }

    /// Numbers of the rounds that are wide enough for one.
    fn round_numbers(&self, panel: &Panel<'_>, chart: &Chart<'_, '_>) -> Drawn {
        let below = chart.backend_coord(&(0.0, 0.0)).1;
        panel.draw(&Text::new("round", (LEFT - 8, below + 12), aligned(small(), HPos::Right)))?;
        let mut free = LEFT;
        for (number, round) in (1_u32..).zip(&self.rounds) {
            let [from, to] = [round.begin_ms, round.end_ms].map(|at| chart.backend_coord(&(at, 0.0)).0);
            panel.draw(&PathElement::new(vec![(from, below), (from, below + 6)], MARK))?;
            if to - from >= 13 && from >= free {
                let at = ((from + to) / 2, below + 12);
                panel.draw(&Text::new(number.to_string(), at, aligned(small(), HPos::Center)))?;
                free = to;
            }
        }
        Ok(())
    }

    /// The lower panel.
    fn rates(&self, panel: &Panel<'_>, time: Range<f64>) -> Drawn {
        panel.draw(&Text::new("Rates, MiB/s", (MARGIN, 10), bold(13, TEXT)))?;
        for (x, colour, word) in [(150, SENT, "sent"), (230, DIRTIED, "dirtied")] {
            panel.draw(&PathElement::new(vec![(x, 10), (x + 22, 10)], colour.stroke_width(2)))?;
            panel.draw(&Text::new(word, (x + 30, 10), text(12)))?;
        }
        let fastest = self.rounds.iter().flat_map(|round| [round.bandwidth, round.dirtied]).flatten();
        let most = (fastest.fold(0.0, f64::max) / 1_048_576.0).max(1.0);
        let in_seconds = time.end >= 2000.0;
        let unit = if in_seconds { "seconds" } else { "milliseconds" };
        let mut chart = ChartBuilder::on(panel)
            .margin_top(28)
            .margin_bottom(8)
            .margin_right(SIZE.0.cast_signed() - RIGHT)
            .set_label_area_size(LabelAreaPosition::Left, LEFT)
            .set_label_area_size(LabelAreaPosition::Bottom, 48)
            .build_cartesian_2d(time, 0.0..most)?;
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh().x_labels(9).y_labels(6).y_label_formatter(&|value| number(*value));
        mesh.x_desc(format!("{unit} since the migration began")).axis_desc_style(small());
        let label = |value: &f64| if in_seconds { number(value / 1000.0) } else { number(*value) };
        mesh.x_label_formatter(&label);
        mesh.bold_line_style(GRID).light_line_style(TRANSPARENT).axis_style(GRID).label_style(small()).draw()?;
        self.bands(&mut chart)?;
        let sent = |round: &TraceRound| round.bandwidth;
        let dirtied = |round: &TraceRound| round.dirtied;
        for steps in self.steps(sent) {
            chart.draw_series(LineSeries::new(steps, SENT.stroke_width(2)))?;
        }
        for steps in self.steps(dirtied) {
            chart.draw_series(LineSeries::new(steps, DIRTIED.stroke_width(2)))?;
        }
        Ok(())
    }

    /// A rate, a step as long as each round; one line for every run of rounds in which it is known.
    fn steps(&self, rate: impl Fn(&TraceRound) -> Option<f64>) -> Vec<Vec<(f64, f64)>> {
        let runs = self.rounds.chunk_by(|one, next| rate(one).is_some() == rate(next).is_some());
        let points = |round: &TraceRound| {
            let value = rate(round)? / 1_048_576.0;
            Some([(round.begin_ms, value), (round.end_ms, value)])
        };
        runs.map(|run| run.iter().filter_map(points).flatten().collect())
            .filter(|run: &Vec<_>| !run.is_empty())
            .collect()
    }

    /// The band in which the guest was paused, and the one of postcopy.
    fn bands(&self, chart: &mut Chart<'_, '_>) -> Drawn {
        // A pause of a millisecond in a minute is a line.
        let narrowest = self.end() * 1.5 / f64::from(RIGHT - LEFT);
        let high = chart.y_range().end;
        for (colour, span) in [(POSTCOPY.mix(0.14), self.postcopy), (PAUSE.mix(0.45), self.pause)] {
            let Some((from, to)) = span else { continue };
            let corners = [(from, 0.0), (to.max(from + narrowest), high)];
            chart.draw_series([Rectangle::new(corners, colour.filled())])?;
        }
        Ok(())
    }

    /// Words for the bands and the marks, side by side in the upper panel.
    fn captions(&self, panel: &Panel<'_>, chart: &mut Chart<'_, '_>, high: f64) -> Drawn {
        let mut captions = Vec::new();
        if let Some((from, to)) = self.pause {
            captions.push((PAUSE, from, format!("paused for {}", duration(to - from))));
        }
        if let Some((from, to)) = self.postcopy {
            captions.push((TEXT, from, format!("postcopy for {}", duration(to - from))));
        }
        captions.extend(self.marks.iter().map(|mark| (TEXT, mark.at_ms, mark.what.clone())));
        captions.sort_by(|a, b| a.1.total_cmp(&b.1));
        let place = |chart: &Chart<'_, '_>, at: f64| chart.backend_coord(&(at, high));
        // Left of the first of them, or behind the last one if there is no room: no caption covers a band.
        let first = captions.first().map_or(LEFT, |(_, at, _)| place(chart, *at).0);
        let ends = self.pause.iter().chain(&self.postcopy).map(|(_, to)| *to);
        let last = place(chart, ends.chain(captions.iter().map(|(_, at, _)| *at)).fold(0.0, f64::max)).0;
        let (side, x) =
            if first > LEFT + (RIGHT - LEFT) / 3 { (HPos::Right, first - 8) } else { (HPos::Left, last + 8) };
        for (line, (colour, at, words)) in (0..).zip(captions) {
            let mark = if colour == PAUSE { PAUSE } else { MARK };
            chart.draw_series(DashedLineSeries::new([(at, 0.0), (at, high)], 2, 3, mark.into()))?;
            let style = if colour == PAUSE { bold(12, PAUSE) } else { text(12) };
            panel.draw(&Text::new(words, (x, TOP + 10 + line * 18), aligned(style, side)))?;
        }
        Ok(())
    }
}

fn bold(pixels: u8, colour: RGBColor) -> TextStyle<'static> {
    let style = font(pixels, FontStyle::Bold);
    TextStyle { color: colour.to_backend_color(), ..style }
}

fn text(pixels: u8) -> TextStyle<'static> {
    font(pixels, FontStyle::Normal)
}

fn small() -> TextStyle<'static> {
    text(11)
}

fn aligned(style: TextStyle<'static>, side: HPos) -> TextStyle<'static> {
    style.pos(Pos::new(side, VPos::Center))
}

/// Text of this height in pixels, with its middle line at the given place.
fn font(pixels: u8, style: FontStyle) -> TextStyle<'static> {
    // plotters makes a font smaller by this factor.
    let size = f64::from(pixels) * 1.24;
    let family = FontFamily::Name("system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif");
    let font = TextStyle::from(FontDesc::new(family, size, style));
    aligned(font.color(&TEXT), HPos::Left)
}

fn mebibytes(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a picture has a thousand pixels")]
    let bytes = bytes as f64;
    bytes / 1_048_576.0
}

/// A number with as many digits as it needs.
fn number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    let (whole, rest) = text.split_once('.').map_or((text, None), |(whole, rest)| (whole, Some(rest)));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) && whole.len() > 4 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    rest.map_or(grouped.clone(), |rest| format!("{grouped}.{rest}"))
}

/// `0.42 ms`, `6.5 ms`, `120 ms`, `1.42 s`.
pub(crate) fn duration(millis: f64) -> String {
    match millis {
        short if short < 1.0 => format!("{short:.2} ms"),
        short if short < 10.0 => format!("{short:.1} ms"),
        middle if middle < 1000.0 => format!("{middle:.0} ms"),
        long => format!("{:.2} s", long / 1000.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace() -> Trace {
        let round = |begin_ms, end_ms, left, dirtied| TraceRound {
            begin_ms,
            end_ms,
            left,
            unsent: 0,
            dirtied,
            bandwidth: Some(9e8),
        };
        Trace {
            title: "a <guest> & \"more\"".into(),
            summary: "3 rounds".into(),
            rounds: vec![round(0.0, 300.0, 256 << 20, None), round(300.0, 340.0, 15 << 20, Some(5e7))],
            pause: Some((340.0, 346.5)),
            ..Trace::default()
        }
    }

    #[test]
    fn a_picture_is_well_formed_and_says_what_was_measured() {
        let svg = trace().svg().unwrap();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;guest&gt; &amp; &quot;more&quot;") && svg.contains("paused for 6.5 ms"));
        assert_eq!(svg.matches("<polygon").count(), 2, "an area a round");
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_migration_without_rounds_has_a_picture_too() {
        let svg = Trace { postcopy: Some((1.0, 90.0)), postcopy_left: 16 << 20, ..Trace::default() }.svg().unwrap();
        assert!(svg.contains("postcopy for 89 ms") && !svg.contains("NaN"), "{svg}");
        assert!(Trace::default().svg().unwrap().contains("</svg>"));
    }

    /// For looking at: `LIMOSA_PICTURE=F cargo test -p limosa-demo picture`.
    #[test]
    fn a_picture_is_the_same_for_the_same_numbers() {
        let (one, other) = (trace().svg().unwrap(), trace().svg().unwrap());
        assert_eq!(one, other);
        if let Some(path) = std::env::var_os("LIMOSA_PICTURE") {
            std::fs::write(path, one).unwrap();
        }
    }

    #[test]
    fn numbers_and_times_have_the_digits_that_people_read() {
        assert_eq!(["0", "0.25", "200", "12,000"].map(str::to_owned), [0.0, 0.25, 200.0, 12000.0].map(number));
        assert_eq!(
            ["0.42 ms", "6.5 ms", "120 ms", "1.42 s"].map(str::to_owned),
            [0.42, 6.5, 120.0, 1420.0].map(duration)
        );
    }
}
