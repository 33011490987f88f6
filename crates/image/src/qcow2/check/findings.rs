//! Keeping count of what is wrong.

use super::report::{CheckReport, Finding, FindingKind};

/// A report that is being written.
#[derive(Debug, Clone)]
pub(super) struct Findings {
    pub(super) report: CheckReport,
    most: usize,
}

impl Findings {
    pub(super) fn new(most: usize) -> Self {
        Self { report: CheckReport::default(), most }
    }

    /// Counts something wrong `times`, and keeps it as one finding.
    pub(super) fn note(&mut self, kind: FindingKind, times: u64, what: impl FnOnce() -> (String, String)) {
        if times == 0 {
            return;
        }
        let figure = match kind {
            FindingKind::Leak => &mut self.report.leaks,
            FindingKind::Corruption => &mut self.report.corruptions,
            FindingKind::Error => &mut self.report.check_errors,
        };
        *figure = figure.saturating_add(times);
        if self.report.findings.len() < self.most {
            let (table, why) = what();
            self.report.findings.push(Finding { kind, table, why });
        } else {
            self.report.findings_left_out += 1;
        }
    }

    pub(super) fn corruption(&mut self, times: u64, what: impl FnOnce() -> (String, String)) {
        self.note(FindingKind::Corruption, times, what);
    }
}
