//! The arguments of what moves pages on several channels.

use clap::{Args, ValueEnum};
use limosa_channel::ZeroCopy;
use limosa_stream::multifd::Compression;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompressionArg {
    /// No compression
    None,
    /// zlib
    Zlib,
    /// Zstandard
    Zstd,
}

impl From<CompressionArg> for Compression {
    fn from(compression: CompressionArg) -> Self {
        match compression {
            CompressionArg::None => Self::None,
            CompressionArg::Zlib => Self::Zlib,
            CompressionArg::Zstd => Self::Zstd,
        }
    }
}

/// How contents leave on channels beside the main one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ZeroCopyArg {
    /// Copied into the kernel, like everything else
    Off,
    /// As it is best there
    Auto,
    /// Lent to the kernel by `MSG_ZEROCOPY`, over TCP
    Msg,
    /// By reference, over TCP and unix sockets
    Splice,
}

/// How pages of a file leave on channels beside the main one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FileZeroCopyArg {
    /// Read and copied
    Off,
    /// Spliced if possible, else read and copied
    Auto,
    /// Spliced from the file by reference, except short runs of pages; fails if that is not possible
    Splice,
}

impl From<FileZeroCopyArg> for ZeroCopy {
    fn from(zero_copy: FileZeroCopyArg) -> Self {
        match zero_copy {
            FileZeroCopyArg::Off => Self::Off,
            FileZeroCopyArg::Auto => Self::Auto,
            FileZeroCopyArg::Splice => Self::Splice,
        }
    }
}

/// How many channels there are beside the main one, and what is on them.
#[derive(Debug, Args)]
pub(crate) struct ChannelArgs {
    /// Move memory on N multifd channels, 1 to 16, in addition to the main channel (QEMU's multifd and multifd-channels)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) channels: Option<u8>,

    /// Compression of pages on the multifd channels (QEMU's multifd-compression)
    #[arg(long, value_enum, default_value_t = CompressionArg::None, requires = "channels")]
    pub(crate) compression: CompressionArg,
}
