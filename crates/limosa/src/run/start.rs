//! Starting the QEMU of `limosa run`, with the snapshot as its memory where that is possible.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use anyhow::bail;
use limosa_console::say;
use limosa_qemu::qmp::{Options, Qmp, QmpError};
use limosa_qemu::{
    BlockPlace, IncomingFrom, MappedCommandLine, check_snapshot_not_shared, is_same_file, launch,
    missing_memory_option, name_memory_backend, rewrite_for_mapping,
};
use limosa_snapshot::Snapshot;

use super::{Caller, GONE_WITHIN, Notice, Qemu, program};
use crate::args::{MemoryArg, RunArgs};
use crate::packed::unmappable;
use crate::relay::Relay;

/// A QEMU, and its monitor if it has opened one.
type Greeted = (Qemu, Result<Qmp, QmpError>);

/// Checks that QEMU can be started with this snapshot as it is asked for.
pub(super) fn check(args: &RunArgs, snapshot: &Snapshot) -> anyhow::Result<()> {
    let same = |name: &str| is_same_file(Path::new(name), &args.snapshot);
    if let Err(why) = check_snapshot_not_shared(&args.command, &same) {
        bail!("{why}; use share=off, or let limosa map it: --memory mapped without a memory backend");
    }
    let file = snapshot.mapping_descriptor()?;
    mapped_command(args, snapshot, file.as_fd(), &Notice { shown: false }).map(drop)
}

/// Starts QEMU and waits for its monitor.
pub(super) fn start(
    args: &RunArgs,
    snapshot: &Snapshot,
    relay: Relay,
    caller: &Caller<'_>,
    notice: &Notice,
) -> anyhow::Result<Greeted> {
    let file = snapshot.mapping_descriptor()?;
    let Some(mapped) = mapped_command(args, snapshot, file.as_fd(), notice)? else {
        return launched(args, &name_memory_backend(&args.command, snapshot)?, &[], relay, caller);
    };
    let (mut qemu, greeted) = launched(args, &mapped, &[file.as_fd()], relay, caller)?;
    if greeted.is_ok() || qemu.relay.end_was_asked() || !qemu.ended_within(GONE_WITHIN)? {
        return Ok((qemu, greeted));
    }
    let Some(option) = missing_memory_option(&args.command) else { return Ok((qemu, greeted)) };
    qemu.reap()?;
    let why = format!("{} has no option {option} of memory-backend-file; QEMU 8.2 and newer have it", qemu.program);
    if args.how.memory == MemoryArg::Mapped {
        bail!("the memory cannot be mapped: {why}; use --memory auto");
    }
    // QEMU has complained already, in words of its own.
    say!("limosa: the memory is not mapped: {why}; --memory lazy starts it without this attempt");
    launched(args, &name_memory_backend(&args.command, snapshot)?, &[], qemu.relay, caller)
}

fn launched(
    args: &RunArgs,
    command: &[OsString],
    inherited_fds: &[BorrowedFd<'_>],
    relay: Relay,
    caller: &Caller<'_>,
) -> anyhow::Result<Greeted> {
    let launched = launch(command, IncomingFrom::Deferred, inherited_fds)?;
    relay.aim(launched.child.id());
    let program = program(&args.command);
    // QEMU starts meanwhile.
    if let Err(error) = (caller.started)() {
        Qemu { child: launched.child, relay, program }.end(None)?;
        return Err(error);
    }
    let (child, greeted) = launched.connect(&Options { greeting_timeout: args.start_within, ..Options::default() });
    Ok((Qemu { child, relay, program }, greeted))
}

/// Returns the command line that makes the snapshot the memory; `None` if it is not wanted, or not possible and not
/// required.
fn mapped_command(
    args: &RunArgs,
    snapshot: &Snapshot,
    file: BorrowedFd<'_>,
    notice: &Notice,
) -> anyhow::Result<Option<Vec<OsString>>> {
    let required = match args.how.memory {
        MemoryArg::Mapped => true,
        MemoryArg::Auto => false,
        MemoryArg::Lazy | MemoryArg::Eager => return Ok(None),
    };
    match map(args, snapshot, file, required) {
        Ok(found) => {
            found.notices.iter().for_each(|line| notice.tell(line));
            Ok(Some(found.args))
        }
        Err(why) if required => bail!("the memory cannot be mapped: {why}; use --memory auto"),
        Err(why) => {
            notice.tell(&format!("the memory is not mapped: {why}"));
            Ok(None)
        }
    }
}

fn map(args: &RunArgs, snapshot: &Snapshot, file: BorrowedFd<'_>, required: bool) -> anyhow::Result<MappedCommandLine> {
    if !snapshot.is_mappable() {
        bail!("{}", unmappable(snapshot));
    }
    if args.how.channels.channels.is_some() {
        bail!("--channels is for memory that is sent");
    }
    if snapshot.has_checksums() && !required {
        bail!("its checksums would all have to be verified before the guest runs");
    }
    // The open file itself: another file may have its name by then.
    let file = format!("/dev/fd/{}", file.as_raw_fd());
    Ok(rewrite_for_mapping(&args.command, &BlockPlace::guest_memory_of(snapshot)?, &file)?)
}
