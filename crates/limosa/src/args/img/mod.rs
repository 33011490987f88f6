//! The arguments of `limosa img`: qemu-img's, command by command.
//!
//! Law: an option that qemu-img has is taken with qemu-img's meaning or refused with one line; none is ignored. What is
//! refused is not listed in `--help`. Each command's arguments are resolved into a plain struct of
//! [`crate::img::options`].

mod amend;
mod bench;
mod bitmap;
mod check;
mod commit;
mod compare;
mod convert;
mod create;
mod dd;
mod image;
mod info;
mod map;
mod measure;
mod rebase;
mod resize;
mod snapshot;

use std::ffi::OsString;

use clap::{Args, Subcommand};

pub(crate) use amend::ImgAmendArgs;
pub(crate) use bench::ImgBenchArgs;
pub(crate) use bitmap::ImgBitmapArgs;
pub(crate) use check::ImgCheckArgs;
pub(crate) use commit::ImgCommitArgs;
pub(crate) use compare::ImgCompareArgs;
pub(crate) use convert::{ImgConvertArgs, parse_snapshot};
pub(crate) use create::ImgCreateArgs;
pub(crate) use dd::ImgDdArgs;
pub(crate) use image::{ObjectArg, OpenArgs, parse_aio};
pub(crate) use info::ImgInfoArgs;
pub(crate) use map::ImgMapArgs;
pub(crate) use measure::ImgMeasureArgs;
pub(crate) use rebase::ImgRebaseArgs;
pub(crate) use resize::{ImgResizeArgs, parse_new_size};
pub(crate) use snapshot::ImgSnapshotArgs;

#[derive(Debug, Args)]
// As of getopt(3): the last of an option counts.
#[command(args_override_self = true)]
#[command(after_help = "Options, output and exit status are qemu-img's. Sizes: 512 64k 1.5G 0x10000, with \
                        b k M G T P E for powers of 1024.\n\
                        Exit status: 0 done, 1 failed (one line says what, where and what to do) or bad usage; check and \
                        compare have more, listed in their --help.")]
#[command(version = concat!(env!("CARGO_PKG_VERSION"), " (commands and options of qemu-img 10.0)"))]
pub(crate) struct ImgArgs {
    /// Trace events of QEMU, which limosa does not have.
    #[arg(short = 'T', long, value_name = "EVENTS", hide = true)]
    pub(crate) trace: Option<OsString>,

    #[command(subcommand)]
    pub(crate) command: ImgCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImgCommand {
    /// Create a new image
    Create(ImgCreateArgs),
    /// Show what an image is: format, sizes, backing file
    Info(ImgInfoArgs),
    /// Check an image's tables and refcounts, and repair them
    Check(ImgCheckArgs),
    /// Show where an image's contents are stored, including backing files
    Map(ImgMapArgs),
    /// Copy images into a new image, of the same or another format
    Convert(Box<ImgConvertArgs>),
    /// Compare the guest-visible contents of two images
    Compare(ImgCompareArgs),
    /// Copy blocks of an image into a new image
    Dd(ImgDdArgs),
    /// Show the space that a new image, or a converted one, would need
    Measure(ImgMeasureArgs),
    /// Change the virtual size of an image
    Resize(ImgResizeArgs),
    /// Change options of an image: key slots, version, lazy refcounts, size
    Amend(Box<ImgAmendArgs>),
    /// Move an overlay's contents into its backing file
    Commit(ImgCommitArgs),
    /// Put an overlay on another backing file
    Rebase(Box<ImgRebaseArgs>),
    /// List, take, apply or delete an image's internal snapshots
    Snapshot(ImgSnapshotArgs),
    /// Add, remove, clear, switch or merge an image's persistent bitmaps
    Bitmap(Box<ImgBitmapArgs>),
    /// Measure requests to an image
    Bench(Box<ImgBenchArgs>),
    /// An unknown command.
    #[command(external_subcommand)]
    Other(Vec<OsString>),
}

impl ImgCommand {
    /// How its images are opened; `None`: it is no command.
    pub(crate) fn open(&self) -> Option<&OpenArgs> {
        Some(match self {
            Self::Create(args) => &args.open,
            Self::Info(args) => &args.image.open,
            Self::Check(args) => &args.image.open,
            Self::Map(args) => &args.image.open,
            Self::Convert(args) => &args.open,
            Self::Compare(args) => &args.open,
            Self::Dd(args) => &args.image.open,
            Self::Measure(args) => &args.image.open,
            Self::Resize(args) => &args.image.open,
            Self::Amend(args) => &args.image.open,
            Self::Commit(args) => &args.image.open,
            Self::Rebase(args) => &args.image.open,
            Self::Snapshot(args) => &args.image.open,
            Self::Bitmap(args) => &args.image.open,
            Self::Bench(args) => &args.image.open,
            Self::Other(_) => return None,
        })
    }
}
