//! Limits of a command's memory and time, for images from strangers.
//!
//! Law: a command that reaches a limit ends as a failed one: one line, exit status 1 (of `compare`: 4), and no target
//! that it has not completed.

use std::panic;
use std::process;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use anyhow::Context as _;

use super::interrupt::UNFINISHED;
use super::meter;
use super::size::for_people;
use crate::memory_limit;
use crate::program::{self, say_named};

/// How long a thread that has no memory waits for the lock of the unfinished files, which it may hold itself.
const WAIT: Duration = Duration::from_millis(500);

/// Limits of a command.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Most bytes of memory.
    pub(crate) memory: Option<u64>,
    /// The longest time.
    pub(crate) time: Option<Duration>,
}

/// The limit of memory, and the exit status of a command that reaches it.
static MEMORY: OnceLock<(u64, i32)> = OnceLock::new();

impl Limits {
    /// Sets the limits of this process. `status`: the exit status of a command that reaches one.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn set(self, status: u8) -> anyhow::Result<()> {
        let status = i32::from(status);
        if let Some(bytes) = self.memory {
            MEMORY.get_or_init(|| (bytes, status));
            end_where_threads_have_no_stack();
            memory_limit::set(bytes, end_without_memory).context("--limit-memory: cannot set the limit")?;
        }
        if let Some(time) = self.time {
            let wait = move || {
                thread::sleep(time);
                // Held to the end: no file is created any more.
                let _removed = UNFINISHED.remove_all();
                meter::end_line();
                say_named!("not done within {}: increase --limit-time", limosa_console::quantity::time(time));
                process::exit(status);
            };
            thread::Builder::new().name("limit".into()).spawn(wait).context("--limit-time: cannot start a thread")?;
        }
        Ok(())
    }
}

/// The standard library panics on a new thread for whose signal stack there is no memory: that ends the process, too.
fn end_where_threads_have_no_stack() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        if panic.payload().downcast_ref().is_some_and(|why: &String| why.contains("alternative stack")) {
            memory_limit::exhausted(None);
        }
        usual(panic);
    }));
}

/// Ends the process on the thread that has no memory. It may hold the lock of stderr's or of the display's, too.
/// `bytes`: how much more it needs, if that is known.
fn end_without_memory(bytes: Option<usize>) -> ! {
    let (limit, status) = MEMORY.get().copied().unwrap_or((0, 1));
    let removed = UNFINISHED.try_remove_all(WAIT);
    let more = bytes.map(|bytes| format!(" (another {bytes} bytes)")).unwrap_or_default();
    let line = format!(
        "{}: more memory is needed than {}{more}: increase --limit-memory\n",
        program::name(),
        for_people(limit)
    );
    // The process ends now: a failure cannot be reported any more.
    let _ = rustix::io::write(std::io::stderr(), line.as_bytes());
    drop(removed);
    process::exit(status)
}
