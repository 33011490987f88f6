//! `limosa snapshot list`, `rm`, `rebase`, `merge` and `prune`: the snapshots of a directory.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::bail;
use comfy_table::{Cell, CellAlignment};
use limosa_console::{anyhow_error_line, check_stdout, print_out, quantity, say};
use limosa_control::JobKind;
use limosa_image::reference::is_object;
use limosa_migrate::control::Stop;
use limosa_pack::{PackOptions, Packed, PruneStep, Retention, SnapshotEntry, SnapshotFile, plan_prune};
use serde_json::{Value, json};

use crate::args::{
    ListSnapshotsArgs, MergeSnapshotArgs, PruneSnapshotsArgs, RebaseSnapshotArgs, RemoveSnapshotsArgs, RepackArgs,
};
use crate::inspect::table;
use crate::job::JobHandles;
use crate::packed;
use crate::remedy;
use crate::remote;
use crate::report;
use crate::snapshot::place::Place;

pub(crate) fn list(args: &ListSnapshotsArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    let entries = Place::new(&args.directory).list()?;
    if args.json {
        let mut object = json!({ "snapshots": entries.iter().map(entry_object).collect::<Vec<_>>() });
        remote::add_cost(&mut object);
        print_out!("{object}");
        check_stdout()?;
        return Ok(ExitCode::SUCCESS);
    }
    if entries.is_empty() {
        print_out!("no snapshots in {}", args.directory.display());
    }
    let names = Names::of(&entries);
    let mut shown = table(&["snapshot", "VM", "saved", "pages", "stored"], 3);
    for entry in entries.iter().filter(|entry| entry.fault.is_none()) {
        let bytes = |bytes| Cell::new(quantity::bytes(bytes)).set_alignment(CellAlignment::Right);
        let base = entry.base.as_ref().map(|base| format!(" on {}", base.display())).unwrap_or_default();
        let encrypted = if entry.is_encrypted { ", encrypted" } else { "" };
        shown.add_row([
            Cell::new(format!("{}{base}{encrypted}", entry.name.display())),
            Cell::new(names.shown(entry)),
            Cell::new(report::date(entry.saved)),
            bytes(entry.page_bytes),
            bytes(entry.allocated),
        ]);
    }
    if !shown.is_empty() {
        print_out!("{shown}");
    }
    for (entry, fault) in entries.iter().filter_map(|entry| Some((entry, entry.fault.as_ref()?))) {
        print_out!("cannot be restored: {}: {fault}", entry.name.display());
    }
    remote::tell_cost();
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// The names of VMs, each with the VMs that have it.
struct Names<'a>(BTreeMap<&'a str, BTreeSet<&'a str>>);

impl<'a> Names<'a> {
    fn of(entries: &'a [SnapshotEntry]) -> Self {
        let mut names: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
        for entry in entries {
            if let Some(name) = &entry.vm_name {
                names.entry(name.as_str()).or_default().insert(entry.vm.as_str());
            }
        }
        Self(names)
    }

    /// A VM as people know it: by its name, with its uuid if others have that name too.
    fn shown(&self, entry: &SnapshotEntry) -> String {
        let Some(name) = &entry.vm_name else { return entry.vm.clone() };
        let is_shared = self.0.get(name.as_str()).is_some_and(|vms| vms.len() > 1);
        // One without a uuid has its name as what tells it from others.
        if is_shared && entry.vm != *name { format!("{name} {}", entry.vm) } else { name.clone() }
    }
}

fn entry_object(entry: &SnapshotEntry) -> Value {
    let mut object = json!({
        "name": entry.name.to_string_lossy(),
        "id": entry.id,
        "vm": entry.vm,
        "vm_name": entry.vm_name,
        "saved": entry.saved,
        "page_bytes": entry.page_bytes,
        "allocated": entry.allocated,
        "packed": entry.is_packed,
        "encrypted": entry.is_encrypted,
        "base": entry.base.as_ref().map(|base| base.to_string_lossy()),
        "fault": entry.fault,
    });
    if entry.name.to_str().is_none() {
        // The text of such a name is not the name.
        let hex = entry.name.as_encoded_bytes().iter().map(|byte| format!("{byte:02x}"));
        object["name_hex"] = hex.collect::<String>().into();
    }
    object
}

/// The snapshots that were packed again, those that were removed, and those that stay because of a failure.
#[derive(Debug, Default)]
struct Done {
    rebased: Vec<Value>,
    removed: Vec<String>,
    failed: Vec<(String, String)>,
}

impl Done {
    fn rebased(&mut self, packed: &Packed, begun: Instant) {
        packed::tell_packed(packed, begun.elapsed());
        self.rebased.push(packed::packed_object(packed, begun.elapsed()));
    }

    fn removed(&mut self, name: &OsStr) {
        say!("removed {}", name.display());
        self.removed.push(name.to_string_lossy().into_owned());
    }

    fn failed(&mut self, name: &OsStr, error: &anyhow::Error) {
        let why = format!("{}{}", anyhow_error_line(error), remedy::of_cause(error));
        say!("limosa: {why}");
        self.failed.push((name.to_string_lossy().into_owned(), why));
    }

    /// Prints it for programs, and returns how the command ends.
    fn end(self, json: bool) -> anyhow::Result<ExitCode> {
        let code = if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        if json {
            let failed = self.failed.iter().map(|(snapshot, why)| json!({ "snapshot": snapshot, "why": why }));
            let failed: Vec<_> = failed.collect();
            let mut object = json!({ "rebased": self.rebased, "removed": self.removed, "failed": failed });
            remote::add_cost(&mut object);
            print_out!("{object}");
            check_stdout()?;
        }
        remote::tell_cost();
        Ok(code)
    }
}

pub(crate) fn remove(args: &RemoveSnapshotsArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    let mut places: BTreeMap<PathBuf, Place> = BTreeMap::new();
    let mut left: Vec<&Path> = Vec::new();
    for snapshot in args.snapshots.iter().map(PathBuf::as_path) {
        // One that is named twice is removed once.
        if !left.contains(&snapshot) {
            left.push(snapshot);
        }
    }
    let mut done = Done::default();
    loop {
        let before = left.len();
        let mut failed = Vec::new();
        // Those that stand on another one go first, in any order of the command line.
        left.retain(|snapshot| {
            let removed = Place::of(snapshot).and_then(|(place, name)| {
                let place =
                    places.entry(place.path_of(OsStr::new(""))).or_insert_with(|| place.ignoring(&args.ignore.ignore));
                Ok(place.remove(&name)?)
            });
            match removed {
                Ok(()) => done.removed(snapshot.as_os_str()),
                Err(error) => {
                    failed.push((*snapshot, error));
                    return true;
                }
            }
            false
        });
        if left.len() == before {
            if failed.len() == 1
                && done.removed.is_empty()
                && let Some((_, error)) = failed.pop()
            {
                return Err(error);
            }
            failed.iter().for_each(|(snapshot, error)| done.failed(snapshot.as_os_str(), error));
            return done.end(args.json);
        }
    }
}

fn options(args: &RepackArgs) -> PackOptions {
    let mut options = PackOptions::default();
    options.level = Some(args.level);
    options
}

/// Refuses to pack an object again.
fn refuse_object(snapshot: &Path) -> anyhow::Result<()> {
    if is_object(snapshot) {
        bail!("{0}: an object is not packed again; pack it into a new one: limosa pack {0} URL", snapshot.display());
    }
    Ok(())
}

pub(crate) fn rebase(args: &RebaseSnapshotArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.repack.key)?;
    refuse_object(&args.snapshot)?;
    let (directory, name) = packed::directory_of(&args.snapshot)?;
    let directory = directory.ignoring(args.repack.ignore.ignore.iter().cloned());
    let base = match &args.base {
        Some(base) => {
            let (_, name) = packed::directory_of(base)?;
            if !limosa_qemu::is_same_file(base, &directory.path_of(&name)) {
                bail!("{}: is in another directory; a snapshot and its base are kept together", base.display());
            }
            Some(name)
        }
        None => None,
    };
    let begun = Instant::now();
    let handles = JobHandles::with_socket(None, JobKind::Save, "packing", false)?;
    let packed = directory.rebase(&name, base.as_deref(), &options(&args.repack), &handles.engine);
    drop(handles);
    let packed = packed?;
    packed::tell_packed(&packed, begun.elapsed());
    if args.repack.json {
        print_out!("{}", packed::packed_object(&packed, begun.elapsed()));
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn merge(args: &MergeSnapshotArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.repack.key)?;
    refuse_object(&args.snapshot)?;
    let (directory, name) = packed::directory_of(&args.snapshot)?;
    let directory = directory.ignoring(args.repack.ignore.ignore.iter().cloned());
    let begun = Instant::now();
    let handles = JobHandles::with_socket(None, JobKind::Save, "packing", false)?;
    let mut done = Done::default();
    let merged = directory.merge(&name, &options(&args.repack), &handles.engine, |packed| done.rebased(&packed, begun));
    drop(handles);
    match merged {
        Ok(()) => done.removed(&name),
        Err(error) if done.rebased.is_empty() => return Err(error.into()),
        // What was packed again before stays so, and a repetition continues there.
        Err(error) => done.failed(&name, &error.into()),
    }
    done.end(args.repack.json)
}

pub(crate) fn prune(args: &PruneSnapshotsArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.repack.key)?;
    let place = Place::new(&args.directory).ignoring(&args.repack.ignore.ignore);
    let entries = place.list()?;
    if let Some(entry) = entries.iter().find(|entry| !entry.is_base_known) {
        let fault = entry.fault.as_deref().unwrap_or_default();
        bail!(
            "{}: may stand on any other one, and cannot be looked into: {fault}; give its key, or --ignore it",
            entry.name.display()
        );
    }
    let mut retention = Retention::new();
    (retention.last, retention.daily) = (args.keep_last, args.keep_daily);
    retention.with_bases = !place.is_rewritable();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let plan = plan_prune(&entries, &retention, now);
    for staying in &plan.staying {
        say!("limosa: {}: stays, with all that it stands on: {}", staying.name.display(), staying.why);
    }
    if plan.steps.is_empty() {
        say!("nothing to remove");
    }
    if args.dry_run {
        return show_plan(&plan.steps, args.repack.json);
    }
    let begun = Instant::now();
    let handles = JobHandles::with_socket(None, JobKind::Save, "packing", false)?;
    let mut done = Done::default();
    for step in &plan.steps {
        if handles.engine.control.stop_requested() == Some(Stop::Cancel) {
            let (PruneStep::Rebase { snapshot, .. } | PruneStep::Remove { snapshot }) = step;
            done.failed(&snapshot.name, &anyhow::anyhow!("cancelled; what was done stays done"));
            break;
        }
        match (step, place.carry_out(step, &options(&args.repack), &handles.engine)) {
            (_, Ok(Some(packed))) => done.rebased(&packed, begun),
            (PruneStep::Remove { snapshot } | PruneStep::Rebase { snapshot, .. }, Ok(None)) => {
                done.removed(&snapshot.name);
            }
            // One that is being restored stays for now, and what it stands on; the others go.
            (PruneStep::Remove { snapshot } | PruneStep::Rebase { snapshot, .. }, Err(error)) => {
                done.failed(&snapshot.name, &error.into());
            }
        }
    }
    drop(handles);
    done.end(args.repack.json)
}

/// Shows what a prune would do.
fn show_plan(steps: &[PruneStep], json: bool) -> anyhow::Result<ExitCode> {
    let text = |name: &OsString| name.to_string_lossy().into_owned();
    let (mut rebased, mut removed, mut bytes) = (Vec::new(), Vec::new(), 0_u64);
    for step in steps {
        match step {
            PruneStep::Rebase { snapshot, base } => {
                let onto = base.as_ref().map_or("nothing".to_owned(), |base| base.name.display().to_string());
                say!("would have {} stand on {onto}", snapshot.name.display());
                let base = base.as_ref().map(|base: &SnapshotFile| text(&base.name));
                rebased.push(json!({ "snapshot": text(&snapshot.name), "base": base }));
            }
            PruneStep::Remove { snapshot } => {
                say!("would remove {} ({})", snapshot.name.display(), quantity::bytes(snapshot.allocated));
                bytes = bytes.saturating_add(snapshot.allocated);
                removed.push(text(&snapshot.name));
            }
        }
    }
    if json {
        print_out!("{}", json!({ "would_rebase": rebased, "would_remove": removed, "bytes": bytes }));
        check_stdout()?;
    }
    Ok(ExitCode::SUCCESS)
}
