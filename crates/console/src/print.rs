//! Lines for people (stderr) and for programs (stdout).
//!
//! Law: a job does not fail because its output is not read. A terminal that has hung up or a pipe that was closed loses
//! output, not VMs; `println!` would panic. But a command whose only work is its output has failed if that did not
//! get out.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;

use limosa_page::error_with_causes;

/// The error of the first line that standard output did not take.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// A line for people.
#[macro_export]
macro_rules! say {
    ($($words:tt)*) => { $crate::say_line(format_args!($($words)*)) };
}

/// Implements `say!`.
///
/// The line is written at once: programs that write to the same log, or read it meanwhile, see no part of a line.
pub fn say_line(words: fmt::Arguments<'_>) {
    let _ = io::stderr().lock().write_all(format!("{words}\n").as_bytes());
}

/// A line of the result that was asked for.
#[macro_export]
macro_rules! print_out {
    () => { $crate::print_out!("") };
    ($($words:tt)*) => { $crate::print_line(format_args!($($words)*)) };
}

/// Implements `print_out!`.
pub fn print_line(words: fmt::Arguments<'_>) {
    let mut out = io::stdout().lock();
    if let Err(error) = out.write_fmt(format_args!("{words}\n")).and_then(|()| out.flush()) {
        // A reader that closes a pipe has read enough.
        if error.kind() != io::ErrorKind::BrokenPipe {
            let _ = LOST.set(error);
        }
    }
}

/// Fails if a line could not be printed: for commands that do nothing else.
pub fn check_stdout() -> anyhow::Result<()> {
    match LOST.get() {
        None => Ok(()),
        Some(error) => Err(anyhow::anyhow!("standard output: {error}")),
    }
}

/// Returns an error and its causes in one line, without repetitions.
pub fn anyhow_error_line(error: &anyhow::Error) -> String {
    error_line(error.as_ref())
}

/// Returns an error and its causes in one line, as [`anyhow_error_line`] does.
#[must_use]
pub fn error_line(error: &(dyn std::error::Error + 'static)) -> String {
    error_with_causes(error).replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let inner = anyhow::anyhow!("no space left");
        let error = inner.context("cannot write x: no space left");
        assert_eq!(anyhow_error_line(&error), "cannot write x: no space left");
        let inner = anyhow::anyhow!("no space left");
        assert_eq!(anyhow_error_line(&inner.context("x: no space left; free some")), "x: no space left; free some");
    }
}
