//! The progress bar of a running job, on a terminal only.

use limosa_console::quantity;
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use limosa_migrate::control::{Phase, Progress, ProgressReading};
use limosa_page::PAGE_SIZE;

/// A bar that is drawn until it is dropped.
pub(crate) struct Bar {
    over: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Bar {
    /// Draws `progress` if stderr is a terminal.
    pub(crate) fn show(progress: &Progress, verb: &'static str) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        if !std::io::stderr().is_terminal() {
            return Self { over, thread: None };
        }
        let (progress, stop) = (progress.clone(), Arc::clone(&over));
        let thread = thread::Builder::new().name("bar".into()).spawn(move || draw(&progress, verb, &stop)).ok();
        Self { over, thread }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
    }
}

fn draw(progress: &Progress, verb: &'static str, over: &AtomicBool) {
    let style =
        ProgressStyle::with_template("{prefix:>10} [{bar:30}] {percent:>3}% {binary_bytes_per_sec:>12} {eta:>4} {msg}")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::new(1).with_style(style).with_prefix(verb);
    while !over.load(Ordering::Acquire) {
        let reading = progress.read();
        if reading.total_pages > 0 {
            bar.set_length(reading.total_pages.saturating_mul(PAGE_SIZE));
            bar.set_position(done(&reading).saturating_mul(PAGE_SIZE));
            bar.set_message(kinds(&reading));
        }
        thread::park_timeout(Duration::from_millis(100));
    }
    bar.finish_and_clear();
}

/// Pages that need not move again, by what is known so far.
fn done(reading: &ProgressReading) -> u64 {
    (reading.normal_pages + reading.zero_pages).saturating_sub(reading.resent_pages).min(reading.total_pages)
}

fn kinds(reading: &ProgressReading) -> String {
    let mut text =
        format!("{} pages, {} zero", quantity::count(reading.normal_pages), quantity::count(reading.zero_pages));
    if reading.resent_pages > 0 {
        text.push_str(&format!(", {} again", quantity::count(reading.resent_pages)));
    }
    match reading.phase {
        Phase::PostcopyActive => {
            text.push_str(&format!(", {} requested; the guest runs", quantity::count(reading.requests)));
        }
        Phase::Device | Phase::Completing => text.push_str("; finishing"),
        _ => {}
    }
    text
}
