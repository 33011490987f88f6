//! The live status line, on a terminal only.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use limosa_console::{quantity, say};
use limosa_protect::{KeptBase, KeptCheckpoint};
use parking_lot::Mutex;

/// A line that is drawn until it is dropped.
pub(super) struct StatusLine {
    bar: Option<ProgressBar>,
    every: Duration,
    longest: Mutex<Duration>,
}

impl StatusLine {
    /// Draws on stderr if that is a terminal.
    pub(super) fn show(every: Duration) -> Self {
        let style = ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
        let bar = std::io::stderr().is_terminal().then(|| ProgressBar::new_spinner().with_style(style));
        if let Some(bar) = &bar {
            bar.set_message("receiving all of the VM");
        }
        Self { bar, every, longest: Mutex::default() }
    }

    /// Says that the VM is protected.
    pub(super) fn begin(&self, base: &KeptBase) {
        let path = base.path.display();
        let (bytes, elapsed) = (quantity::bytes(base.bytes), quantity::time(base.elapsed));
        let say = || say!("limosa: the VM is protected: {path} counts ({bytes} received in {elapsed})");
        match &self.bar {
            Some(bar) => bar.suspend(say),
            None => say(),
        }
    }

    /// Shows the newest checkpoint.
    pub(super) fn update(&self, kept: &KeptCheckpoint) {
        let Some(bar) = &self.bar else { return };
        let mut longest = self.longest.lock();
        *longest = longest.max(kept.pause);
        bar.set_message(format!(
            "checkpoint {}: every {}, pause {} ({} at most), {} pages, {}, lag {}{}",
            kept.number,
            quantity::time(kept.period.unwrap_or(self.every)),
            quantity::time(kept.pause),
            quantity::time(*longest),
            quantity::count(kept.stored.pages.contents),
            quantity::bytes(kept.bytes),
            quantity::time(kept.lag()),
            kept.output.filter(|output| output.held_packets > 0).map_or_else(String::new, |output| format!(
                ", {} frames held for {}",
                quantity::count(output.held_packets),
                quantity::time(output.median_hold)
            )),
        ));
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
