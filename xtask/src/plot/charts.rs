//! The pictures of each bench.

/// A picture of some cases of a bench.
#[derive(Debug)]
pub(super) struct Chart {
    /// The bench.
    bench: &'static str,
    /// The name of the file after its date.
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// The prefix of the cases that it shows.
    pub(super) cases: &'static str,
    pub(super) figure: Figure,
}

/// The figure that sets the length of the bars.
#[derive(Debug, Clone, Copy)]
pub(super) enum Figure {
    /// Seconds on the clock.
    Wall,
    /// A counter, and the number of counts in a unit.
    Counter { name: &'static str, words: &'static str, unit: &'static str, per_unit: f64 },
}

impl Figure {
    /// The caption.
    pub(super) fn words(self) -> &'static str {
        match self {
            Self::Wall => "time, less is better",
            Self::Counter { words, .. } => words,
        }
    }

    /// The value of several rounds that is shown.
    pub(super) fn of_rounds(self, rounds: u32) -> String {
        match self {
            Self::Wall => format!("median of {rounds} rounds, line from the shortest to the longest"),
            Self::Counter { .. } => format!("median of {rounds} rounds"),
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

const CHARTS: [Chart; 11] = [
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
    Chart {
        bench: "zero-page",
        name: "zero-cold",
        title: "Zero pages that are in no cache: nanoseconds for a page",
        cases: "cold, zero",
        figure: PER_PAGE,
    },
    Chart {
        bench: "zero-page",
        name: "zero-early",
        title: "Pages in cache whose first line is not zero: nanoseconds for a page",
        cases: "hot, differs early",
        figure: PER_PAGE,
    },
    Chart {
        bench: "zero-page",
        name: "zero-guests",
        title: "A guest with 31 of 32 pages zero, migrated as a whole",
        cases: "zero-heavy guest",
        figure: Figure::Wall,
    },
    Chart {
        bench: "zero-page",
        name: "zero-freed",
        title: "Guests that zero what they free, or write contents, migrated as a whole",
        cases: "guest that",
        figure: Figure::Wall,
    },
    Chart {
        bench: "zero-copy",
        name: "zero-copy",
        title: "Sending a GiB over tcp: what it costs the sender",
        cases: "1 GiB over tcp",
        figure: Figure::Counter {
            name: "sender_cpu_us_per_gib",
            words: "the sender's CPU time, less is better",
            unit: "ms",
            per_unit: 1000.0,
        },
    },
    Chart {
        bench: "zero-copy",
        name: "zero-copy-busy",
        title: "Sending a GiB while every core is busy with something else",
        cases: "1 GiB over tcp, every core busy",
        figure: Figure::Wall,
    },
    Chart {
        bench: "free-page",
        name: "free-page-away",
        title: "7 GiB of an idle guest of 8 GiB given back to the host",
        cases: "7 GiB resident and free",
        figure: Figure::Wall,
    },
    Chart {
        bench: "free-page",
        name: "free-page-migration",
        title: "A Linux guest of 8 GiB that is idle, migrated as a whole",
        cases: "migration",
        figure: Figure::Wall,
    },
];

const PER_PAGE: Figure =
    Figure::Counter { name: "ps_per_page", words: "CPU time for a page, less is better", unit: "ns", per_unit: 1000.0 };

/// Those of a bench.
pub(super) fn of(bench: &str) -> Vec<&'static Chart> {
    CHARTS.iter().filter(|chart| chart.bench == bench).collect()
}
