//! `limosa snapshot`: operations on snapshot files themselves, and on the snapshots of a directory.

mod directory;
mod place;

use std::process::ExitCode;

use anyhow::bail;
use limosa_console::{print_out, quantity, say};
use limosa_image::reference::is_object;
use limosa_pack::is_packed;
use limosa_snapshot::seal_snapshot;
use serde_json::json;

use crate::args::{SealArgs, SnapshotArgs, SnapshotCommand};
use directory::{list, merge, prune, rebase, remove};

pub(crate) fn run(args: &SnapshotArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        SnapshotCommand::Seal(args) => seal(args),
        SnapshotCommand::List(args) => list(args),
        SnapshotCommand::Rm(args) => remove(args),
        SnapshotCommand::Rebase(args) => rebase(args),
        SnapshotCommand::Merge(args) => merge(args),
        SnapshotCommand::Prune(args) => prune(args),
    }
}

fn seal(args: &SealArgs) -> anyhow::Result<ExitCode> {
    let path = args.snapshot.display();
    if is_object(&args.snapshot) {
        bail!("{path}: is in an object store, and is not mapped; unpack it first: limosa unpack {path} FILE");
    }
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
