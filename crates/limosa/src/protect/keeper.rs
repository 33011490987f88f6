//! `limosa keep`: checkpoints of VMs on other hosts.

use std::ffi::OsString;
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::{Context as _, bail};
use limosa_channel::{Listener, Options};
use limosa_console::{anyhow_error_line, error_line, print_out, quantity, say};
use limosa_control::JobKind;
use limosa_migrate::VmError;
use limosa_protect::{
    Continued, Farewell, KeepEvent, KeepOptions, KeepReport, KeepRequest, StandbyOptions, Survivor, keep,
};
use limosa_qemu::{check_command_line, check_program};
use limosa_snapshot::Manifest;
use parking_lot::Mutex;
use serde_json::{Value, json};
use signal_hook::consts::SIGUSR1;

use super::durability;
use super::fence::{Fence, run_command};
use crate::args::KeeperArgs;
use crate::job::{JobHandles, THIS_PROGRAM};
use crate::run;
use crate::usage::misused;

pub(crate) fn run(args: &KeeperArgs) -> anyhow::Result<ExitCode> {
    if let Some(why) = args.contradiction() {
        misused(why);
    }
    let mut options = KeepOptions::default();
    options.lost_after = args.lost_after;
    options.stall_timeout = args.stall_timeout;
    options.store.durability = durability(args.durable);
    let listener = Listener::bind(&args.uri, &Options { tls: args.tls.read()?, ..Options::default() })?;
    let (now, outcome) = (Arc::new(AtomicBool::new(false)), Mutex::new(None));
    let fence = |manifest: &Manifest| fence(args, manifest);
    let survive = |survivor| *outcome.lock() = Some(outlive(survivor, args));
    let standby = (!args.command.is_empty()).then_some(StandbyOptions {
        command: &args.command,
        warm: args.standby,
        start_within: args.start_within,
        when_lost: args.when_lost,
        now: &now,
        fence: &fence,
        disk_servers: &args.disk_server,
        survive: &survive,
    });
    if standby.is_some() {
        check_command_line(&args.command)?;
        check_program(&args.command)?;
        if args.standby && !args.disk_server.is_empty() {
            expect_reconnection(&args.command)?;
        }
        signal_hook::flag::register(SIGUSR1, Arc::clone(&now)).context("cannot handle signals")?;
    }
    let handles = JobHandles::with_socket(None, JobKind::Save, "keeping", true)?;
    let report = keep(KeepRequest {
        listener: &listener,
        directory: &args.directory,
        options: &options,
        standby,
        watch: handles.watch(),
        event: &|event| match event {
            KeepEvent::Listening => say!("limosa: listening on {}", listener.local_uri()),
            other => tell_event(other, args),
        },
    })?;
    tell(&report);
    if args.json {
        print_out!("{}", object(&report));
    }
    match outcome.into_inner() {
        Some(status) => Ok(run::like(status?)),
        None => Ok(ExitCode::SUCCESS),
    }
}

/// Refuses a standby whose disk over NBD would not connect again: its server closes all connections when it drops what
/// came after a checkpoint, and the guest would see requests fail.
fn expect_reconnection(command: &[OsString]) -> anyhow::Result<()> {
    let words = command.iter().map(|word| word.to_string_lossy());
    let is_nbd = |word: &str| ["driver=nbd", "\"nbd\"", "file=nbd:"].iter().any(|mark| word.contains(mark));
    match words.into_iter().find(|word| is_nbd(word) && !word.contains("reconnect-delay")) {
        Some(disk) => bail!(
            "a failover closes the connections of disks over NBD, and a standby must connect again: give it \
             reconnect-delay=10 ({disk})"
        ),
        None => Ok(()),
    }
}

