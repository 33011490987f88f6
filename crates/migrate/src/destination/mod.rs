//! The destination role in precopy: pages from the channel to a [`PageSink`], then the device state.
//!
//! The stream is read in large pieces into receive buffers and decoded in place. A page is not taken out of them: the
//! sink gets slices of a buffer, gathered over as many consecutive pages as have arrived, and hands them to the kernel
//! in one vectored call, while the next buffer fills (`writer`). User space moves only the tail of a record that the
//! end of a buffer cut in two, at most one page a buffer.
//!
//! The role ends with the VM stopped at the source and the source waiting for the acknowledgement. The caller gives it
//! with [`ReceivedStream::acknowledge`]: until then the source can resume its VM, and only the caller knows whether the
//! received VM has to be durable first.
//!
//! A source that says where its device sections end (PING 6) is answered when every page and every section is in its
//! place; its stream is whole when its commit (PING 7) has come, and the description behind it.
//!
//! With the option [`colo`](DestinationOptions::colo) a stream is the base of [`Checkpoints`], which follow it on the
//! same channel.
//!
//! With [multifd channels](Destination::channels) most pages come on these, each read by a thread of its own, and
//! meet at synchronization points. [`MultifdAccept`] finds out which connection is which channel.

mod aside;
mod buffer;
mod colo;
mod devices;
mod hooks;
mod incoming;
mod memory;
mod multifd;
mod multifd_accept;
mod options;
mod page_writer;
mod phase;
mod receiver;
mod run;
mod scatter;
mod sync;
mod unpack;

use std::sync::Arc;

use limosa_channel::Channel;
use limosa_page::broken_invariant;

use crate::control::Handle;
use crate::error::MigrateError;
use crate::pages::PageSink;
use phase::{Package, Phase, Whole};
use receiver::{Receiver, Role};

pub use aside::Aside;
pub use colo::{Checkpoint, CheckpointStats, Checkpoints, NextCheckpoint, NextState};
pub(crate) use hooks::Hooks;
pub use incoming::ReceivedStream;
pub(crate) use incoming::{Broken, Ownership, PostcopySwitchover, Received, SourceNow};
pub use multifd::MultifdOptions;
pub use multifd_accept::{MultifdAccept, MultifdAcceptOptions, MultifdChannels};
pub use options::{DestinationOptions, DestinationStats};

/// The destination role.
pub struct Destination<'a, S: PageSink + Send + ?Sized> {
    sink: &'a mut S,
    role: Role,
    hooks: Option<&'a dyn Hooks>,
}

impl<S: PageSink + Send + ?Sized> std::fmt::Debug for Destination<'_, S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Role { channel, options, .. } = &self.role;
        f.debug_struct("Destination").field("channel", channel).field("options", options).finish_non_exhaustive()
    }
}

/// The end of what a receiver reads.
enum End {
    /// The end of the stream.
    Whole(Whole),
    /// A postcopy's package follows: the bytes of it that have arrived.
    Package(Package, Vec<u8>),
}

impl<'a, S: PageSink + Send + ?Sized> Destination<'a, S> {
    /// A destination that reads from `channel` and hands pages to `sink`. It keeps a clone of the handle.
    pub fn new(sink: &'a mut S, channel: Channel, handle: &Handle) -> Self {
        let Handle { control, progress } = handle.clone();
        let role = Role {
            channel: Arc::new(channel),
            pages: Vec::new(),
            multifd: MultifdOptions::default(),
            control,
            progress,
            options: DestinationOptions::default(),
        };
        Self { sink, role, hooks: None }
    }

    /// Sets the options.
    #[must_use]
    pub fn options(mut self, options: DestinationOptions) -> Self {
        self.role.options = options;
        self
    }

    /// With multifd channels, in the order of their numbers, their initial packets read: those of a
    /// [`MultifdChannels`].
    #[must_use]
    pub fn channels(mut self, pages: Vec<Channel>, options: MultifdOptions) -> Self {
        self.role.pages = pages.into_iter().map(Arc::new).collect();
        self.role.multifd = options;
        self
    }

    /// For a VM that waits here for its state.
    pub(crate) fn hooks(mut self, hooks: &'a dyn Hooks) -> Self {
        self.hooks = Some(hooks);
        self
    }

    /// Receives a whole stream.
    ///
    /// On `Err` the channel is closed, so that a source with a return path resumes its VM.
    pub fn run(self) -> Result<ReceivedStream, MigrateError> {
        match self.arrive() {
            Ok(Received::Whole(incoming)) => Ok(*incoming),
            // Refused where it began, unless there are hooks.
            Ok(Received::PostcopySwitchover(switched)) => {
                Err(MigrateError::SwitchedToPostcopy { offset: switched.decoder.offset() })
            }
            Err(broken) => Err(broken.error),
        }
    }

    /// Receives a stream up to its end, or to the package of a postcopy.
    pub(crate) fn arrive(self) -> Result<Received, Broken> {
        let Self { sink, role, hooks } = self;
        let role = Arc::new(role);
        role.channels().for_each(|channel| role.control.watch(channel));
        let mut receiver = Receiver::new(Arc::clone(&role), hooks);
        let result = receiver.run(sink).and_then(|phase| match phase {
            Phase::Whole(whole) => Ok(End::Whole(whole)),
            Phase::Package(package) => Ok(End::Package(package, receiver.buffer.arrived()?.to_vec())),
            Phase::Layout | Phase::Memory(_) | Phase::DeviceState(_) => {
                Err(broken_invariant("a stream that was received has come to its end").into())
            }
        });
        let (answered, return_path, stats) = (receiver.answered, receiver.return_path, receiver.stats);
        let channel = Arc::clone(&role.channel);
        let pages = role.pages.clone();
        match result {
            Ok(End::Whole(Whole { start, tail, devices })) => {
                role.control.unwatch();
                let owner = match (answered, return_path) {
                    (true, _) => Ownership::Committed,
                    (false, true) => Ownership::Awaited,
                    (false, false) => Ownership::Unanswerable,
                };
                let receiver = role.options.colo.then(|| Box::new(receiver.for_checkpoints()));
                let incoming = ReceivedStream {
                    setup: start,
                    tail,
                    devices,
                    stats,
                    channel,
                    _pages: pages,
                    owner,
                    return_path,
                    receiver,
                };
                Ok(Received::Whole(Box::new(incoming)))
            }
            Ok(End::Package(Package { start, length }, arrived)) => {
                let decoder = receiver.decoder;
                let switched = PostcopySwitchover { start, decoder, arrived, length, stats, channel, _pages: pages };
                Ok(Received::PostcopySwitchover(Box::new(switched)))
            }
            Err(error) => {
                role.close();
                Err(Broken { error: role.control.explain(error), answered })
            }
        }
    }
}
