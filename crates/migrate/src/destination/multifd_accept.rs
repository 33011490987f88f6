//! The channels of one migration, told apart among all connections.
//!
//! All channels of a migration connect to one address. Which is which shows in their first bytes: `QEVM` begins the
//! main channel, an initial packet one of the others. They are looked at without being taken, so order does not matter;
//! where they cannot be looked at, the main channel is the first to connect.
//!
//! The law: **no connection holds up another**, with any number of them and in any state.
//! Connections that have not yet said who they are wait in a short row; when it is full, and none of them has said so
//! since, the one that has waited longest is closed, over TLS of those who have not shaken hands. What names itself
//! wrongly ends the gathering with an error that says what is expected. Over TLS the bytes are those inside, so
//! channels are told apart as without it; a peer that does not complete the handshake is a stranger, and reported.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Listener, RefusalLog};
use limosa_page::error_with_causes;
use limosa_stream::configuration;
use limosa_stream::multifd::{self, INITIAL_LEN, InitialPacket};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::error::MigrateError;

/// Connections that may wait until they say who they are: all channels there can be, and some strangers.
const ROW: usize = 64;
/// Connections that are accepted before those that wait are looked at again.
const AT_ONCE: usize = 256;
/// How a TLS connection begins: a handshake record of version 3, with any contents (RFC 8446, section 5.1).
const TLS_HELLO: [u8; 2] = [22, 3];
/// How soon a connection is looked at again that has said a part of who it is.
const AGAIN_AFTER: Duration = Duration::from_millis(5);

/// The channels that are expected, and the signs that tell them apart.
#[derive(Debug, Clone)]
pub struct MultifdAcceptOptions {
    /// Multifd channels: QEMU's `multifd-channels`.
    pub channels: u8,
    /// How long they may take to connect, all together.
    pub timeout: Duration,
    /// The first connection is the main channel, also if its bytes look different: for transports that cannot be
    /// peeked.
    pub main_first: bool,
}

/// All channels of one migration.
#[derive(Debug)]
pub struct MultifdChannels {
    /// The main channel; nothing has been read from it.
    pub main: Channel,
    /// The others by their number; their initial packets have been read.
    pub multifd: Vec<Channel>,
}

/// Receives the reason why a connection was turned away.
type Tell<'a> = Box<dyn FnMut(&MigrateError) + 'a>;

/// Accepts connections until all channels are there.
pub struct MultifdAccept<'a> {
    listener: &'a Listener,
    options: MultifdAcceptOptions,
    begun: Instant,
    main: Option<Channel>,
    pages: Vec<Option<Channel>>,
    uuid: Option<[u8; 16]>,
    row: VecDeque<Waiting>,
    turned_away: u64,
    /// Why, the last time that there was more to say than that it was a stranger.
    why: Option<MigrateError>,
    reasons: RefusalLog,
    tell: Option<Tell<'a>>,
}

impl fmt::Debug for MultifdAccept<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = (&self.options, &self.main, &self.pages, &self.row, self.turned_away, &self.why);
        f.debug_tuple("MultifdAccept").field(&fields).finish()
    }
}

#[derive(Debug)]
struct Waiting {
    channel: Channel,
    /// It has said a part of who it is: the kernel would report it readable for ever.
    began: bool,
}

/// The kind of a connection.
enum Found {
    Unknown {
        began: bool,
    },
    Main,
    Pages(InitialPacket),
    Stranger,
    /// One that may have meant to be a channel.
    Refused(MigrateError),
}

impl<'a> MultifdAccept<'a> {
    /// Begins to wait on `listener`; the time runs from here.
    pub fn new(listener: &'a Listener, options: MultifdAcceptOptions) -> Self {
        let pages = (0..options.channels).map(|_| None).collect();
        let (main, uuid, row) = (None, None, VecDeque::with_capacity(ROW));
        let (begun, turned_away, why, tell) = (Instant::now(), 0, None, None);
        let reasons = RefusalLog::default();
        Self { listener, options, begun, main, pages, uuid, row, turned_away, why, reasons, tell }
    }

    /// Has `tell` hear why a connection was turned away that may have meant to be a channel: one that does not come
    /// through the TLS handshake, or that speaks TLS to an end that does not. The same reason is reported once, and a
    /// few reasons only.
    #[must_use]
    pub fn on_refusal(mut self, tell: impl FnMut(&MigrateError) + 'a) -> Self {
        self.tell = Some(Box::new(tell));
        self
    }

