//! Bars, written by hand as SVG.
//!
//! A bar is as long as its median; the line over it goes from the smallest to the largest figure, and the number stands
//! behind. Cases far apart in size, which one scale would make invisible, get a scale of their own. It reads on white and on
//! black paper: there is no background, and colours follow the reader's preference where the program that shows it tells.

use std::fmt::Write as _;

use super::Spread;

/// Width of the picture, in its own units.
const WIDTH: f64 = 960.0;
/// Where bars begin.
const LEFT: f64 = 210.0;
/// Where the longest may end: behind it is room for a number.
const RIGHT: f64 = WIDTH - 110.0;
/// Where the first case begins.
const TOP: f64 = 104.0;
const BAR: f64 = 15.0;
/// From one bar to the next.
const STEP: f64 = 20.0;
/// For the name of a case.
const NAME: f64 = 22.0;
/// Between two cases, and more of it where the scale changes.
const GAP: f64 = 10.0;
const SCALE_GAP: f64 = 26.0;

/// Cases whose largest figures differ by more than this have scales of their own.
const FAR: f64 = 3.0;

/// One bar.
#[derive(Debug)]
pub(super) struct Bar {
    pub(super) label: String,
    /// Which of the colours, the plain way's first; what is beyond the last has that one.
    pub(super) colour: usize,
    pub(super) spread: Spread,
}

/// A case, and a bar for each way of doing it, the plain one first.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) label: String,
    pub(super) bars: Vec<Bar>,
}

impl Row {
    fn largest(&self) -> f64 {
        self.bars.iter().map(|bar| bar.spread.max).fold(0.0, f64::max)
    }
}

/// What is drawn.
#[derive(Debug)]
pub(super) struct Picture<'p> {
    pub(super) title: &'p str,
    /// Lines under the title.
    pub(super) notes: &'p [String],
    pub(super) unit: &'p str,
    pub(super) rows: &'p [Row],
}

impl Picture<'_> {
    /// The picture, a complete SVG document.
    pub(super) fn svg(&self) -> String {
        let mut body = String::new();
        text(&mut body, "title", (24.0, 34.0), "start", self.title);
        for (line, note) in (0_u8..).zip(self.notes) {
            text(&mut body, "soft", (24.0, 56.0 + f64::from(line) * 18.0), "start", note);
        }
        let mut y = TOP;
        let mut rest = self.rows;
        let mut first = true;
        while !rest.is_empty() {
            let (panel, later) = rest.split_at(same_scale(rest));
            y += if std::mem::take(&mut first) { 0.0 } else { SCALE_GAP };
            y = self.panel(&mut body, panel, y);
            rest = later;
        }
        let height = y + 14.0;
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
             role=\"img\">\n<title>{}</title>\n{STYLE}{body}</svg>\n",
            escaped(self.title)
        )
    }

    /// Cases of one scale, from `y` on; where they end.
    fn panel(&self, out: &mut String, rows: &[Row], mut y: f64) -> f64 {
        let largest = rows.iter().map(Row::largest).fold(0.0, f64::max);
        let scale = if largest > 0.0 { (RIGHT - LEFT) / largest } else { 0.0 };
        for row in rows {
            text(out, "name", (24.0, y + 12.0), "start", &row.label);
            y += NAME;
            let begin = y;
            for bar in &row.bars {
                self.bar(out, bar, scale, y);
                y += STEP;
            }
            let _ =
                writeln!(out, "<path class=\"base\" d=\"M{LEFT} {:.1}V{:.1}\"/>", begin - 3.0, y - STEP + BAR + 3.0);
            y += GAP;
        }
        y - GAP
    }

    fn bar(&self, out: &mut String, bar: &Bar, scale: f64, y: f64) {
        let Spread { min, median, max } = bar.spread;
        let middle = y + BAR / 2.0;
        text(out, "soft", (LEFT - 8.0, middle + 4.0), "end", &bar.label);
        let _ = writeln!(
            out,
            "<rect class=\"way{}\" x=\"{LEFT}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"1.5\"/>",
            bar.colour.min(3),
            median * scale
        );
        let (low, high) = (LEFT + min * scale, LEFT + max * scale);
        if high - low >= 0.5 {
            let _ = writeln!(
                out,
                "<path class=\"range\" d=\"M{low:.1} {middle:.1}H{high:.1}M{low:.1} {0:.1}v6M{high:.1} {0:.1}v6\"/>",
                middle - 3.0
            );
        }
        text(out, "value", (high.max(LEFT + median * scale) + 8.0, middle + 4.0), "start", &self.number(median));
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

/// How many of the first rows are shown on one scale.
fn same_scale(rows: &[Row]) -> usize {
    let (mut least, mut most) = (f64::INFINITY, 0.0_f64);
    let fits = |row: &&Row| {
        (least, most) = (least.min(row.largest()), most.max(row.largest()));
        most <= least * FAR
    };
    rows.iter().take_while(fits).count().max(1)
}

fn text(out: &mut String, class: &str, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = escaped(words);
    let _ = writeln!(out, "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Colours that hold on both papers; programs that know their reader's preference get the better ones.
const STYLE: &str = "<style>\n\
    text { font: 12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #6b7683; }\n\
    .title { font-size: 17px; font-weight: 600; fill: #4d5866; }\n\
    .name { font-size: 13px; font-weight: 600; fill: #5b6673; }\n\
    .value { font-variant-numeric: tabular-nums; }\n\
    .base { stroke: #8a94a0; stroke-opacity: .7; fill: none; }\n\
    .range { stroke: #56616e; stroke-width: 1.3; fill: none; }\n\
    .way0 { fill: #9aa5b1; }\n\
    .way1 { fill: #2f83c5; }\n\
    .way2 { fill: #e08a1e; }\n\
    .way3 { fill: #4c9f70; }\n\
    @media (prefers-color-scheme: dark) {\n\
    text { fill: #a3adb8; } .title { fill: #dfe5ec; } .name { fill: #c3ccd6; } .range { stroke: #eef2f6; }\n\
    .way0 { fill: #67727f; } .way1 { fill: #3d93d6; }\n\
    }\n\
    </style>\n";

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
        assert_eq!([same_scale(&rows), same_scale(&rows[2..]), same_scale(&rows[3..])], [2, 1, 1]);
        let svg = Picture { title: "t", notes: &[], unit: "s", rows: &rows }.svg();
        // The largest of each scale ends where bars end.
        assert_eq!(svg.matches(&format!("H{RIGHT:.1}M")).count(), 2, "{svg}");
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
        let svg = Picture { title: "a <b> & \"c\"", notes: &["d".into()], unit: "s", rows: &[row("e", &[1.0])] }.svg();
        assert!(
            svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && svg.contains("a &lt;b&gt; &amp; &quot;c&quot;")
        );
        for open in ["<text", "<title", "<style"] {
            assert_eq!(
                svg.matches(open).count(),
                svg.matches(&format!("{}>", open.replace('<', "</"))).count(),
                "{open}"
            );
        }
    }
}
