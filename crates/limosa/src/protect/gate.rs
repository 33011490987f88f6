//! `limosa protect gate`: a VM's network, held back while there are checkpoints of the VM.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use limosa_console::{print_out, quantity, say};
use limosa_migrate::output::OutputCounters;
use limosa_protect::gate::{Gate, GateAddresses, GateClient, GateError, GateKeeper, GateOptions, GateReport};
use limosa_socket::SocketAccess;
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;

use crate::args::GateArgs;
use crate::usage::misused;

/// How long a gate may take for an answer: it does nothing that waits.
pub(super) const ANSWER_WITHIN: Duration = Duration::from_secs(5);

pub(super) fn run(args: &GateArgs) -> anyhow::Result<ExitCode> {
    if args.socket == args.listen {
        misused(format_args!("--listen {}: must be another socket than that of the gate", args.listen.display()));
    }
    let mut options = GateOptions::default();
    options.limit = args.limit;
    options.grace = args.grace;
    options.access = SocketAccess::default().mode(args.socket_mode).group(args.socket_group);
    let (stop, signalled) = UnixStream::pair().context("cannot handle signals")?;
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        pipe::register(signal, signalled.try_clone()?).context("cannot handle signals")?;
    }
    let addresses = GateAddresses { vm: &args.listen, keeper: &args.socket, network: &args.net };
    let gate = Gate::open(addresses, &options)?;
    let report = gate.run(stop.as_fd(), &|line| say!("limosa: {line}"))?;
    tell(&report);
    if args.json {
        print_out!("{}", object(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes gates for a protection.
pub(super) fn connect(sockets: &[PathBuf], keeper: GateKeeper) -> anyhow::Result<Vec<GateClient>> {
    let connect = |socket: &PathBuf| match GateClient::connect(socket, ANSWER_WITHIN, keeper) {
        Err(error @ GateError::Connect { .. }) => {
            Err(anyhow::Error::from(error).context("no gate; start it before the VM: limosa protect gate"))
        }
        other => Ok(other?),
    };
    sockets.iter().map(connect).collect()
}

/// Says which gates had no VM when they were taken.
pub(super) fn warn_of_idle(sockets: &[PathBuf], gates: &[GateClient]) {
    for (socket, _) in sockets.iter().zip(gates).filter(|(_, gate)| !gate.has_vm()) {
        say!("limosa: no VM is connected to the gate at {}: it holds no output until one is", socket.display());
    }
}

fn tell(report: &GateReport) {
    say!(
        "forwarded {} frames of the VM, {}, and {} to it, {}",
        quantity::count(report.sent_frames),
        quantity::bytes(report.sent_bytes),
        quantity::count(report.received_frames),
        quantity::bytes(report.received_bytes),
    );
    if report.series > 0 {
        say!("  held {} of them in {} protections", quantity::count(report.held.held_packets), report.series);
    }
}

fn object(report: &GateReport) -> Value {
    json!({
        "sent": { "frames": report.sent_frames, "bytes": report.sent_bytes, "undelivered": report.undelivered_frames },
        "received": {
            "frames": report.received_frames,
            "bytes": report.received_bytes,
            "undelivered": report.unreceived_frames,
        },
        "series": report.series,
        "held": held(&report.held),
    })
}

/// Counters of held output.
pub(super) fn held(output: &OutputCounters) -> Value {
    json!({
        "held_frames": output.held_packets,
        "held_bytes": output.held_bytes,
        "released_frames": output.released_packets,
        "released_bytes": output.released_bytes,
        "aborted_frames": output.aborted_packets,
        "overflow_frames": output.overflow_packets,
        "undelivered_frames": output.undelivered_packets,
        "hold": {
            "median_ms": quantity::millis(output.median_hold),
            "max_ms": quantity::millis(output.longest_hold),
        },
    })
}
