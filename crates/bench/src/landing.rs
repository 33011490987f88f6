//! How received pages get from the socket into the snapshot file.
//!
//! A stream with the shape of QEMU's comes over a local socket; every contestant lands its pages at their places in a new
//! sparse file. On a disk the clock ends when the file is durable, on tmpfs with the last page. CPU seconds are those of
//! the receiving side alone, without kernel threads; what those took shows in `others_cpu_ms` together with other
//! programs on the machine.

mod batch;
mod feeder;
mod linear;
mod records;
mod scatter;
mod spliced;

use std::fs::{File, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};

use self::batch::{Hand, Outlet, PAGE, WriteBack};
use self::feeder::Content;
use self::scatter::{InFile, Ring, Scatter};
use crate::content::fill_random;
use crate::frame::{Contestant, Frame, interleave};
use crate::machine::Machine;
use crate::measure::{Measured, Stopwatch, millis, thread_cpu};
use crate::raw::Mapping;
use crate::report::{Report, ratio};
use crate::socket_pair::{WIDE, pair};
use crate::{Options, PLAIN};

/// What a receiver did.
#[derive(Debug, Default)]
struct Intake {
    reads: u64,
    pages: u64,
    zeros: u64,
    /// Pages that a wrong guess made it copy.
    copied: u64,
    /// Of the threads beside the receiver.
    writer_cpu: Duration,
}

/// How pages are taken from the socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Through one buffer; with a writer thread full ones are handed over.
    Linear { len: usize, writers: usize },
    /// Straight to places in a ring of buffers, which threads write past the page cache.
    Ring { len: usize, direct_writers: usize },
    /// Straight into the mapped file.
    InFile,
    /// Through a pipe, without leaving the kernel.
    Splice,
}

impl Way {
    fn direct(self) -> bool {
        matches!(self, Self::Ring { direct_writers: 1.., .. })
    }
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A contestant's name, its way, the write-back modes that it runs with on a disk, and whether it runs in every setting.
type Entry = (&'static str, Way, &'static [WriteBack], bool);

const KERNEL: &[WriteBack] = &[WriteBack::Kernel];
const STARTED: &[WriteBack] = &[WriteBack::Started];
const BOTH: &[WriteBack] = &[WriteBack::Kernel, WriteBack::Started];

/// The contestants.
const WAYS: &[Entry] = &[
    (PLAIN, Way::Linear { len: MIB, writers: 0 }, BOTH, true),
    ("linear 256K", Way::Linear { len: 256 * KIB, writers: 0 }, STARTED, false),
    ("linear 4M", Way::Linear { len: 4 * MIB, writers: 0 }, STARTED, false),
    ("linear 1M, writer thread", Way::Linear { len: MIB, writers: 1 }, STARTED, false),
    ("ring 1M", Way::Ring { len: MIB, direct_writers: 0 }, STARTED, true),
    ("ring 1M, 2 direct writers", Way::Ring { len: MIB, direct_writers: 2 }, KERNEL, true),
    ("mapped", Way::InFile, STARTED, false),
    ("splice", Way::Splice, STARTED, false),
];

/// One kind of file and stream.
struct Setting<'a> {
    case: String,
    dir: &'a Path,
    durable: bool,
    content: Content,
    socket_buffer: Option<usize>,
}

