//! `limosa serve`: images for clients of NBD, and for virtual machines over vhost-user-blk.
//!
//! Law: however it is ended by a signal that can be handled, images are flushed and closed after the last request, and
//! what fails then is reported.

mod address;
pub(crate) mod beside;
mod ctl;
mod devices;
mod dropped;
mod ends;
mod epochs;
mod images;
pub(crate) mod journals;
mod metrics;
pub(crate) mod on_top;
mod overlay;
pub(crate) mod remedy;
mod report;
mod sandbox;
mod servers;
mod steering;
mod wanted;

use std::process::{self, ExitCode};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_channel::{Listener, Uri};
use limosa_console::{check_stdout, print_out, quantity, say};
use limosa_export::{Export, ExportCounters, Exports};
use limosa_image::qcow2::JournalFolder;
use limosa_storage::block_on;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::json;
use signal_hook::iterator::Signals;

use crate::args::{SandboxArg, ServeArgs, ServeCommand, ServeCommandArgs};
use crate::img::{interrupt, object};
use crate::metrics::Metrics;
use crate::remote;
use crate::usage::misused;
use devices::BlockDevice;
use ends::{Clients, Ends};
use images::Images;
use sandbox::Needs;
use servers::Servers;
use steering::Steering;

/// How long after a signal the images may still be opened.
const OPENED_WITHIN: Duration = Duration::from_secs(3);

/// The least memory for requests of all connections.
const MEMORY_MIN: u64 = 128 << 20;

pub(crate) fn run(args: &ServeCommandArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        Some(ServeCommand::Ctl(args)) => ctl::run(args),
        None => serve_images(&args.serve),
    }
}

