//! `limosa pack` and `limosa unpack`, and packed snapshots where a snapshot is wanted.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use limosa_clone::copy_path;
use limosa_console::{error_line, print_out, quantity, say};
use limosa_control::JobKind;
use limosa_image::luks::Passphrase;
use limosa_image::reference::is_object;
use limosa_pack::{
    Access, Base, PackEncryption, PackError, PackOptions, Packed, SnapshotDirectory, SnapshotFolder, UnpackedFile,
    is_packed, open_snapshot, unpack,
};
use limosa_qemu::is_same_file;
use limosa_snapshot::{Durability, Snapshot, UnnamedFile};
use serde_json::{Value, json};

use crate::args::{HowPackedArgs, KeyArgs, PackArgs, UnpackArgs};
use crate::img::object;
use crate::job::JobHandles;
use crate::packed_target::PackedTarget;
use crate::remote;

/// The key of encrypted snapshots; set once, before a command opens one.
static KEY: OnceLock<Passphrase> = OnceLock::new();

/// Lets snapshots be opened with the key that was given.
///
/// # Errors
/// An object cannot be had; no secret has the name.
pub(crate) fn define_key(args: &KeyArgs) -> anyhow::Result<()> {
    object::define(args.object.all())?;
    let Some(id) = &args.key_secret else { return Ok(()) };
    let missing = || format!("--key-secret {id}: no such secret; define it with --object secret,id={id}");
    let key = object::secrets().get(id).cloned().with_context(missing)?;
    KEY.set(key).map_err(|_| anyhow::anyhow!("--key-secret: the key is defined once"))
}

/// Returns the directory of these snapshots.
pub(crate) fn directory(path: &Path) -> SnapshotDirectory {
    SnapshotDirectory::new(path, KEY.get().cloned())
}

/// Returns the directory of a snapshot, and its name there.
pub(crate) fn directory_of(snapshot: &Path) -> anyhow::Result<(SnapshotDirectory, OsString)> {
    Ok(SnapshotDirectory::of(snapshot, KEY.get().cloned())?)
}

/// Returns the means to open snapshots.
pub(crate) fn access() -> Access {
    Access::default().passphrase(KEY.get().cloned()).stores(remote::stores())
}

/// Returns the folder of these snapshots in an object store.
pub(crate) fn folder(url: &Path) -> SnapshotFolder {
    SnapshotFolder::new(&url.to_string_lossy(), &access())
}

/// Returns the folder of a snapshot in an object store, and its name there.
pub(crate) fn folder_of(snapshot: &Path) -> anyhow::Result<(SnapshotFolder, OsString)> {
    let found = snapshot.to_str().and_then(|url| SnapshotFolder::of(url, &access()));
    found.with_context(|| format!("{}: is not the name of an object", snapshot.display()))
}

/// Whether a name is that of a packed snapshot or an object: one that is not opened as a file.
pub(crate) fn is_one(name: &Path) -> bool {
    is_object(name) || is_packed(name)
}

/// Opens a snapshot, packed or not, in a file or an object store.
pub(crate) fn open(path: &Path) -> anyhow::Result<Snapshot> {
    Ok(open_snapshot(path, &access())?)
}

/// Returns why a snapshot cannot be mapped, with the remedy.
pub(crate) fn unmappable(snapshot: &Snapshot) -> String {
    let path = snapshot.path().display();
    if let Some(why) = snapshot.not_plain_reason() {
        let seal = if has_mappable_contents(snapshot) { "" } else { "; limosa snapshot seal FILE" };
        return format!("{path}: {why}, and cannot be mapped; unpack it first: limosa unpack {path} FILE{seal}");
    }
    format!(
        "{path}: was not made to be mapped (an older version or QEMU wrote it); make it so: limosa snapshot seal {path}"
    )
}

/// Whether the file that was packed could be mapped.
fn has_mappable_contents(snapshot: &Snapshot) -> bool {
    snapshot.manifest().is_some_and(|manifest| manifest.mappable)
}

