//! The command line of limosa-bench.

use std::path::PathBuf;

use clap::Parser;
use clap::builder::PossibleValue;
use limosa_console::parse;
use limosa_image::qcow2::CloneMode;

/// Measure limosa beside stock QEMU and beside its own plain ways.
#[derive(Debug, Parser)]
#[command(name = "limosa-bench", version, max_term_width = 100)]
#[command(
    after_help = "Sizes: 4K 64M 8G 1T. Exit status: 0 done, 1 failed, or with --check a target was missed, 2 bad usage."
)]
pub(crate) struct BenchArgs {
    /// What to measure
    #[arg(value_name = "NAME", value_parser = names())]
    pub(crate) name: String,

    /// Whom to compare with, where limosa runs by itself otherwise: cow, stream
    #[arg(long, value_name = "WHOM", value_parser = ["qemu"])]
    pub(crate) against: Option<String>,

    /// Memory of the VMs; 2G for save, 4G for restore, 1G for stream and zero-copy by default; for zero-page the pages that are cold, more than four times the last-level cache; for cow the disk, 2G; for free-page the guest, 8G
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub(crate) size: Option<u64>,

    /// How much space an image takes at once for writes to come, for cow; 4M by default
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    pub(crate) allocate_ahead: Option<u64>,

    /// How many requests the sequential cases of cow make, over the disk again and again; 65536 by default, which take 3 s or so
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) sequential: Option<u64>,

    /// Whether merged copies are shared where the filesystem can, for cow: off, auto, or a size from which on; auto by default
    #[arg(long, value_name = "off|auto|SIZE", value_parser = clone_mode)]
    pub(crate) clone: Option<CloneMode>,

    /// How often each contestant runs
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) rounds: u32,

    /// The limosa program to measure; the one beside this program by default
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) limosa: Option<PathBuf>,

    /// Where files are made; the temporary directory by default
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,

    /// Run only the contestants whose case and variant, with one blank between them, begin with this: --only "1 GiB over tcp copy, 2"
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
fn names() -> [PossibleValue; 8] {
    let hidden = PossibleValue::new(limosa_bench::stream::END).hide(true);
    let [save, restore, stream, zero_page, zero_copy, cow, free_page] = [
        ("save", "A VM into a file: limosa, and QEMU itself"),
        ("restore", "A VM out of a file: lazily and eagerly, and QEMU itself"),
        ("stream", "Memory of a live migration between two processes"),
        ("zero-page", "Which pages are zero: what it costs to find out, and what it saves"),
        (
            "zero-copy",
            "Pages of a live migration copied, lent by MSG_ZEROCOPY, and spliced; idle and with every core busy",
        ),
        ("cow", "Writes into qcow2 images, most of them to new clusters"),
        ("free-page", "A guest asked for its free pages, beside inflating a balloon in it"),
    ]
    .map(|(name, what)| PossibleValue::new(name).help(what));
    [save, restore, stream, zero_page, zero_copy, cow, free_page, hidden]
}

/// `off`, `auto`, or the size from which on what would be copied is cloned.
fn clone_mode(text: &str) -> Result<CloneMode, String> {
    parse::threshold(text, CloneMode::Off, CloneMode::AUTO, CloneMode::From)
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
