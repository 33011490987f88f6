//! The model of Linux's driver, behind a vhost-user front end of our own: arrays of 256 page numbers as Linux sends
//! them, and what its driver cannot do: arrays of 16,384, pieces of 2 MiB, and, past the queues, one bitmap of all
//! pages.

use std::io::{Read as _, Write as _};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use limosa_balloon::{Balloon, Features, GuestRam, Options as DeviceOptions, Reclaim as _, Strategy, VhostUserBalloon};
use limosa_balloon_driver::{Blocks, Driver, FrontEnd, Machine, Pages};
use limosa_memory::{BlockOptions, GuestMemory, rust_vmm};
use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber};
use limosa_vhost::Server;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, fallocate};
use vm_memory::GuestMemoryMmap;

use super::discards::{Discards, Pieces, Timed, taken};
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, Stopwatch, millis};
use crate::options::Options;
use crate::report::{Report, gib_or_mib, ratio};
use crate::scratch::Scratch;

const HUGE: u64 = 2 << 20;
const LIMIT: Duration = Duration::from_secs(300);

/// How the guest reports which pages it gives away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReportFormat {
    /// In arrays of this number of page numbers.
    Arrays(usize),
    /// In arrays of all numbers of a piece of 2 MiB.
    Huge,
    /// All at once, a bit for each page.
    Bitmap,
}

const FORMATS: [(ReportFormat, Pieces); 6] = [
    (ReportFormat::Arrays(256), Pieces::Runs),
    (ReportFormat::Arrays(16_384), Pieces::Runs),
    (ReportFormat::Huge, Pieces::Runs),
    (ReportFormat::Bitmap, Pieces::Runs),
    (ReportFormat::Arrays(256), Pieces::Pages),
    (ReportFormat::Arrays(16_384), Pieces::Pages),
];

fn case(memory: u64) -> String {
    format!("{} resident, a model of the driver", gib_or_mib(taken(memory)))
}

fn variant((format, pieces): (ReportFormat, Pieces)) -> String {
    let format = match format {
        ReportFormat::Arrays(numbers) => format!("arrays of {numbers}"),
        ReportFormat::Huge => "pieces of 2 MiB".into(),
        ReportFormat::Bitmap => "one bitmap".into(),
    };
    let pieces = if pieces == Pieces::Runs { "run" } else { "page" };
    format!("inflate, {format}, a discard for each {pieces}")
}

pub(super) fn rounds(options: &Options, memory: u64) -> Result<Vec<Series>> {
    let mut contestants = Vec::new();
    for format in FORMATS {
        let (case, variant) = (case(memory), variant(format));
        if options.wants(&case, &variant) {
            contestants.push(Contestant { case, variant, run: Box::new(move |_: &Frame| inflate(memory, format)) });
        }
    }
    if contestants.is_empty() {
        return Ok(Vec::new());
    }
    interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))
}

pub(super) fn judge(report: &mut Report, all: &[Series], memory: u64) {
    for (format, pieces) in FORMATS.into_iter().filter(|(format, _)| *format != ReportFormat::Arrays(256)) {
        let plain = variant((ReportFormat::Arrays(256), pieces));
        for figure in ["wall", "cpu"] {
            report.ratios.extend(ratio(all, &case(memory), &variant((format, pieces)), &plain, figure));
        }
    }
}

