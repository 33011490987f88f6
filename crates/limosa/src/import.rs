//! `limosa import`, and other programs' files where a snapshot is wanted.

use limosa_console::quantity;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use limosa_channel::Uri;
use limosa_control::JobKind;
use limosa_page::directory_of;
use limosa_qemu::is_same_file;
use limosa_snapshot::{Decompressor, Durability, Foreign, Imported, SaveImage, Snapshot, SnapshotError, UnnamedFile};
use serde_json::{Value, json};

use crate::args::ImportArgs;
use crate::job::JobHandles;
use crate::packed;
use crate::remote;
use crate::report;
use crate::usage::misused;
use crate::vm_state;
use limosa_console::{print_out, say};

pub(crate) fn run(args: &ImportArgs) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    if args.xml.as_ref() == Some(&args.snapshot) {
        misused(format_args!("{}: the snapshot and the domain XML must be different files", args.snapshot.display()));
    }
    remote::refuse_target(&args.snapshot, "give a file, and pack that")?;
    if is_one_file(&args.stream, &args.snapshot) {
        bail!("{}: the source and the snapshot must be different files", args.snapshot.display());
    }
    let (foreign, feeder) = match &args.tag {
        Some(tag) => {
            let (foreign, feeder) = vm_state::open(&args.stream, tag, &args.disk, args.force_share)?;
            (foreign, Some(feeder))
        }
        None => (open(&args.stream)?, None),
    };
    if args.xml.is_some() && foreign.is_importable() && foreign.save_image().is_none() {
        bail!("{}: {}, which has no domain XML: omit --xml", args.stream.display(), foreign.describe());
    }
    // Both are refused before anything is read.
    let pending = packed::new_file(&args.snapshot, args.new.force)?;
    let xml = args.xml.as_deref().map(|path| packed::new_file(path, args.new.force)).transpose()?;
    let (durability, options) = (args.new.durability(), args.new.write_options());
    let handles = JobHandles::with_socket(args.control.as_deref(), JobKind::Save, "importing", false)?;
    let (what, decompressor, image) = (foreign.describe(), foreign.decompressor(), foreign.save_image().cloned());
    let imported = foreign.import(pending, options, &handles.engine);
    drop(handles);
    let imported = imported.map_err(anyhow::Error::from);
    let imported = match feeder {
        Some(feeder) => feeder.after(imported),
        None => imported,
    };
    let done = Done { imported: imported?, what, decompressor, elapsed: begun.elapsed() };
    if let (Some(pending), Some(image)) = (xml, &image) {
        write_xml(pending, image, durability).with_context(|| {
            format!("the snapshot {} is complete, but its XML was not written", args.snapshot.display())
        })?;
    }
    done.tell();
    if let Some(image) = &image {
        tell_domain(image, args.xml.as_deref());
    }
    if args.json {
        print_out!("{}", done.object(args.xml.as_deref()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether the snapshot would replace its own source.
fn is_one_file(stream: &Path, snapshot: &Path) -> bool {
    let uri = stream.to_str().filter(|text| text.starts_with("file:")).and_then(|text| text.parse().ok());
    let path = match &uri {
        Some(Uri::File { path, .. }) => path,
        _ => stream,
    };
    path.exists() && is_same_file(path, snapshot)
}

/// Opens a file, named in QEMU's way, or standard input.
fn open(stream: &Path) -> anyhow::Result<Foreign> {
    if stream == Path::new("-") {
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            bail!("standard input is a terminal: pipe a migration stream into limosa import, or give a file");
        }
        let own = stdin.as_fd().try_clone_to_owned().context("standard input")?;
        return Ok(Foreign::from_fd(own, Path::new("standard input"))?);
    }
    let uri = stream.to_str().filter(|text| text.starts_with("file:")).map(str::parse).transpose()?;
    Ok(match uri {
        // Without an offset it may begin later all the same.
        Some(Uri::File { path, offset }) => Foreign::open(&path, (offset > 0).then_some(offset))?,
        _ => Foreign::open(stream, None)?,
    })
}

fn write_xml(pending: UnnamedFile, image: &SaveImage, durability: Durability) -> anyhow::Result<()> {
    let target = pending.target().to_path_buf();
    pending.file().write_all(image.xml.as_bytes()).with_context(|| format!("cannot write {}", target.display()))?;
    pending.publish(durability)?;
    Ok(())
}

/// An import that is done.
struct Done {
    imported: Imported,
    what: &'static str,
    decompressor: Option<Decompressor>,
    elapsed: Duration,
}

impl Done {
    fn tell(&self) {
        let manifest = &self.imported.published.manifest;
        let stored = manifest.pages.normal.saturating_mul(limosa_page::PAGE_SIZE);
        let packed =
            self.decompressor.map(|decompressor| format!(", packed by {}", decompressor.program())).unwrap_or_default();
        say!(
            "imported {} ({} of {} memory) in {}, {:.2} GiB/s, from {}{packed}",
            self.imported.published.path.display(),
            quantity::bytes(stored),
            quantity::bytes(manifest.ram_bytes),
            quantity::time(self.elapsed),
            quantity::rate(stored, self.elapsed),
            self.what,
        );
        say!("  pages: {}", report::pages(&manifest.pages, "left out by the source", "sent again"));
    }

    fn object(&self, xml: Option<&Path>) -> Value {
        let (published, manifest) = (&self.imported.published, &self.imported.published.manifest);
        json!({
            "snapshot": published.path.to_string_lossy(),
            "id": manifest.id,
            "from": self.what,
            "packer": self.decompressor.map(Decompressor::program),
            "machine": manifest.machine,
            "vm_name": manifest.vm_name,
            "vm_uuid": manifest.vm_uuid,
            "run_state": manifest.run_state,
            "xml": xml.map(|path| path.to_string_lossy().into_owned()),
            "elapsed_ms": quantity::millis(self.elapsed),
            "gib_per_s": quantity::rate(manifest.pages.normal * limosa_page::PAGE_SIZE, self.elapsed),
            "ram_bytes": manifest.ram_bytes,
            "file_length": published.length,
            "pages": manifest.pages,
            "bytes": report::page_bytes(&manifest.pages),
            "channel": self.imported.channel.as_ref().map(report::counters),
            "file": report::counters(&self.imported.file),
        })
    }
}

fn tell_domain(image: &SaveImage, xml: Option<&Path>) {
    say!(
        "  domain {}: it {} when it was saved; {}",
        image.name.as_deref().unwrap_or("without a name"),
        if image.header.was_running { "ran" } else { "was paused" },
        match xml {
            Some(path) => format!("its XML is in {}", path.display()),
            None => "its XML was not stored (use --xml FILE)".to_owned(),
        }
    );
}

/// Opens a snapshot; of another program's file one is made for this once, when [`Stored::snapshot`] is asked for it.
pub(crate) enum Stored {
    Snapshot(Box<Snapshot>),
    Foreign(Foreign),
}

impl Stored {
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        if packed::is_one(path) {
            return Ok(Self::Snapshot(Box::new(packed::open(path)?)));
        }
        let foreign = Foreign::open(path, None)?;
        Ok(if foreign.is_importable() {
            Self::Foreign(foreign)
        } else {
            Self::Snapshot(Box::new(foreign.into_snapshot()?))
        })
    }

    /// Whether the snapshot has no name, so that no other process can continue with it after this one.
    pub(crate) fn is_foreign(&self) -> bool {
        matches!(self, Self::Foreign(_))
    }

    /// The snapshot; `purpose` says what it is made for.
    pub(crate) fn snapshot(self, purpose: &str, quiet: bool) -> anyhow::Result<Snapshot> {
        let foreign = match self {
            Self::Snapshot(snapshot) => return Ok(*snapshot),
            Self::Foreign(foreign) => foreign,
        };
        let path = foreign.path().to_path_buf();
        let (pending, folder) = temporary(&path)?;
        if !quiet {
            say!(
                "limosa: {}: {}: converting it to a temporary file in {} {purpose}; for lazy restores, convert it once \
                 with limosa import",
                path.display(),
                foreign.describe(),
                folder.display()
            );
        }
        let handles = JobHandles::with_socket(None, JobKind::Save, "converting", quiet)?;
        Ok(foreign.import_unnamed(pending, &handles.engine)?)
    }
}

/// Makes a file beside this one, where there is room for its contents, or in the temporary directory.
fn temporary(path: &Path) -> Result<(UnnamedFile, PathBuf), SnapshotError> {
    let name = format!("{}.limosa-{}", path.file_name().unwrap_or_default().to_string_lossy(), std::process::id());
    let beside = directory_of(path).to_path_buf();
    let elsewhere = std::env::temp_dir();
    match UnnamedFile::create(&beside.join(&name), false) {
        Ok(pending) => Ok((pending, beside)),
        Err(error) => match UnnamedFile::create(&elsewhere.join(&name), false) {
            Ok(pending) => Ok((pending, elsewhere)),
            Err(_) => Err(error),
        },
    }
}