/// Returns a copy of a packed or remote snapshot in the directory of its clones, which they can map: the one that is
/// there, or a new one. `None`: the snapshot needs no copy, or could not be mapped before it was packed.
///
/// # Errors
/// The copy cannot be made; a file there is not it.
pub(crate) fn copy_to_map(snapshot: &Snapshot, clones: &Path) -> anyhow::Result<Option<Snapshot>> {
    if snapshot.not_plain_reason().is_none() || !has_mappable_contents(snapshot) {
        return Ok(None);
    }
    let begun = Instant::now();
    std::fs::create_dir_all(clones).with_context(|| format!("cannot make {}", clones.display()))?;
    let path = copy_path(clones, snapshot.id());
    if !path.try_exists().with_context(|| path.display().to_string())? {
        if snapshot.packed_summary().is_some_and(|summary| summary.encrypted) {
            say!("limosa: {}: has the memory of an encrypted snapshot in the clear", path.display());
        }
        snapshot.check_restorable()?;
        let handles = JobHandles::with_socket(None, JobKind::Save, "unpacking", false)?;
        let made = UnnamedFile::create(&path, false)
            .map_err(PackError::from)
            .and_then(|pending| unpack(snapshot, pending, Durability::Synced, &handles.engine));
        drop(handles);
        match made {
            Ok(made) => say!(
                "unpacked into {} ({} of pages) in {}; clones share it, and it goes with the last of them",
                path.display(),
                quantity::bytes(made.page_bytes),
                quantity::time(begun.elapsed())
            ),
            // Another limosa was faster.
            Err(_) if path.exists() => {}
            Err(error) => {
                return Err(error)
                    .context("it cannot be unpacked for its clones; with --memory eager they need no file");
            }
        }
    }
    let again = || format!("{}: remove it, and it is unpacked again", path.display());
    let copy = Snapshot::open(&path).with_context(again)?;
    if copy.id() != snapshot.id() || !copy.is_mappable() {
        bail!("{}: is not the copy of {} that its name says", path.display(), snapshot.path().display());
    }
    copy.lock_serving()?;
    Ok(Some(copy))
}

/// Opens the base of a new packed snapshot.
pub(crate) fn open_base(args: &HowPackedArgs, target: &Path) -> anyhow::Result<Option<Base>> {
    let Some(path) = &args.base else { return Ok(None) };
    let base = Base::open(path, &access())?;
    base.check_beside(target)?;
    if !args.encrypt && base.is_encrypted() {
        let base = path.display().to_string();
        return Err(PackError::Unencrypted { path: target.to_path_buf(), base }.into());
    }
    if args.encrypt && !base.is_encrypted() {
        say!(
            "limosa: {}: is not encrypted: what the new snapshot has in common with it is in the clear",
            path.display()
        );
    }
    Ok(Some(base))
}

/// Refuses to replace a file that other snapshots stand on: they would be lost with it.
pub(crate) fn refuse_needed(target: &Path, replace: bool) -> anyhow::Result<()> {
    if !replace || !is_packed(target) {
        return Ok(());
    }
    let (directory, name) = directory_of(target)?;
    let dependents = match directory.dependents(&name) {
        Ok(dependents) => dependents,
        Err(error) => bail!(
            "{}: another file may stand on it, and would be lost with it; choose another name: {}",
            target.display(),
            error_line(&error)
        ),
    };
    if let Some(first) = dependents.first() {
        bail!("{}: {} stands on it, and would be lost with it; choose another name", target.display(), first.display());
    }
    Ok(())
}

/// Prepares a new file. One that others stand on is not replaced.
pub(crate) fn new_file(path: &Path, replace: bool) -> anyhow::Result<UnnamedFile> {
    refuse_needed(path, replace)?;
    Ok(UnnamedFile::create(path, replace)?)
}

/// Returns how a snapshot is packed.
pub(crate) fn options(args: &HowPackedArgs, level: u8, durability: Durability) -> anyhow::Result<PackOptions> {
    let mut options = PackOptions::default();
    options.level = Some(level);
    options.cluster_size = args.cluster_size;
    if args.encrypt {
        let key = KEY.get().context("--encrypt needs --key-secret ID")?;
        let mut encryption = PackEncryption::new(key.clone());
        encryption.iter_time = args.iter_time;
        options.encryption = Some(encryption);
    }
    options.durability = durability;
    Ok(options)
}

