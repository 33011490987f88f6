//! The verdicts of `qemu-img check` and of limosa on an image, in the same words.

use std::path::Path;

use limosa_image::qcow2::{CheckOptions, CheckReport, check};
use limosa_storage::{MemoryStorage, block_on};
use limosa_testkit::qemu_img_output;

/// The figures of a check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Figures {
    pub(crate) end: u64,
    pub(crate) clusters: [u64; 4],
    pub(crate) leaks: u64,
    pub(crate) corruptions: u64,
    pub(crate) errors: u64,
}

/// The figures of the stock tool, and what else it said; `None` if it gives up.
pub(crate) fn stock(path: &Path) -> (Option<Figures>, String) {
    let (found, said) = run(&["check", "--output", "json", "-f", "qcow2", path.to_str().unwrap()]);
    (found.map(|(figures, _)| figures), said)
}

/// The same after a repair, and how many leaks it has given back.
pub(crate) fn stock_repair(path: &Path, what: &str) -> (Option<(Figures, u64)>, String) {
    run(&["check", "-r", what, "--output", "json", "-f", "qcow2", path.to_str().unwrap()])
}

fn run(arguments: &[&str]) -> (Option<(Figures, u64)>, String) {
    let output = qemu_img_output(arguments).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // A repair says in words what it did, before the figures.
    let json = text.find("{\n").map_or("", |begin| &text[begin..]);
    let Ok(found) = serde_json::from_str::<serde_json::Value>(json) else { return (None, said + &text) };
    let figure = |name: &str| found.get(name).and_then(serde_json::Value::as_u64).unwrap_or(0);
    let clusters = ["total-clusters", "allocated-clusters", "compressed-clusters", "fragmented-clusters"].map(figure);
    let figures = Figures {
        end: figure("image-end-offset"),
        clusters,
        leaks: figure("leaks"),
        corruptions: figure("corruptions"),
        errors: figure("check-errors"),
    };
    (Some((figures, figure("leaks-fixed"))), said)
}

/// The figures of a report.
pub(crate) fn figures(report: &CheckReport) -> Figures {
    Figures {
        end: report.image_end_offset,
        clusters: [
            report.total_clusters,
            report.allocated_clusters,
            report.compressed_clusters,
            report.fragmented_clusters,
        ],
        leaks: report.leaks,
        corruptions: report.corruptions,
        errors: report.check_errors,
    }
}

/// limosa's verdict on these bytes, with memory for `memory` bytes.
pub(crate) fn ours(bytes: &[u8], memory: usize) -> Result<CheckReport, limosa_image::ImageError> {
    let storage = MemoryStorage::with_contents(bytes.to_vec(), u64::MAX);
    block_on(check(&storage, CheckOptions::default().memory(memory)))
}
