//! The report: one JSON shape for every bench, and the same numbers as a table.
//!
//! A ratio is taken round by round, of two runs that followed each other closely, and the median of those is reported:
//! what slowed the whole machine for a while then slowed both. The ratio of two medians would mix rounds.

use std::collections::BTreeMap;
use std::fmt;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

use crate::frame::Series;
use crate::machine::Machine;
use crate::measure::Measured;

/// The results of a bench.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Name of the bench.
    pub bench: String,
    /// Where it ran.
    pub machine: Machine,
    /// How many times each contestant ran.
    pub rounds: u32,
    /// Every contestant's figures.
    pub cases: Vec<Case>,
    /// Contestants compared.
    pub ratios: Vec<Ratio>,
    /// The bound of a target.
    pub targets: Vec<Target>,
}

/// One contestant's figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The operation.
    pub case: String,
    /// The way it was done.
    pub variant: String,
    /// Wall seconds.
    pub wall_s: Spread,
    /// CPU seconds of all who worked.
    pub cpu_s: Spread,
    /// Medians over the rounds.
    pub counters: BTreeMap<String, u64>,
}

/// Smallest, middle and largest of a series.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// Middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// Largest.
    pub max: f64,
}

impl Spread {
    /// Of any number of values; of none, zeros.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        values.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (values.first(), values.last()) else {
            return Self::default();
        };
        let upper = values.get(values.len() / 2).copied().unwrap_or(max);
        let lower = values.get((values.len() - 1) / 2).copied().unwrap_or(min);
        Self { min, median: f64::midpoint(lower, upper), max }
    }
}

/// Two contestants of one case compared.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The case of both.
    pub case: String,
    /// Variant above the line.
    pub of: String,
    /// Variant below the line.
    pub to: String,
    /// `wall`, `cpu` or the name of a counter.
    pub figure: String,
    /// Median over the rounds of the two runs' quotient.
    pub median: f64,
}

/// Something asked of a figure.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Target {
    /// The bound.
    pub name: String,
    /// The bound, such as `<= 1.25`.
    pub want: String,
    /// The figure; none where this machine cannot show it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub got: Option<f64>,
    /// Whether the bound holds; none where this machine cannot show it.
    pub met: Option<bool>,
    /// Why it cannot be shown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// Why a target has no figure whose contestants did not take part.
pub(crate) const NOT_RUN: &str = "it was not run";

/// A bound on a figure.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    /// The figure is at most this.
    AtMost(f64),
    /// The figure is at least this.
    AtLeast(f64),
}

impl Bound {
    fn holds(self, got: f64) -> bool {
        match self {
            Self::AtMost(bound) => got <= bound,
            Self::AtLeast(bound) => got >= bound,
        }
    }

    fn describe(self) -> String {
        match self {
            Self::AtMost(bound) => format!("<= {bound}"),
            Self::AtLeast(bound) => format!(">= {bound}"),
        }
    }
}

impl Target {
    /// A target for a figure; without a figure it is one that could not be shown, and `why` says why.
    pub fn new(name: impl Into<String>, bound: Bound, got: Option<f64>, why: &str) -> Self {
        Self {
            name: name.into(),
            want: bound.describe(),
            got,
            met: got.map(|got| bound.holds(got)),
            why: got.is_none().then(|| why.to_owned()),
        }
    }
}

impl Report {
    /// A report of what the rounds gave, without ratios and targets yet.
    pub fn new(bench: &str, machine: Machine, rounds: u32, all: &[Series]) -> Self {
        let cases = all.iter().map(case_of).collect();
        Self { bench: bench.to_owned(), machine, rounds, cases, ratios: Vec::new(), targets: Vec::new() }
    }

    /// Drops the targets of contestants that were not to run: those that begin with `only` were.
    pub(crate) fn keep_what_ran(&mut self, only: &str) {
        let wanted = |target: &Target| {
            target.name.contains(only) || self.cases.iter().any(|case| target.name.contains(&case.case))
        };
        self.targets
            .retain(|target| target.got.is_some() || (target.why.as_deref() != Some(NOT_RUN) && wanted(target)));
    }

    /// Whether no target is missed. Targets that this machine cannot show do not count.
    pub fn targets_met(&self) -> bool {
        self.targets.iter().all(|target| target.met != Some(false))
    }

    /// The report as the one line of JSON that `--json` prints.
    pub fn to_json(&self) -> serde_json::Result<String> {
        serde_json::to_string(self)
    }
}

