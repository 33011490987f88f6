//! `limosa receive`: a migration destination that is a file.
//!
//! The law: a source that waits for an answer gets it when the file is durable and has its name, and not before; until
//! then its VM is its own. One that does not wait cannot be helped, and is only recognized.

use limosa_console::quantity;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use limosa_channel::{Options, Tls};
use limosa_control::JobKind;
use limosa_migrate::MigrateError;
use limosa_migrate::control::Phase;
use limosa_migrate::multifd::MultifdOptions;
use limosa_migrate::stats::DestinationStats;
use limosa_migrate::stored::{Destination, DestinationOptions, ReceivedStream};
use limosa_snapshot::{Manifest, Published, SnapshotWriter, Transport, UnnamedFile};
use serde_json::json;

use crate::args::ReceiveArgs;
use crate::endpoint::{self, PeerEnd, Wire};
use crate::job::JobHandles;
use crate::packed;
use crate::remedy;
use crate::report;
use crate::usage::misused;
use limosa_console::{error_line, print_out, say};

/// Longest silence of a source that is there.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// How long nothing may come behind the end of the stream. The VM waits at its source, and the file gets its name
/// before the end is certain.
const AFTER_THE_END: Duration = Duration::from_millis(100);

pub(crate) fn run(args: &ReceiveArgs) -> anyhow::Result<ExitCode> {
    if let Some(why) = args.contradiction() {
        misused(why);
    }
    endpoint::keep_stdout(&args.uri, args.endpoint.json);
    let tls = args.tls.read()?;
    // Refused before it waits for a connection.
    let pending = packed::new_file(&args.snapshot, args.new.force)?;
    let handles = JobHandles::with_socket(args.endpoint.control.as_deref(), JobKind::Save, "receiving", false)?;
    handles.engine.control.set_max_bandwidth(args.endpoint.max_bandwidth);
    let received = receive(args, tls, pending, &handles);
    drop(handles);
    let received = received?;
    tell(args, &received);
    if args.endpoint.json {
        print_out!("{}", object(&received));
    }
    Ok(ExitCode::SUCCESS)
}

/// The result of receiving a VM.
struct Received {
    published: Published,
    stats: DestinationStats,
    file: limosa_channel::Counters,
    /// Whether the source got the answer that all is well.
    answered: bool,
    elapsed: Duration,
}

fn receive(
    args: &ReceiveArgs,
    tls: Option<Tls>,
    pending: UnnamedFile,
    handles: &JobHandles,
) -> anyhow::Result<Received> {
    let control = &handles.engine.control;
    let mut writer = SnapshotWriter::new(pending, args.new.write_options())?;
    let options = Options { read_rate_limit: Some(control.rate_limit().clone()), tls, ..Options::default() };
    let count = args.channels.channels.unwrap_or(0);
    let Wire { channel, pages, end } = Wire::from(&args.uri, &options, count, args.endpoint.timeout, handles)?;
    let begun = Instant::now();
    let options = DestinationOptions {
        answer_timeout: Some(args.endpoint.timeout.unwrap_or(ANSWER_TIMEOUT)),
        end_of_stream_timeout: AFTER_THE_END,
        recorded: end.recorded || args.endpoint.one_way,
        ..DestinationOptions::default()
    };
    let multifd = MultifdOptions { compression: args.channels.compression };
    let destination = Destination::new(&mut writer, channel, &handles.engine).options(options).channels(pages, multifd);
    let incoming = match destination.run() {
        Ok(incoming) => incoming,
        Err(error) => return Err(unreceived(error, end)),
    };
    let file = writer.counters();
    let answered = incoming.has_return_path();
    let stats = incoming.stats;
    let timeout = args.endpoint.timeout.unwrap_or(ANSWER_TIMEOUT);
    let published = if answered {
        let published = publish(&incoming, writer, handles)?;
        hand_over(incoming, &published.path).map_err(|error| afterwards(&published.path, error))??;
        end.finish(timeout).map_err(|error| afterwards(&published.path, error))?;
        published
    } else {
        // What a command that fails has said is not to be trusted.
        if end.is_command() {
            end.finish(timeout).map_err(|error| anyhow!("{}; nothing was kept", error_line(&error)))?;
        }
        publish(&incoming, writer, handles)?
    };
    handles.engine.progress.set_phase(Phase::Completed);
    Ok(Received { published, stats, file, answered, elapsed: begun.elapsed() })
}

