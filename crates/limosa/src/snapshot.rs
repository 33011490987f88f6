//! `limosa snapshot`: operations on snapshot files themselves, and on the snapshots of a directory.

use std::process::ExitCode;

use anyhow::bail;
use comfy_table::{Cell, CellAlignment};
use limosa_console::{check_stdout, print_out, quantity, say};
use limosa_pack::{SnapshotEntry, is_packed};
use limosa_snapshot::seal_snapshot;
use serde_json::{Value, json};

use crate::args::{ListSnapshotsArgs, SealArgs, SnapshotArgs, SnapshotCommand};
use crate::inspect::table;
use crate::packed;
use crate::report;

pub(crate) fn run(args: &SnapshotArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        SnapshotCommand::Seal(args) => seal(args),
        SnapshotCommand::List(args) => list(args),
    }
}

fn seal(args: &SealArgs) -> anyhow::Result<ExitCode> {
    let path = args.snapshot.display();
    if is_packed(&args.snapshot) {
        bail!("{path}: is packed, and cannot be mapped; unpack it first: limosa unpack {path} FILE");
    }
    let sealed = seal_snapshot(&args.snapshot)?;
    if sealed.was_mappable {
        say!("{path}: was mappable already; it is read-only");
    } else {
        say!("{path}: mappable and read-only; {} pages of old contents taken out", quantity::count(sealed.cleared));
    }
    if args.json {
        print_out!(
            "{}",
            json!({
                "was_mappable": sealed.was_mappable,
                "cleared_pages": sealed.cleared,
                "explicit_zero_pages": sealed.explicit_zero,
            })
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn list(args: &ListSnapshotsArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    let entries = packed::directory(&args.directory).list()?;
    if args.json {
        print_out!("{}", json!({ "snapshots": entries.iter().map(entry_object).collect::<Vec<_>>() }));
        check_stdout()?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut shown = table(&["snapshot", "VM", "saved", "pages", "on disk"], 3);
    for entry in entries.iter().filter(|entry| entry.fault.is_none()) {
        let bytes = |bytes| Cell::new(quantity::bytes(bytes)).set_alignment(CellAlignment::Right);
        let base = entry.base.as_ref().map(|base| format!(" on {}", base.display())).unwrap_or_default();
        let encrypted = if entry.is_encrypted { ", encrypted" } else { "" };
        shown.add_row([
            Cell::new(format!("{}{base}{encrypted}", entry.name.display())),
            Cell::new(&entry.vm),
            Cell::new(report::date(entry.saved)),
            bytes(entry.page_bytes),
            bytes(entry.allocated),
        ]);
    }
    print_out!("{shown}");
    for (entry, fault) in entries.iter().filter_map(|entry| Some((entry, entry.fault.as_ref()?))) {
        print_out!("cannot be restored: {}: {fault}", entry.name.display());
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

fn entry_object(entry: &SnapshotEntry) -> Value {
    json!({
        "name": entry.name.to_string_lossy(),
        "id": entry.id,
        "vm": entry.vm,
        "saved": entry.saved,
        "page_bytes": entry.page_bytes,
        "allocated": entry.allocated,
        "packed": entry.is_packed,
        "encrypted": entry.is_encrypted,
        "base": entry.base.as_ref().map(|base| base.to_string_lossy()),
        "fault": entry.fault,
    })
}