/// Makes sure that the protected VM is off, or refused, and has its disks as of the checkpoint.
fn fence(args: &KeeperArgs, manifest: &Manifest) -> Result<(), VmError> {
    let is_off = args.fenced || args.fence.is_some();
    let fence = Fence { gates: &args.gate, disk_servers: Some(&args.disk_server), is_off };
    let close = || {
        if let Some(command) = &args.fence {
            fence.look(manifest)?;
            run_command(command)?;
        }
        fence.close(manifest)
    };
    let fenced_by = close().map_err(|error| anyhow_error_line(&error))?;
    if !fenced_by.is_empty() {
        say!("limosa: the protected VM is refused by {}", fenced_by.join(", "));
    }
    Ok(())
}

/// Waits for the end of the VM that continues here.
fn outlive(survivor: Survivor, args: &KeeperArgs) -> anyhow::Result<ExitStatus> {
    match survivor {
        Survivor::Runs(continued) => {
            let Continued { child, elapsed, .. } = *continued;
            say!("limosa: the VM continues here, {} after it was fenced", quantity::time(elapsed));
            run::outlive(child, &args.command)
        }
        _ => {
            say!("limosa: the VM continues here, from its checkpoint");
            let mut command = Command::new(THIS_PROGRAM);
            command.args(["protect", "failover", "--fenced"]).arg(&args.directory);
            for server in &args.disk_server {
                command.arg("--disk-server").arg(server);
            }
            command.arg("--").args(&args.command);
            let child = command.spawn().context("cannot start the failover")?;
            run::outlive(child, &args.command)
        }
    }
}

fn tell_event(event: &KeepEvent<'_>, args: &KeeperArgs) {
    match event {
        KeepEvent::Connected { peer } => say!("limosa: {peer} sends its VM"),
        KeepEvent::Ended { newest: None, error, .. } => {
            say!(
                "limosa: nothing was kept of it{}",
                error.map(|error| format!(": {}", error_line(error))).unwrap_or_default()
            );
        }
        KeepEvent::Ended { newest: Some(newest), farewell, error } => {
            let why = match (farewell, error) {
                (Some(Farewell::Unprotected), _) => "its protection has ended; the VM continues there".to_owned(),
                (Some(Farewell::VmEnded), _) => "the VM has ended by itself".to_owned(),
                (Some(Farewell::VmLost), _) => "the VM is lost: its QEMU has ended without a word".to_owned(),
                (_, Some(error)) => format!("the VM may be lost: {}", error_line(*error)),
                (_, None) => "the VM may be lost: its host closed the connection without a word".to_owned(),
            };
            let is_lost = matches!(farewell, None | Some(Farewell::VmLost));
            let next = if is_lost { after_loss(args) } else { String::new() };
            say!("limosa: checkpoint {newest} is the last one: {why}{next}");
        }
        _ => {}
    }
}

/// Says how a VM that is lost continues.
fn after_loss(args: &KeeperArgs) -> String {
    match args.when_lost {
        _ if args.command.is_empty() => {
            format!("; limosa protect failover {} continues it", args.directory.display())
        }
        Some(time) => format!("; it continues here when it has been lost for {}", quantity::time(time)),
        None => format!("; kill -USR1 {} has it continue here", std::process::id()),
    }
}

fn tell(report: &KeepReport) {
    say!(
        "kept {} checkpoints of {} protections in {}",
        quantity::count(report.checkpoints),
        report.series,
        quantity::time(report.elapsed)
    );
    if report.checkpoints > 0 {
        super::tell_pages((report.pages, report.equal_pages, report.zero_pages), report.bytes);
    }
}

fn object(report: &KeepReport) -> Value {
    json!({
        "newest": report.newest.as_ref().map(|path| path.to_string_lossy()),
        "series": report.series,
        "checkpoints": report.checkpoints,
        "elapsed_ms": quantity::millis(report.elapsed),
        "pages": { "contents": report.pages, "unchanged": report.equal_pages, "zero": report.zero_pages },
        "received_bytes": report.bytes,
        "failed_over": report.failed_over,
    })
}