/// The same numbers for people.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cases = Table::new();
        cases.load_preset(presets::NOTHING);
        cases.set_header(["case", "variant", "wall s: min", "median", "max", "cpu s: min", "median", "max"]);
        let mut counters = String::new();
        for Case { case, variant, wall_s, cpu_s, counters: values } in &self.cases {
            let figures = [wall_s, cpu_s].into_iter().flat_map(|spread| [spread.min, spread.median, spread.max]);
            cases.add_row(
                [case.clone(), variant.clone()].into_iter().chain(figures.map(|figure| format!("{figure:.3}"))),
            );
            let values: Vec<String> = values.iter().map(|(name, value)| format!("{name} {value}")).collect();
            if !values.is_empty() {
                counters.push_str(&format!("{case}, {variant}: {}\n", values.join(", ")));
            }
        }
        for column in cases.column_iter_mut().skip(2) {
            column.set_cell_alignment(CellAlignment::Right);
        }
        let Self { bench, machine, rounds, .. } = self;
        writeln!(f, "{bench}: {machine}, {rounds} rounds\n{cases}\n\nmedians:\n{counters}")?;
        for Ratio { case, of, to, figure, median } in &self.ratios {
            writeln!(f, "{case}: {figure} of {of} / {to}: {median:.3}")?;
        }
        for Target { name, want, got, met, why } in &self.targets {
            let verdict = match met {
                Some(true) => "met",
                Some(false) => "MISSED",
                None => "not shown",
            };
            let got = got.map(|got| format!("{got:.3}")).or_else(|| why.clone()).unwrap_or_default();
            writeln!(f, "target {name}: want {want}, got {got}: {verdict}")?;
        }
        Ok(())
    }
}

/// Compares two variants of a case round by round; none if one of them did not run or has no such figure.
pub fn ratio(all: &[Series], case: &str, of: &str, to: &str, figure: &str) -> Option<Ratio> {
    let find = |variant: &str| all.iter().find(|series| series.case == case && series.variant == variant);
    let (above, below) = (find(of)?, find(to)?);
    let quotients: Vec<f64> = above
        .runs
        .iter()
        .zip(&below.runs)
        .filter_map(|(above, below)| Some(value(above, figure)? / value(below, figure).filter(|below| *below > 0.0)?))
        .collect();
    if quotients.is_empty() {
        return None;
    }
    let median = Spread::of(quotients).median;
    Some(Ratio { case: case.into(), of: of.into(), to: to.into(), figure: figure.into(), median })
}

/// The spread of one figure of one contestant: `wall`, `cpu` (seconds) or a counter.
pub fn figure(all: &[Series], case: &str, variant: &str, figure: &str) -> Option<Spread> {
    let series = all.iter().find(|series| series.case == case && series.variant == variant)?;
    let values: Vec<f64> = series.runs.iter().filter_map(|run| value(run, figure)).collect();
    (!values.is_empty()).then(|| Spread::of(values))
}

fn value(run: &Measured, figure: &str) -> Option<f64> {
    match figure {
        "wall" => Some(run.wall.as_secs_f64()),
        "cpu" => Some(run.cpu.as_secs_f64()),
        counter => run.counters.get(counter).map(|&value| to_f64(value)),
    }
}

fn case_of(series: &Series) -> Case {
    let mut columns: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for run in &series.runs {
        for (&name, &value) in &run.counters {
            columns.entry(name).or_default().push(value);
        }
    }
    let median = |mut values: Vec<u64>| {
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(0)
    };
    Case {
        case: series.case.clone(),
        variant: series.variant.clone(),
        wall_s: Spread::of(series.runs.iter().map(|run| rounded(run.wall.as_secs_f64()))),
        cpu_s: Spread::of(series.runs.iter().map(|run| rounded(run.cpu.as_secs_f64()))),
        counters: columns.into_iter().map(|(name, values)| (name.to_owned(), median(values))).collect(),
    }
}

/// Tenths of milliseconds: more would be noise.
fn rounded(seconds: f64) -> f64 {
    (seconds * 1e4).round() / 1e4
}

#[expect(clippy::cast_precision_loss, reason = "figures are far below 2^52, and a ratio needs no more")]
fn to_f64(value: u64) -> f64 {
    value as f64
}

