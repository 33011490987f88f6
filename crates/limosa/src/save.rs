//! `limosa save`.

use limosa_console::quantity;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::bail;
use limosa_clone::SavedDisks;
use limosa_control::JobKind;
use limosa_image::reference::is_object;
use limosa_pack::{Base, DEFAULT_LEVEL, PackOptions, Packed};
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::MonitorAddress;
use limosa_qemu::{
    DiskPolicy, JobError, NotConverging, OnTimeout, SaveOptions, SaveReport, SaveTimeout, TransportChoice, Watchdog,
    save,
};
use limosa_snapshot::{Disk, Durability, HeldSnapshot, Snapshot, Transport};
use serde_json::json;
use uuid::Uuid;

use crate::args::{DisksArg, OnTimeoutArg, SaveArgs, SaveDisksArg, TransportArg};
use crate::job::{self, JobHandles};
use crate::packed;
use crate::packed_target::PackedTarget;
use crate::remote;
use crate::report;
use crate::usage::misused;
use limosa_console::{error_line, print_out, say};

pub(crate) fn run(args: &SaveArgs) -> anyhow::Result<ExitCode> {
    // Also for a plain one: others in its directory may be encrypted.
    packed::define_key(&args.key)?;
    if args.pack.is_some() {
        return run_packed(args);
    }
    let how = &args.how_packed;
    if how.base.is_some() || how.encrypt || how.cluster_size.is_some() {
        misused("--base, --encrypt and --cluster-size are for a packed snapshot: add --pack zstd");
    }
    remote::refuse_target(&args.snapshot, "add --pack zstd")?;
    packed::refuse_needed(&args.snapshot, args.new.force)?;
    let monitor = job::connect(&args.job.qmp)?;
    let handles = JobHandles::new(&args.job, JobKind::Save, "saving", false)?;
    let (report, _) = save_with(&monitor, &args.snapshot, &options(args), handles)?;
    tell(&report);
    if args.job.json {
        print_out!("{}", object(&report));
    }
    Ok(ExitCode::SUCCESS)
}