fn inflate(memory: u64, (format, pieces): (ReportFormat, Pieces)) -> Result<Measured> {
    let free = memory - taken(memory)..memory;
    let block = BlockOptions::memfd("pc.ram", memory).map()?;
    let (file, _) = block.file().context("a memfd")?;
    let resident = fallocate(file, FallocateFlags::empty(), free.start, free.end - free.start);
    resident.context("so much memory for the guest")?;
    let ram = Arc::new(GuestMemory::new(vec![block])?);
    let discards = Arc::new(Discards::default());
    discards.begin(pieces);
    let array = match format {
        ReportFormat::Bitmap => return by_bitmap(&ram, free, &discards),
        ReportFormat::Arrays(numbers) => numbers,
        ReportFormat::Huge => usize::try_from(HUGE / PAGE_SIZE)?,
    };
    let balloon = Arc::new(Balloon::new(DeviceOptions::default()));
    let timed = discards.clone();
    let device = VhostUserBalloon::with_reclaim(balloon.clone(), move |ram| {
        Ok(Arc::new(Timed { ram: GuestRam::from_front_end(ram, Strategy::Auto)?, discards: timed.clone() }))
    });
    let folder = Scratch::new_in(&std::env::temp_dir())?;
    let path = folder.path().join("balloon.sock");
    let server = Server::bind(&path, Arc::new(device))?;
    let stopper = server.stopper();
    let server = thread::spawn(move || server.serve());
    let run = || {
        let front_end = Arc::new(FrontEnd::connect(&path, ram.clone())?);
        let rings: GuestMemoryMmap<_> = rust_vmm::export(&ram)?;
        let machine = Machine::over(front_end, Arc::new(rings), 1 << 20);
        let piece = if format == ReportFormat::Huge { HUGE } else { PAGE_SIZE };
        let pages = Allocator { blocks: Blocks::new(free.clone()), piece, rest: 0..0, took: Duration::ZERO };
        let pages = Arc::new(Mutex::new(pages));
        let mut driver = Driver::probe(machine, pages.clone(), Features::NONE)?.with_arrays_of(array);
        let watch = Stopwatch::start(&[])?;
        balloon.set_target(free.start)?;
        let end = Instant::now() + LIMIT;
        while balloon.size().actual > free.start {
            ensure!(Instant::now() < end, "the model's balloon is not inflated");
            if !driver.poll()? {
                thread::yield_now();
            }
        }
        let measured = discards.end(watch.stop()?);
        let allocating = pages.lock().took;
        let translating = Duration::from_nanos(balloon.counters().translating_ns);
        Ok(split(measured, allocating, translating, discards.took()))
    };
    let measured = run();
    stopper.stop();
    server.join().map_err(|_| anyhow!("the server panicked"))??;
    measured
}

/// Splits the time. The rest of all other parts is sending, which includes waiting for the other side.
fn split(measured: Measured, allocating: Duration, translating: Duration, discarding: Duration) -> Measured {
    let sending = measured.wall.saturating_sub(allocating + translating + discarding);
    measured
        .with("allocating_ms", millis(allocating))
        .with("sending_ms", millis(sending))
        .with("translating_ms", millis(translating))
}

/// The guest takes all the pages that are requested, and reports them in one message, which virtio-balloon does not
/// have.
fn by_bitmap(ram: &Arc<GuestMemory>, free: Range<u64>, discards: &Arc<Discards>) -> Result<Measured> {
    let (mut guest, mut host) = UnixStream::pair()?;
    let timed = Timed { ram: GuestRam::new(ram.clone(), Strategy::Auto), discards: discards.clone() };
    let pages = ram.block(0)?.pages().len();
    let host = thread::spawn(move || {
        let mut bytes = vec![0; usize::try_from(pages.div_ceil(64) * 8)?];
        host.read_exact(&mut bytes)?;
        let began = Instant::now();
        let words: Vec<_> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let mut given = PageBitmap::new(pages);
        given.union_words(PageNumber(0), &words);
        let runs: Vec<_> = given.runs().collect();
        let translating = began.elapsed();
        runs.iter().try_for_each(|run| timed.discard(&run.bytes()).map(drop))?;
        host.write_all(&[0])?;
        anyhow::Ok(translating)
    });
    let watch = Stopwatch::start(&[])?;
    let mut pages_of = Blocks::new(free);
    let mut words = vec![0_u64; usize::try_from(pages.div_ceil(64))?];
    let began = Instant::now();
    while let Some(address) = pages_of.allocate(PAGE_SIZE) {
        let number = address / PAGE_SIZE;
        if let Some(word) = words.get_mut(usize::try_from(number / 64)?) {
            *word |= 1 << (number % 64);
        }
    }
    let allocating = began.elapsed();
    let bytes: Vec<_> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    guest.write_all(&bytes)?;
    guest.read_exact(&mut [0])?;
    let measured = watch.stop()?;
    let translating = host.join().map_err(|_| anyhow!("the host's thread panicked"))??;
    Ok(split(discards.end(measured), allocating, translating, discards.took()))
}

/// The guest's allocator, which looks at the clock: pages one by one, out of pieces.
struct Allocator {
    blocks: Blocks,
    piece: u64,
    /// The rest of the last piece.
    rest: Range<u64>,
    took: Duration,
}

impl Pages for Allocator {
    fn allocate(&mut self, length: u64) -> Option<u64> {
        let began = Instant::now();
        if self.rest.is_empty() {
            let length = self.piece.max(length);
            self.rest = self.blocks.allocate(length).map_or(0..0, |start| start..start + length);
        }
        let page = (!self.rest.is_empty()).then_some(self.rest.start);
        self.rest.start += page.map_or(0, |_| length);
        self.took += began.elapsed();
        page
    }

    fn free(&mut self, block: Range<u64>) {
        self.blocks.free(block);
    }
}
