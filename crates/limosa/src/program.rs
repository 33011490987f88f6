//! The name that the program was called by.
//!
//! Law: a link with the name `qemu-img` is `limosa img`. Usage and messages then have that name, because scripts and
//! people look for it; nothing else differs.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::LazyLock;

use clap::{Args as _, Command, CommandFactory as _, FromArgMatches as _, Parser as _};

use crate::args::{self, Cli, ImgArgs};

const QEMU_IMG: &str = "qemu-img";

static IS_QEMU_IMG: LazyLock<bool> =
    LazyLock::new(|| std::env::args_os().next().is_some_and(|called| is_qemu_img(&called)));

fn is_qemu_img(called: &OsStr) -> bool {
    Path::new(called).file_name() == Some(OsStr::new(QEMU_IMG))
}

/// Returns the name that messages begin with.
pub(crate) fn name() -> &'static str {
    if *IS_QEMU_IMG { QEMU_IMG } else { "limosa" }
}

/// Prints a line for people that begins with the name that the program was called by.
macro_rules! say_named {
    ($($words:tt)*) => {
        limosa_console::say!("{}: {}", $crate::program::name(), format_args!($($words)*))
    };
}
pub(crate) use say_named;

/// Returns the words that call a command for images.
pub(crate) fn img() -> &'static str {
    if *IS_QEMU_IMG { QEMU_IMG } else { "limosa img" }
}

/// Returns the words of the command line, beginning with a command of limosa.
pub(crate) fn words() -> Vec<OsString> {
    let implied = IS_QEMU_IMG.then(|| OsString::from("img"));
    implied.into_iter().chain(std::env::args_os().skip(1)).collect()
}

/// Returns the definition of `limosa img` under the name `qemu-img`.
fn qemu_img() -> Command {
    ImgArgs::augment_args(Command::new(QEMU_IMG))
        .about("Create, inspect, check and convert disk images: limosa img")
        .display_name(QEMU_IMG)
        // Scripts look for the version of qemu-img that the options are of.
        .version(concat!("version 10.0.0 (limosa ", env!("CARGO_PKG_VERSION"), ")"))
        .max_term_width(100)
}

/// Returns the definition that the words of `limosa img` are parsed by, and how many of them come before it.
pub(crate) fn definition() -> (Command, usize) {
    if *IS_QEMU_IMG { (qemu_img(), 1) } else { (Cli::command(), 0) }
}

/// Parses the command line.
///
/// # Errors
/// Bad usage, or a request for help.
pub(crate) fn parse() -> Result<Cli, clap::Error> {
    if !*IS_QEMU_IMG {
        return Cli::try_parse();
    }
    let mut command = qemu_img();
    let matches = command.try_get_matches_from_mut(std::env::args_os())?;
    let args = ImgArgs::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok(Cli { command: args::Command::Img(args), verbose: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_of_that_name_is_recognized_in_any_folder() {
        assert!(["qemu-img", "/usr/bin/qemu-img", "./qemu-img"].iter().all(|called| is_qemu_img(called.as_ref())));
        assert!(!["limosa", "qemu-img/limosa", "qemu-img2", ""].iter().any(|called| is_qemu_img(called.as_ref())));
        qemu_img().debug_assert();
    }
}
