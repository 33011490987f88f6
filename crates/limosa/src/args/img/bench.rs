//! The arguments of `limosa img bench`.

use std::ffi::OsString;

use clap::Args;
use limosa_image::qcow2::ReflinkMode;
use limosa_storage::{CacheMode, Io};

use super::image::{ImageArgs, ShareArg, parse_aio};
use crate::img::options::{BenchOptions, Source};
use crate::img::size::{parse_request, parse_size};
use limosa_console::parse;

#[derive(Debug, Args)]
pub(crate) struct ImgBenchArgs {
    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// Number of requests
    #[arg(short, long, value_name = "N", default_value_t = 75_000, value_parser = clap::value_parser!(u32).range(..=0x7fff_ffff))]
    count: u32,

    /// Number of requests in flight
    #[arg(short, long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    depth: u32,

    /// Size of a request
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4k", value_parser = parse_request)]
    buffer_size: u64,

    /// Distance between consecutive requests; 0, the default, means the size of a request
    #[arg(short = 'S', long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    step_size: u64,

    /// Offset of the first request
    #[arg(short, long, value_name = "SIZE", default_value = "0", value_parser = parse_size)]
    offset: u64,

    /// Write; without this, read
    // Without locks the image could be in use by a running VM.
    #[arg(short, long, conflicts_with = "force_share")]
    write: bool,

    /// Fill written buffers with this byte
    #[arg(long, value_name = "BYTE", default_value_t = 0)]
    pattern: u8,

    /// Flush after each N requests
    #[arg(long, value_name = "N", default_value_t = 0, requires = "write")]
    flush_interval: u32,

    /// Do not wait for requests in flight before a flush
    #[arg(long, requires = "flush_interval")]
    no_drain: bool,

    /// Cache mode: none, writeback, writethrough, unsafe, directsync
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,

    /// Asynchronous I/O backend; native means the same as `io_uring` here
    #[arg(short = 'i', long, value_name = "threads|native|io_uring", value_parser = parse_aio)]
    aio: Option<Io>,

    /// The same as --aio native
    #[arg(short, long, conflicts_with = "aio")]
    native: bool,

    /// Whether copied data is shared (reflinked) if the file system can: off, auto, or a minimum size
    #[arg(long, value_name = "off|auto|SIZE", default_value = "auto", value_parser = clone_mode)]
    clone: ReflinkMode,

    #[command(flatten)]
    share: ShareArg,

    /// No effect, as in qemu-img: results are always printed
    #[arg(short = 'q', long = "quiet")]
    _quiet: bool,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    json: bool,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,
}

impl ImgBenchArgs {
    /// Resolves the arguments.
    ///
    /// # Errors
    /// A combination that qemu-img refuses.
    pub(crate) fn resolve(self) -> anyhow::Result<BenchOptions> {
        if self.flush_interval > 0 && self.flush_interval < self.depth {
            anyhow::bail!(
                "--flush-interval {} is less than the depth of {}: requests in flight would wait for several flushes",
                self.flush_interval,
                self.depth
            );
        }
        Ok(BenchOptions {
            source: Source {
                force_share: self.share.force_share,
                cache: self.cache,
                io: if self.native { Io::Uring } else { self.aio.unwrap_or_default() },
                ..self.image.source(&self.file)
            },
            count: self.count,
            depth: self.depth,
            buffer_size: self.buffer_size,
            step_size: if self.step_size == 0 { self.buffer_size } else { self.step_size },
            offset: self.offset,
            write: self.write,
            pattern: self.pattern,
            flush_interval: self.flush_interval,
            drain: !self.no_drain,
            clone: self.clone,
            json: self.json,
        })
    }
}

/// `off`, `auto`, or the size from which on what would be copied is cloned.
fn clone_mode(text: &str) -> Result<ReflinkMode, parse::ParseError> {
    parse::threshold(text, ReflinkMode::Off, ReflinkMode::AUTO, ReflinkMode::AtLeast)
}
