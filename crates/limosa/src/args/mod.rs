//! The command line, and its text in `--help`.
//!
//! Parsing ends here: each command turns its arguments into what the libraries take, and no library sees clap.

mod balloon;
mod bitmap_changes;
mod channels;
mod clone;
mod endpoint;
mod img;
mod import;
mod inspect;
mod job;
mod keep;
mod packaging;
mod packed;
mod protect;
mod receive;
mod restore;
mod run;
mod save;
mod send;
mod serve;
mod serve_ctl;
mod snapshot;
mod tls;
mod working_set;

use std::ffi::OsString;

use clap::{Parser, Subcommand};

pub(crate) use balloon::{BalloonArgs, BalloonCommand, BalloonCtlArgs, BalloonCtlCommand, BalloonServeArgs};
pub(crate) use channels::ChannelArgs;
pub(crate) use clone::{
    BackingArg, CloneArgs, CloneCommand, CloneMemoryArg, ListClonesArgs, MakeClonesArgs, RemoveClonesArgs,
    StopClonesArgs,
};
pub(crate) use endpoint::EndpointArgs;
pub(crate) use img::{ImgArgs, ImgCommand, parse_aio};
pub(crate) use import::{ExportArgs, ImportArgs};
pub(crate) use inspect::{InspectArgs, MappedVmArgs};
pub(crate) use job::{DisksArg, JobArgs, SteerArgs, TransportArg};
pub(crate) use keep::KeeperArgs;
pub(crate) use packaging::{CompletionsArgs, ManArgs, ShellArg};
pub(crate) use packed::{HowPackedArgs, KeyArgs, PackArgs, UnpackArgs};
pub(crate) use protect::{
    DurableArg, FailoverArgs, GateArgs, KeepArgs, MergeArgs, MethodArg, OnLossArg, OutputArg, ProtectArgs,
    ProtectCommand, ProtectDisksArg,
};
pub(crate) use receive::ReceiveArgs;
pub(crate) use restore::{
    HowArgs, MemoryArg, RestoreArgs, ResumeArgs, RunStateArgs, SetClockArg, ZeroPageDetectionArg,
};
pub(crate) use run::RunArgs;
pub(crate) use save::{OnTimeoutArg, SaveArgs, SaveDisksArg};
pub(crate) use send::{SendArgs, SendMemoryArg, SendModeArg};
pub(crate) use serve::{JournalArg, SandboxArg, ServeArgs, ServeCommandArgs};
pub(crate) use serve_ctl::{
    ServeAddArgs, ServeBitmapArgs, ServeCommand, ServeCtlArgs, ServeCtlCommand, ServeEpochArgs, ServeKeeperArgs,
    ServedImageArgs,
};
pub(crate) use snapshot::{
    ListSnapshotsArgs, MergeSnapshotArgs, NewSnapshotArgs, PruneSnapshotsArgs, RebaseSnapshotArgs, RemoveSnapshotsArgs,
    RepackArgs, SealArgs, SnapshotArgs, SnapshotCommand,
};
pub(crate) use tls::{TlsClientArgs, TlsServerArgs};
pub(crate) use working_set::{RECORDED_BY_DEFAULT, ReadAheadArg, WorkingSetArgs};

/// Save a running QEMU VM and restore it in milliseconds.
#[derive(Debug, Parser)]
#[command(name = "limosa", version, max_term_width = 100)]
#[command(after_help = "Sizes: 4K 64M 8G 1T. Rates: 100M, in bytes per second. Times: 300ms 30s 5m.\n\
                        URLs of objects: s3://BUCKET/KEY gs://BUCKET/KEY az://CONTAINER/KEY https://HOST/PATH.\n\
                        Exit status: 0 done, 1 failed (one line says what, where and what to do), 2 bad usage.\n\
                        inspect and img define further values; see their --help.")]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,

    /// Print more on stderr: -v decisions and cleanup, -vv also messages between limosa and QEMU, where there is one
    #[arg(short, long, action = clap::ArgAction::Count, global = true)]
    pub(crate) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Save a running VM to a file; the VM then continues, unless --stop is given
    Save(SaveArgs),
    /// Restore a VM into a QEMU started with -incoming defer: mapped if it maps the file, else lazily, else eagerly
    Restore(RestoreArgs),
    /// Receive a migrating VM into a file as a migration destination; needs no QEMU monitor
    Receive(ReceiveArgs),
    /// Send a stored VM to a waiting QEMU as a migration source; needs no QEMU monitor
    Send(SendArgs),
    /// Start a QEMU and restore a VM into it; terminal, signals and exit status are that QEMU's
    Run(RunArgs),
    /// Start many VMs of one snapshot that share its memory; list, end and remove them
    Clone(CloneArgs),
    /// Keep checkpoints of a running VM all the while; continue it from the newest one when its host has failed
    Protect(ProtectArgs),
    /// Keep the checkpoints that a limosa protect on another host sends
    Keep(KeeperArgs),
    /// Continue a VM that an interrupted job left paused
    Resume(ResumeArgs),
    /// Convert a recorded migration stream or a libvirt save image into a snapshot
    Import(ImportArgs),
    /// Write a snapshot as a plain migration stream that unmodified QEMU loads
    Export(ExportArgs),
    /// Compress a snapshot into a qcow2 image, which every command takes as it is; optionally encrypted, or on a base
    Pack(PackArgs),
    /// Make a plain snapshot of a packed one
    Unpack(UnpackArgs),
    /// Show the contents of a snapshot, a recorded migration stream or a libvirt save image
    Inspect(InspectArgs),
    /// List, rebase, merge, remove and prune the snapshots of a directory; make one mappable
    Snapshot(SnapshotArgs),
    /// Create, inspect, check and convert disk images; compatible with qemu-img
    Img(ImgArgs),
    /// Serve disk images to QEMU and other clients over NBD or vhost-user-blk; list, add and remove them while they are
    /// used
    Serve(Box<ServeCommandArgs>),
    /// Serve a virtio-balloon device over vhost-user; take memory from guests and learn their free pages
    Balloon(BalloonArgs),
    /// Print a shell completion script
    Completions(CompletionsArgs),
    /// Write the manual pages for packaging
    #[command(hide = true)]
    Man(ManArgs),
    /// Watch a job and clean up if it is killed
    #[command(hide = true, alias = "guard")]
    Watchdog {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