fn serve_images(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    if args.images.is_empty() && args.control.is_none() {
        misused("no image is given, as in: limosa serve disk.qcow2 --nbd unix:/run/vm/disk.sock");
    }
    let addresses = address::all(args);
    check(args, &addresses);
    let tls = args.tls.read()?;
    object::define(args.open.object.all())?;
    // Before anything is open that they would leave behind.
    let signals = Signals::new(interrupt::signals()).context("cannot handle signals")?;
    if addresses.contains(&Uri::Stdio) {
        address::keep_messages_from_client();
    }
    allow_descriptors();
    let exports = Exports::new();
    let journals = journals::open(args.journal.as_ref())?;
    let opened = open_images(args, journals, &exports)
        .and_then(|images| Ok((images, Arc::new(Servers::bind(args, tls, &exports)?))));
    let (images, servers) = match opened {
        Ok(opened) => opened,
        // Images may be open all the same: those before one that could not be.
        Err(error) => return first_failure([Err(error), close(&exports, &[])]).map(|()| ExitCode::FAILURE),
    };
    let begun = Instant::now();
    let served = serve_exports(args, &addresses, signals, (&servers, &exports, images));
    let closed = close(&exports, &servers.devices);
    first_failure([served, closed])?;
    print_report(args, &servers, &exports, begun);
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Serves exports until a signal or a command ends the servers.
fn serve_exports(
    args: &ServeArgs,
    addresses: &[Uri],
    signals: Signals,
    (servers, exports, images): (&Arc<Servers>, &Exports, Images),
) -> anyhow::Result<()> {
    let Ends { clients, control, metrics: listener } = Ends::bind(args, addresses)?;
    let nbd_addresses = clients.addresses();
    if remote::is_in_use() {
        // Its client has a thread and makes connections, which the sandbox does not allow.
        anyhow::ensure!(
            args.sandbox != SandboxArg::On,
            "--sandbox on: an image is in an object store; use off or auto"
        );
        say!("limosa: the sandbox is off: an image is in an object store");
    } else {
        sandbox::confine(args.sandbox, &needs(args, addresses, &images)?)?;
        if args.sandbox != SandboxArg::Off {
            remote::stay_out();
        }
    }
    announce(args, &clients, &servers.devices, (exports, listener.as_ref()))?;
    let steering = Steering::new(Arc::clone(servers), (exports.clone(), images), nbd_addresses, args);
    let steering = Arc::new(steering);
    let commands = Arc::clone(&steering);
    let control = control.map(|socket| socket.serve(commands)).transpose().context("--control")?;
    let (counted, all) = (Arc::clone(servers), exports.clone());
    let page = move || {
        let exports = all.all();
        let exports = exports.iter().map(|export| (export, counted.client_count(export)));
        metrics::page(&counted.nbd.counters(), exports)
    };
    let metrics = listener.map(|listener| Metrics::serve(listener, page)).transpose()?;
    let served = until_signal(signals, servers, || serve(clients, servers));
    // First the control socket, so that no client orders more.
    drop((control, metrics));
    steering.end();
    served
}

/// Ends the program if options contradict each other.
fn check(args: &ServeArgs, addresses: &[Uri]) {
    let piped = addresses.contains(&Uri::Stdio);
    if piped && args.json {
        misused("--json prints on standard output, which --nbd - uses for the client");
    }
    if piped && (addresses.len() > 1 || !args.vhost_user_blk.is_empty()) {
        misused("--nbd - serves one client, and no other address");
    }
    devices::check(args);
    if args.name.len() > args.images.len() {
        misused(format_args!("--name is given {} times for {} images", args.name.len(), args.images.len()));
    }
    if args.overlay.is_some() && args.images.len() != 1 {
        misused("--overlay is for one image");
    }
    if args.max_memory < MEMORY_MIN {
        misused("--max-memory must be at least 128M: room for requests of the greatest length");
    }
    if let Some(why) = args.tls.contradiction(addresses) {
        misused(why);
    }
}

/// Returns the names that the server uses after its start.
///
/// # Errors
/// A folder that is allowed does not exist.
fn needs(args: &ServeArgs, addresses: &[Uri], images: &Images) -> anyhow::Result<Needs> {
    for folder in &args.allow_dir {
        std::fs::read_dir(folder).with_context(|| format!("--allow-dir {}", folder.display()))?;
    }
    Ok(Needs {
        socket_folders: Ends::socket_folders(args, addresses),
        devices: !args.vhost_user_blk.is_empty(),
        image_folders: args.allow_dir.clone(),
        journal_folder: images.journals().map(|journals| journals.path().to_path_buf()),
    })
}

/// Opens the images on a thread of its own: a thread that has used a ring keeps it, with threads of the kernel that
/// would not be confined.
///
/// A store that does not answer takes minutes, in which a signal ends the program: images that are open by then are
/// left as after a kill, which their journals are for. If they are all open in time, the servers get the signal, too.
fn open_images(args: &ServeArgs, journals: Option<JournalFolder>, exports: &Exports) -> anyhow::Result<Images> {
    let mut signals = Signals::new(interrupt::signals()).context("cannot handle signals")?;
    let handle = signals.handle();
    let (end, ended) = mpsc::channel::<()>();
    let listening = thread::Builder::new().name("signals".into()).spawn(move || {
        let Some(signal) = signals.forever().next() else { return };
        if ended.recv_timeout(OPENED_WITHIN) == Err(RecvTimeoutError::Timeout) {
            say!("limosa: interrupted; the images were not all open yet");
            process::exit(interrupt::ENDED_BY + signal);
        }
    });
    let listening = listening.context("cannot start a thread for signals")?;
    let opened = thread::scope(|scope| scope.spawn(|| images::open(args, journals, exports)).join());
    drop(end);
    handle.close();
    // Before the sandbox, which this thread would be outside of.
    let _ = listening.join();
    opened.map_err(|_| anyhow::anyhow!("images cannot be opened; this is a bug in limosa"))?
}

/// Serves until it ends, and stops the servers at a signal.
fn until_signal(
    mut signals: Signals,
    servers: &Arc<Servers>,
    serve: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let (stopper, handle) = (Arc::clone(servers), signals.handle());
    let listening = thread::Builder::new().name("signals".into()).spawn(move || {
        for _signal in signals.forever() {
            stopper.stop();
        }
    });
    let listening = listening.context("cannot start a thread for signals")?;
    let served = serve();
    handle.close();
    let _ = listening.join();
    served
}

/// Takes as many descriptors as this process may have: a client needs four. If that fails there is room for fewer.
fn allow_descriptors() {
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Serves clients until the servers are stopped.
fn serve(clients: Clients, servers: &Servers) -> anyhow::Result<()> {
    let listeners = match clients {
        Clients::Connected(channel) => return Ok(servers.nbd.serve_channel(channel)?),
        Clients::Listeners(listeners) => listeners,
    };
    let ended = thread::scope(|scope| {
        let nbd = listeners
            .iter()
            .map(|listener| start(scope, "nbd-listener", servers, move || Ok(servers.nbd.serve(listener)?)));
        let devices =
            servers.devices.iter().map(|device| start(scope, "blk-listener", servers, move || device.serve()));
        let threads: Vec<_> = nbd.chain(devices).collect();
        if threads.iter().any(Result::is_err) {
            servers.stop();
        }
        threads
            .into_iter()
            .map(|thread| Ok(thread.context("cannot start a thread for clients")?.join()))
            .collect::<Vec<_>>()
    });
    first_failure(ended.into_iter().map(|served| {
        served.and_then(|served| {
            served.map_err(|_| anyhow::anyhow!("a thread of the server failed; this is a bug in limosa"))?
        })
    }))
}

/// Starts a thread that serves. The end of one is the end of all.
fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &str,
    servers: &'scope Servers,
    serve: impl FnOnce() -> anyhow::Result<()> + Send + 'scope,
) -> std::io::Result<ScopedJoinHandle<'scope, anyhow::Result<()>>> {
    let serve = move || {
        let served = serve();
        servers.stop();
        served
    };
    thread::Builder::new().name(name.into()).spawn_scoped(scope, serve)
}