/// Saves into a plain snapshot beside the target, and packs that: the VM waits no longer than for a plain save, pages
/// that come again are not packed twice, and at any moment there is a whole snapshot of the VM if it was left stopped.
fn run_packed(args: &SaveArgs) -> anyhow::Result<ExitCode> {
    let begun = Instant::now();
    let target = &args.snapshot;
    // All that can be refused is, before the VM is touched.
    let packing = packed::options(&args.how_packed, args.pack.unwrap_or(DEFAULT_LEVEL), args.new.durability())?;
    let base = packed::open_base(&args.how_packed, target)?;
    let prepared = PackedTarget::prepare(target, args.new.force)?;
    let plain = plain_beside(target);
    let is_left = is_left(args, &plain)?;
    if args.how_packed.encrypt {
        say!(
            "limosa: {}: is in the clear until it is packed, and on the disk until its blocks are reused",
            plain.display()
        );
    }
    let monitor = job::connect(&args.job.qmp)?;
    let handles = JobHandles::new(&args.job, JobKind::Save, "saving", false)?;
    let mut options = options(args);
    // Not before there is a new one.
    options.replace = is_left;
    if !args.stop {
        // A VM that continues loses nothing with it; the packed one is durable.
        options.durability = Durability::Unsynced;
    }
    let needed = SavedDisks::mark_needed(&images(&monitor)?, target)?;
    let saved = save_with(&monitor, &plain, &options, handles);
    let (report, plain_needed) = match saved {
        Ok(saved) => saved,
        Err(error) => {
            if !plain.exists() {
                needed.unmark_needed();
            }
            return Err(error);
        }
    };
    drop(monitor);
    let packed = match pack_plain(args, &plain, prepared, base.as_ref(), &packing) {
        Ok(packed) => packed,
        Err(error) => {
            needed.unmark_needed();
            let (shown, target) = (plain.display(), target.display());
            let line = format!(
                "the VM is saved in {shown}, and that is not packed; repeat it: {}",
                repeat(args, &shown, &target)
            );
            return Err(error.context(line));
        }
    };
    tell(&report);
    packed::tell_packed(&packed, begun.elapsed());
    remote::tell_cost();
    // The VM is saved, also if the plain file cannot be removed.
    match HeldSnapshot::lock(&plain).and_then(HeldSnapshot::remove) {
        Ok(()) => plain_needed.unmark_needed(),
        Err(error) => say!("limosa: the plain snapshot stays: {}", error_line(&error)),
    }
    if args.job.json {
        let mut object = object(&report);
        object["snapshot"] = packed.path.to_string_lossy().into();
        object["packed"] = packed::packed_object(&packed, begun.elapsed());
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Packs the plain snapshot, and opens what came of it with all that it stands on: only then the plain one may go.
fn pack_plain(
    args: &SaveArgs,
    plain: &Path,
    target: PackedTarget,
    base: Option<&Base>,
    packing: &PackOptions,
) -> anyhow::Result<Packed> {
    let snapshot = Snapshot::open(plain)?;
    snapshot.lock_serving()?;
    let handles = JobHandles::with_socket(args.job.steer.control.as_deref(), JobKind::Save, "packing", false)?;
    let packed = target.pack(&snapshot, base, packing, &handles.engine)?;
    drop(handles);
    if is_object(&packed.path) {
        // It was opened again.
        return Ok(packed);
    }
    let found = packed::open(&packed.path)?;
    found.check_restorable()?;
    if found.id() != snapshot.id() {
        bail!("{}: another file has its name now", packed.path.display());
    }
    Ok(packed)
}

/// The command that packs a plain snapshot as this save would have.
fn repeat(args: &SaveArgs, plain: &dyn fmt::Display, target: &dyn fmt::Display) -> String {
    let base = args.how_packed.base.as_ref().map(|base| format!(" --base {}", base.display())).unwrap_or_default();
    let encrypt =
        if args.how_packed.encrypt { " --encrypt --key-secret ID --object secret,id=ID,file=KEY" } else { "" };
    format!("limosa pack {plain} {target}{base}{encrypt}, then remove {plain}")
}

/// Returns whether an interrupted save has left a plain snapshot that the target has packed: the new plain one replaces
/// it. Refuses to continue if it was not packed.
fn is_left(args: &SaveArgs, plain: &Path) -> anyhow::Result<bool> {
    if !plain.exists() {
        return Ok(false);
    }
    let target = &args.snapshot;
    let is_packed = Snapshot::open(plain).is_ok_and(|plain| {
        packed::open(target).is_ok_and(|target| target.id() == plain.id() && target.check_restorable().is_ok())
    });
    if !is_packed {
        let shown = plain.display();
        let repeat = repeat(args, &shown, &target.display());
        bail!("{shown}: an interrupted save has left this snapshot; pack it, or remove it: {repeat}");
    }
    Ok(true)
}

/// Returns the name of the plain snapshot that a packed one is made of. That of an object is made of its URL, so that
/// it is found again after a kill.
fn plain_beside(target: &Path) -> PathBuf {
    const SUFFIX: &str = ".unpacked";
    if is_object(target) {
        let name = Uuid::new_v5(&Uuid::NAMESPACE_URL, target.as_os_str().as_encoded_bytes());
        return remote::staging_folder().join(format!("limosa-{name}{SUFFIX}"));
    }
    let mut name = target.file_name().unwrap_or_default().to_os_string();
    name.push(SUFFIX);
    target.with_file_name(name)
}

/// Saves a VM that continues, with its disks of the same instant, so that it can be cloned. `overlay_dir` is the
/// directory of the overlays that it continues on.
pub(crate) fn save_to_clone(
    address: &MonitorAddress,
    snapshot: &Path,
    replace: bool,
    overlay_dir: Option<PathBuf>,
) -> anyhow::Result<SaveReport> {
    packed::refuse_needed(snapshot, replace)?;
    let monitor = job::connect(address)?;
    let handles = JobHandles::with_socket(None, JobKind::Save, "saving", false)?;
    let mut options = SaveOptions::default();
    options.disks = DiskPolicy::Overlay;
    options.replace = replace;
    options.overlay_dir = overlay_dir;
    let (report, _) = save_with(&monitor, snapshot, &options, handles)?;
    tell(&report);
    Ok(report)
}

fn save_with(
    monitor: &Monitor,
    snapshot: &Path,
    options: &SaveOptions,
    handles: JobHandles,
) -> anyhow::Result<(SaveReport, SavedDisks)> {
    let limited = || handles.engine.control.max_bandwidth().is_some();
    let not_converging = |save: &NotConverging| say!("limosa: {}", endless(save, limited()));
    let mut watch = handles.watch();
    watch.not_converging = Some(&not_converging);
    let clones_disks = SavedDisks::mark_needed(&images(monitor)?, snapshot)?;
    let report = save(monitor, snapshot, options, watch, || {
        Ok(Some(Watchdog::spawn(job::THIS_PROGRAM.as_ref(), ["watchdog", "--"], monitor.qmp())?))
    });
    // One that failed after it had its name is a snapshot, and needs the disks.
    match report {
        Ok(report) => Ok((report, clones_disks)),
        Err(error) => {
            if !snapshot.exists() {
                clones_disks.unmark_needed();
            }
            Err(error.into())
        }
    }
}

/// The images that the VM's disks consist of.
fn images(monitor: &Monitor) -> Result<Vec<PathBuf>, JobError> {
    let disks = monitor.all_disks()?;
    let files = disks.iter().flat_map(|disk| disk.path.as_deref().into_iter().chain(disk.lower_files()));
    Ok(files.map(Path::to_path_buf).collect())
}

impl From<TransportArg> for TransportChoice {
    fn from(via: TransportArg) -> Self {
        match via {
            TransportArg::Auto => Self::Auto,
            TransportArg::File => Self::File,
            TransportArg::Socket => Self::Socket,
        }
    }
}

impl From<DisksArg> for DiskPolicy {
    fn from(disks: DisksArg) -> Self {
        match disks {
            DisksArg::Check => Self::Check,
            DisksArg::Ignore => Self::Ignore,
        }
    }
}

impl From<SaveDisksArg> for DiskPolicy {
    fn from(disks: SaveDisksArg) -> Self {
        match disks {
            SaveDisksArg::Check => Self::Check,
            SaveDisksArg::Overlay => Self::Overlay,
            SaveDisksArg::Ignore => Self::Ignore,
        }
    }
}

fn options(args: &SaveArgs) -> SaveOptions {
    let on_timeout = match args.on_timeout {
        OnTimeoutArg::Pause => OnTimeout::Pause,
        OnTimeoutArg::Cancel => OnTimeout::Cancel,
    };
    let mut options = SaveOptions::default();
    options.transport = args.via.into();
    options.listen = args.listen.clone();
    options.channels = args.channels.channels;
    options.compression = args.channels.compression;
    options.stop = args.stop;
    options.background = args.background;
    options.replace = args.new.force;
    options.checksum = args.new.checksum;
    options.downtime = args.downtime;
    options.timeout = args.timeout.map(|limit| SaveTimeout { limit, action: on_timeout });
    options.disks = args.disks.into();
    options.overlay_dir = args.overlay_dir.clone();
    options.disk_servers.clone_from(&args.disk_server);
    options.durability = args.new.durability();
    options.hint_wait = args.hint_wait;
    options
}

/// Returns the line about a save that does not converge, with its remedies.
fn endless(save: &NotConverging, limited: bool) -> String {
    let remaining = quantity::bytes(save.remaining);
    let rate = if limited { ", raise --max-bandwidth" } else { "" };
    let background = if save.background { ", or save with --background" } else { "" };
    format!(
        "the VM changes its memory as fast as it is saved ({remaining} to save after {} rounds), and this may never end: \
         set --timeout TIME, with --on-timeout pause to stop the VM for the rest{rate}{background}",
        save.rounds
    )
}

fn transport(report: &SaveReport) -> &'static str {
    match report.transport {
        Transport::File => "file",
        _ => "socket",
    }
}

fn tell(report: &SaveReport) {
    let manifest = &report.published.manifest;
    let pages = &manifest.pages;
    let stored = pages.normal.saturating_mul(limosa_page::PAGE_SIZE);
    say!(
        "saved {} ({} of {} memory) in {}, {:.2} GiB/s, via {}",
        report.published.path.display(),
        quantity::bytes(stored),
        quantity::bytes(manifest.ram_bytes),
        quantity::time(report.elapsed),
        quantity::rate(stored, report.elapsed),
        transport(report),
    );
    say!("  pages: {}", report::pages(pages, "hinted as free and not sent", "sent again"));
    match report.downtime {
        Some(downtime) => say!(
            "  the VM was stopped for {} and resumed after {}; it is {}",
            quantity::time(downtime),
            quantity::time(report.time_to_vm_running),
            report.vm_state
        ),
        None => say!("  the VM is {}", report.vm_state),
    }
    for (disk, overlay) in frozen(report) {
        let name = disk.device.as_deref().unwrap_or(&disk.node);
        say!("  disk {name} continues in {}, over {}", overlay.display(), disk.path.display());
    }
    if frozen(report).next().is_some() {
        say!("  do not write to the backing files as long as the overlays or the snapshot are needed");
    }
    if let (Some(channel), Some(file)) = (&report.channel, &report.file) {
        say!("  system calls: {} reads, {} writes", quantity::count(channel.calls_in), quantity::count(file.calls_out));
    }
}

/// Returns the disks that were frozen, with the overlays that the VM continues on.
fn frozen(report: &SaveReport) -> impl Iterator<Item = (&Disk, &PathBuf)> {
    report.published.manifest.disks.iter().filter_map(|disk| Some((disk, disk.overlay.as_ref()?)))
}

pub(crate) fn object(report: &SaveReport) -> serde_json::Value {
    let manifest = &report.published.manifest;
    json!({
        "snapshot": report.published.path.to_string_lossy(),
        "id": manifest.id,
        "via": transport(report),
        "vm_state": report.vm_state,
        "downtime_ms": report.downtime.map(quantity::millis),
        "to_vm_running_ms": quantity::millis(report.time_to_vm_running),
        "elapsed_ms": quantity::millis(report.elapsed),
        "gib_per_s": quantity::rate(manifest.pages.normal * limosa_page::PAGE_SIZE, report.elapsed),
        "ram_bytes": manifest.ram_bytes,
        "file_length": report.published.length,
        "pages": manifest.pages,
        "bytes": report::page_bytes(&manifest.pages),
        "rounds": report.rounds,
        "overlays": frozen(report).map(|(disk, overlay)| json!({
            "device": disk.device,
            "node": disk.node,
            "export": disk.export,
            "frozen": disk.path.to_string_lossy(),
            "format": disk.format,
            "overlay": overlay.to_string_lossy(),
        })).collect::<Vec<_>>(),
        "channel": report.channel.as_ref().map(report::counters),
        "file": report.file.as_ref().map(report::counters),
    })
}
