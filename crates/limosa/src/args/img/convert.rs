//! The arguments of `limosa img convert`.

use std::ffi::OsString;

use clap::Args;
use limosa_image::convert::CopyBitmaps;
use limosa_image::qcow2::SnapshotChoice;
use limosa_image::reference::split_options;
use limosa_storage::CacheMode;

use super::image::{OpenArgs, ReportArgs, ShareArg};
use crate::img::options::{ConvertOptions, Name, Source, Target};
use crate::img::size::{parse_rate, parse_size};
use crate::program;

#[derive(Debug, Args)]
#[command(override_usage = format!("{} convert [OPTIONS] SOURCE... TARGET", program::img()))]
pub(crate) struct ImgConvertArgs {
    /// The images' format; probed by default
    #[arg(short = 'f', long, value_name = "FMT", conflicts_with = "source_image_opts")]
    source_format: Option<String>,

    /// Read this internal snapshot of SOURCE: its id or name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", value_parser = parse_snapshot, overrides_with = "source_snapshot")]
    source_snapshot: Option<SnapshotChoice>,

    /// Each SOURCE is a list of options: driver=qcow2,file.driver=file,file.filename=NAME,...
    #[arg(long, visible_alias = "image-opts")]
    source_image_opts: bool,

    /// The sources' cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback")]
    source_cache: CacheMode,

    /// The target's format: raw, qcow2 or luks
    #[arg(short = 'O', long, value_name = "FMT", default_value = "raw")]
    target_format: String,

    /// TARGET is a list of options, as with --source-image-opts; the image must exist
    #[arg(long, requires = "no_create", conflicts_with = "target_format")]
    target_image_opts: bool,

    /// Options of the target's format: NAME=VALUE[,NAME=VALUE...]; -o help lists them. Repeatable
    #[arg(short = 'o', long, value_name = "OPTIONS")]
    target_options: Vec<String>,

    /// The target's cache mode; default unsafe, with --resume writeback
    #[arg(short = 't', long, value_name = "MODE")]
    target_cache: Option<CacheMode>,

    /// The target's backing file; contents that SOURCE has from its own backing file are not copied, so both must be
    /// the same there. With -n, TARGET must have this one
    #[arg(short = 'B', long, value_name = "FILE")]
    backing: Option<OsString>,

    /// The target's backing file's format
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,

    /// Do not create the target; it must exist and be at least as large as the sources
    #[arg(short, long)]
    no_create: bool,

    /// The target already reads as zeros
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,

    /// How many consecutive zero bytes become a hole; default 4k; 0: no holes, the target is fully allocated
    #[arg(short = 'S', long, value_name = "SIZE", value_parser = parse_size)]
    sparse_size: Option<u64>,

    /// Number of requests in flight, 1 to 16; default 8, with -c as many as there are processors if those are more
    #[arg(short = 'm', long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    parallel: Option<u8>,

    /// Write out of order where that is faster, which is with -t none and to NBD servers; clusters are then allocated
    /// in any order
    #[arg(short = 'W', long)]
    oob_writes: bool,

    /// Compress the clusters of a qcow2 target, on several processors; -o help names the option for the method
    #[arg(short = 'c', long)]
    compress: bool,

    /// Level of compression: zlib 1 to 9 (default 9), zstd 1 to 22 (default 3)
    #[arg(long, value_name = "LEVEL", requires = "compress")]
    compress_level: Option<u8>,

    /// Let the kernel copy between files where contents are stored unchanged (raw targets); zeros are not detected
    #[arg(short = 'C', long = "copy-range-offloading", conflicts_with_all = ["sparse_size", "salvage", "compress"])]
    copy_range: bool,

    /// Continue an interrupted copy, or begin one that can be continued: TARGET gets its name when it is complete
    #[arg(long, conflicts_with_all = ["no_create", "oob_writes", "salvage", "bitmaps"])]
    resume: bool,

    /// Maximum bandwidth in bytes per second
    #[arg(short = 'r', long, value_name = "RATE", value_parser = parse_rate)]
    rate: Option<u64>,

