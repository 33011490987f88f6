//! `cargo xtask bench --plot`: pictures of what was recorded, beside the records.
//!
//! Law: a picture is made of its JSON and nothing else, so the same JSON gives the same bytes; a test holds what is
//! committed to that.

mod bars;
mod charts;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::shell;
use charts::{Chart, Figure};

/// The part of the output of `limosa-bench NAME --json` that is drawn.
#[derive(Debug, Deserialize)]
struct Report {
    bench: String,
    machine: Machine,
    rounds: u32,
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Machine {
    cpu: String,
    cores: u32,
    memory_gib: u64,
    kernel: String,
}

#[derive(Debug, Deserialize)]
struct Case {
    case: String,
    variant: String,
    wall_s: Spread,
    counters: std::collections::BTreeMap<String, u64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct Spread {
    min: f64,
    median: f64,
    max: f64,
}

impl Case {
    /// The figure as the chart wants it; `None` if this one has none.
    fn figure(&self, figure: Figure) -> Option<Spread> {
        let (spread, factor) = match figure {
            Figure::Wall => (self.wall_s, 1.0),
            Figure::Counter { name, per_unit, .. } => {
                #[expect(clippy::cast_precision_loss, reason = "a picture has a thousand pixels")]
                let value = *self.counters.get(name)? as f64;
                (Spread { min: value, median: value, max: value }, per_unit)
            }
        };
        Some(Spread { min: spread.min / factor, median: spread.median / factor, max: spread.max / factor })
    }
}

/// Draws the pictures of every record.
pub(crate) fn run() -> Result<()> {
    let folder = folder();
    let pictures = pictures(&folder)?;
    for (path, svg) in &pictures {
        fs::write(path, svg).with_context(|| path.display().to_string())?;
        println!("{}", path.strip_prefix(shell::workspace()).unwrap_or(path).display());
    }
    println!("plot: {} pictures", pictures.len());
    Ok(())
}

/// Where records are.
fn folder() -> PathBuf {
    shell::workspace().join("docs/benchmarks")
}

/// Every picture of the records in a folder, by path: `DATE-BENCH.json` gives `DATE-CHART.svg` for each chart of that
/// bench.
fn pictures(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut records = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry.with_context(|| folder.display().to_string())?.path();
        if path.extension().is_some_and(|extension| extension == "json") {
            records.push(path);
        }
    }
    records.sort();
    let mut pictures = Vec::new();
    for path in records {
        let name = path.display().to_string();
        let text = fs::read_to_string(&path).with_context(|| name.clone())?;
        let report: Report = serde_json::from_str(&text).with_context(|| format!("{name}: no report of a bench"))?;
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let Some(date) = stem.strip_suffix(&format!("-{}", report.bench)) else {
            bail!("{name}: a record of {0} is called DATE-{0}.json", report.bench);
        };
        for chart in charts::of(&report.bench) {
            let svg = draw(chart, &report, date)?;
            pictures.extend(svg.map(|svg| (folder.join(format!("{date}-{}.svg", chart.name)), svg)));
        }
    }
    Ok(pictures)
}

/// One picture; none of a record of other cases.
fn draw(chart: &Chart, report: &Report, date: &str) -> Result<Option<String>> {
    let mut rows: Vec<bars::Row> = Vec::new();
    // What a variant is called up to its first comma has a colour, in the order of appearance.
    let mut kinds: Vec<&str> = Vec::new();
    for case in report.cases.iter().filter(|case| case.case.starts_with(chart.cases)) {
        let Some(spread) = case.figure(chart.figure) else { continue };
        let label = case.case.strip_prefix(chart.cases).unwrap_or(&case.case).trim_start_matches([',', ' ']);
        let kind = case.variant.split(',').next().unwrap_or_default();
        let colour = kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        });
        let bar = bars::Bar { label: case.variant.clone(), colour, spread };
        match rows.iter_mut().find(|row| row.label == label) {
            Some(row) => row.bars.push(bar),
            None => rows.push(bars::Row { label: label.to_owned(), bars: vec![bar] }),
        }
    }
    if rows.is_empty() {
        return Ok(None);
    }
    let Machine { cpu, cores, memory_gib, kernel } = &report.machine;
    let notes = [
        format!("{}; {}", chart.figure.words(), chart.figure.of_rounds(report.rounds)),
        format!("{date}, {cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}"),
    ];
    let picture = bars::Picture { title: chart.title, notes: &notes, unit: chart.figure.unit(), rows: &rows };
    picture.svg().map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECORD: &str = r#"{"bench":"stream","machine":{"cpu":"x <1>","cores":2,"memory_gib":24,"kernel":"6.1","qemu":null},
        "rounds":5,"cases":[
        {"case":"records, 512 MiB, cold, over tcp","variant":"copied","wall_s":{"min":0.2,"median":0.25,"max":0.3},
         "cpu_s":{"min":0.1,"median":0.1,"max":0.1},"counters":{"writes":33000}},
        {"case":"records, 512 MiB, cold, over tcp","variant":"gathered","wall_s":{"min":0.1,"median":0.15,"max":0.2},
         "cpu_s":{"min":0.1,"median":0.1,"max":0.1},"counters":{"writes":263}},
        {"case":"records, 512 MiB, cold, over tcp at 1 GbE","variant":"copied","wall_s":{"min":4.2,"median":4.3,"max":4.4},
         "cpu_s":{"min":0.1,"median":0.1,"max":0.1},"counters":{}}],"ratios":[],"targets":[]}"#;

    fn chart() -> &'static Chart {
        charts::of("stream").first().unwrap()
    }

    #[test]
    fn a_picture_shows_every_case_its_figures_and_where_they_come_from() {
        let report: Report = serde_json::from_str(RECORD).unwrap();
        let draw = |report: &Report| draw(chart(), report, "2026-11-22").unwrap();
        let svg = draw(&report).unwrap();
        for words in [
            "512 MiB, cold, over tcp at 1 GbE",
            "copied",
            "gathered",
            "150 ms",
            "4.30 s",
            "2026-11-22, x &lt;1&gt;, 2 cores",
        ] {
            assert!(svg.contains(words), "{words:?} in {svg}");
        }
        assert_eq!(Some(svg), draw(&report));
        assert_eq!(draw(&Report { cases: Vec::new(), ..report }), None);
    }

    #[test]
    fn a_record_is_named_for_its_day_and_its_bench() {
        let folder = limosa_testkit::scratch().unwrap();
        fs::write(folder.path().join("2026-11-22-stream.json"), RECORD).unwrap();
        let found = pictures(folder.path()).unwrap();
        assert_eq!(found.len(), 1, "of its cases one chart is drawn");
        assert!(found[0].0.ends_with(format!("2026-11-22-{}.svg", chart().name)));
        fs::write(folder.path().join("stream.json"), RECORD).unwrap();
        assert!(pictures(folder.path()).unwrap_err().to_string().contains("DATE-stream.json"));
    }

    #[test]
    fn the_pictures_that_are_committed_are_those_of_the_records() {
        let drawn = pictures(&folder()).unwrap();
        for (path, svg) in &drawn {
            let committed = fs::read_to_string(path).unwrap_or_default();
            assert!(committed == *svg, "{}: draw it anew, with `cargo xtask bench --plot`", path.display());
        }
        for entry in fs::read_dir(folder()).unwrap() {
            let path = entry.unwrap().path();
            let is_picture = path.extension().is_some_and(|extension| extension == "svg");
            assert!(!is_picture || drawn.iter().any(|(drawn, _)| *drawn == path), "{}: of no record", path.display());
        }
    }
}
