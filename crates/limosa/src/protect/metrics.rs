//! `limosa protect --metrics`: the figures of a protection, for Prometheus.

use limosa_migrate::output::OutputCounters;

use super::figures::{Figures, Now};
use crate::metrics::text::Page;

/// Returns the metrics of a protection.
pub(super) fn page(figures: &Figures) -> String {
    figures.read(|now| {
        let mut page = series(now);
        let output = now.last.as_ref().and_then(|last| last.output);
        if let Some(output) = output.filter(|_| figures.counts_output()) {
            held(&mut page, &output);
        }
        page.into_text()
    })
}

/// Begins a page with the checkpoints.
fn series(now: &Now) -> Page {
    let mut page = Page::new("limosa_protect_");
    let help = "1 once a checkpoint counts: the VM is protected.";
    page.single("protected", "gauge", help, u8::from(now.newest.is_some()));
    page.single("checkpoints_total", "counter", "Checkpoints behind the base that counted.", now.sums.checkpoints);
    if let Some(newest) = now.newest {
        page.single("newest_checkpoint", "gauge", "Number of the newest checkpoint.", newest.number);
        let help = "Instant of the VM's state in the newest checkpoint, in seconds since 1970.";
        page.single("newest_timestamp_seconds", "gauge", help, newest.timestamp());
    }
    if let Some(period) = now.last.as_ref().and_then(|last| last.period) {
        let help = "Time between the last two checkpoints.";
        page.single("period_seconds", "gauge", help, period.as_secs_f64());
    }
    let help = "Time that a checkpoint stopped the VM, at most.";
    page.family("pause_seconds", "histogram", help);
    page.histogram("pause_seconds", "", &now.pauses);
    page.family("lag_seconds", "histogram", "Age of a checkpoint when it counted.");
    page.histogram("lag_seconds", "", &now.lags);
    page.family("pages_total", "counter", "Pages that came.");
    let sums = &now.sums;
    for (kind, count) in
        [("changed", sums.pages.saturating_sub(sums.unchanged)), ("unchanged", sums.unchanged), ("zero", sums.zero)]
    {
        page.sample("pages_total", &format!("kind=\"{kind}\""), count);
    }
    page.single("received_bytes_total", "counter", "Bytes that came.", sums.received);
    page.single("written_bytes_total", "counter", "Bytes of pages that were written.", sums.written());
    page
}

/// Adds output that was held back.
fn held(page: &mut Page, output: &OutputCounters) {
    page.family("output_packets_total", "counter", "Packets of the VM that were held back, and what became of them.");
    for (fate, count) in [
        ("held", output.held_packets),
        ("released", output.released_packets),
        ("aborted", output.aborted_packets),
        ("overflow", output.overflow_packets),
        ("undelivered", output.undelivered_packets),
    ] {
        page.sample("output_packets_total", &format!("fate=\"{fate}\""), count);
    }
    page.family("output_bytes_total", "counter", "Bytes of packets that were held back and released.");
    for (fate, bytes) in [("held", output.held_bytes), ("released", output.released_bytes)] {
        page.sample("output_bytes_total", &format!("fate=\"{fate}\""), bytes);
    }
    let help = "Half of the packets were held for a shorter time.";
    page.single("output_hold_median_seconds", "gauge", help, output.median_hold.as_secs_f64());
    let help = "Longest time that a packet was held.";
    page.single("output_hold_longest_seconds", "gauge", help, output.longest_hold.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_protected_from_its_base_on() {
        let figures = Figures::new("/d".into(), false).unwrap();
        let before = page(&figures);
        assert!(before.contains("limosa_protect_protected 0\n") && !before.contains("newest"), "{before}");
        figures.began();
        let after = page(&figures);
        assert!(after.contains("limosa_protect_protected 1\n"), "{after}");
        assert!(after.contains("limosa_protect_newest_checkpoint 0\n"), "{after}");
    }
}
