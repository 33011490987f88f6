//! `limosa export`.

use limosa_console::quantity;
use std::fmt;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};
use limosa_control::JobKind;
use limosa_migrate::stats::PrecopyStats;
use limosa_qemu::is_same_file;
use limosa_snapshot::Snapshot;
use serde_json::json;

use crate::args::ExportArgs;
use crate::job::JobHandles;
use crate::packed;
use crate::remote;
use crate::report;
use crate::usage::misused;
use crate::vm_state;
use limosa_console::{print_out, say};

pub(crate) fn run(args: &ExportArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    let snapshot = packed::open(&args.snapshot)?;
    let target = Target::of(args)?;
    let stats = target.write(args, &snapshot)?;
    tell(&target, &snapshot, &stats);
    remote::tell_cost();
    if args.json {
        let mut object = object(&target, &stats);
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The place of the exported VM.
enum Target<'a> {
    Stdout,
    Stream(&'a Path),
    Inside { image: &'a Path, tag: &'a str },
}

impl<'a> Target<'a> {
    fn of(args: &'a ExportArgs) -> anyhow::Result<Self> {
        match (&args.stream, args.into.as_deref().zip(args.tag.as_deref())) {
            (_, Some((image, tag))) => Ok(Self::Inside { image, tag }),
            (Some(stream), None) if stream == Path::new("-") => {
                if args.json {
                    misused("--json prints to standard output, which carries the stream");
                }
                Ok(Self::Stdout)
            }
            (Some(stream), None) => Ok(Self::Stream(stream)),
            // The command line asks for one of the two.
            (None, None) => bail!("give a file to create, or --into IMAGE --tag NAME"),
        }
    }

    fn write(&self, args: &ExportArgs, snapshot: &Snapshot) -> anyhow::Result<PrecopyStats> {
        if let Self::Stream(stream) = self
            && is_same_file(stream, &args.snapshot)
        {
            bail!("{}: the snapshot and the stream must be different files", stream.display());
        }
        snapshot.lock_serving()?;
        let stdout = std::io::stdout();
        if matches!(self, Self::Stdout) && stdout.is_terminal() {
            bail!("standard output is a terminal: redirect it, or give a file");
        }
        let handles = JobHandles::with_socket(None, JobKind::Save, "exporting", matches!(self, Self::Stdout))?;
        let stats = match self {
            Self::Stdout => {
                let own = stdout.as_fd().try_clone_to_owned().context("standard output")?;
                snapshot.export(own, Path::new("standard output"), &handles.engine)?
            }
            Self::Stream(stream) => snapshot.export_file(packed::new_file(stream, args.force)?, &handles.engine)?,
            Self::Inside { image, tag } => vm_state::put(snapshot, image, tag, &args.disk, &handles.engine)?,
        };
        drop(handles);
        Ok(stats)
    }
}

impl fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdout => f.write_str("standard output"),
            Self::Stream(stream) => write!(f, "{}", stream.display()),
            Self::Inside { image, tag } => write!(f, "snapshot {tag} of {}", image.display()),
        }
    }
}

fn tell(target: &Target<'_>, snapshot: &Snapshot, stats: &PrecopyStats) {
    let moved = stats.normal_pages.saturating_mul(limosa_page::PAGE_SIZE);
    say!(
        "exported to {target} ({}) in {}, {:.2} GiB/s",
        quantity::bytes(stats.channel.bytes_out),
        quantity::time(stats.elapsed),
        quantity::rate(moved, stats.elapsed)
    );
    say!("  pages: {} with contents, {} zero", quantity::count(stats.normal_pages), quantity::count(stats.zero_pages));
    let recorded = snapshot.devices().global_state(snapshot.device_tail()).ok().flatten().map(|state| state.run_state);
    if let (Some(recorded), Some(state)) = (recorded, snapshot.run_state())
        && recorded != state
    {
        say!("  QEMU will load it {recorded}, as recorded in the stream; it was {state}: continue it with cont");
    }
}

fn object(target: &Target<'_>, stats: &PrecopyStats) -> serde_json::Value {
    let place = |path: &Path| path.to_string_lossy().into_owned();
    let (stream, image, tag) = match target {
        Target::Stdout => (Some("-".to_owned()), None, None),
        Target::Stream(stream) => (Some(place(stream)), None, None),
        Target::Inside { image, tag } => (None, Some(place(image)), Some(*tag)),
    };
    json!({
        "stream": stream,
        "image": image,
        "tag": tag,
        "elapsed_ms": quantity::millis(stats.elapsed),
        "gib_per_s": quantity::rate(stats.normal_pages.saturating_mul(limosa_page::PAGE_SIZE), stats.elapsed),
        "length": stats.channel.bytes_out,
        "pages": { "normal": stats.normal_pages, "zero": stats.zero_pages },
        "channel": report::counters(&stats.channel),
    })
}
