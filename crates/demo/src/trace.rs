//! The course of a live migration as a picture: SVG, written by hand.
//!
//! Law: a picture shows what was measured and nothing between. The memory that is left falls from what a round began with
//! to what it had not sent when the next one looked; rates are steps as long as their round; the pause is as long as the
//! guest itself has measured it. It reads on white and on black paper: there is no background, and the colours of text and
//! lines follow the reader's preference where the program that shows it tells.

use std::fmt::Write as _;

use crate::axis::{self, Axis};

/// Width of the picture, in its own units.
const WIDTH: f64 = 960.0;
/// Height of the picture.
const HEIGHT: f64 = 560.0;
/// Where the panels begin and end, left to right.
const LEFT: f64 = 84.0;
const RIGHT: f64 = WIDTH - 40.0;
/// The upper panel: memory that is left.
const REST: (f64, f64) = (104.0, 316.0);
/// The lower panel: rates.
const RATES: (f64, f64) = (372.0, 500.0);

/// One round of a migration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TraceRound {
    /// When it began, in milliseconds since the migration did.
    pub begin_ms: f64,
    /// When it ended.
    pub end_ms: f64,
    /// Bytes that were to be sent when it began.
    pub left: u64,
    /// Bytes of those that were not sent when it ended.
    pub unsent: u64,
    /// Bytes of memory that the guest dirtied a second; `None` as long as nothing is known.
    pub dirtied: Option<f64>,
    /// Bytes of the stream that left a second; `None` if that is not worth drawing: what goes into buffers while the guest
    /// stands still is gone in no time.
    pub bandwidth: Option<f64>,
}

/// What happened at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct Mark {
    /// Milliseconds since the migration began.
    pub at_ms: f64,
    /// What, in a word or two.
    pub what: String,
}

/// What is drawn.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Trace {
    /// What moved.
    pub title: String,
    /// What it came to.
    pub summary: String,
    /// The rounds, by time.
    pub rounds: Vec<TraceRound>,
    /// From when to when nobody ran, in milliseconds since the migration began.
    pub pause: Option<(f64, f64)>,
    /// From when the pages followed that the guest ran ahead of, to when the last one was there.
    pub postcopy: Option<(f64, f64)>,
    /// Bytes that were left when postcopy began.
    pub postcopy_left: u64,
    /// Moments of note.
    pub marks: Vec<Mark>,
}

impl Trace {
    /// The picture, a complete SVG document.
    pub fn svg(&self) -> String {
        let mut out = String::with_capacity(16 << 10);
        let time = Axis::new(0.0, self.end(), (LEFT, RIGHT), 8);
        let most = self.rounds.iter().map(|round| round.left).max().unwrap_or(0).max(self.postcopy_left);
        let rest = Axis::new(0.0, mebibytes(most).max(1.0), (REST.1, REST.0), 4);
        let fastest = self.rounds.iter().flat_map(|round| [round.bandwidth, round.dirtied]).flatten();
        let rates = Axis::new(0.0, (fastest.fold(0.0, f64::max) / 1_048_576.0).max(1.0), (RATES.1, RATES.0), 3);
        self.head(&mut out);
        grid(&mut out, &time, &rest, REST);
        grid(&mut out, &time, &rates, RATES);
        self.pause(&mut out, &time);
        self.rest(&mut out, &time, &rest);
        self.rates(&mut out, &time, &rates);
        self.captions(&mut out, &time);
        out.push_str("</svg>\n");
        out
    }

    /// The last moment that is drawn.
    fn end(&self) -> f64 {
        let rounds = self.rounds.iter().map(|round| round.end_ms);
        let spans = self.pause.iter().chain(&self.postcopy).map(|(_, end)| *end);
        let last = rounds.chain(spans).chain(self.marks.iter().map(|mark| mark.at_ms)).fold(0.0, f64::max);
        (last * 1.02).max(1.0)
    }

