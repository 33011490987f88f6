//! The process that has the checkpoints, and whose guest survives.

use std::io::IoSlice;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use limosa_channel::{Channel, Listener, Options, Uri};
use limosa_console::error_line;
use limosa_memory::GuestMemory;
use limosa_migrate::checkpoints::NextCheckpoint;
use limosa_migrate::stored::{Destination, DestinationOptions, PageError, PageSink, StreamSetup};
use limosa_migrate::{Handle, LiveVm as _, MigrateError};
use limosa_page::{PAGE_LEN, PageNumber, PageRange, to_u64};

use super::printer::{Printer, put};
use super::settings::{KNOWN, PATIENCE, ProtectSettings, READY};
use super::vm::PrintingVm;
use crate::error::DemoError;
use crate::guest::{self, GuestKind};

pub(super) fn run(socket: &Path, settings: &ProtectSettings) -> Result<(), DemoError> {
    let memory = PrintingVm::memory(settings)?;
    let failed = |error: limosa_channel::ChannelError| DemoError::Guest(error_line(&error));
    let listener = Listener::bind(&Uri::Unix(socket.into()), &Options::default()).map_err(failed)?;
    put(READY);
    let channel = listener.accept(Some(PATIENCE)).map_err(failed)?;
    let guest = guest::receive(GuestKind::Threads, Arc::clone(&memory), settings.log)?;
    let mut newest = None;
    // However it ends, the newest checkpoint is what there is.
    let ended = keep(&memory, channel, &mut newest);
    let Some(sections) = newest else {
        let why = ended.map_or_else(|error| error_line(&error), |()| "it ended before its base was here".into());
        return Err(DemoError::Guest(why));
    };
    let survivor = PrintingVm { guest, printer: Printer::start(settings.line_every)? };
    let failed = |error: limosa_migrate::VmError| DemoError::Guest(error_line(&*error));
    survivor.load(&sections).map_err(failed)?;
    // Each of its pages is what the checkpoint's guest had written, or this fails.
    survivor.guest.verify()?;
    put(format_args!("{KNOWN} {}", survivor.printer.number()));
    survivor.resume().map_err(failed)?;
    // The parent ends this process.
    loop {
        std::thread::sleep(PATIENCE);
    }
}

/// Keeps checkpoints; `newest` has the state of the devices of the newest one.
fn keep(memory: &GuestMemory, channel: Channel, newest: &mut Option<Vec<u8>>) -> Result<(), MigrateError> {
    let options = DestinationOptions { colo: true, ..DestinationOptions::default() };
    let mut pages = Aside { memory, pages: Vec::new() };
    let base = Destination::new(&mut pages, channel, &Handle::new()).options(options).run()?;
    pages.fold()?;
    let first = base.tail.clone();
    let mut checkpoints = base.into_checkpoints()?;
    checkpoints.begin()?;
    *newest = Some(first);
    while checkpoints.wait_request(None)? == NextCheckpoint::Requested {
        checkpoints.reply()?;
        let checkpoint = checkpoints.receive(&mut pages, Some(Duration::from_secs(10)))?;
        // All of it is here: it counts, also if its primary ends now.
        pages.fold()?;
        *newest = Some(checkpoint.sections);
        checkpoints.loaded()?;
    }
    Ok(())
}

/// Pages of a checkpoint that is not whole, beside the memory of the one before.
struct Aside<'m> {
    memory: &'m GuestMemory,
    pages: Vec<(usize, PageRange, Vec<u8>)>,
}

impl Aside<'_> {
    /// Puts them into the memory: the checkpoint is whole. A run without contents is zero.
    fn fold(&mut self) -> Result<(), MigrateError> {
        for (block, pages, contents) in self.pages.drain(..) {
            let failed = |error: limosa_memory::MemoryError| MigrateError::Source(error.into());
            let block = self.memory.block(block).map_err(failed)?;
            if contents.is_empty() {
                block.discard(pages).map_err(failed)?;
            } else {
                block.write(pages.bytes().start, &contents).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn check(&self, block: usize, pages: PageRange) -> Result<(), PageError> {
        let known = self.memory.block(block)?.pages();
        if pages.end > known.end {
            return Err(format!("the memory has no {pages}").into());
        }
        Ok(())
    }
}

impl PageSink for Aside<'_> {
    fn begin(&mut self, start: &StreamSetup) -> Result<(), PageError> {
        let ours = self.memory.blocks().iter().map(|block| (block.name(), block.len()));
        if !ours.eq(start.blocks.iter().map(|block| (block.name.as_str(), block.used_length))) {
            return Err("the primary's memory has another size".into());
        }
        Ok(())
    }

    fn put_pages(&mut self, block: usize, first: PageNumber, pages: &[IoSlice<'_>]) -> Result<(), PageError> {
        let range = PageRange::starting_at(first, to_u64(pages.len()));
        self.check(block, range)?;
        self.pages.push((block, range, pages.iter().flat_map(|page| page.iter().copied()).collect()));
        Ok(())
    }

    fn put_zero(&mut self, block: usize, pages: PageRange) -> Result<(), PageError> {
        self.check(block, pages)?;
        self.pages.push((block, pages, Vec::new()));
        Ok(())
    }

    fn read_back(&mut self, _: usize, _: PageNumber, _: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        Err("pages that build on others are not expected".into())
    }
}
