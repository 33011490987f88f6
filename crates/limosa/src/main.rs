//! The command line of limosa: parse, wire, print.
//!
//! Each command has a module that turns its arguments into what the libraries take and what they return into lines.
//! Messages for people go to stderr, results for programs (`--json`) to stdout.

mod args;
mod balloon;
mod bars;
mod changed;
mod checkpoints;
mod clock;
mod clone;
mod compare;
mod ctl;
mod detach;
mod disk_set;
mod endpoint;
mod export;
mod holder;
mod img;
mod import;
mod inspect;
mod job;
mod memory_limit;
mod metrics;
mod packaging;
mod packed;
mod packed_target;
mod program;
mod protect;
mod receive;
mod relay;
mod remedy;
mod remote;
mod report;
mod restore;
mod resume;
mod run;
mod save;
mod send;
mod serve;
mod signals;
mod snapshot;
mod usage;
mod vm_state;
mod working_set;

use std::io::IsTerminal;
use std::process::ExitCode;

use args::Command;
use memory_limit::LimitedAllocator;

#[global_allocator]
static ALLOCATOR: LimitedAllocator = LimitedAllocator;

fn main() -> ExitCode {
    let cli = match program::parse() {
        Ok(cli) => cli,
        Err(error) => return usage::report(&error),
    };
    log(cli.verbose);
    // A core dump would hold pages of the guest. If it cannot be forbidden, the jobs are still worth doing.
    let _ = rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable);
    let result = match cli.command {
        Command::Save(args) => save::run(&args),
        Command::Restore(args) => restore::run(args),
        Command::Receive(args) => receive::run(&args),
        Command::Send(args) => send::run(&args),
        Command::Run(args) => run::run(&args, cli.verbose),
        Command::Clone(args) => clone::run(&args),
        Command::Protect(args) => protect::run(args, cli.verbose),
        Command::Keep(args) => protect::keep(&args),
        Command::Resume(args) => resume::run(&args),
        Command::Import(args) => import::run(&args),
        Command::Export(args) => export::run(&args),
        Command::Pack(args) => packed::run_pack(&args),
        Command::Unpack(args) => packed::run_unpack(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Snapshot(args) => snapshot::run(&args),
        Command::Img(args) => img::run(args),
        Command::Serve(args) => serve::run(&args),
        Command::Balloon(args) => balloon::run(&args),
        Command::Completions(args) => packaging::completions(&args),
        Command::Man(args) => packaging::man(&args),
        Command::Watchdog { arguments } => {
            // Without a key: nobody but its user has it.
            return limosa_qemu::run_watchdog(&arguments, remedy::WATCHDOG, &packed::access());
        }
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            program::say_named!("{}{}", limosa_console::anyhow_error_line(&error), remedy::of_cause(&error));
            if usage::is_misuse(&error) { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

fn log(verbose: u8) {
    let level = match verbose {
        0 => tracing::Level::WARN,
        1 => tracing::Level::INFO,
        2 => tracing::Level::DEBUG,
        _ => tracing::Level::TRACE,
    };
    tracing_subscriber::fmt()
        .with_max_level(level)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        .init();
}
