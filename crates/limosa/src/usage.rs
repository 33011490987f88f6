//! Errors in the command line: those that clap finds, and those that only the command can see.
//!
//! Law: both look the same and have the same exit status, so that a script can tell a wrong call from a failed job.

use std::ffi::OsStr;
use std::fmt::Display;
use std::process::ExitCode;

use clap::Command;
use clap::error::ErrorKind;

use limosa_qemu::{Conflict, JobError};

use crate::program;

/// Prints the error of the command line, or the help that was asked for.
pub(crate) fn report(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    let mut arguments = program::words();
    arguments.retain(|word| !word.as_encoded_bytes().starts_with(b"-"));
    match (error.use_stderr(), arguments.first(), arguments.get(1)) {
        (false, ..) => ExitCode::SUCCESS,
        // As in qemu-img: 2 means that an image is corrupt. But for `compare` 1 means that the images differ, which was
        // not checked.
        (true, Some(command), of) if command == "img" && of.is_none_or(|of| of != "compare") => ExitCode::FAILURE,
        _ => ExitCode::from(2),
    }
}

/// Ends the program with a usage error of its command: options that contradict each other, or a value that cannot be.
/// Nothing may have been begun.
pub(crate) fn misused(why: impl Display) -> ! {
    command_of(&program::words()).error(ErrorKind::ArgumentConflict, why).exit()
}

/// Whether options that contradict each other are the cause, which a library has found.
pub(crate) fn is_misuse(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let conflict = match cause.downcast_ref() {
            Some(JobError::Refused { conflict, .. }) => conflict.as_ref(),
            _ => None,
        };
        matches!(conflict, Some(Conflict::Options(..) | Conflict::Missing(_) | Conflict::CommandLine(_)))
    })
}

/// Returns the command that these words call, for its usage line.
fn command_of(words: &[impl AsRef<OsStr>]) -> Command {
    let (mut command, before) = program::definition();
    command.build();
    for word in words.iter().skip(before).map(AsRef::as_ref).filter(|word| !word.as_encoded_bytes().starts_with(b"-")) {
        match command.find_subcommand(word) {
            Some(below) => command = below.clone(),
            None => break,
        }
    }
    command
}

#[cfg(test)]
mod tests {
    use limosa_qemu::JobOption;

    use super::*;

    #[test]
    fn options_that_contradict_each_other_are_bad_usage_wherever_that_is_found() {
        let refused =
            |conflict| anyhow::Error::from(JobError::Refused { why: "no".into(), conflict }).context("not saved");
        assert!(is_misuse(&refused(Some(Conflict::Options(JobOption::Background, JobOption::Stop)))));
        assert!(is_misuse(&refused(Some(Conflict::Missing(JobOption::Channels)))));
        assert!(!is_misuse(&refused(Some(Conflict::Unsupported(JobOption::LazyMode)))));
        assert!(!is_misuse(&refused(None)));
    }

    #[test]
    fn an_error_shows_the_usage_of_the_command_that_was_called() {
        let shown = |words: &[&str]| command_of(words).error(ErrorKind::ArgumentConflict, "no").to_string();
        assert!(shown(&["-v", "send", "vm", "tcp:a:1"]).contains("Usage: limosa send [OPTIONS] <SNAPSHOT> <URI>"));
        assert!(shown(&["img", "convert", "-c"]).contains("Usage: limosa img convert"));
        assert!(shown(&["no-command"]).contains("Usage: limosa [OPTIONS] <COMMAND>"));
    }
}
