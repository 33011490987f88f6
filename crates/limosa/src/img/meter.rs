//! The progress of `limosa img`, and its rate limit.
//!
//! With `-p` and without a terminal the line is that of qemu-img; at a terminal it is a bar. Either is
//! finished also if a signal ends the process.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use limosa_image::Progress;
use parking_lot::{Mutex, MutexGuard};

/// The smallest difference between two printed lines, in hundredths of a percent: qemu-img's.
const LEAST: u64 = 100;
/// 100%, in hundredths of a percent.
const ALL: u64 = 10_000;

/// The display of progress.
enum Shown {
    Nowhere,
    Bar(ProgressBar),
    /// The value printed last, in hundredths of a percent, and whether it is on stderr.
    Line(Option<u64>, bool),
}

impl Shown {
    fn note(&mut self, progress: Progress) {
        match self {
            Self::Nowhere => {}
            Self::Bar(bar) => {
                bar.set_length(progress.total);
                bar.set_position(progress.done);
            }
            Self::Line(last, on_stderr) => {
                let now = hundredths(progress);
                if last.is_none_or(|last| now >= last + LEAST || (now == ALL && last < ALL)) {
                    *last = Some(now);
                    print(now, *on_stderr);
                }
            }
        }
    }

    fn end(&self) {
        match self {
            Self::Nowhere => {}
            Self::Bar(bar) => bar.finish_and_clear(),
            Self::Line(_, true) => _ = std::io::stderr().write_all(b"\n"),
            Self::Line(_, false) => _ = std::io::stdout().write_all(b"\n"),
        }
    }
}

/// The current display. Locked while it is printed: nothing follows the end of the line.
static NOW: Mutex<Shown> = Mutex::new(Shown::Nowhere);

/// Whether stdout has other bytes, and lines of progress are printed on stderr.
static OFF_STDOUT: AtomicBool = AtomicBool::new(false);

/// Keeps progress off stdout, which the image is written to.
pub(crate) fn keep_off_stdout() {
    OFF_STDOUT.store(true, Ordering::Relaxed);
}

fn now() -> MutexGuard<'static, Shown> {
    NOW.lock()
}

/// Ends the display before the process ends.
pub(crate) fn end_line() {
    std::mem::replace(&mut *now(), Shown::Nowhere).end();
}

/// Shows the progress of a job, and limits its rate.
pub(crate) struct Meter {
    /// Most bytes a second.
    rate: Option<u64>,
    started: Instant,
}

impl Meter {
    /// A meter. `asked`: progress is shown even without a terminal. `quiet` overrides everything else.
    pub(crate) fn new(verb: &'static str, asked: bool, quiet: bool, rate: Option<u64>) -> Self {
        let off_stdout = OFF_STDOUT.load(Ordering::Relaxed);
        let shown = if quiet {
            Shown::Nowhere
        } else if asked && (!std::io::stdout().is_terminal() && (!off_stdout || !std::io::stderr().is_terminal())) {
            Shown::Line(None, off_stdout)
        } else if std::io::stderr().is_terminal() {
            Shown::Bar(bar(verb))
        } else {
            Shown::Nowhere
        };
        *now() = shown;
        let meter = Self { rate, started: Instant::now() };
        now().note(Progress::new(0, 1, 0));
        meter
    }

    /// Shows the progress; waits if the job exceeds its rate.
    pub(crate) fn note(&self, progress: Progress) -> ControlFlow<()> {
        now().note(progress);
        if let Some(rate) = self.rate.filter(|&rate| rate > 0) {
            let due = due(progress.moved, rate);
            thread::sleep(due.saturating_sub(self.started.elapsed()));
        }
        ControlFlow::Continue(())
    }

    /// Hides the bar, because other output follows.
    pub(crate) fn hide(&self) {
        if let Shown::Bar(bar) = &*now() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        end_line();
    }
}

/// Prints a line over the one before, as qemu-img does.
fn print(hundredths: u64, on_stderr: bool) {
    let mut out: Box<dyn Write> = if on_stderr { Box::new(std::io::stderr()) } else { Box::new(std::io::stdout()) };
    let _ = write!(out, "    ({}.{:02}/100%)\r", hundredths / 100, hundredths % 100).and_then(|()| out.flush());
}

fn hundredths(progress: Progress) -> u64 {
    let (done, total) = (u128::from(progress.done.min(progress.total)), u128::from(progress.total.max(1)));
    u64::try_from((done * u128::from(ALL) + total / 2) / total).unwrap_or(ALL)
}

/// The time that moving these bytes takes at this rate.
fn due(moved: u64, rate: u64) -> Duration {
    let nanos = u128::from(moved) * 1_000_000_000 / u128::from(rate.max(1));
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

fn bar(verb: &'static str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{prefix:>10} [{bar:30}] {percent:>3}% {binary_bytes_per_sec:>12} {eta:>4}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(1).with_style(style).with_prefix(verb)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_printed_in_hundredths_of_a_percent() {
        let at = |done, total| hundredths(Progress::new(done, total, 0));
        assert_eq!([at(0, 3), at(2, 3), at(3, 3), at(0, 0), at(u64::MAX, u64::MAX)], [0, 6667, 10_000, 0, 10_000]);
    }

    #[test]
    fn what_has_been_moved_decides_how_long_it_takes() {
        assert_eq!(due(3 << 20, 2 << 20), Duration::from_millis(1500));
        assert_eq!(due(0, 1), Duration::ZERO);
    }
}
