//! `limosa img`: disk images.
//!
//! Law: `limosa img` replaces qemu-img. Output for programs and exit statuses are the same; output for people has the
//! same content, and errors say more.

mod amend;
mod bench;
mod bitmap;
mod check;
mod commit;
mod commit_to;
mod compare;
mod convert;
pub(crate) mod create;
mod dd;
pub(crate) mod format_options;
mod info;
pub(crate) mod interrupt;
pub(crate) mod limits;
mod looking;
mod map;
mod measure;
mod meter;
pub(crate) mod object;
pub(crate) mod open;
pub(crate) mod options;
mod pipe;
mod pretty;
mod rebase;
mod resize;
pub(crate) mod size;
mod snapshot;

use std::ffi::OsString;
use std::process::ExitCode;

use limosa_image::ImageError;

use crate::args::{ImgArgs, ImgCommand};
use crate::program::{self, say_named};

pub(crate) fn run(args: ImgArgs) -> anyhow::Result<ExitCode> {
    // Before there is a limit of memory, which its thread would be the first to reach.
    interrupt::listen()?;
    if args.trace.is_some() {
        say_named!("--trace: limosa has no trace events; the option has no effect");
    }
    if let Some(open) = args.command.open() {
        // 1 would say that two images differ.
        let status = if matches!(args.command, ImgCommand::Compare(_)) { compare::READ } else { 1 };
        match (open.limits.limits().set(status).and_then(|()| object::define(open.object.all())), &args.command) {
            (Ok(()), _) => {}
            (Err(error), ImgCommand::Compare(_)) => return Ok(compare::refuse(&error)),
            (Err(error), _) => return Err(error),
        }
    }
    let checks = matches!(args.command, ImgCommand::Check(_));
    let done = match args.command {
        ImgCommand::Create(args) => create::run(&args.resolve()?),
        ImgCommand::Info(args) => info::run(&args.resolve()),
        ImgCommand::Check(args) => check::run(&args.resolve()),
        ImgCommand::Map(args) => map::run(&args.resolve()),
        ImgCommand::Convert(args) => convert::run(&args.resolve()?),
        ImgCommand::Compare(args) => compare::run(&args.resolve()),
        ImgCommand::Dd(args) => dd::run(&args.resolve()?),
        ImgCommand::Measure(args) => measure::run(&args.resolve()?),
        ImgCommand::Resize(args) => resize::run(&args.resolve()),
        ImgCommand::Amend(args) => amend::run(&args.resolve()?),
        ImgCommand::Commit(args) => commit::run(&args.resolve()),
        ImgCommand::Rebase(args) => rebase::run(&args.resolve()?),
        ImgCommand::Snapshot(args) => snapshot::run(&args.resolve()?),
        ImgCommand::Bitmap(args) => bitmap::run(&args.resolve()),
        ImgCommand::Bench(args) => bench::run(&args.resolve()?),
        ImgCommand::Other(words) => refuse(&words),
    };
    done.map_err(|error| if checks { error } else { with_remedy(error) })
}

/// Prints the error of a command other than `check`, with its remedy.
fn with_remedy(error: anyhow::Error) -> anyhow::Error {
    let is_damage = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<ImageError>().is_some_and(ImageError::is_damage)
    };
    if error.chain().any(is_damage) {
        return anyhow::anyhow!(
            "{}; `{} check -r all` repairs images",
            limosa_console::anyhow_error_line(&error),
            program::img()
        );
    }
    error
}

fn refuse(words: &[OsString]) -> anyhow::Result<ExitCode> {
    let name = words.first().map(|word| word.to_string_lossy()).unwrap_or_default();
    anyhow::bail!("img {name:?}: unknown command; see {} --help", program::img())
}
