//! A device that prints numbered lines, and the gate behind which they wait for their checkpoint.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::VmError;
use limosa_migrate::output::{OutputCounters, OutputGate, OutputSignal};
use parking_lot::Mutex;

use crate::error::DemoError;

/// The printer: its thread prints while the VM runs.
#[derive(Debug, Default)]
pub(super) struct Printer {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    runs: bool,
    /// Number of the last line.
    number: u64,
    /// In a series; what is printed is held then.
    signal: Option<OutputSignal>,
    /// Lines of the open epoch.
    open: Vec<(u64, Instant)>,
    /// Lines of epochs that do not count yet.
    sealed: VecDeque<(u64, Vec<(u64, Instant)>)>,
    counters: OutputCounters,
}

impl Printer {
    /// A printer that stands still, and prints a line in each such time once it runs.
    pub(super) fn start(every: Duration) -> Result<Arc<Self>, DemoError> {
        let printer = Arc::new(Self::default());
        let prints = Arc::downgrade(&printer);
        let print = move || {
            while let Some(printer) = prints.upgrade() {
                printer.print();
                drop(printer);
                thread::sleep(every);
            }
        };
        let thread = thread::Builder::new().name("printer".into()).spawn(print);
        thread.map(|_| printer).map_err(DemoError::system("cannot start a thread"))
    }

    fn print(&self) {
        let mut state = self.state.lock();
        if !state.runs {
            return;
        }
        state.number = state.number.saturating_add(1);
        let number = state.number;
        match state.signal.clone() {
            Some(signal) => {
                state.open.push((number, Instant::now()));
                state.counters.held_packets = state.counters.held_packets.saturating_add(1);
                signal.before_output();
            }
            None => put(number),
        }
    }

    /// Lets it print, or stops it: then it prints nothing more.
    pub(super) fn set_running(&self, runs: bool) {
        self.state.lock().runs = runs;
    }

    /// Its state: the number of the last line.
    pub(super) fn number(&self) -> u64 {
        self.state.lock().number
    }

    /// Takes its state.
    pub(super) fn set_number(&self, number: u64) {
        self.state.lock().number = number;
    }
}

impl OutputGate for Printer {
    fn watch(&self, signal: &OutputSignal) -> Result<(), VmError> {
        self.state.lock().signal = Some(signal.clone());
        Ok(())
    }

    fn seal(&self, epoch: u64) -> Result<(), VmError> {
        let mut state = self.state.lock();
        let lines = std::mem::take(&mut state.open);
        state.sealed.push_back((epoch, lines));
        Ok(())
    }

    fn commit(&self, epoch: u64) -> Result<(), VmError> {
        let mut state = self.state.lock();
        while state.sealed.front().is_some_and(|(sealed, _)| *sealed <= epoch) {
            for (number, since) in state.sealed.pop_front().into_iter().flat_map(|(_, lines)| lines) {
                put(number);
                let counters = &mut state.counters;
                counters.released_packets = counters.released_packets.saturating_add(1);
                counters.longest_hold = counters.longest_hold.max(since.elapsed());
            }
        }
        Ok(())
    }

    fn abort(&self, epoch: u64) -> Result<(), VmError> {
        let mut state = self.state.lock();
        state.sealed.retain(|(sealed, _)| *sealed < epoch);
        state.open.clear();
        state.signal = None;
        Ok(())
    }

    fn counters(&self) -> OutputCounters {
        self.state.lock().counters
    }
}

/// Prints a line where the world sees it.
pub(super) fn put(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    // Who does not read any more sees nothing.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
