//! The arguments of `limosa send`.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};
use limosa_channel::{Uri, ZeroCopy};
use limosa_console::parse::{self, ParseError};

use super::channels::file_zero_copy;
use super::restore::preempt;
use super::{ChannelArgs, EndpointArgs, KeyArgs, TlsClientArgs};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SendModeArg {
    /// The guest runs when all pages have arrived
    Precopy,
    /// The guest runs at once and its pages follow; the destination must set postcopy-ram and have a return path
    Postcopy,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SendMemoryArg {
    /// All of the guest's memory is sent
    Sent,
    /// The destination was started with the options of limosa inspect --qemu-args: only device state and small blocks
    /// are sent. A destination that maps anything else gets a broken guest, and nothing here can tell
    Mapped,
}

#[derive(Debug, Args)]
#[command(
    after_long_help = "The destination is a QEMU with the saved machine type and devices, started with -incoming URI; for \
postcopy and for --channels with -incoming defer, so that its capability postcopy-ram or multifd can be set before \
migrate-incoming.\n\n  \
  limosa send vm.limosa tcp:host:4444\n  \
  limosa send vm.limosa tcp:host:4444 --channels 4 --compression zstd\n  \
  limosa send vm.limosa tcp:host:4444 --tls-creds /etc/pki/qemu\n  \
  limosa send vm.limosa \"exec:ssh host limosa receive - vm.limosa\"\n  \
  limosa send vm.limosa --one-way \"exec:zstd > vm.stream.zst\""
)]
pub(crate) struct SendArgs {
    /// The snapshot to send: a file, or the URL of an object in a store
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) key: KeyArgs,

    /// Where the stream goes: tcp:HOST:PORT, unix:PATH, exec:COMMAND, fd:N, or - for standard input and output
    #[arg(value_name = "URI")]
    pub(crate) uri: Uri,

    /// When the guest starts running
    #[arg(long, value_enum, default_value_t = SendModeArg::Precopy)]
    pub(crate) mode: SendModeArg,

    /// Where the destination has the guest's memory from
    #[arg(long, value_enum, default_value_t = SendMemoryArg::Sent)]
    pub(crate) memory: SendMemoryArg,

    /// With postcopy, the page size of a RAM block that is on huge pages at the destination; repeatable
    #[arg(long, value_name = "BLOCK=SIZE", value_parser = parse_page_size)]
    pub(crate) page_size: Vec<(String, u64)>,

    /// With postcopy, answer page requests on a second connection; the destination must set postcopy-preempt
    #[arg(long, value_parser = preempt(), action = ArgAction::Set, default_value = "off")]
    pub(crate) preempt: bool,

    /// Resume an interrupted postcopy; first give the destination QEMU the command migrate-recover with this URI
    #[arg(long, conflicts_with = "mode")]
    pub(crate) recover: bool,

    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,

    #[command(flatten)]
    pub(crate) channels: ChannelArgs,

    /// How pages get from the file to the multifd channels
    #[arg(long, value_parser = file_zero_copy(), value_name = "METHOD", default_value = "auto", requires = "channels")]
    pub(crate) zero_copy: ZeroCopy,

    #[command(flatten)]
    pub(crate) tls: TlsClientArgs,
}

impl SendArgs {
    /// Returns the options that exclude each other, as clap would say it.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        let postcopy = self.recover || self.mode == SendModeArg::Postcopy;
        let two = self.preempt;
        let connects = self.uri.is_socket();
        if matches!(self.uri, Uri::File { .. }) {
            Some("limosa send needs a receiver; to write the stream into a file, use limosa export")
        } else if self.memory == SendMemoryArg::Mapped && (postcopy || self.channels.channels.is_some()) {
            Some("--memory mapped needs --mode precopy and no --channels: there is next to nothing to send")
        } else if !postcopy && (two || !self.page_size.is_empty()) {
            Some("--page-size and --preempt need --mode postcopy")
        } else if postcopy && self.endpoint.one_way {
            Some("--one-way needs --mode precopy: in postcopy the destination requests pages")
        } else if postcopy && self.channels.channels.is_some() {
            Some("--channels needs --mode precopy: postcopy does not use multifd channels")
        } else if self.channels.channels.is_some() && !connects {
            Some("--channels needs several connections: use tcp:HOST:PORT or unix:PATH")
        } else if two && !connects {
            Some("--preempt on needs a second connection: use tcp:HOST:PORT or unix:PATH")
        } else if self.tls.tls_creds.is_some() && self.zero_copy == ZeroCopy::Splice {
            Some("--zero-copy splice cannot be combined with --tls-creds: splicing sends pages unencrypted")
        } else {
            self.tls.contradiction(&self.uri)
        }
    }
}

/// Reads the page size of a RAM block: `BLOCK=2M`.
fn parse_page_size(text: &str) -> Result<(String, u64), ParseError> {
    let wrong = || ParseError::new(text, "page size of a RAM block", "BLOCK=2M");
    let (block, size) = text.rsplit_once('=').filter(|(block, _)| !block.is_empty()).ok_or_else(wrong)?;
    let size = parse::size(size).ok().filter(|size| size.is_power_of_two()).ok_or_else(wrong)?;
    Ok((block.to_owned(), size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_size_names_its_block() {
        assert_eq!(parse_page_size("/objects/mem=2M"), Ok(("/objects/mem".into(), 2 << 20)));
        assert_eq!(parse_page_size("a=b=4K"), Ok(("a=b".into(), 4096)));
        for wrong in ["", "2M", "=2M", "mem=", "mem=3M", "mem=x"] {
            assert!(parse_page_size(wrong).is_err(), "{wrong}");
        }
    }
}
