//! `limosa send`: a migration source whose VM is a file.

use limosa_console::quantity;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use limosa_channel::{Channel, Options, Tls};
use limosa_control::JobKind;
use limosa_migrate::MigrateError;
use limosa_migrate::multifd::MultifdSourceOptions;
use limosa_migrate::stored::{Milestone, PostcopyOptions, PostcopySource, PrecopyOptions, PrecopySource, PresentBlock};
use limosa_qemu::{BlockPlace, LazyReport};
use limosa_snapshot::Snapshot;
use serde_json::json;

use crate::args::{SendArgs, SendMemoryArg, SendModeArg};
use crate::endpoint::{self, Wire};
use crate::import::Stored;
use crate::job::JobHandles;
use crate::packed;
use crate::remedy;
use crate::remote;
use crate::report;
use crate::restore;
use crate::usage::misused;
use limosa_console::{error_line, print_out, say};

/// How long a destination may take to be reached, and to answer for the first time.
const REACH_WITHIN: Duration = Duration::from_secs(60);
/// How long a destination may take to make room for the next byte, or to finish: it may have gigabytes to make durable.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(600);
/// Send buffer to ask for: a few batches of pages.
const SEND_BUFFER: usize = 512 << 10;

/// The result of sending.
struct Sent {
    normal: u64,
    zero: u64,
    channel: limosa_channel::Counters,
    lazy: Option<LazyReport>,
    to_guest: Option<Duration>,
    /// Whether the destination has reported success.
    answered: bool,
    elapsed: Duration,
}