    fn head(&self, out: &mut String) {
        let _ = write!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" \
             height=\"{HEIGHT}\" role=\"img\">\n<title>{}</title>\n<desc>{}</desc>\n{STYLE}",
            escaped(&self.title),
            escaped(&self.summary)
        );
        text(out, "title", 24.0, 34.0, "start", &self.title);
        text(out, "soft", 24.0, 56.0, "start", &self.summary);
        text(out, "name", 24.0, REST.0 - 16.0, "start", "Memory still to send, MiB");
        text(out, "name", 24.0, RATES.0 - 16.0, "start", "Rates, MiB/s");
        let mut x = RIGHT;
        for (class, word) in [("sent", "leaves"), ("dirty", "is dirtied")] {
            text(out, "soft", x, RATES.0 - 16.0, "end", word);
            #[expect(clippy::cast_precision_loss, reason = "a word is short")]
            let width = word.len() as f64 * 5.8 + 8.0;
            let _ = writeln!(out, "<path class=\"line {class}\" d=\"M{:.1} {:.1}h-22\"/>", x - width, RATES.0 - 20.0);
            x -= width + 42.0;
        }
    }

    /// The band in which nobody ran, and the one in which pages followed.
    fn pause(&self, out: &mut String, time: &Axis) {
        for (class, span) in [("later", self.postcopy), ("still", self.pause)] {
            let Some((from, to)) = span else { continue };
            let (from, to) = (time.place(from), time.place(to));
            // A pause of a millisecond in a minute is still a line.
            let width = (to - from).max(1.5);
            for (top, bottom) in [REST, RATES] {
                let _ = writeln!(
                    out,
                    "<rect class=\"{class}\" x=\"{from:.1}\" y=\"{top}\" width=\"{width:.1}\" height=\"{}\"/>",
                    bottom - top
                );
            }
        }
    }

    /// What is left, falling within each round.
    fn rest(&self, out: &mut String, time: &Axis, rest: &Axis) {
        let floor = rest.place(0.0);
        for round in &self.rounds {
            let (from, to) = (time.place(round.begin_ms), time.place(round.end_ms));
            let (high, low) = (rest.place(mebibytes(round.left)), rest.place(mebibytes(round.unsent)));
            let _ = writeln!(
                out,
                "<path class=\"fill\" d=\"M{from:.1} {floor:.1}V{high:.1}L{to:.1} {low:.1}V{floor:.1}Z\"/>\
                 <path class=\"line left\" d=\"M{from:.1} {high:.1}L{to:.1} {low:.1}\"/>"
            );
        }
        if let Some((from, to)) = self.postcopy {
            let (from, to, high) = (time.place(from), time.place(to), rest.place(mebibytes(self.postcopy_left)));
            let _ = writeln!(
                out,
                "<path class=\"fill\" d=\"M{from:.1} {floor:.1}V{high:.1}L{to:.1} {floor:.1}Z\"/>\
                 <path class=\"line left dashed\" d=\"M{from:.1} {high:.1}L{to:.1} {floor:.1}\"/>"
            );
        }
        // Numbers of the rounds that are wide enough to bear one.
        let mut free = LEFT;
        for (number, round) in (1..).zip(&self.rounds) {
            let (from, to) = (time.place(round.begin_ms), time.place(round.end_ms));
            let _ = writeln!(out, "<path class=\"tick\" d=\"M{from:.1} {:.1}v6\"/>", REST.1);
            if to - from >= 13.0 && from >= free {
                text(out, "small", (from + to) / 2.0, REST.1 + 15.0, "middle", &format!("{number}"));
                free = to;
            }
        }
    }

    fn rates(&self, out: &mut String, time: &Axis, rates: &Axis) {
        let sent = self.rounds.iter().map(|round| round.bandwidth).collect::<Vec<_>>();
        let dirtied = self.rounds.iter().map(|round| round.dirtied).collect::<Vec<_>>();
        for (class, values) in [("sent", sent), ("dirty", dirtied)] {
            let mut path = String::new();
            let mut down = false;
            for (round, value) in self.rounds.iter().zip(values) {
                let Some(value) = value else {
                    down = false;
                    continue;
                };
                let (from, to) = (time.place(round.begin_ms), time.place(round.end_ms));
                let y = rates.place(value / 1_048_576.0);
                let _ = write!(path, "{}{from:.1} {y:.1}H{to:.1}", if down { "L" } else { "M" });
                down = true;
            }
            if !path.is_empty() {
                let _ = writeln!(out, "<path class=\"line {class}\" d=\"{path}\"/>");
            }
        }
    }

    /// Words for the bands and the marks, side by side above the upper panel.
    fn captions(&self, out: &mut String, time: &Axis) {
        let mut captions = Vec::new();
        if let Some((from, to)) = self.pause {
            captions.push(("warn", from, format!("stands still {}", axis::duration(to - from))));
        }
        if let Some((from, to)) = self.postcopy {
            captions.push(("soft", from, format!("runs there, pages follow {}", axis::duration(to - from))));
        }
        captions.extend(self.marks.iter().map(|mark| ("soft", mark.at_ms, mark.what.clone())));
        captions.sort_by(|a, b| b.1.total_cmp(&a.1));
        // Side by side with the first of them, or behind the last one where there is no room: nothing stands in a band.
        let places = captions.iter().map(|(_, at, _)| time.place(*at));
        let (first, last) = places.fold((RIGHT, LEFT), |(first, last), x| (first.min(x), last.max(x)));
        let before = first > LEFT + (RIGHT - LEFT) * 0.35;
        let behind = self.pause.iter().chain(&self.postcopy).map(|(_, to)| time.place(*to)).fold(last, f64::max);
        let (anchor, x) = if before { ("end", first - 8.0) } else { ("start", behind + 8.0) };
        for (step, (class, at, words)) in (0..).zip(captions.iter().rev()) {
            let mark = time.place(*at);
            let _ = writeln!(out, "<path class=\"mark {class}\" d=\"M{mark:.1} {:.1}V{:.1}\"/>", REST.0 - 4.0, REST.1);
            text(out, class, x, REST.0 + 14.0 + f64::from(step) * 18.0, anchor, words);
        }
    }
}

