//! The arguments of `limosa receive`.

use std::path::PathBuf;

use clap::Args;
use limosa_channel::Uri;

use super::{ChannelArgs, EndpointArgs, NewSnapshotArgs, TlsServerArgs};

#[derive(Debug, Args)]
#[command(
    after_long_help = "A source with a return path (QEMU's capability return-path, or limosa send) gets its acknowledgement when \
the file is durable and has its name; until then its VM can go on there. A source without one takes its last \
write for success, even if this end fails later.\n\n\
limosa prints the address it listens on to stderr; with --control, query-migrate reports it as socket-address.\n\n  \
  limosa receive tcp:0.0.0.0:4444 vm.limosa\n  \
  limosa receive unix:/run/in.sock vm.limosa\n  \
  limosa receive tcp:0.0.0.0:4444 vm.limosa --tls-creds /etc/pki/qemu\n  \
  limosa receive \"exec:ssh host limosa send vm.limosa -\" vm.limosa\n  \
  zstd -dc stream.zst | limosa receive --one-way fd:0 vm.limosa"
)]
pub(crate) struct ReceiveArgs {
    /// Where the stream comes from: tcp:HOST:PORT or unix:PATH to listen on, exec:COMMAND, fd:N, `file:PATH`, or - for
    /// standard input and output
    #[arg(value_name = "URI")]
    pub(crate) uri: Uri,

    /// The file to create
    #[arg(value_name = "SNAPSHOT")]
    pub(crate) snapshot: PathBuf,

    #[command(flatten)]
    pub(crate) endpoint: EndpointArgs,

    #[command(flatten)]
    pub(crate) channels: ChannelArgs,

    #[command(flatten)]
    pub(crate) tls: TlsServerArgs,

    #[command(flatten)]
    pub(crate) new: NewSnapshotArgs,
}

impl ReceiveArgs {
    /// Returns the reason why the arguments contradict each other, if they do.
    pub(crate) fn contradiction(&self) -> Option<&'static str> {
        if self.channels.channels.is_some() && !(self.uri.is_socket() || matches!(self.uri, Uri::Fd(_))) {
            return Some("--channels needs several connections: listen on tcp:HOST:PORT or unix:PATH");
        }
        self.tls.contradiction(&self.uri)
    }
}