fn unreceived(error: MigrateError, end: PeerEnd) -> anyhow::Error {
    let hint = match &error {
        MigrateError::NoReturnPath { .. } => "; to receive a recorded stream, use --one-way",
        MigrateError::Sink(_) => "",
        _ => "; nothing was kept",
    };
    let remedy = remedy::of(&error);
    let explained = end.explain(error);
    anyhow!("{}{remedy}{hint}", limosa_console::anyhow_error_line(&explained))
}

/// Gives the file its name, or reports to the source that this side failed.
fn publish(incoming: &ReceivedStream, writer: SnapshotWriter, handles: &JobHandles) -> anyhow::Result<Published> {
    let mut manifest = Manifest::new();
    manifest.transport = Some(Transport::Socket);
    manifest.pages.resent = incoming.stats.resent_pages;
    let published = handles
        .engine
        .control
        .check()
        .map_err(anyhow::Error::from)
        .and_then(|()| Ok(writer.finish(&incoming.tail, manifest)?));
    if published.is_err() {
        // A source that does not receive it sees the channel close.
        let _ = incoming.refuse();
    }
    published
}

/// Answers the source. The outer failure leaves the file, which may be all that there is of the VM; the inner
/// one has taken it away, because it is not whole.
fn hand_over(incoming: ReceivedStream, path: &Path) -> Result<anyhow::Result<()>, MigrateError> {
    incoming.acknowledge()?;
    if let Err(error @ MigrateError::Protocol(_)) = incoming.confirm_end() {
        let _ = std::fs::remove_file(path);
        return Ok(Err(error.into()));
    }
    Ok(Ok(()))
}

fn afterwards(path: &Path, error: impl std::error::Error + 'static) -> anyhow::Error {
    anyhow!(
        "the snapshot {} is complete, but then: {}; check at the source whether its VM still runs",
        path.display(),
        error_line(&error)
    )
}

fn tell(args: &ReceiveArgs, received: &Received) {
    let manifest = &received.published.manifest;
    let pages = &manifest.pages;
    let stored = pages.normal.saturating_mul(limosa_page::PAGE_SIZE);
    say!(
        "received {} ({} of {} memory) in {}, {:.2} GiB/s, from {}",
        received.published.path.display(),
        quantity::bytes(stored),
        quantity::bytes(manifest.ram_bytes),
        quantity::time(received.elapsed),
        quantity::rate(stored, received.elapsed),
        args.uri,
    );
    say!("  pages: {}", report::pages(pages, "left out by the source", "sent again"));
    if !received.answered {
        say!("  the source did not wait for an acknowledgement: it took its last write for success");
    }
}

fn object(received: &Received) -> serde_json::Value {
    let manifest = &received.published.manifest;
    json!({
        "snapshot": received.published.path.to_string_lossy(),
        "id": manifest.id,
        "machine": manifest.machine,
        "run_state": manifest.run_state,
        "answered": received.answered,
        "elapsed_ms": quantity::millis(received.elapsed),
        "gib_per_s": quantity::rate(manifest.pages.normal * limosa_page::PAGE_SIZE, received.elapsed),
        "ram_bytes": manifest.ram_bytes,
        "file_length": received.published.length,
        "pages": manifest.pages,
        "bytes": report::page_bytes(&manifest.pages),
        "channel": report::counters(&received.stats.channel),
        "file": report::counters(&received.file),
    })
}
