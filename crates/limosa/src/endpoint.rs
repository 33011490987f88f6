//! The two ends of a migration without a monitor: a connection, and perhaps a command behind it.
//!
//! The law: a command that was started is waited for or ended, and its failure is reported, because it is the cause
//! of what the stream failed with.

use std::fs::File;
use std::io::Seek as _;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use limosa_channel::{Channel, ChannelError, Exec, Listener, Options, Shutdown, Tls, TlsFailure, Uri};
use limosa_migrate::MigrateError;
use limosa_migrate::multifd::{MultifdAccept, MultifdAcceptOptions, MultifdChannels};

use crate::job::JobHandles;
use crate::remedy;
use crate::usage::misused;
use limosa_console::{error_line, say};

/// How long a command whose stream has broken off may take to end, so that its exit status can be reported.
const EXPLAIN_WITHIN: Duration = Duration::from_secs(2);

/// How long a destination that gives no answer is listened to for a refusal: it looks at a certificate as soon as it
/// has come.
const LISTEN_FOR: Duration = Duration::from_secs(10);

/// How long to wait for a connection before checking whether the job was cancelled.
const TICK: Duration = Duration::from_millis(20);
/// A time longer than any job waits.
const FOR_EVER: Duration = Duration::from_secs(10 * 365 * 86_400);

/// A connected peer.
pub(crate) struct Wire {
    /// The main channel, for the engine.
    pub(crate) channel: Channel,
    /// The multifd channels.
    pub(crate) pages: Vec<Channel>,
    pub(crate) end: PeerEnd,
}

/// The part of a peer that remains when the engine has the channel.
pub(crate) struct PeerEnd {
    channel: Channel,
    command: Option<Exec>,
    /// Whether the peer only delivers bytes: a file.
    pub(crate) recorded: bool,
}

impl Wire {
    fn new(channel: Channel, command: Option<Exec>, recorded: bool) -> anyhow::Result<Self> {
        let end = PeerEnd { channel: channel.try_clone()?, command, recorded };
        Ok(Self { channel, pages: Vec::new(), end })
    }

    fn exec(command: &str, options: &Options) -> anyhow::Result<Self> {
        let (channel, command) = Exec::start(command, options)?;
        Self::new(channel, Some(command), false)
    }

    /// Connects to standard input and output; `remedy` is for when they are not both connected.
    fn stdio(options: &Options, remedy: &str) -> anyhow::Result<Self> {
        let connected = Channel::connect(&Uri::Stdio, options).map_err(|error| match error {
            ChannelError::Unsupported { .. } => anyhow!("{error}{remedy}"),
            error => error.into(),
        });
        Self::new(connected?, None, false)
    }

    /// Reaches a destination, with `channels` multifd channels.
    pub(crate) fn to(uri: &Uri, options: &Options, channels: u8) -> anyhow::Result<Self> {
        match uri {
            Uri::Exec(command) => Self::exec(command, options),
            Uri::Stdio => Self::stdio(options, "; to send to standard output only, use fd:1"),
            _ => {
                // The main channel first: a destination that has no other means to tell channels apart goes by their
                // order. Over TLS it has shaken hands then. The others do so on their own threads, because QEMU waits
                // for what each has to say before it looks at the next.
                let main = Channel::connect(uri, options)?;
                let options =
                    &Options { tls: options.tls.clone().map(Tls::with_deferred_handshake), ..options.clone() };
                let connect = |number| {
                    let connected = Channel::connect(uri, options);
                    connected.map_err(|error| {
                        anyhow!(
                            "{}; multifd channel {number} of {channels}: the destination needs multifd on and \
                             multifd-channels {channels} before it listens",
                            error_line(&error)
                        )
                    })
                };
                let pages = (1..=channels).map(connect).collect::<anyhow::Result<_>>()?;
                Ok(Self { pages, ..Self::new(main, None, false)? })
            }
        }
    }

    /// Waits for a source, without a limit or for `within`.
    pub(crate) fn from(
        uri: &Uri,
        options: &Options,
        channels: u8,
        within: Option<Duration>,
        handles: &JobHandles,
    ) -> anyhow::Result<Self> {
        match uri {
            Uri::Exec(command) => Self::exec(command, options),
            Uri::Stdio => Self::stdio(options, "; to receive from standard input only, use --one-way fd:0"),
            Uri::File { path, offset } => {
                let failed = || format!("cannot read {}", path.display());
                let mut file = File::open(path).with_context(failed)?;
                file.seek(std::io::SeekFrom::Start(*offset)).with_context(failed)?;
                Self::new(Channel::from_fd_with(file.into(), options)?, None, true)
            }
            _ => {
                let listener = Listener::bind(uri, options)?;
                if listener.socket().is_none() {
                    let channel = listener.accept(None)?;
                    let recorded = is_regular_file(&channel);
                    return Self::new(channel, None, recorded);
                }
                handles.set_listen_address(listener.local_uri());
                say!("limosa: listening on {}", listener.local_uri());
                // Strangers that connect are turned away meanwhile.
                let options = MultifdAcceptOptions { channels, timeout: within.unwrap_or(FOR_EVER), main_first: false };
                let mut gathering = MultifdAccept::new(&listener, options)
                    .on_refusal(|why| say!("limosa: connection rejected: {}{}", error_line(why), remedy::of(why)));
                loop {
                    handles.engine.control.check()?;
                    let set = gathering.poll(TICK).map_err(|error| remedy::with_channels(error, channels))?;
                    if let Some(MultifdChannels { main, multifd: pages }) = set {
                        return Ok(Self { pages, ..Self::new(main, None, false)? });
                    }
                }
            }
        }
    }
}

