//! `limosa serve`: images for clients of NBD.
//!
//! Law: however it is ended by a signal that can be handled, images are flushed and closed after the last request, and
//! what fails then is reported.

mod address;
mod images;

use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::Context as _;
use limosa_channel::{Listener, Options, Uri};
use limosa_console::{check_stdout, print_out, quantity, say};
use limosa_export::nbd::{Limits, Server, ServerCounters, ServerError, ServerOptions};
use limosa_export::{Export, ExportCounters, Exports};
use limosa_page::to_usize;
use limosa_storage::block_on;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use signal_hook::iterator::Signals;

use crate::args::ServeArgs;
use crate::img::interrupt;
use crate::usage::misused;

pub(crate) fn run(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let addresses = address::all(args);
    let piped = addresses.contains(&Uri::Stdio);
    if piped && args.json {
        misused("--json prints on standard output, which --nbd - uses for the client");
    }
    if piped && addresses.len() > 1 {
        misused("--nbd - serves one client, and no other address");
    }
    if args.name.len() > args.images.len() {
        misused(format_args!("--name is given {} times for {} images", args.name.len(), args.images.len()));
    }
    if let Some(why) = args.tls.contradiction(&addresses) {
        misused(why);
    }
    let tls = args.tls.read()?;
    // Before anything is open that they would leave behind.
    let mut signals = Signals::new(interrupt::signals()).context("cannot handle signals")?;
    if piped {
        address::keep_messages_from_client();
    }
    let exports = images::open(args)?;
    allow_descriptors();
    let limits = Limits::default()
        .connections(to_usize(args.max_connections.into()))
        .handshake(args.handshake_timeout)
        .stall(args.stall_timeout);
    let mut options = ServerOptions::default().limits(limits);
    if let Some((tls, required)) = tls {
        options = options.tls(tls, required);
    }
    let server = Server::new(exports.clone(), options)?;
    let stopper = server.stopper();
    let handle = signals.handle();
    let begun = Instant::now();
    let listening = thread::Builder::new().name("signals".into()).spawn(move || {
        for _signal in signals.forever() {
            stopper.stop();
        }
    });
    let listening = listening.context("cannot start a thread for signals")?;
    let served = serve(args, &addresses, &server, &exports);
    handle.close();
    let _ = listening.join();
    let closed = close(&exports);
    first_failure([served, closed])?;
    report(args, &server.counters(), &exports, begun);
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Takes as many descriptors as this process may have: a client needs four. If that fails there is room for fewer.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Serves clients at all addresses until the server is stopped.
fn serve(args: &ServeArgs, addresses: &[Uri], server: &Server, exports: &Exports) -> anyhow::Result<()> {
    let options = Options::default();
    if addresses == [Uri::Stdio] {
        let channel = address::standard_streams(&options)?;
        return Ok(server.serve_channel(channel)?);
    }
    let bind = |uri| Listener::bind(uri, &options).context("--nbd");
    let listeners = addresses.iter().map(bind).collect::<anyhow::Result<Vec<_>>>()?;
    announce(args, &listeners, exports)?;
    let ended = thread::scope(|scope| {
        let serve = |listener| {
            let served = server.serve(listener);
            // The end of one is the end of all.
            server.stopper().stop();
            served
        };
        let start =
            |listener| thread::Builder::new().name("nbd-listener".into()).spawn_scoped(scope, move || serve(listener));
        let threads: Vec<_> = listeners.iter().map(start).collect();
        if threads.iter().any(Result::is_err) {
            server.stopper().stop();
        }
        threads
            .into_iter()
            .map(|thread| Ok(thread.context("cannot start a thread for clients")?.join()))
            .collect::<Vec<_>>()
    });
    first_failure(ended.into_iter().map(|served| {
        served.and_then(|served| {
            Ok(served.map_err(|_| anyhow::anyhow!("a thread of the server failed; this is a bug in limosa"))??)
        })
    }))
}

/// Says that clients can connect.
fn announce(args: &ServeArgs, listeners: &[Listener], exports: &Exports) -> anyhow::Result<()> {
    let exports = exports.all();
    let name = exports.first().filter(|_| exports.len() == 1).map_or("", |export| export.name());
    let uris: Vec<_> = listeners
        .iter()
        .map(|listener| address::client_uri(listener.local_uri(), name, args.tls.is_required()))
        .collect();
    let what = match exports.as_slice() {
        [export] => format!("{} ({})", export.disk().name(), quantity::bytes(export.size())),
        exports => format!("{} images", exports.len()),
    };
    if args.json {
        let exports: Vec<_> = exports.iter().map(|export| description(export)).collect();
        print_out!("{}", json!({ "event": "ready", "nbd": uris, "exports": exports }));
        check_stdout()?;
    }
    say!("limosa: serving {what} at {}", uris.join(" and "));
    Ok(())
}

fn description(export: &Export) -> Value {
    let disk = export.disk();
    json!({
        "name": export.name(),
        "image": &**disk.name(),
        "format": disk.format(),
        "size": export.size(),
        "read-only": export.is_read_only(),
    })
}

/// Flushes and closes all images.
fn close(exports: &Exports) -> anyhow::Result<()> {
    first_failure(exports.all().into_iter().map(|export| {
        let disk = Arc::clone(export.disk());
        block_on(disk.close()).with_context(|| format!("cannot close {}", disk.name()))
    }))
}

/// Returns the first failure of all results, and prints the others.
fn first_failure(results: impl IntoIterator<Item = anyhow::Result<()>>) -> anyhow::Result<()> {
    let mut first = Ok(());
    for result in results {
        match (result, &first) {
            (Err(error), Err(_)) => say!("limosa: {}", limosa_console::anyhow_error_line(&error)),
            (Err(error), Ok(())) => first = Err(error),
            (Ok(()), _) => {}
        }
    }
    first
}

fn report(args: &ServeArgs, server: &ServerCounters, exports: &Exports, begun: Instant) {
    let exports = exports.all();
    let sum = |of: fn(&ExportCounters) -> u64| exports.iter().map(|export| of(&export.counters())).sum::<u64>();
    say!(
        "limosa: {} connections served in {}; {} read, {} written, {} flushes",
        quantity::count(server.connections),
        quantity::time(begun.elapsed()),
        quantity::bytes(sum(|counters| counters.read_bytes)),
        quantity::bytes(sum(|counters| counters.written_bytes)),
        quantity::count(sum(|counters| counters.flushes)),
    );
    if args.json {
        let exports: Vec<_> = exports.iter().map(|export| export_counters(export)).collect();
        print_out!("{}", json!({ "event": "ended", "counters": server_counters(server), "exports": exports }));
    }
}

fn server_counters(counters: &ServerCounters) -> Value {
    json!({
        "connections": counters.connections,
        "refused": counters.refused,
        "handshake-timeouts": counters.handshake_timeouts,
        "stalled": counters.stalled,
        "protocol-errors": counters.protocol_errors,
        "receives": counters.receives,
        "sends": counters.sends,
    })
}

fn export_counters(export: &Export) -> Value {
    let counters = export.counters();
    json!({
        "name": export.name(),
        "reads": counters.reads,
        "read-bytes": counters.read_bytes,
        "writes": counters.writes,
        "written-bytes": counters.written_bytes,
        "zeroes": counters.zeroes,
        "zeroed-bytes": counters.zeroed_bytes,
        "flushes": counters.flushes,
        "others": counters.others,
        "failures": counters.failures,
    })
}

/// The remedy for a server that failed.
pub(crate) fn remedy(error: &ServerError) -> Option<&'static str> {
    match error {
        ServerError::Start(_) | ServerError::Thread(_) => {
            Some("; raise the limits of this user (ulimit -n, ulimit -u)")
        }
        _ => None,
    }
}
