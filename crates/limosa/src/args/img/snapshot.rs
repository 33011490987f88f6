//! The arguments of `limosa img snapshot`.

use std::ffi::OsString;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use limosa_image::qcow2::{SnapshotChange, SnapshotChoice};

use super::image::{ImageArgs, QuietArg, ShareArg};
use crate::img::options::{SnapshotOptions, Source};

#[derive(Debug, Args)]
pub(crate) struct ImgSnapshotArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// List the snapshots: the default
    #[arg(short, long, conflicts_with_all = ["create", "apply", "delete"])]
    list: bool,

    /// Take a snapshot of this name
    #[arg(short, long, value_name = "SNAPSHOT", conflicts_with_all = ["apply", "delete", "force_share"])]
    create: Vec<String>,

    /// Make the disk what it was at this snapshot: its id or name; the present contents are lost
    #[arg(short, long, value_name = "SNAPSHOT", conflicts_with_all = ["delete", "force_share"])]
    apply: Vec<String>,

    /// Delete this snapshot: its id or name
    #[arg(short, long, value_name = "SNAPSHOT", conflicts_with = "force_share")]
    delete: Vec<String>,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    _quiet: QuietArg,

    /// Print the list as JSON
    #[arg(long)]
    json: bool,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgSnapshotArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// Several changes are asked for.
    pub(crate) fn resolve(mut self) -> anyhow::Result<SnapshotOptions> {
        let several = self.create.len() + self.apply.len() + self.delete.len() > 1;
        anyhow::ensure!(!several, "-c, -a and -d: only one snapshot at a time");
        let change = match (self.create.pop(), self.apply.pop(), self.delete.pop()) {
            (Some(name), _, _) => Some(SnapshotChange::Create { name, taken: now() }),
            (_, Some(word), _) => Some(SnapshotChange::Apply(SnapshotChoice::IdOrName(word))),
            (_, _, Some(word)) => Some(SnapshotChange::Delete(SnapshotChoice::IdOrName(word))),
            (None, None, None) => None,
        };
        Ok(SnapshotOptions {
            source: Source { force_share: self.share.force_share, ..self.image.source(&self.file) },
            change,
            json: self.json,
        })
    }
}

/// The time as a snapshot has it: seconds since 1970 in 32 bits, and nanoseconds.
fn now() -> (u32, u32) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (u32::try_from(since.as_secs()).unwrap_or(u32::MAX), since.subsec_nanos())
}