impl PeerEnd {
    /// Whether answers can come back.
    pub(crate) fn answers(&self) -> bool {
        self.channel.has_direction(Shutdown::Both)
    }

    /// Whether there is a command whose exit status is not known yet.
    pub(crate) fn is_command(&self) -> bool {
        self.command.is_some()
    }

    /// Shuts the sending direction down, and waits for the command, if there is one.
    pub(crate) fn finish(mut self, within: Duration) -> Result<(), ChannelError> {
        // The peer may have gone by itself.
        let _ = self.channel.shutdown(Shutdown::Write);
        self.command.as_mut().map_or(Ok(()), |command| command.finish(within))
    }

    /// As [`finish`](Self::finish), where the destination gives no answer. Over TLS this end has shaken hands before
    /// the other one has looked at its certificate, and everything may have been sent before its refusal comes: so it
    /// is waited for, for a while, until the other end has gone. Stock QEMU refuses without a word, and cannot be
    /// distinguished from one that has all.
    pub(crate) fn finish_unanswered(self, within: Duration) -> Result<(), ChannelError> {
        if self.channel.is_encrypted() {
            let _ = self.channel.shutdown(Shutdown::Write);
            let end = Instant::now() + LISTEN_FOR.min(within);
            let mut room = [0; 256];
            while Instant::now() < end {
                self.channel.set_timeouts(Some(end.saturating_duration_since(Instant::now())), None)?;
                match self.channel.read(&mut room) {
                    Ok(1..) => {}
                    Err(error) if matches!(error.tls_failure(), Some(TlsFailure::Refused(_))) => return Err(error),
                    Ok(0) | Err(_) => break,
                }
            }
        }
        self.finish(within)
    }

    /// The error of the engine, or that of the command if it failed first.
    pub(crate) fn explain(mut self, error: MigrateError) -> anyhow::Error {
        let broken = match &error {
            MigrateError::Channel(error) => error.is_closed(),
            MigrateError::Stream(_) | MigrateError::Protocol(_) => true,
            _ => false,
        };
        if broken && let Some(command) = &mut self.command {
            let _ = self.channel.shutdown(Shutdown::Write);
            if let Err(failure @ ChannelError::CommandFailed { .. }) = command.finish(EXPLAIN_WITHIN) {
                return anyhow::Error::from(error).context(failure);
            }
        }
        error.into()
    }
}

/// Ends with a usage error if standard output has to be two things at once.
pub(crate) fn keep_stdout(uri: &Uri, json: bool) {
    if json && matches!(uri, Uri::Stdio | Uri::Fd(1)) {
        misused("--json prints to standard output, which carries the stream");
    }
}

fn is_regular_file(channel: &Channel) -> bool {
    use rustix::fs::{FileType, fstat};
    fstat(channel).is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::RegularFile)
}

#[cfg(test)]
mod tests {
    use limosa_testkit::{Authority, scratch};

    use super::*;

    #[test]
    fn a_destination_that_refuses_a_certificate_is_heard_although_all_was_put_before() {
        let (folder, bare) = (scratch().unwrap(), scratch().unwrap());
        let authority = Authority::new().unwrap();
        authority.equip(folder.path()).unwrap();
        authority.trusted_in(bare.path()).unwrap();
        let with = |tls: Tls| Options { tls: Some(tls), ..Options::default() };
        for certificate in [false, true] {
            let server = with(Tls::server(folder.path(), true).unwrap());
            let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &server).unwrap();
            let client = if certificate { folder.path() } else { bare.path() };
            let client = with(Tls::client(client, None).unwrap());
            let (all, put_all) = std::sync::mpsc::channel();
            let finished = std::thread::scope(|scope| {
                let uri = listener.local_uri();
                let sends = scope.spawn(move || {
                    let wire = Wire::to(uri, &client, 0).unwrap();
                    wire.channel.write_all(b"all").unwrap();
                    drop(wire.channel);
                    all.send(()).unwrap();
                    wire.end.finish_unanswered(Duration::from_secs(60))
                });
                let server = listener.accept(None).unwrap();
                // A client has shaken hands when it has said its last word; a server answers before it looks at that.
                while put_all.try_recv().is_err() {
                    let _ = server.try_complete_handshake();
                }
                while let Ok(1..) = server.read(&mut [0; 100]) {}
                drop(server);
                sends.join().unwrap()
            });
            match finished {
                Ok(()) => assert!(certificate),
                Err(error) => {
                    assert!(!certificate && error.to_string().contains("this end has none"), "{error}");
                }
            }
        }
    }
}