pub(crate) fn run(args: &SendArgs) -> anyhow::Result<ExitCode> {
    if let Some(why) = args.contradiction() {
        misused(why);
    }
    packed::define_key(&args.key)?;
    endpoint::keep_stdout(&args.uri, args.endpoint.json);
    let tls = args.tls.read()?;
    let stored = Stored::open(&args.snapshot)?;
    if stored.is_foreign() && args.mode == SendModeArg::Postcopy {
        bail!("{}: not a snapshot; postcopy needs one: convert it with limosa import", args.snapshot.display());
    }
    let snapshot = stored.snapshot("and sending it", false)?;
    snapshot.check_restorable()?;
    snapshot.lock_serving()?;
    let mapped = mapped_blocks(args, &snapshot)?;
    let handles = JobHandles::with_socket(args.endpoint.control.as_deref(), JobKind::Restore, "sending", false)?;
    handles.engine.control.set_max_bandwidth(args.endpoint.max_bandwidth);
    let sent = send(args, tls, &snapshot, mapped, &handles);
    drop(handles);
    let sent = sent?;
    tell(args, &sent);
    remote::tell_cost();
    if args.endpoint.json {
        let mut object = object(&sent);
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the RAM blocks that the destination maps, according to its user.
fn mapped_blocks(args: &SendArgs, snapshot: &Snapshot) -> anyhow::Result<Vec<PresentBlock>> {
    if args.memory == SendMemoryArg::Sent {
        return Ok(Vec::new());
    }
    let path = args.snapshot.display();
    if !snapshot.is_mappable() {
        bail!("{}", packed::unmappable(snapshot));
    }
    snapshot.verify_all()?;
    snapshot.make_read_only()?;
    let memory = BlockPlace::guest_memory_of(snapshot).map_err(|why| anyhow!("{path}: cannot be mapped: {why}"))?;
    Ok(memory.into_iter().map(|block| PresentBlock::unchanged(block.name)).collect())
}

fn send(
    args: &SendArgs,
    tls: Option<Tls>,
    snapshot: &Snapshot,
    in_place: Vec<PresentBlock>,
    handles: &JobHandles,
) -> anyhow::Result<Sent> {
    let begun = Instant::now();
    let limit = args.endpoint.timeout;
    let options = Options {
        connect_timeout: Some(limit.unwrap_or(REACH_WITHIN)),
        write_timeout: Some(limit.unwrap_or(ANSWER_TIMEOUT)),
        send_buffer: Some(SEND_BUFFER),
        tls,
        ..Options::default()
    };
    let multifd = MultifdSourceOptions {
        compression: args.channels.compression,
        uuid: snapshot.manifest().and_then(|manifest| manifest.vm_uuid).map(|uuid| uuid.into_bytes()),
        detect_zero: false,
        zero_copy: args.zero_copy,
        ..MultifdSourceOptions::default()
    };
    // What several channels are made to can answer, if it is asked.
    multifd.check_zero_copy(snapshot, !args.endpoint.one_way)?;
    let Wire { channel, pages, end } = Wire::to(&args.uri, &options, args.channels.channels.unwrap_or(0))?;
    let answers = end.answers() && !args.endpoint.one_way;
    let start = GuestStart { begun, after: OnceLock::new() };
    let sent = if args.recover || args.mode == SendModeArg::Postcopy {
        if !answers {
            anyhow::bail!("{}: postcopy needs a return path for page requests, and this URI has none", args.uri);
        }
        let source = PostcopySource::new(snapshot, channel, &handles.engine);
        postcopy(args, source, &options, &start)
    } else {
        let options = PrecopyOptions {
            return_path: answers,
            ping_timeout: Some(limit.unwrap_or(REACH_WITHIN)),
            answer_timeout: limit.unwrap_or(ANSWER_TIMEOUT),
            in_place,
            ..PrecopyOptions::default()
        };
        let source = PrecopySource::new(snapshot, channel, &handles.engine).options(options).channels(pages, multifd);
        source.and_then(PrecopySource::run).map(|stats| Sent {
            normal: stats.normal_pages,
            zero: stats.zero_pages,
            channel: stats.channel,
            lazy: None,
            to_guest: None,
            answered: answers,
            elapsed: stats.elapsed,
        })
    };
    match sent {
        Ok(mut sent) => {
            let timeout = limit.unwrap_or(ANSWER_TIMEOUT);
            let finished = if sent.answered { end.finish(timeout) } else { end.finish_unanswered(timeout) };
            match finished {
                Err(error) if sent.answered => {
                    return Err(anyhow!(
                        "everything was sent and the destination reported success, but {}",
                        error_line(&error)
                    ));
                }
                finished => finished?,
            }
            sent.elapsed = begun.elapsed();
            Ok(sent)
        }
        Err(error) => {
            let advice = advice(args, &error, start.after.get().is_some());
            Err(anyhow!("{}{advice}", limosa_console::anyhow_error_line(&end.explain(error))))
        }
    }
}

/// When the guest began to run at the destination.
struct GuestStart {
    begun: Instant,
    /// Measured from `begun`; empty until the guest runs.
    after: OnceLock<Duration>,
}

fn postcopy<'a>(
    args: &'a SendArgs,
    source: PostcopySource<'a, Snapshot>,
    options: &'a Options,
    start: &'a GuestStart,
) -> Result<Sent, MigrateError> {
    let mut postcopy = PostcopyOptions { page_sizes: args.page_size.iter().cloned().collect(), ..Default::default() };
    if let Some(limit) = args.endpoint.timeout {
        postcopy.answer_timeout = limit;
    }
    let mut source = source.options(postcopy).on_milestone(|milestone| {
        if milestone == Milestone::DevicesLoaded {
            let after = *start.after.get_or_init(|| start.begun.elapsed());
            let what = if args.recover { "the destination continues" } else { "the guest runs" };
            say!("{what} after {}; its memory follows", quantity::time(after));
        }
    });
    if args.preempt {
        source = source.preempt(Box::new(|| Channel::connect(&args.uri, options)));
    }
    let stats = if args.recover { source.recover() } else { source.run() }?;
    Ok(Sent {
        normal: stats.normal_pages,
        zero: stats.zero_pages,
        channel: stats.main,
        lazy: Some(LazyReport { request_latency: stats.request_latency, main: stats.main, preempt: stats.preempt }),
        to_guest: start.after.get().copied(),
        answered: true,
        elapsed: stats.elapsed,
    })
}

/// Returns advice after a failure.
fn advice(args: &SendArgs, error: &MigrateError, guest_runs: bool) -> String {
    if guest_runs || args.recover {
        return format!(
            "; the guest stalls where it accesses missing memory: give its QEMU the command migrate-recover, then run: \
             limosa send --recover {} {}",
            args.snapshot.display(),
            args.uri
        );
    }
    let remedy = remedy::of(error);
    let hint = match (error, args.channels.channels) {
        (
            MigrateError::Channel(_)
            | MigrateError::Multifd { .. }
            | MigrateError::AnswerTimedOut { .. }
            | MigrateError::Protocol(_)
            | MigrateError::Refused { .. },
            Some(count),
        ) => format!(
            "; not sent: see the log of the destination (it needs multifd on, multifd-channels {count} and \
             multifd-compression {})",
            args.channels.compression.name()
        ),
        (MigrateError::AnswerTimedOut { .. }, _) if args.mode == SendModeArg::Precopy => {
            "; if the other end cannot answer, use --one-way".into()
        }
        (
            MigrateError::Channel(_)
            | MigrateError::AnswerTimedOut { .. }
            | MigrateError::Protocol(_)
            | MigrateError::Refused { .. },
            _,
        ) if args.mode == SendModeArg::Postcopy => {
            "; not sent: see the log of the destination (it needs the capability postcopy-ram)".into()
        }
        (MigrateError::Channel(_) | MigrateError::Protocol(_), _) => {
            "; not sent: see the log of the destination".into()
        }
        _ => String::new(),
    };
    remedy + &hint
}

fn tell(args: &SendArgs, sent: &Sent) {
    let moved = sent.normal.saturating_mul(limosa_page::PAGE_SIZE);
    say!(
        "sent {} to {} in {}: {} pages with contents, {} zero; {} at {:.2} GiB/s",
        args.snapshot.display(),
        args.uri,
        quantity::time(sent.elapsed),
        quantity::count(sent.normal),
        quantity::count(sent.zero),
        quantity::bytes(moved),
        quantity::rate(moved, sent.elapsed)
    );
    // What the kernel has of it besides pages, headers, was copied in any case.
    match sent.channel.spliced.min(moved) {
        _ if moved == 0 => {}
        0 => say!("  the pages were read and copied"),
        spliced if spliced == moved => say!("  the pages were spliced from the file, not copied"),
        spliced => {
            say!("  {} of it were spliced from the file, the rest was read and copied", quantity::bytes(spliced));
        }
    }
    if let Some(lazy) = &sent.lazy {
        restore::tell_requests(lazy);
    }
    if !sent.answered {
        say!("  no answer was possible: check at the other end whether it has arrived");
    }
}

fn object(sent: &Sent) -> serde_json::Value {
    let moved = sent.normal.saturating_mul(limosa_page::PAGE_SIZE);
    json!({
        "mode": if sent.lazy.is_some() { "postcopy" } else { "precopy" },
        "answered": sent.answered,
        "to_guest_ms": sent.to_guest.map(quantity::millis),
        "elapsed_ms": quantity::millis(sent.elapsed),
        "gib_per_s": quantity::rate(moved, sent.elapsed),
        "pages": { "normal": sent.normal, "zero": sent.zero },
        "lazy": sent.lazy.as_ref().map(restore::lazy_object),
        "channel": report::counters(&sent.channel),
    })
}