    /// Waits for so long at most; the channels once they are all there. What else has connected is closed then.
    ///
    /// # Errors
    /// They are not all there in time; a number that occurs twice or is not below the number of channels; channels of
    /// two VMs.
    pub fn poll(&mut self, wait: Duration) -> Result<Option<MultifdChannels>, MigrateError> {
        self.poll_observed(wait, |_| {})
    }

    /// As [`poll`](Self::poll); every connection is shown as soon as it is accepted, before it is known who it is.
    ///
    /// # Errors
    /// As `poll`.
    pub fn poll_observed(
        &mut self,
        wait: Duration,
        mut show: impl FnMut(&Channel),
    ) -> Result<Option<MultifdChannels>, MigrateError> {
        let step = Instant::now();
        loop {
            self.accept(&mut show)?;
            self.look()?;
            if self.main.is_some() && self.pages.iter().all(Option::is_some) {
                let pages = std::mem::take(&mut self.pages).into_iter().flatten().collect();
                return Ok(self.main.take().map(|main| MultifdChannels { main, multifd: pages }));
            }
            let (rest, all) =
                (wait.saturating_sub(step.elapsed()), self.options.timeout.saturating_sub(self.begun.elapsed()));
            if all.is_zero() {
                return Err(MigrateError::MissingChannels {
                    what: self.missing(),
                    refused: self.why.take().map(Box::new),
                });
            }
            if rest.is_zero() {
                return Ok(None);
            }
            self.wait(rest.min(all))?;
        }
    }

    /// Takes new connections into the row.
    fn accept(&mut self, show: &mut impl FnMut(&Channel)) -> Result<(), MigrateError> {
        for _ in 0..AT_ONCE {
            let channel = match self.listener.accept(Some(Duration::ZERO)) {
                Err(error) if error.is_timeout() => return Ok(()),
                accepted => accepted?,
            };
            show(&channel);
            if self.options.main_first && self.main.is_none() {
                self.main = Some(channel);
                continue;
            }
            if self.row.len() >= ROW {
                self.look()?;
                self.make_room();
            }
            self.row.push_back(Waiting { channel, began: false });
        }
        Ok(())
    }

    /// Closes one of the row, if it is full.
    fn make_room(&mut self) {
        if self.row.len() < ROW {
            return;
        }
        let is_strange = |waiting: &Waiting| !matches!(waiting.channel.try_complete_handshake(), Ok(true));
        let strange: Vec<_> =
            (0..).zip(&self.row).filter(|(_, waiting)| is_strange(waiting)).map(|(at, _)| at).collect();
        // Where every peer may shake hands, those who have and say nothing are no better than others.
        let place = strange.first().filter(|_| strange.len() >= ROW / 2).copied().unwrap_or(0);
        self.turned_away += u64::from(self.row.remove(place).is_some());
    }

    /// Looks at those in the row.
    fn look(&mut self) -> Result<(), MigrateError> {
        for _ in 0..self.row.len() {
            let Some(mut waiting) = self.row.pop_front() else { break };
            match self.identify(&waiting.channel)? {
                Found::Unknown { began } => {
                    waiting.began = began;
                    self.row.push_back(waiting);
                }
                Found::Main if self.main.is_none() => self.main = Some(waiting.channel),
                Found::Pages(packet) => self.place(packet, waiting.channel)?,
                Found::Main | Found::Stranger => self.turned_away += 1,
                Found::Refused(why) => self.refuse(why),
            }
        }
        Ok(())
    }

    fn refuse(&mut self, error: MigrateError) {
        self.turned_away += 1;
        let why = error_with_causes(&error);
        if let Some(tell) = self.tell.as_mut().filter(|_| self.reasons.is_new(&why)) {
            tell(&error);
        }
        self.why = Some(error);
    }