    /// Continue after read errors of a source; unreadable parts become zeros
    #[arg(long)]
    salvage: bool,

    #[command(flatten)]
    share: ShareArg,

    #[command(flatten)]
    report: ReportArgs,

    #[command(flatten)]
    pub(super) open: OpenArgs,

    /// Copy the persistent bitmaps of the source, too
    #[arg(long)]
    bitmaps: bool,

    /// Leave out bitmaps that cannot be relied on, where --bitmaps would fail
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,

    /// The source images, which are concatenated, and the target; - is stdin or stdout
    #[arg(value_name = "SOURCE... TARGET", num_args = 1.., required_unless_present = "target_options")]
    files: Vec<OsString>,
}

impl ImgConvertArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// An argument is missing.
    pub(crate) fn resolve(self) -> anyhow::Result<ConvertOptions> {
        let source = |name: &OsString| Source {
            force_share: self.share.force_share,
            cache: self.source_cache,
            ..self.open.source(name, self.source_format.as_ref(), self.source_image_opts)
        };
        let target = Target {
            format: self.target_format,
            options: self.target_options.join(","),
            cache: self.target_cache.unwrap_or(if self.resume { CacheMode::Writeback } else { CacheMode::Unsafe }),
            image_opts: self.target_image_opts,
        };
        let (name, sources) = match self.files.split_last() {
            Some((name, sources)) if !sources.is_empty() => (Name(name.clone()), sources),
            _ if target.asks_for_help() => (Name::default(), self.files.as_slice()),
            _ => anyhow::bail!("source or target not given; use {} convert SOURCE TARGET", program::img()),
        };
        Ok(ConvertOptions {
            sources: sources.iter().map(source).collect(),
            name,
            snapshot: self.source_snapshot,
            target,
            backing: self.backing,
            backing_format: self.backing_format,
            no_create: self.no_create,
            target_is_zero: self.target_is_zero,
            sparse_size: self.sparse_size,
            parallel: self.parallel,
            out_of_order: self.oob_writes,
            copy_range: self.copy_range,
            compress: self.compress,
            compress_level: self.compress_level,
            resume: self.resume,
            rate: self.rate,
            salvage: self.salvage,
            bitmaps: match (self.bitmaps, self.skip_broken_bitmaps) {
                (false, _) => None,
                (true, false) => Some(CopyBitmaps::All),
                (true, true) => Some(CopyBitmaps::Usable),
            },
            progress: self.report.progress,
            quiet: self.report.quiet.quiet,
            json: self.report.json,
        })
    }
}

/// Parses the name of a snapshot by qemu-img's rules.
pub(crate) fn parse_snapshot(text: &str) -> Result<SnapshotChoice, String> {
    if !text.starts_with("snapshot.") {
        return Ok(SnapshotChoice::IdOrName(text.to_owned()));
    }
    let (mut id, mut name) = (None, None);
    for option in split_options(text) {
        match option.split_once('=') {
            Some(("snapshot.id", value)) => id = Some(value.to_owned()),
            Some(("snapshot.name", value)) => name = Some(value.to_owned()),
            _ => return Err(format!("{option:?}: write snapshot.id=ID, snapshot.name=NAME, or an id or a name alone")),
        }
    }
    Ok(SnapshotChoice::IdAndName { id, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_meant_by_id_or_by_name_or_by_both() {
        let both = |id: Option<&str>, name: Option<&str>| {
            Ok(SnapshotChoice::IdAndName { id: id.map(Into::into), name: name.map(Into::into) })
        };
        assert_eq!(parse_snapshot("a=b,c"), Ok(SnapshotChoice::IdOrName("a=b,c".into())));
        assert_eq!(parse_snapshot("snapshot.id=1"), both(Some("1"), None));
        assert_eq!(parse_snapshot("snapshot.name=a,,b,snapshot.id="), both(Some(""), Some("a,b")));
        for wrong in ["snapshot.", "snapshot.id", "snapshot.date=1", "snapshot.id=1,name=2"] {
            assert!(parse_snapshot(wrong).is_err(), "{wrong}");
        }
    }
}