/// Runs the bench. Every variant is compared with the plain one of its case.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let size = options.size.unwrap_or(1 << 30);
    let len = usize::try_from(size).context("--size")?.next_multiple_of(PAGE);
    let mut memory = Mapping::anonymous(len).context("memory for the stream's pages")?;
    fill_random(memory.bytes_mut());
    let memory = &memory;
    let disk = options.dir.clone().unwrap_or_else(std::env::temp_dir);
    let shm = PathBuf::from("/dev/shm");
    let setting = |name: &str, on_disk: bool, content, socket_buffer| Setting {
        case: name.to_owned(),
        dir: if on_disk { &disk } else { &shm },
        durable: on_disk,
        content,
        socket_buffer,
    };
    let wide = Some(WIDE);
    // Scattered zeros only on tmpfs: on a disk they make a file of ten thousands of extents, and to delete that takes a
    // file system mounted with `discard` longer than all rounds.
    let settings = [
        setting("disk", true, Content::Dense, wide),
        setting("tmpfs", false, Content::Dense, wide),
        setting("tmpfs, narrow socket", false, Content::Dense, None),
        setting("tmpfs, scattered zeros", false, Content::ScatteredZeros, wide),
        setting("disk, runs of zeros", true, Content::ZeroRuns, wide),
    ];
    let mut contestants = Vec::new();
    for setting in &settings {
        for (name, way, write_back) in contest(setting) {
            if options.wants(&setting.case, &name) {
                contestants.push(Contestant {
                    case: setting.case.clone(),
                    variant: name,
                    run: Box::new(move |frame| land(setting, way, write_back, memory.bytes(), frame)),
                });
            }
        }
    }
    ensure!(!contestants.is_empty(), "{}", options.nobody());
    let frame = Frame { touch: options.touch.unwrap_or(size) };
    let all = interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))?;
    let mut report = Report::new("landing", Machine::this(&options.qemu), options.rounds, &all);
    for series in all.iter().filter(|series| series.variant != PLAIN) {
        for figure in ["wall", "cpu"] {
            report.ratios.extend(ratio(&all, &series.case, &series.variant, PLAIN, figure));
        }
    }
    Ok(report)
}

/// Who takes part in a setting: on a disk in each of the write-back modes given; on tmpfs, which has no write-back and
/// takes no direct I/O, once. Where the socket or the content differs only those that could win take part.
fn contest(setting: &Setting<'_>) -> Vec<(String, Way, WriteBack)> {
    let main = setting.content == Content::Dense && setting.socket_buffer.is_some();
    let mut all = Vec::new();
    for &(name, way, write_backs, everywhere) in WAYS {
        if !(main || everywhere) || (way.direct() && !setting.durable) {
            continue;
        }
        for &write_back in if setting.durable { write_backs } else { KERNEL } {
            let suffix = if write_back == WriteBack::Started { ", write-back" } else { "" };
            all.push((format!("{name}{suffix}"), way, write_back));
        }
    }
    all
}

/// Lands the stream once.
fn land(setting: &Setting<'_>, way: Way, write_back: WriteBack, memory: &[u8], frame: &Frame) -> Result<Measured> {
    let scratch = tempfile::Builder::new().prefix("limosa-landing-").tempdir_in(setting.dir)?;
    let path = scratch.path().join("pages");
    let file = create(&path, memory.len(), way.direct())?;
    // What the last contestant left to be written is not this one's.
    rustix::fs::syncfs(&file).context("syncfs")?;
    frame.touch()?;

    let (sender, socket) = pair(setting.socket_buffer)?;
    let watch = Stopwatch::start(&[])?;
    let outlet = Outlet::new(&file, write_back);
    let (intake, cpu, feeder_cpu) = std::thread::scope(|scope| {
        let content = setting.content;
        let feeder = scope.spawn(move || feeder::feed(&sender, memory, content).map(|()| thread_cpu()));
        let outlet = &outlet;
        let receiver = scope.spawn(move || -> Result<(Intake, Duration)> {
            let intake = receive(way, &socket, outlet, memory.len())?;
            if setting.durable {
                rustix::fs::fdatasync(outlet.file()).context("fdatasync")?;
            }
            Ok((intake, thread_cpu()))
        });
        let received = receiver.join().map_err(|_| anyhow!("the receiver panicked"))?;
        let fed = feeder.join().map_err(|_| anyhow!("the feeder panicked"))?;
        // A receiver that fails closes the socket, and the feeder then fails for that alone.
        let (intake, cpu) = received?;
        anyhow::Ok((intake, cpu, fed?))
    })?;
    let total = watch.stop()?;
    let pages = (memory.len() / PAGE) as u64;
    ensure!(intake.pages + intake.zeros == pages, "{} of {pages} pages arrived", intake.pages + intake.zeros);
    Ok(Measured { wall: total.wall, cpu: cpu + intake.writer_cpu, counters: total.counters }
        .with("reads", intake.reads)
        .with("writes", outlet.calls())
        .with("copied_pages", intake.copied)
        .with("feeder_cpu_ms", millis(feeder_cpu)))
}

