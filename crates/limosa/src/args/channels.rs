//! The arguments of what moves pages on several channels.

use clap::Args;
use clap::builder::TypedValueParser;
use limosa_channel::ZeroCopy;
use limosa_console::named_values;
use limosa_stream::multifd::Compression;

/// Methods by which pages of a file leave on multifd channels: [`ZeroCopy`] without what only memory can.
pub(super) fn file_zero_copy() -> impl TypedValueParser<Value = ZeroCopy> {
    named_values([
        (ZeroCopy::Off, "off", "Read and copied"),
        (ZeroCopy::Auto, "auto", "Spliced if possible, else read and copied"),
        (
            ZeroCopy::Splice,
            "splice",
            "Spliced from the file by reference, except short runs of pages; fails if that is not possible",
        ),
    ])
}

fn compression() -> impl TypedValueParser<Value = Compression> {
    named_values([
        (Compression::None, "none", "No compression"),
        (Compression::Zlib, "zlib", "zlib"),
        (Compression::Zstd, "zstd", "Zstandard"),
    ])
}

/// The number of multifd channels, and what is on them.
#[derive(Debug, Args)]
pub(crate) struct ChannelArgs {
    /// Move memory on N multifd channels, 1 to 16, in addition to the main channel (QEMU's multifd and
    /// multifd-channels)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) channels: Option<u8>,

    /// Compression of pages on the multifd channels (QEMU's multifd-compression)
    #[arg(long, value_parser = compression(), default_value = "none", requires = "channels")]
    pub(crate) compression: Compression,
}