/// A panel's lines and numbers.
fn grid(out: &mut String, time: &Axis, values: &Axis, (_, bottom): (f64, f64)) {
    for value in values.ticks() {
        let y = values.place(value);
        let _ = writeln!(out, "<path class=\"grid\" d=\"M{LEFT} {y:.1}H{RIGHT}\"/>");
        text(out, "small", LEFT - 8.0, y + 4.0, "end", &values.label(value));
    }
    if bottom == RATES.1 {
        let seconds = time.end() >= 2000.0;
        for value in time.ticks() {
            let x = time.place(value);
            let _ = writeln!(out, "<path class=\"tick\" d=\"M{x:.1} {bottom}v6\"/>");
            let label = if seconds { axis::number(value / 1000.0) } else { axis::number(value) };
            text(out, "small", x, bottom + 20.0, "middle", &label);
        }
        let unit = if seconds { "seconds since the migration began" } else { "milliseconds since the migration began" };
        text(out, "small", RIGHT, bottom + 38.0, "end", unit);
    } else {
        text(out, "small", LEFT - 8.0, bottom + 15.0, "end", "round");
    }
}

fn text(out: &mut String, class: &str, x: f64, y: f64, anchor: &str, words: &str) {
    let _ = writeln!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>",
        escaped(words)
    );
}

fn mebibytes(bytes: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "a picture has a thousand pixels")]
    let bytes = bytes as f64;
    bytes / 1_048_576.0
}

fn escaped(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Colours that hold on both papers; programs that know their reader's preference get the better ones.
const STYLE: &str = "<style>\n\
    text { font: 12px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; fill: #6b7683; }\n\
    .title { font-size: 17px; font-weight: 600; fill: #4d5866; }\n\
    .name { font-size: 13px; font-weight: 600; fill: #5b6673; }\n\
    .small { font-size: 11px; }\n\
    .warn { fill: #d1495b; font-weight: 600; }\n\
    .grid { stroke: #8a94a0; stroke-opacity: .28; fill: none; }\n\
    .tick { stroke: #8a94a0; stroke-opacity: .7; fill: none; }\n\
    .mark { stroke: #8a94a0; stroke-dasharray: 2 3; fill: none; }\n\
    .mark.warn { stroke: #d1495b; }\n\
    .line { fill: none; stroke-width: 2; stroke-linejoin: round; }\n\
    .left { stroke: #2f83c5; }\n\
    .dashed { stroke-dasharray: 5 4; }\n\
    .fill { fill: #2f83c5; fill-opacity: .2; }\n\
    .sent { stroke: #2f83c5; }\n\
    .dirty { stroke: #e08a1e; }\n\
    .still { fill: #d1495b; fill-opacity: .45; }\n\
    .later { fill: #4c9f70; fill-opacity: .14; }\n\
    @media (prefers-color-scheme: dark) {\n\
    text { fill: #a3adb8; } .title { fill: #dfe5ec; } .name { fill: #c3ccd6; } .warn { fill: #ef6f7f; }\n\
    }\n\
    </style>\n";

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
        let svg = trace().svg();
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;guest&gt; &amp; &quot;more&quot;") && svg.contains("stands still 6.5 ms"));
        assert_eq!(svg.matches("class=\"fill\"").count(), 2, "an area a round");
        for open in ["<text", "<title", "<style", "<desc"] {
            let close = open.replace('<', "</");
            assert_eq!(svg.matches(open).count(), svg.matches(&format!("{close}>")).count(), "{open}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }

    #[test]
    fn a_migration_without_rounds_has_a_picture_too() {
        let svg = Trace { postcopy: Some((1.0, 90.0)), postcopy_left: 16 << 20, ..Trace::default() }.svg();
        assert!(svg.contains("pages follow 89 ms") && !svg.contains("NaN"), "{svg}");
        assert!(Trace::default().svg().contains("</svg>"));
    }

    /// For looking at: `LIMOSA_PICTURE=F cargo test -p limosa-demo picture`.
    #[test]
    fn a_picture_is_the_same_for_the_same_numbers() {
        let (one, other) = (trace().svg(), trace().svg());
        assert_eq!(one, other);
        if let Some(path) = std::env::var_os("LIMOSA_PICTURE") {
            std::fs::write(path, one).unwrap();
        }
    }
}