fn create(path: &Path, len: usize, direct: bool) -> Result<File> {
    let mut open = OpenOptions::new();
    open.read(true).write(true).create_new(true).mode(0o600);
    if direct {
        open.custom_flags(libc::O_DIRECT);
    }
    let file = open.open(path).with_context(|| format!("{}: cannot be created", path.display()))?;
    file.set_len(len as u64).with_context(|| format!("{}: cannot be made {len} bytes long", path.display()))?;
    Ok(file)
}

fn receive(way: Way, socket: &OwnedFd, outlet: &Outlet<'_>, len: usize) -> Result<Intake> {
    let pages = (len / PAGE) as u64;
    let queue = Mutex::new(None);
    std::thread::scope(|scope| match way {
        Way::Linear { len, writers } => {
            linear::receive(socket, Hand::new(scope, outlet, &queue, writers, len), len, pages, writers > 0)
        }
        Way::Ring { len, direct_writers } => {
            let ring = Ring::new(Hand::new(scope, outlet, &queue, direct_writers, len), len);
            let mut scatter = Scatter::new(socket, ring, pages);
            scatter.receive()?;
            Ok(Intake { writer_cpu: scatter.places.finish()?, ..scatter.intake })
        }
        Way::InFile => {
            let mut scatter = Scatter::new(socket, InFile::new(outlet, len)?, pages);
            scatter.receive()?;
            scatter.places.finish();
            Ok(scatter.intake)
        }
        Way::Splice => spliced::receive(socket, outlet, pages),
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Lands a stream and returns what the file holds.
    fn landed(way: Way, content: Content, memory: &[u8]) -> Vec<u8> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pages");
        let file = create(&path, memory.len(), way.direct()).expect("a file");
        let outlet = Outlet::new(&file, WriteBack::Started);
        let (sender, socket) = pair(None).expect("a pair");
        std::thread::scope(|scope| {
            scope.spawn(move || feeder::feed(&sender, memory, content).expect("feeds"));
            let intake = receive(way, &socket, &outlet, memory.len()).expect("receives");
            assert_eq!(intake.pages + intake.zeros, (memory.len() / PAGE) as u64);
        });
        fs::read(&path).expect("reads back")
    }

    #[test]
    fn every_way_lands_every_page_at_its_place_and_leaves_zero_pages_zero() {
        let mut memory = vec![0; 3000 * PAGE];
        fill_random(&mut memory);
        for content in [Content::Dense, Content::ScatteredZeros, Content::ZeroRuns] {
            let mut expected = memory.clone();
            for (number, page) in (0..).zip(expected.as_chunks_mut::<PAGE>().0) {
                if content.is_zero(number) {
                    page.fill(0);
                }
            }
            for &(name, way, ..) in WAYS {
                assert!(landed(way, content, &memory) == expected, "{name}, {content:?}");
            }
        }
    }

    #[test]
    fn a_record_outside_the_block_is_refused() {
        let (sender, socket) = pair(None).expect("a pair");
        rustix::io::write(&sender, &records::Record::Page(7).encode()).expect("sends");
        drop(sender);
        let file = tempfile::tempfile().expect("a file");
        let outlet = Outlet::new(&file, WriteBack::Kernel);
        let way = Way::Linear { len: MIB, writers: 0 };
        let error = receive(way, &socket, &outlet, 7 * PAGE).expect_err("page 7 of 7");
        assert!(error.to_string().contains("not one of a block of 7 pages"), "{error:#}");
    }

    #[test]
    fn a_stream_that_ends_inside_a_page_is_an_error_in_every_way() {
        for &(name, way, ..) in WAYS {
            let (sender, socket) = pair(None).expect("a pair");
            rustix::io::write(&sender, &records::Record::Page(0).encode()).expect("sends");
            rustix::io::write(&sender, &[1; 100]).expect("sends");
            drop(sender);
            let file = tempfile::tempfile().expect("a file");
            file.set_len(8 * PAGE as u64).expect("grows");
            let outlet = Outlet::new(&file, WriteBack::Kernel);
            let result = receive(way, &socket, &outlet, 8 * PAGE);
            assert!(result.is_err(), "{name}");
        }
    }
}