/// Says that clients can connect.
fn announce(
    args: &ServeArgs,
    clients: &Clients,
    devices: &[BlockDevice],
    (exports, metrics): (&Exports, Option<&Listener>),
) -> anyhow::Result<()> {
    // One that is connected already needs no address.
    let Clients::Listeners(listeners) = clients else { return Ok(()) };
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
        let exports: Vec<_> = exports.iter().map(|export| report::description(export)).collect();
        let devices: Vec<_> = devices.iter().map(BlockDevice::description).collect();
        let mut ready = json!({ "event": "ready", "nbd": uris, "vhost-user-blk": devices, "exports": exports });
        if let (Some(metrics), Some(ready)) = (metrics, ready.as_object_mut()) {
            ready.insert("metrics".into(), metrics.local_uri().to_string().into());
        }
        print_out!("{ready}");
        check_stdout()?;
    }
    if let Some(metrics) = metrics {
        say!("limosa: metrics at {}", metrics.local_uri());
    }
    if let [_, _, ..] = exports.as_slice() {
        for export in &exports {
            let size = quantity::bytes(export.size());
            say!("limosa: export {:?} is {} ({size})", export.name(), export.disk().name());
        }
    }
    let addresses: Vec<_> = uris.into_iter().chain(devices.iter().map(BlockDevice::address)).collect();
    say!("limosa: serving {what} at {}", addresses.join(" and "));
    Ok(())
}

/// Flushes and closes all images.
fn close(exports: &Exports, devices: &[BlockDevice]) -> anyhow::Result<()> {
    // A thread that a front end blocks may have begun requests that it never ends, and closing waits for them. What was
    // flushed is safe; the failure of the device is reported.
    let is_blocked = |export: &Arc<Export>| devices.iter().any(|device| device.is_blocked(export));
    first_failure(exports.all().into_iter().filter(|export| !is_blocked(export)).map(|export| {
        let disk = export.disk();
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

fn print_report(args: &ServeArgs, servers: &Servers, exports: &Exports, begun: Instant) {
    let exports = exports.all();
    let server = servers.nbd.counters();
    let front_ends: u64 = servers.devices.iter().map(BlockDevice::front_ends).sum();
    let sum = |of: fn(&ExportCounters) -> u64| exports.iter().map(|export| of(&export.counters())).sum::<u64>();
    say!(
        "limosa: {} connections served in {}; {} read, {} written, {} flushes",
        quantity::count(server.connections + front_ends),
        quantity::time(begun.elapsed()),
        quantity::bytes(sum(|counters| counters.read_bytes)),
        quantity::bytes(sum(|counters| counters.written_bytes)),
        quantity::count(sum(|counters| counters.flushes)),
    );
    if let Some(cost) = remote::cost() {
        say!("limosa: object stores: {} requests, {} bytes received", cost["requests"], cost["bytes-received"]);
    }
    if args.json {
        let exports: Vec<_> = exports.iter().map(|export| report::ended(export)).collect();
        let mut counters = report::server_counters(&server);
        counters["front-ends"] = front_ends.into();
        let mut ended = json!({ "event": "ended", "counters": counters, "exports": exports });
        remote::add_cost(&mut ended);
        print_out!("{ended}");
    }
}