    fn identify(&self, channel: &Channel) -> Result<Found, MigrateError> {
        let mut bytes = [0; INITIAL_LEN];
        let got = match channel.peek(&mut bytes) {
            Ok(None) => return Ok(Found::Unknown { began: false }),
            Ok(Some(got)) if got > 0 => got,
            // It has gone again. Who has shaken hands before may not trust this end, and not say so: stock QEMU goes
            // so.
            Ok(Some(_)) => {
                let gone = channel.read_exact(&mut bytes).err();
                let why = gone.filter(|gone| gone.tls_failure().is_some()).map(|gone| Found::Refused(gone.into()));
                return Ok(why.unwrap_or(Found::Stranger));
            }
            Err(error) if error.is_closed() => return Ok(Found::Stranger),
            Err(error) if error.tls_failure().is_some() => return Ok(Found::Refused(error.into())),
            Err(error) => return Err(error.into()),
        };
        let magic = &bytes[..got.min(4)];
        if magic == configuration::MAGIC && !self.options.main_first {
            return Ok(Found::Main);
        }
        if got == INITIAL_LEN && magic == multifd::MAGIC {
            // It is all there: this waits for nothing.
            channel.read_exact(&mut bytes)?;
            return Ok(Found::Pages(InitialPacket::decode(&bytes)?));
        }
        if got >= TLS_HELLO.len() && bytes.starts_with(&TLS_HELLO) {
            return Ok(Found::Refused(MigrateError::WantsTls { peer: channel.peer().to_owned() }));
        }
        let known = [configuration::MAGIC, multifd::MAGIC].iter().any(|known| known.starts_with(magic));
        Ok(if known { Found::Unknown { began: true } } else { Found::Stranger })
    }

    fn place(&mut self, packet: InitialPacket, channel: Channel) -> Result<(), MigrateError> {
        let (id, count) = (packet.id, self.options.channels);
        if *self.uuid.get_or_insert(packet.uuid) != packet.uuid {
            let what = format!("multifd channel {id} belongs to another VM than the others (its uuid differs)");
            return Err(MigrateError::Channels(what));
        }
        match self.pages.get_mut(usize::from(id)) {
            Some(place @ None) => *place = Some(channel),
            Some(Some(_)) => {
                return Err(MigrateError::Channels(format!(
                    "two connections say that they are multifd channel {id}; is only one VM migrating to {}?",
                    self.listener.local_uri()
                )));
            }
            None => {
                return Err(MigrateError::Channels(format!(
                    "a connection says that it is multifd channel {id}, and {count} are expected (numbered from 0)"
                )));
            }
        }
        Ok(())
    }

    /// Waits for a connection, or for bytes on one of the row.
    fn wait(&self, rest: Duration) -> Result<(), MigrateError> {
        let socket = self.listener.socket().ok_or_else(|| {
            MigrateError::Channels(
                "several channels cannot come through one connected descriptor; listen instead".into(),
            )
        })?;
        let rest = if self.row.iter().any(|waiting| waiting.began) { rest.min(AGAIN_AFTER) } else { rest };
        let silent = self.row.iter().filter(|waiting| !waiting.began).map(|waiting| waiting.channel.as_fd());
        let mut polled: Vec<_> =
            std::iter::once(socket).chain(silent).map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut polled, Timespec::try_from(rest).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(MigrateError::Channels(format!("waiting for connections: {errno}"))),
        }
    }

    /// Who has not come.
    fn missing(&self) -> String {
        let missing: Vec<_> = self.pages.iter().enumerate().filter(|(_, place)| place.is_none()).collect();
        let ids: Vec<_> = missing.iter().map(|(id, _)| id.to_string()).collect();
        let (main, pages) = (self.main.is_none(), !ids.is_empty());
        let mut what = String::new();
        match (main, pages) {
            (true, true) => what.push_str("neither the main channel nor multifd channels "),
            (true, false) if self.pages.is_empty() => what.push_str("no migration"),
            (true, false) => what.push_str("no main channel"),
            (false, _) => what.push_str("no multifd channels "),
        }
        what.push_str(&ids.join(", "));
        let within = self.options.timeout.as_secs_f32();
        what.push_str(&format!(" came to {} within {within} s", self.listener.local_uri()));
        if self.turned_away > 0 {
            let why = self.why.as_ref().map(|why| format!(": {}", error_with_causes(why))).unwrap_or_default();
            what.push_str(&format!(" ({} other connections were turned away{why})", self.turned_away));
        }
        if !self.row.is_empty() {
            what.push_str(&format!(" ({} connections say nothing)", self.row.len()));
        }
        what
    }
}