/// Names a size in GiB, or in MiB if it is not a whole number of GiB.
pub(crate) fn gib_or_mib(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 30) { format!("{} GiB", bytes >> 30) } else { format!("{} MiB", bytes >> 20) }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn series(variant: &str, walls: &[u64]) -> Series {
        let runs = walls
            .iter()
            .map(|&wall| Measured { wall: Duration::from_secs(wall), ..Measured::default() }.with("reads", wall))
            .collect();
        Series { case: "c".into(), variant: variant.into(), runs }
    }

    fn report(targets: Vec<Target>) -> Report {
        let machine =
            Machine { cpu: "x".into(), cores: 2, memory_gib: 24, kernel: "6.1".into(), qemu: Some("10.0.2".into()) };
        let all = [series("a", &[2, 8, 3]), series("b", &[1, 4, 3])];
        let ratios = ratio(&all, "c", "a", "b", "wall").into_iter().collect();
        Report { ratios, targets, ..Report::new("demo", machine, 3, &all) }
    }

    #[test]
    fn the_json_has_the_documented_shape() {
        let met = Target::new("t", Bound::AtMost(0.8), Some(0.5), "");
        let unseen = Target::new("u", Bound::AtLeast(2.0), None, "no QEMU");
        let json = report(vec![met, unseen]).to_json().expect("serialises");
        let expected = concat!(
            r#"{"bench":"demo","machine":{"cpu":"x","cores":2,"memory_gib":24,"kernel":"6.1","qemu":"10.0.2"},"rounds":3,"#,
            r#""cases":[{"case":"c","variant":"a","wall_s":{"min":2.0,"median":3.0,"max":8.0},"#,
            r#""cpu_s":{"min":0.0,"median":0.0,"max":0.0},"counters":{"reads":3}},"#,
            r#"{"case":"c","variant":"b","wall_s":{"min":1.0,"median":3.0,"max":4.0},"#,
            r#""cpu_s":{"min":0.0,"median":0.0,"max":0.0},"counters":{"reads":3}}],"#,
            r#""ratios":[{"case":"c","of":"a","to":"b","figure":"wall","median":2.0}],"#,
            r#""targets":[{"name":"t","want":"<= 0.8","got":0.5,"met":true},"#,
            r#"{"name":"u","want":">= 2","met":null,"why":"no QEMU"}]}"#,
        );
        assert_eq!(json, expected);
    }

    #[test]
    fn only_a_missed_target_fails_the_check() {
        let target = |got| Target::new("t", Bound::AtMost(1.0), got, "no QEMU");
        assert!(report(vec![target(None), target(Some(1.0))]).targets_met());
        assert!(!report(vec![target(None), target(Some(1.1))]).targets_met());
    }

    #[test]
    fn of_a_bench_that_ran_in_part_only_targets_of_the_cases_that_ran_are_reported() {
        let target = |name: &str, got, why| Target::new(name, Bound::AtMost(1.0), got, why);
        let mut part = report(vec![
            target("worst of all", Some(0.5), ""),
            target("c: wall of a / QEMU", None, "no QEMU"),
            target("c: wall of a / z", None, NOT_RUN),
            target("3 GiB: wall of a / QEMU", None, "no QEMU"),
            target("4 GiB: wall of a / z", None, "no namespaces"),
        ]);
        // Nothing of 4 GiB could run, which has to be reported.
        part.keep_what_ran("4 GiB");
        let left: Vec<_> = part.targets.iter().map(|target| target.name.as_str()).collect();
        assert_eq!(left, ["worst of all", "c: wall of a / QEMU", "4 GiB: wall of a / z"]);
    }

    #[test]
    fn a_ratio_pairs_the_runs_of_one_round() {
        let all = [series("a", &[2, 8, 3]), series("b", &[1, 4, 3])];
        assert_eq!(ratio(&all, "c", "a", "b", "wall").map(|ratio| ratio.median), Some(2.0));
        assert_eq!(ratio(&all, "c", "a", "b", "reads").map(|ratio| ratio.median), Some(2.0));
        assert_eq!(ratio(&all, "c", "a", "missing", "wall"), None);
        assert_eq!(ratio(&all, "c", "a", "b", "cpu"), None, "nothing divided by no time at all");
    }

    #[test]
    fn the_table_says_which_targets_are_missed_or_not_shown() {
        let missed = Target::new("fast", Bound::AtMost(0.8), Some(0.9), "");
        let unseen = Target::new("wide", Bound::AtLeast(2.0), None, "no network card");
        let table = report(vec![missed, unseen]).to_string();
        assert!(table.contains("target fast: want <= 0.8, got 0.900: MISSED"), "{table}");
        assert!(table.contains("target wide: want >= 2, got no network card: not shown"), "{table}");
    }

    #[test]
    fn the_median_of_an_even_number_lies_between_the_two_in_the_middle() {
        assert_eq!(Spread::of([4.0, 1.0, 2.0, 3.0]), Spread { min: 1.0, median: 2.5, max: 4.0 });
        assert_eq!(Spread::of([]), Spread::default());
    }
}
