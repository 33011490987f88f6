//! The command line of limosa-bench.

use std::path::PathBuf;

use clap::Parser;
use clap::builder::PossibleValue;
use limosa_console::parse;
use limosa_image::qcow2::ReflinkMode;

/// Measure limosa, compared with stock QEMU and with its own simpler methods.
#[derive(Debug, Parser)]
#[command(name = "limosa-bench", version, max_term_width = 100)]
#[command(
    after_help = "Sizes: 4K 64M 8G 1T. Exit status: 0 done, 1 failed, or with --check a target was missed, 2 bad usage."
)]
pub(crate) struct BenchArgs {
    /// Bench to run
    #[arg(value_name = "NAME", value_parser = names())]
    pub(crate) name: String,

    /// Also measure stock QEMU, in the benches that run without it by default: cow, stream
    #[arg(long, value_name = "PROGRAM", value_parser = ["qemu"])]
    pub(crate) against: Option<String>,

    /// Memory of the VMs; default 2G for save, 4G for restore, 512M for clone (half of it has contents), 1G for stream,
    /// zero-copy and remote (one more VM has 16 times as much), 8G for free-page, 256M for protect. For cow, serve and
    /// img: size of the disk, default 2G, 512M and 1G. For zero-page: size of the cold memory, by default more than
    /// four times the last-level cache
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub(crate) size: Option<u64>,

    /// For clone: how many VMs are started together; several numbers are several cases; default 1,4,16,32
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) count: Vec<u32>,

    /// For cow: how much space an image allocates ahead of writes; default 4M
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub(crate) allocate_ahead: Option<u64>,

    /// For cow: number of requests of each sequential case, which go over the disk repeatedly; default 65536, about 3 s
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sequential: Option<u64>,

    /// For cow: whether copied data is shared (reflinked) if the file system can: off, auto, or a minimum size; default
    /// auto
    #[arg(long, value_name = "off|auto|SIZE", value_parser = clone_mode)]
    pub(crate) clone: Option<ReflinkMode>,

    /// How often each contestant runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,

    /// The limosa program to measure; default: the one in the directory of this program
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) limosa: Option<PathBuf>,

    /// Directory for files; default: the temporary directory
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,

    /// Run only the contestants whose case and variant, separated by a space, begin with TEXT, for example "1 GiB over
    /// tcp copy, 2"
    #[arg(long, value_name = "TEXT")]
    pub(crate) only: Option<String>,

    /// Exit with 1 if a target is not met
    #[arg(long)]
    pub(crate) check: bool,

    /// Print one JSON object on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// The benches, and what one of them starts as its own child.
fn names() -> [PossibleValue; 14] {
    let hidden = PossibleValue::new(limosa_bench::stream::END).hide(true);
    let [save, restore, packed, remote, clone, stream, zero_page, zero_copy, cow, serve, img, free_page, protect] = [
        ("save", "Save a VM into a file, by limosa and by QEMU"),
        ("restore", "Restore a VM from a file, lazily and eagerly, by limosa and by QEMU"),
        ("packed", "Pack a stored VM, save one packed, and restore it, compared with zstd and with plain snapshots"),
        ("remote", "Restore a packed VM from an object store over a slow line, compared with downloading it first"),
        ("clone", "Start many VMs of one snapshot: mapped, lazily, eagerly, and QEMUs without one"),
        ("stream", "Send the memory of a live migration to another process"),
        ("zero-page", "Find zero pages: what it costs and what it saves"),
        ("zero-copy", "Send pages by copy, MSG_ZEROCOPY and splice, with idle and with busy cores"),
        ("cow", "Write into qcow2 images, mostly to new clusters"),
        ("serve", "Serve disks over NBD, compared with QEMU's storage daemon and nbdkit"),
        ("img", "Convert, compress, encrypt, commit, check and compare disk images, beside qemu-img"),
        ("free-page", "Ask a guest for its free pages, compared with inflating its balloon"),
        ("protect", "Keep checkpoints of a running VM, compared with a keeper that throws them away"),
    ]
    .map(|(name, what)| PossibleValue::new(name).help(what));
    [save, restore, packed, remote, clone, stream, zero_page, zero_copy, cow, serve, img, free_page, protect, hidden]
}

/// `off`, `auto`, or the size from which on what would be copied is cloned.
fn clone_mode(text: &str) -> Result<ReflinkMode, parse::ParseError> {
    parse::threshold(text, ReflinkMode::Off, ReflinkMode::AUTO, ReflinkMode::AtLeast)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        use clap::CommandFactory as _;
        BenchArgs::command().debug_assert();
    }
}
