//! Which pictures are drawn of which bench.

/// A picture of some cases of a bench.
#[derive(Debug)]
pub(super) struct Chart {
    /// The bench.
    bench: &'static str,
    /// What the file is called, behind its date.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// What the cases that it shows begin with.
    pub(super) cases: &'static str,
    pub(super) figure: Figure,
}

/// What the bars are as long as.
#[derive(Debug, Clone, Copy)]
pub(super) enum Figure {
    /// Seconds on the clock.
    Wall,
    /// A counter, so many of which make a unit.
    Counter { name: &'static str, words: &'static str, unit: &'static str, per_unit: f64 },
}

impl Figure {
    /// What it is.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Wall => "time, less is better",
            Self::Counter { words, .. } => words,
        }
    }

    /// The unit; `s` is scaled to what is readable.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Wall => "s",
            Self::Counter { unit, .. } => unit,
        }
    }
}

const CHARTS: [Chart; 3] = [
    Chart {
        bench: "stream",
        name: "vectors",
        title: "Page records: copied through a buffer of 16 KiB, and gathered",
        cases: "records",
        figure: Figure::Wall,
    },
    Chart {
        bench: "stream",
        name: "headers",
        title: "Pages behind one header",
        cases: "headers",
        figure: Figure::Wall,
    },
    Chart {
        bench: "stream",
        name: "neighbour",
        title: "A neighbour in the sender's cache: nanoseconds for a step",
        cases: "neighbour",
        figure: Figure::Counter {
            name: "neighbour_ps_per_step",
            words: "its own CPU time for a step, less is better",
            unit: "ns",
            per_unit: 1000.0,
        },
    },
];

/// Those of a bench.
pub(super) fn of(bench: &str) -> Vec<&'static Chart> {
    CHARTS.iter().filter(|chart| chart.bench == bench).collect()
}
