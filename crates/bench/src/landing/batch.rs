//! Pages that lie in memory and where they go: [`Batch`], the [`Outlet`] that writes one, and who does the writing.

use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use rustix::io::pwritev;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::measure::thread_cpu;
use crate::raw;

/// Bytes of a page.
pub(super) const PAGE: usize = 4096;

/// How much is written between two requests to start write-back.
const WRITE_BACK_STEP: u64 = 32 << 20;
/// Most slices that one vectored call takes (`UIO_MAXIOV`).
const MOST_SLICES: usize = 1024;

/// A page's worth of memory, aligned as direct I/O wants it.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C, align(4096))]
pub(super) struct Page(pub(super) [u8; PAGE]);

/// Memory and the pages in it.
pub(super) struct Batch {
    pub(super) memory: Vec<Page>,
    /// Byte position in the memory, number of the page.
    pub(super) pages: Vec<(usize, u64)>,
}

impl Batch {
    pub(super) fn new(len: usize) -> Self {
        Self { memory: vec![Page([0; PAGE]); len.div_ceil(PAGE)], pages: Vec::new() }
    }
}

/// When dirty pages of the file start on their way to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WriteBack {
    /// When the kernel thinks so, at the latest at the sync.
    Kernel,
    /// Asked for after every 32 MiB.
    Started,
}

/// The file, and how it is written.
pub(super) struct Outlet<'a> {
    file: &'a File,
    write_back: WriteBack,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    calls: u64,
    /// First byte, end and amount of what was written since write-back was last started.
    start: u64,
    end: u64,
    written: u64,
}

impl<'a> Outlet<'a> {
    pub(super) fn new(file: &'a File, write_back: WriteBack) -> Self {
        Self { file, write_back, state: Mutex::default() }
    }

    pub(super) fn file(&self) -> &'a File {
        self.file
    }

    pub(super) fn calls(&self) -> u64 {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).calls
    }

    /// Writes every page of the batch to its place, one call for each run of consecutive pages.
    pub(super) fn write(&self, batch: &Batch) -> Result<()> {
        let bytes = batch.memory.as_slice().as_bytes();
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(MOST_SLICES);
        for run in batch.pages.chunk_by(|(_, one), (_, next)| one + 1 == *next) {
            let mut offset = run.first().map_or(0, |(_, number)| number * PAGE as u64);
            // Pages that touch in memory as well go as one slice.
            for piece in run.chunk_by(|(one, _), (next, _)| one + PAGE == *next) {
                if slices.len() == MOST_SLICES {
                    offset += self.write_run(&mut slices, offset)?;
                }
                let start = piece.first().map_or(0, |(at, _)| *at);
                let piece = bytes.get(start..start + piece.len() * PAGE).context("page outside its batch")?;
                slices.push(IoSlice::new(piece));
            }
            self.write_run(&mut slices, offset)?;
        }
        Ok(())
    }

    fn write_run(&self, slices: &mut Vec<IoSlice<'_>>, mut offset: u64) -> Result<u64> {
        let (start, mut calls) = (offset, 0);
        let mut rest = slices.as_mut_slice();
        while !rest.is_empty() {
            let count = pwritev(self.file.as_fd(), rest, offset)
                .with_context(|| format!("writing pages at offset {offset}"))?;
            ensure!(count > 0, "writing pages at offset {offset}: nothing was written");
            offset += count as u64;
            calls += 1;
            IoSlice::advance_slices(&mut rest, count);
        }
        slices.clear();
        self.wrote(start, offset, calls)?;
        Ok(offset - start)
    }

    /// Notes that a range of the file was written, and starts its write-back when there is enough of it.
    pub(super) fn wrote(&self, start: u64, end: u64, calls: u64) -> Result<()> {
        let range = {
            let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.calls += calls;
            state.start = if state.written == 0 { start } else { state.start.min(start) };
            state.end = state.end.max(end);
            state.written += end - start;
            if self.write_back != WriteBack::Started || state.written < WRITE_BACK_STEP {
                return Ok(());
            }
            state.written = 0;
            state.calls += 1;
            state.start..state.end
        };
        raw::start_write_back(self.file, range.start, range.end - range.start).context("sync_file_range")
    }
}

/// Who writes a full batch: the receiver itself, or threads beside it.
pub(super) enum Hand<'scope, 'env> {
    Inline(&'env Outlet<'env>),
    Threads {
        full: SyncSender<Batch>,
        empty: Receiver<Batch>,
        threads: Vec<ScopedJoinHandle<'scope, Result<Duration>>>,
    },
}

impl<'scope, 'env> Hand<'scope, 'env> {
    /// With `writers` threads, each with a batch of `len` bytes in hand and one to follow.
    pub(super) fn new(
        scope: &'scope Scope<'scope, 'env>,
        outlet: &'env Outlet<'env>,
        queue: &'env Mutex<Option<Receiver<Batch>>>,
        writers: usize,
        len: usize,
    ) -> Self {
        if writers == 0 {
            return Self::Inline(outlet);
        }
        let (full, work) = sync_channel::<Batch>(writers);
        let (done, empty) = sync_channel::<Batch>(2 * writers);
        *queue.lock().unwrap_or_else(PoisonError::into_inner) = Some(work);
        for _ in 0..2 * writers {
            let _ = done.send(Batch::new(len));
        }
        let threads = (0..writers).map(|_| {
            let done = done.clone();
            scope.spawn(move || {
                loop {
                    // The guard is held while waiting: the other writers wait for it instead of for the queue.
                    let next =
                        queue.lock().unwrap_or_else(PoisonError::into_inner).as_ref().and_then(|work| work.recv().ok());
                    let Some(mut batch) = next else { return Ok(thread_cpu()) };
                    outlet.write(&batch)?;
                    batch.pages.clear();
                    let _ = done.send(batch);
                }
            })
        });
        Self::Threads { full, empty, threads: threads.collect() }
    }

    /// Has a batch written and returns an empty one.
    pub(super) fn deliver(&mut self, mut batch: Batch) -> Result<Batch> {
        match self {
            Self::Inline(outlet) => {
                outlet.write(&batch)?;
                batch.pages.clear();
                Ok(batch)
            }
            Self::Threads { full, empty, .. } => {
                full.send(batch).map_err(|_| anyhow!("the writing threads have ended"))?;
                empty.recv().context("the writing threads have ended")
            }
        }
    }

    /// Waits until all is written; the CPU time of the threads.
    pub(super) fn finish(self) -> Result<Duration> {
        let Self::Threads { full, threads, .. } = self else { return Ok(Duration::ZERO) };
        drop(full);
        let mut cpu = Duration::ZERO;
        for thread in threads {
            cpu += thread.join().map_err(|_| anyhow!("a writing thread panicked"))??;
        }
        Ok(cpu)
    }
}