pub(crate) fn run_pack(args: &PackArgs) -> anyhow::Result<ExitCode> {
    define_key(&args.key)?;
    let begun = Instant::now();
    refuse_one_file(&args.snapshot, &args.image)?;
    let durability = args.new.durability();
    let options = options(&args.how, args.level, durability)?;
    let base = open_base(&args.how, &args.image)?;
    let target = PackedTarget::prepare(&args.image, args.new.force)?;
    let snapshot = open(&args.snapshot)?;
    snapshot.lock_serving()?;
    let handles = JobHandles::with_socket(None, JobKind::Save, "packing", false)?;
    let packed = target.pack(&snapshot, base.as_ref(), &options, &handles.engine);
    drop(handles);
    let (packed, elapsed) = (packed?, begun.elapsed());
    tell_packed(&packed, elapsed);
    remote::tell_cost();
    if args.new.json {
        let mut object = packed_object(&packed, elapsed);
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn run_unpack(args: &UnpackArgs) -> anyhow::Result<ExitCode> {
    define_key(&args.key)?;
    let begun = Instant::now();
    remote::refuse_target(&args.snapshot, "give a file")?;
    refuse_one_file(&args.image, &args.snapshot)?;
    let pending = new_file(&args.snapshot, args.new.force)?;
    let snapshot = open(&args.image)?;
    snapshot.lock_serving()?;
    let handles = JobHandles::with_socket(None, JobKind::Save, "unpacking", false)?;
    let unpacked = unpack(&snapshot, pending, args.new.durability(), &handles.engine);
    drop(handles);
    let (unpacked, elapsed) = (unpacked?, begun.elapsed());
    let UnpackedFile { path, page_bytes, .. } = &unpacked;
    say!(
        "unpacked {} ({} of pages) in {}, {:.2} GiB/s",
        path.display(),
        quantity::bytes(*page_bytes),
        quantity::time(elapsed),
        quantity::rate(*page_bytes, elapsed)
    );
    remote::tell_cost();
    if args.new.json {
        let mut object = json!({
            "snapshot": path.to_string_lossy(),
            "id": snapshot.id(),
            "file_length": unpacked.length,
            "page_bytes": page_bytes,
            "elapsed_ms": quantity::millis(elapsed),
            "gib_per_s": quantity::rate(*page_bytes, elapsed),
        });
        remote::add_cost(&mut object);
        print_out!("{object}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Refuses to replace a snapshot by what is made of it.
fn refuse_one_file(source: &Path, target: &Path) -> anyhow::Result<()> {
    if is_same_file(source, target) {
        bail!("{}: the snapshot and the file that is made of it must be different files", target.display());
    }
    Ok(())
}

/// Describes a new packed snapshot.
pub(crate) fn tell_packed(packed: &Packed, elapsed: Duration) {
    let Packed { path, length, page_bytes, base_bytes, touched_bytes, whole_because, .. } = packed;
    say!(
        "packed {} ({} of pages in a file of {}, {:.0}%) in {}, {:.2} GiB/s",
        path.display(),
        quantity::bytes(*page_bytes),
        quantity::bytes(*length),
        percent(*length, *page_bytes),
        quantity::time(elapsed),
        quantity::rate(*page_bytes, elapsed)
    );
    if *base_bytes > 0 {
        say!("  {} are in the base as they are, and not stored again", quantity::bytes(*base_bytes));
    }
    if *touched_bytes > 0 {
        say!("  its working set ({}) is in the image, and is fetched first", quantity::bytes(*touched_bytes));
    }
    if let Some(why) = whole_because {
        say!("  it does not stand on the base, and is whole: {why}");
    }
}

/// A new packed snapshot, for programs.
pub(crate) fn packed_object(packed: &Packed, elapsed: Duration) -> Value {
    json!({
        "snapshot": packed.path.to_string_lossy(),
        "file_length": packed.length,
        "page_bytes": packed.page_bytes,
        "own_bytes": packed.own_bytes,
        "base_bytes": packed.base_bytes,
        "working_set_bytes": packed.touched_bytes,
        "whole_because": packed.whole_because,
        "elapsed_ms": quantity::millis(elapsed),
        "gib_per_s": quantity::rate(packed.page_bytes, elapsed),
    })
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 100.0 } else { part as f64 * 100.0 / whole as f64 }
}
