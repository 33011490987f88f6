//! Memory that is sent over and over, and the processes that send it: one on this machine's own network, one at the end
//! of a cable.

use std::cell::RefCell;
use std::fs::File;

use anyhow::{Context, Result};

use super::ends::Source;
use super::send_options::SendOptions;
use super::transport::Transport;
use crate::caches::Caches;
use crate::frame::Frame;
use crate::measure::Measured;
use crate::namespaces::Cable;
use crate::options::Options;
use crate::raw::Mapping;

/// Memory that is touched before a run besides what is received, in bytes.
const SPARE: u64 = 1 << 30;

/// The connection between the two processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Link {
    /// tcp over the loopback interface.
    Tcp,
    Unix,
    /// tcp over a veth pair between two network namespaces.
    Veth,
}

impl Link {
    pub(crate) const ALL: [Self; 3] = [Self::Tcp, Self::Unix, Self::Veth];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Unix => "unix",
            Self::Veth => "veth",
        }
    }
}

/// The memory and its senders.
#[derive(Debug)]
pub(crate) struct Stage<'c> {
    mapping: Mapping,
    here: RefCell<Source<'static>>,
    apart: Option<RefCell<Source<'c>>>,
    frame: Frame,
}

impl<'c> Stage<'c> {
    /// Of the first `memory` bytes of `content`; nothing is sent over veth without a cable.
    pub(crate) fn new(options: &Options, content: &File, memory: u64, cable: Option<&'c Cable>) -> Result<Self> {
        let len = usize::try_from(memory).context("--size")?;
        let mapping = Mapping::of_file(content, len).with_context(|| format!("mapping {memory} bytes"))?;
        let here = Source::start(content, memory, None)?;
        let apart = cable.map(|cable| Source::start(content, memory, Some(cable)));
        let apart = apart.transpose()?.map(RefCell::new);
        // The kernel's buffers take some besides.
        let frame = Frame { touch: options.touch.unwrap_or(memory + SPARE) };
        Ok(Self { mapping, here: RefCell::new(here), apart, frame })
    }

    /// Whether anything can be sent over the link.
    pub(crate) fn has(&self, link: Link) -> bool {
        link != Link::Veth || self.apart.is_some()
    }

    /// Sends the memory once, the caches being as said when the clock starts; `ready` is called before.
    pub(crate) fn send(
        &self,
        link: Link,
        way: SendOptions,
        caches: Caches,
        ready: impl FnOnce() -> Result<()>,
    ) -> Result<Measured> {
        let (transport, apart) = match link {
            Link::Tcp => (Transport::Tcp, None),
            Link::Unix => (Transport::Unix, None),
            Link::Veth => (Transport::Tcp, Some(self.apart.as_ref().context("there is no cable")?)),
        };
        let ready = || caches.prepare(&self.mapping, &self.frame).and_then(|()| ready());
        match apart {
            Some(source) => source.borrow_mut().send(transport, way, ready),
            None => self.here.borrow_mut().send(transport, way, ready),
        }
    }

    /// Has the process on this machine's own network run on one core, or on all.
    pub(crate) fn pin(&self, core: Option<usize>) -> Result<()> {
        self.here.borrow().pin(core)
    }
}
