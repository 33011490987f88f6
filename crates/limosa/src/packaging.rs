//! `limosa completions` and `limosa man`: what a package installs beside the program.
//!
//! Law: both are made from the definitions that `--help` prints, so a command or an option cannot be in one and not in
//! the other. What `--help` hides is hidden here too.

use std::fs;
use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use crate::args::{Cli, CompletionsArgs, ManArgs, ShellArg};
use limosa_console::say;

/// `limosa completions SHELL`: the script on stdout.
pub(crate) fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let shell = match args.shell {
        ShellArg::Bash => Shell::Bash,
        ShellArg::Zsh => Shell::Zsh,
        ShellArg::Fish => Shell::Fish,
    };
    // Into memory first: the generator panics when its writer fails, and half a script is worse than none.
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut shown(), "limosa", &mut script);
    std::io::stdout().lock().write_all(&script).context("cannot write the completion script")?;
    Ok(ExitCode::SUCCESS)
}

/// `limosa man DIR`: the pages as files.
pub(crate) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let directory = &args.directory;
    fs::create_dir_all(directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let mut command = shown().disable_help_subcommand(true);
    command.build();
    let pages = write_pages(&command, args)?;
    say!("limosa: {pages} pages in {}", directory.display());
    Ok(ExitCode::SUCCESS)
}

/// One page for the command and one for each below it: how many.
fn write_pages(command: &Command, args: &ManArgs) -> anyhow::Result<usize> {
    let page = Man::new(command.clone()).manual("limosa").source(concat!("limosa ", env!("CARGO_PKG_VERSION")));
    let path = args.directory.join(page.get_filename());
    let mut text = Vec::new();
    render(&page, command, &mut text).context("cannot make a page")?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    command.get_subcommands().try_fold(1, |pages, below| Ok(pages + write_pages(below, args)?))
}

/// A page in the order of clap's own, but with the usage of `--help` as its synopsis: clap's leaves out the values of
/// options.
fn render(page: &Man, command: &Command, text: &mut Vec<u8>) -> std::io::Result<()> {
    page.render_title(text)?;
    page.render_name_section(text)?;
    let usage = command.clone().render_usage().to_string();
    let mut synopsis = Roff::new();
    synopsis.control("SH", ["SYNOPSIS"]);
    for line in usage.trim_start_matches("Usage:").lines() {
        synopsis.text([roman(line.trim())]).control("br", []);
    }
    synopsis.to_writer(text)?;
    page.render_description_section(text)?;
    page.render_options_section(text)?;
    if command.has_subcommands() {
        page.render_subcommands_section(text)?;
    }
    if command.get_after_help().is_some() || command.get_after_long_help().is_some() {
        page.render_extra_section(text)?;
    }
    if command.get_version().is_some() {
        page.render_version_section(text)?;
    }
    Ok(())
}

/// The command line as `--help` shows it: the completion scripts would offer hidden commands.
fn shown() -> Command {
    let all = Cli::command();
    let mut shown = Command::new("limosa").version(env!("CARGO_PKG_VERSION")).args(all.get_arguments());
    if let Some(about) = all.get_about() {
        shown = shown.about(about.clone());
    }
    if let Some(after) = all.get_after_help() {
        shown = shown.after_help(after.clone());
    }
    shown.subcommands(all.get_subcommands().filter(|below| !below.is_hide_set()))
}
