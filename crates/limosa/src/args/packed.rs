//! The arguments of `limosa pack` and `limosa unpack`, and the key that opens packed snapshots.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use limosa_console::parse::{self, ParseError};
use limosa_pack::DEFAULT_LEVEL;
use limosa_snapshot::Durability;

use super::img::ObjectArg;

/// The key of encrypted snapshots.
#[derive(Debug, Default, Args)]
pub(crate) struct KeyArgs {
    #[command(flatten)]
    pub(crate) object: ObjectArg,

    /// The secret that opens an encrypted snapshot, and its bases: the id of an --object secret
    #[arg(long, value_name = "ID", display_order = 900)]
    pub(crate) key_secret: Option<String>,
}

/// How a snapshot is packed.
#[derive(Debug, Args)]
pub(crate) struct HowPackedArgs {
    /// A packed snapshot in the same directory, or the URL of one beside the new object: only what differs from it is
    /// stored, and it is needed from then on
    #[arg(long, value_name = "SNAPSHOT")]
    pub(crate) base: Option<PathBuf>,

    /// Encrypt it with the secret of --key-secret: LUKS, AES-256 in mode XTS. With limosa save there is a plain file
    /// until it is packed
    #[arg(long, requires = "key_secret")]
    pub(crate) encrypt: bool,

    /// With --encrypt: time that the derivation of the key from the secret may take, each time that it is opened
    #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "100ms", requires = "encrypt")]
    pub(crate) iter_time: Duration,

    /// Bytes that are compressed together: 4K to 2M. Larger ones are smaller in the file and slower to fault in.
    /// Default: 128K, with --base 16K
    #[arg(long, value_name = "SIZE", value_parser = parse_cluster_size)]
    pub(crate) cluster_size: Option<u64>,
}

fn parse_cluster_size(text: &str) -> Result<u64, ParseError> {
    let is_one = |size: &u64| size.is_power_of_two() && (4 << 10..=2 << 20).contains(size);
    let size = parse::size(text).ok().filter(is_one);
    size.ok_or_else(|| ParseError::new(text, "cluster size", "a power of two from 4K to 2M"))
}

/// Options of a command that makes a file.
#[derive(Debug, Args)]
pub(crate) struct NewFileArgs {
    /// Replace the file if it exists
    #[arg(long)]
    pub(crate) force: bool,

    /// Do not wait until the file is durable; a power failure may lose it
    #[arg(long)]
    pub(crate) no_sync: bool,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

impl NewFileArgs {
    /// Whether to wait until a power cut cannot lose the file.
    pub(crate) fn durability(&self) -> Durability {
        if self.no_sync { Durability::Unsynced } else { Durability::Synced }
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "IMAGE is a qcow2 image whose contents are the snapshot's file. Every command that takes a SNAPSHOT \
                        takes it; qemu-img convert -O raw undoes it."
)]
pub(crate) struct PackArgs {
    /// The snapshot to read, which stays as it is: a file, or the URL of an object in a store
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    /// The file to create, or the URL of a new object in a store, which replaces none: it is made in $TMPDIR or
    /// /var/tmp, and uploaded
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,

    /// Level of zstd
    #[arg(long, value_name = "N", default_value_t = DEFAULT_LEVEL, value_parser = clap::value_parser!(u8).range(1..=22))]
    pub(crate) level: u8,

    #[command(flatten)]
    pub(crate) how: HowPackedArgs,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    #[command(flatten)]
    pub(crate) new: NewFileArgs,
}

#[derive(Debug, Args)]
pub(crate) struct UnpackArgs {
    /// The packed snapshot to read, which stays as it is: a file, or the URL of an object in a store
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,

    /// The file to create: one that VMs can map, if it could be before it was packed
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    #[command(flatten)]
    pub(crate) new: NewFileArgs,
}
