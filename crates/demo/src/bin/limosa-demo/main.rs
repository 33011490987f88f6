//! limosa-demo: moves built-in guests between two processes while they run.

mod args;
mod live;
mod protect;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser as _;
use limosa_channel::Uri;
use limosa_console::{print_out, say};
use limosa_demo::monitor::EndMonitor;
use limosa_demo::state::{Role, State, Status};
use serde_json::{Value, json};

use args::{Cli, DecideArgs, DemoCommand, RecoverArgs};

/// How long an end may take for a request.
const SOON: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let cli = Cli::try_parse().unwrap_or_else(|error| error.exit());
    tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_writer(std::io::stderr).without_time().init();
    let result = match cli.command {
        DemoCommand::Live(args) => live::run(&args),
        DemoCommand::Protect(args) => protect::run(&args),
        DemoCommand::Resume(args) => go(&args, Role::Source),
        DemoCommand::Start(args) => go(&args, Role::Destination),
        DemoCommand::Discard(args) => discard(&args),
        DemoCommand::Recover(args) => recover(&args),
        DemoCommand::Status(args) => status(&args),
        DemoCommand::End { arguments } => return end(&arguments),
    };
    result.unwrap_or_else(|error| {
        say!("limosa-demo: {}", limosa_console::anyhow_error_line(&error));
        ExitCode::FAILURE
    })
}

/// One of the two processes. Why it cannot be one goes to who started it, who says it once for both.
fn end(arguments: &[String]) -> ExitCode {
    let ended = match limosa_demo::protect::is_process(arguments) {
        true => limosa_demo::protect::run_process(arguments),
        false => limosa_demo::end::run(arguments),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_out!("{}", limosa_console::anyhow_error_line(&error.into()));
            ExitCode::FAILURE
        }
    }
}

/// Has an undecided end run the guest.
fn go(args: &DecideArgs, role: Role) -> anyhow::Result<ExitCode> {
    let end = EndMonitor::connect(&args.control)?;
    let status = end.status()?;
    if status.role != role {
        let other = if role == Role::Source { "start" } else { "resume" };
        anyhow::bail!("this end is the {}: use limosa-demo {other}", status.role.name());
    }
    if !status.running {
        end.execute("cont", Value::Null)?;
    }
    let ran = status.running;
    let over = |status: &Status| match status.state {
        State::Running => status.running,
        // Its guest runs a moment before the end has done what was requested; with pages that still come it runs all
        // the time.
        State::Receiving => ran,
        _ => true,
    };
    let status = end.wait_status(SOON, "run the guest", over)?;
    if !status.running {
        anyhow::bail!("the guest does not run: {}", status.why.unwrap_or(status.status));
    }
    tell(args, &status);
    Ok(ExitCode::SUCCESS)
}

/// Has an end give the guest up.
fn discard(args: &DecideArgs) -> anyhow::Result<ExitCode> {
    let end = EndMonitor::connect(&args.control)?;
    let status = end.status()?;
    // In postcopy too, as long as its pages keep coming.
    if status.running && status.state != State::PostcopyPaused {
        anyhow::bail!("the guest runs at this end: nothing is discarded");
    }
    end.execute("quit", Value::Null)?;
    say!("limosa-demo: the {} discards the guest and ends", status.role.name());
    if args.json {
        print_out!("{}", json!({ "discarded": status.role.name() }));
    }
    Ok(ExitCode::SUCCESS)
}

/// Connects the two ends of a postcopy again, over a socket next to the destination's.
fn recover(args: &RecoverArgs) -> anyhow::Result<ExitCode> {
    let (source, destination) = (EndMonitor::connect(&args.control)?, EndMonitor::connect(&args.destination)?);
    let at = PathBuf::from(format!("{}.recovery", args.destination.display()));
    let at = destination.listen("migrate-recover", &Uri::Unix(at))?;
    source.execute("migrate", json!({ "uri": at.to_string(), "resume": true }))?;
    let over = |status: &Status| status.state != State::Receiving;
    let status = destination.wait_status(SOON, "get the rest of its memory", over)?;
    if status.state != State::Running {
        anyhow::bail!("the postcopy was not completed: {}", status.why.unwrap_or(status.status));
    }
    say!("limosa-demo: all of the guest's memory is at the destination");
    Ok(ExitCode::SUCCESS)
}

fn status(args: &DecideArgs) -> anyhow::Result<ExitCode> {
    tell(args, &EndMonitor::connect(&args.control)?.status()?);
    Ok(ExitCode::SUCCESS)
}

fn tell(args: &DecideArgs, status: &Status) {
    let runs = if status.running { "the guest runs here" } else { "the guest does not run here" };
    say!("limosa-demo: {}: {runs} ({}); it has counted {}", status.role.name(), status.status, status.beats);
    if let Some(why) = &status.why {
        say!("  {why}");
    }
    for command in &status.decide {
        say!("  {command}");
    }
    if args.json {
        print_out!("{}", json!(status));
    }
}
