//! The channels, memory and parameters of an attempt: nothing in it changes from phase to phase.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_memory::{BlockRole, GuestMemory};
use limosa_page::PAGE_SIZE;
use limosa_stream::{Command, PageSizes, RamBlock, postcopy, ram};

use super::guest::GuestSource;
use crate::control::Control;
use crate::control::Progress;
use crate::error::MigrateError;
use crate::live::MigrationParams;
use crate::pages::PageSource;
use crate::source::dirty_page_queue::DirtyPageQueue;
use crate::source::host_pages::with_page_sizes;
use crate::source::multifd::Multifd;
use crate::source::return_path::ReturnPath;

/// The use of postcopy in a live migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PostcopyMode {
    /// Never.
    #[default]
    Off,
    /// When it is [asked for](Control::start_postcopy), or if precopy is given up for it. The destination has to expect
    /// it.
    Allowed,
    /// At once: the VM stops, and all of its memory follows. A guest that is [asked for its free
    /// pages](super::LiveSource::hint_free_pages) runs until its list is complete; the pages in the list are not sent.
    AtOnce,
}

/// The memory that is sent, and the channels, queue and handles of the sending.
pub(super) struct Link<'e, 'v> {
    pub(super) memory: &'v GuestMemory,
    pub(super) source: &'e GuestSource<'v>,
    pub(super) channel: &'e Arc<Channel>,
    /// The multifd channels.
    pub(super) multifd: Option<&'e Multifd<'e, GuestSource<'v>>>,
    pub(super) return_path: &'e ReturnPath,
    /// The queue of a round's pages, for every thread that sends them.
    pub(super) queue: &'e DirtyPageQueue,
    pub(super) control: &'e Control,
    pub(super) progress: &'e Progress,
}

/// The parameters of the migration.
pub(super) struct Terms<'e> {
    pub(super) params: MigrationParams,
    /// The destination's RAM is zero wherever nothing was sent.
    pub(super) destination_zeroed: bool,
    pub(super) postcopy: PostcopyMode,
    /// The VM is not given away at the end, and its dirty logs stay on.
    pub(super) goes_on_here: bool,
    /// The page sizes of the destination.
    pub(super) page_sizes: &'e BTreeMap<String, u64>,
    /// Whether the destination has loaded a postcopy's devices.
    pub(super) loaded: &'e Loaded,
    pub(super) begun: Instant,
}

/// Whether the destination has loaded the devices of a postcopy: shared with the thread that reads the return path.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// The package is about to leave: an earlier answer to its PING does not count.
    asked: AtomicBool,
    at: OnceLock<Instant>,
}

impl Loaded {
    /// Notes that the package is about to leave.
    pub(super) fn ask(&self) {
        self.asked.store(true, Ordering::Release);
    }

    /// Notes the answer to the package's PING. Returns false if it came before the package.
    pub(super) fn answered(&self) -> bool {
        self.asked.load(Ordering::Acquire) && {
            let _ = self.at.set(Instant::now());
            true
        }
    }

    /// Returns the time of the answer. The VM runs there since.
    pub(super) fn at(&self) -> Option<Instant> {
        self.at.get().copied()
    }
}

impl Link<'_, '_> {
    /// Opens the stream: everything before the first page.
    pub(super) fn open(&self, terms: &Terms<'_>) -> Result<(), MigrateError> {
        let start = self.source.setup();
        let total = start.blocks.iter().map(RamBlock::pages).sum();
        self.progress.expect_pages(total);
        let mut bytes = Vec::new();
        start.configuration.clone().without_mapped_ram().encode(&mut bytes)?;
        Command::OpenReturnPath.encode(&mut bytes)?;
        Command::Ping(postcopy::PING_RETURN_PATH).encode(&mut bytes)?;
        let mut blocks = start.blocks.clone();
        if terms.postcopy != PostcopyMode::Off {
            blocks = listed(&blocks, terms.page_sizes)?;
            let summary = blocks.iter().fold(0, |summary, block| summary | block.page_size.unwrap_or(PAGE_SIZE));
            Command::PostcopyAdvise(Some(PageSizes { summary, target: PAGE_SIZE })).encode(&mut bytes)?;
        }
        ram::encode_ram_layout(start.section_id, &blocks, &mut bytes)?;
        self.end_section(&mut bytes);
        let passed = self.source.to_pass()?;
        if passed.is_empty() {
            return Ok(self.channel.write_all(&bytes)?);
        }
        let passed: Vec<_> = passed.iter().map(AsFd::as_fd).collect();
        Ok(self.channel.write_all_with_descriptors(&bytes, &passed)?)
    }

    /// Ends a section; with multifd channels, has the destination wait for them there.
    pub(super) fn end_section(&self, bytes: &mut Vec<u8>) {
        if self.multifd.is_some_and(Multifd::joins_by_word) {
            ram::encode_multifd_flush(bytes);
        }
        ram::encode_eos(self.source.setup().section_id, bytes);
    }

    /// Fails if the job was stopped, or the destination has gone.
    pub(super) fn check(&self) -> Result<(), MigrateError> {
        self.control.check()?;
        self.return_path.still_open()
    }

    /// Returns the bytes that the kernel has taken on all channels.
    pub(super) fn bytes_out(&self) -> u64 {
        let multifd = self.multifd.map_or(0, Multifd::bytes_out);
        self.channel.counters().bytes_out.wrapping_add(multifd)
    }

    /// Whether a page of the block that was never sent is zero at the destination.
    pub(super) fn leaves_out(&self, terms: &Terms<'_>, block: usize) -> bool {
        terms.destination_zeroed && self.memory.block(block).is_ok_and(|block| block.role() == BlockRole::Ram)
    }

    /// Whether the migration continues in postcopy now.
    pub(super) fn switches(&self, terms: &Terms<'_>) -> bool {
        terms.postcopy != PostcopyMode::Off && self.control.postcopy_wanted()
    }

    /// Returns the longest downtime for the rest.
    pub(super) fn downtime_limit(&self, terms: &Terms<'_>) -> Duration {
        self.control.downtime_limit().unwrap_or(terms.params.downtime_limit)
    }
}

/// Returns the blocks as a stream lists them if postcopy may follow: with page sizes above 4096.
fn listed(blocks: &[RamBlock], page_sizes: &BTreeMap<String, u64>) -> Result<Vec<RamBlock>, MigrateError> {
    let mut blocks = with_page_sizes(blocks, page_sizes)?;
    for block in &mut blocks {
        block.page_size = block.page_size.filter(|size| *size > PAGE_SIZE);
    }
    Ok(blocks)
}
