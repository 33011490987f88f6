//! The real guest: user-mode Linux, which `limosa-guest` of limosa-testkit runs, and whose lines come and go through
//! pipes.

use std::cell::RefCell;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use limosa_balloon::{Balloon, Features, GuestRam, Options as DeviceOptions, Reclaim as _, Strategy, VhostUserBalloon};
use limosa_memory::{FreePageHinting as _, FreePageSink, MemoryError};
use limosa_page::{PAGE_SIZE, PageBitmap, PageNumber, PageRange};
use limosa_vhost::{Ram, Server, ServerError, Stopper};
use parking_lot::{Mutex, MutexGuard};

use super::discards::{Discards, Pieces, Timed, taken};
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::measure::{Measured, Stopwatch, nanoseconds};
use crate::options::Options;
use crate::process::Process;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib, ratio};
use crate::scratch::Scratch;

/// Names the program that runs the guest: `cargo xtask bench` builds it.
const PROGRAM: &str = "LIMOSA_GUEST";
/// How often a run is tried: under load user-mode Linux 6.1 now and then overflows its signal stack, and is gone.
const TRIES: u32 = 3;
/// How long anything in the guest may take.
const LIMIT: Duration = Duration::from_secs(300);

const LIST: &str = "list of free pages";
const BITMAP: &str = "list of free pages, as a bitmap";
const RUNS: &str = "inflate, a discard for each run";
const PAGES: &str = "inflate, a discard for each page";
const HINTS: &str = "list and discard, by blocks";
const HALVES: &str = "list and discard, in 2 MiB pieces";
const REPORTING: &str = "reporting";

const FILTERING: &str = "filtering_us";

/// Seconds for a list, at most.
const LIST_S: f64 = 0.025;
const FASTER: f64 = 100.0;
const RELEASE: f64 = 4.0;
const FILTER_US: f64 = 200.0;

fn idle(memory: u64) -> String {
    format!("idle Linux guest of {}", gib_or_mib(memory))
}

fn resident(memory: u64) -> String {
    format!("{} resident and free", gib_or_mib(taken(memory)))
}

/// The program that runs the guest, or the reason why it is missing.
pub(super) fn program() -> Result<PathBuf, String> {
    let program = std::env::var_os(PROGRAM).map(PathBuf::from);
    program.ok_or_else(|| format!("{PROGRAM} names no program that runs a guest; `cargo xtask bench free-page` does"))
}

/// The series; or why there is no such guest here.
pub(super) fn rounds(options: &Options, memory: u64) -> Result<Result<Vec<Series>, String>> {
    let program = match program() {
        Ok(program) => program,
        Err(why) => return Ok(Err(why)),
    };
    let (idle, resident) = (idle(memory), resident(memory));
    let offered = Features::ALL.without(Features::REPORTING);
    let guest = RefCell::new(None::<Guest>);
    let with = |run: &dyn Fn(&mut Guest) -> Result<Measured>| -> Result<Measured> {
        let mut place = guest.borrow_mut();
        let mut tries = TRIES;
        loop {
            let guest = match &mut *place {
                Some(guest) => guest,
                none => none.insert(Guest::start(&program, memory, offered)?),
            };
            let measured = run(guest);
            tries -= 1;
            if measured.is_ok() || tries == 0 || guest.process.ended()?.is_none() {
                return measured;
            }
            options.tell("user-mode Linux has ended; the run is repeated with a new one");
            *place = None;
        }
    };
    let reporting = || {
        // The other guest's memory is not needed beside this one's.
        guest.borrow_mut().take();
        Guest::start(&program, memory, Features::ALL)?.report(taken(memory))
    };
    type Job<'a> = Box<dyn Fn() -> Result<Measured> + 'a>;
    let jobs: Vec<(&str, &str, Job<'_>)> = vec![
        (&idle, LIST, Box::new(|| with(&|guest| guest.list()))),
        (&idle, BITMAP, Box::new(|| with(&|guest| guest.bitmap(memory)))),
        (&resident, RUNS, Box::new(|| with(&|guest| guest.inflate(taken(memory), Pieces::Runs)))),
        (&resident, PAGES, Box::new(|| with(&|guest| guest.inflate(taken(memory), Pieces::Pages)))),
        (&resident, HINTS, Box::new(|| with(&|guest| guest.release(taken(memory), u64::MAX)))),
        (&resident, HALVES, Box::new(|| with(&|guest| guest.release(taken(memory), 2 << 20)))),
        (&resident, REPORTING, Box::new(reporting)),
    ];
    let mut contestants: Vec<Contestant<'_>> = jobs
        .into_iter()
        .filter(|(case, variant, _)| options.wants(case, variant))
        .map(|(case, variant, job)| Contestant {
            case: case.into(),
            variant: variant.into(),
            run: Box::new(move |_: &Frame| job()),
        })
        .collect();
    if contestants.is_empty() {
        return Ok(Ok(Vec::new()));
    }
    Ok(Ok(interleave(&mut contestants, options.rounds, &Frame { touch: 0 }, &mut |line| options.tell(line))?))
}

pub(super) fn judge(report: &mut Report, all: &[Series], memory: u64, why: Option<&str>) {
    let why = why.unwrap_or(NOT_RUN);
    let (idle, resident) = (idle(memory), resident(memory));
    let list = figure(all, &idle, LIST, "wall").map(|spread| spread.median);
    let mut target = |name: String, bound: Bound, got: Option<f64>| {
        report.targets.push(Target::new(name, bound, got, why));
    };
    target(format!("{idle}: seconds of {LIST}"), Bound::AtMost(LIST_S), list);
    let inflating = figure(all, &resident, RUNS, "wall").map(|spread| spread.median);
    let faster = inflating.zip(list).map(|(inflating, list)| inflating / list);
    target(format!("{resident}: wall of {RUNS} / {LIST}"), Bound::AtLeast(FASTER), faster);
    let released = ratio(all, &resident, PAGES, HINTS, "wall");
    target(
        format!("{resident}: wall of {PAGES} / {HINTS}"),
        Bound::AtLeast(RELEASE),
        released.as_ref().map(|ratio| ratio.median),
    );
    let filtering = figure(all, &idle, BITMAP, FILTERING).map(|spread| spread.median);
    target(format!("{idle}: microseconds of clearing the list in a bitmap"), Bound::AtMost(FILTER_US), filtering);
    report.ratios.extend(released);
    for other in [PAGES, HALVES, RUNS] {
        report.ratios.extend(ratio(all, &resident, other, HINTS, "cpu"));
    }
    report.ratios.extend(ratio(all, &resident, RUNS, HINTS, "wall"));
}

/// A guest, its balloon, and the server between them.
pub(super) struct Guest {
    balloon: Arc<Balloon>,
    device: Arc<VhostUserBalloon>,
    discards: Arc<Discards>,
    process: Process,
    input: ChildStdin,
    lines: Receiver<String>,
    /// Nothing comes any more: the guest has ended.
    silent: Arc<AtomicBool>,
    stopper: Stopper,
    server: Option<JoinHandle<Result<(), ServerError>>>,
    _folder: Scratch,
}

impl Guest {
    /// One whose balloon offers these features, run by that program.
    pub(super) fn start(program: &Path, memory: u64, offered: Features) -> Result<Self> {
        let folder = Scratch::new_in(&std::env::temp_dir())?;
        let path = folder.path().join("balloon.sock");
        let balloon = Arc::new(Balloon::new(DeviceOptions { features: offered, ..DeviceOptions::default() }));
        let discards = Arc::<Discards>::default();
        let timing = discards.clone();
        let device = VhostUserBalloon::with_reclaim(balloon.clone(), move |ram| Ok(Arc::new(timed(ram, &timing)?)));
        let device = Arc::new(device);
        let server = Server::bind(&path, device.clone())?;
        let stopper = server.stopper();
        let server = Some(thread::spawn(move || server.serve()));
        let mut command = Command::new(program);
        command.args(["uml", "--memory", &(memory >> 20).to_string(), "--balloon"]).arg(&path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start(command, None)?;
        let (input, output) = process.pipes().context("the guest's lines")?;
        let (teller, lines) = channel();
        let silent = Arc::new(AtomicBool::new(false));
        let over = silent.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if teller.send(line).is_err() {
                    break;
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        let guest = Self { balloon, device, discards, process, input, lines, silent, stopper, server, _folder: folder };
        guest.wait_line("ready")?;
        guest.until("the guest's driver takes the balloon", || guest.balloon.has_driver())?;
        Ok(guest)
    }

    fn wait_line(&self, wanted: &str) -> Result<()> {
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left).map_err(|_| anyhow!("the guest did not print {wanted:?}"))?;
            if line == wanted {
                return Ok(());
            }
            if line.starts_with("done ") {
                bail!("a line in the guest: {line}");
            }
        }
    }

    fn until(&self, what: &str, so: impl Fn() -> bool) -> Result<()> {
        let end = Instant::now() + LIMIT;
        while !so() {
            ensure!(!self.silent.load(Ordering::Relaxed), "the guest has ended before {what}");
            ensure!(Instant::now() < end, "timed out waiting until {what}");
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Makes this number of bytes of the guest's memory resident, and free.
    fn touch(&mut self, bytes: u64) -> Result<()> {
        self.touch_with("zero", bytes)
    }

    /// The same, full of what that device of the guest gives.
    pub(super) fn touch_with(&mut self, device: &str, bytes: u64) -> Result<()> {
        // A little is left for what the guest needs besides.
        let mib = (bytes >> 20) * 31 / 32;
        writeln!(self.input, "dd if=/dev/{device} of=/tmp/touched bs=1M count={mib} && rm /tmp/touched")?;
        self.wait_line("done 0")
    }

    fn watch(&self) -> Result<Stopwatch> {
        Stopwatch::start(&[self.process.pid()])
    }

    fn ram(&self) -> Result<Arc<Ram>> {
        self.device.ram().context("the guest has shared no memory")
    }

    /// Its memory's file, and where in it what the guest knows by its own address is.
    pub(super) fn file(&self) -> Result<(File, impl Fn(u64) -> u64 + use<>)> {
        let ram = self.ram()?;
        let [region] = ram.regions() else { bail!("the guest's memory is in several pieces") };
        let (guest, file) = (region.guest_address, region.file_offset);
        let place = move |address: u64| address.saturating_sub(guest).saturating_add(file);
        Ok((region.file().try_clone().context("the guest's memory")?, place))
    }

    /// Has the guest have its pages back.
    pub(super) fn done(&mut self) -> Result<()> {
        self.balloon.return_pages();
        // It frees them one by one; a line of its shell comes behind, and a moment of nothing.
        thread::sleep(Duration::from_millis(300));
        writeln!(self.input, "true")?;
        self.wait_line("done 0")
    }

    /// Its free pages, which it holds from then on, and how long it took to name them.
    pub(super) fn ask(&self) -> Result<(Vec<Range<u64>>, Duration)> {
        let list = Arc::new(List::default());
        let began = Instant::now();
        self.balloon.request_list(list.clone())?;
        self.until("the list is complete", || list.lock().1.is_some())?;
        let (ranges, end) = std::mem::take(&mut *list.lock());
        Ok((ranges, end.map_or(LIMIT, |end| end.duration_since(began))))
    }

    fn list(&mut self) -> Result<Measured> {
        let watch = self.watch()?;
        let (ranges, wall) = self.ask()?;
        let measured = Measured { wall, ..watch.stop()? };
        self.done()?;
        Ok(with_hints(measured, &ranges))
    }

    fn bitmap(&mut self, memory: u64) -> Result<Measured> {
        let base = self.ram()?.regions().first().map_or(0, |region| region.guest_address);
        let mut bitmap = PageBitmap::new(memory / PAGE_SIZE);
        bitmap.set_range(PageRange::starting_at(PageNumber(0), memory / PAGE_SIZE));
        let watch = self.watch()?;
        let (ranges, wall) = self.ask()?;
        let began = Instant::now();
        for range in &ranges {
            bitmap.clear_range(PageRange::inside_bytes(
                &(range.start.saturating_sub(base)..range.end.saturating_sub(base)),
            ));
        }
        let filtering = began.elapsed();
        let measured = Measured { wall: wall + filtering, ..watch.stop()? };
        let left = bitmap.count();
        self.done()?;
        Ok(with_hints(measured, &ranges).with(FILTERING, nanoseconds(filtering) / 1000).with("pages_left", left))
    }

    fn inflate(&mut self, bytes: u64, pieces: Pieces) -> Result<Measured> {
        self.touch(bytes)?;
        let ram = self.balloon.size().ram;
        let target = ram.saturating_sub(bytes);
        self.discards.begin(pieces);
        let watch = self.watch()?;
        self.balloon.set_target(target)?;
        self.until("the balloon is inflated", || self.balloon.size().actual <= target)?;
        let measured = self.discards.end(watch.stop()?);
        self.balloon.set_target(ram)?;
        self.until("the balloon is deflated", || self.balloon.size().actual == ram)?;
        Ok(measured)
    }

    fn release(&mut self, bytes: u64, most: u64) -> Result<Measured> {
        self.touch(bytes)?;
        let memory = timed(&*self.ram()?, &self.discards)?;
        self.discards.begin(Pieces::Runs);
        let watch = self.watch()?;
        let (ranges, listing) = self.ask()?;
        for range in &ranges {
            let mut at = range.start;
            while at < range.end {
                let end = at.saturating_add(most).min(range.end);
                memory.discard(&(at..end))?;
                at = end;
            }
        }
        let measured = self.discards.end(watch.stop()?);
        self.done()?;
        Ok(with_hints(measured, &ranges).with("listing_us", nanoseconds(listing) / 1000))
    }

    /// Until nine tenths of it have gone by themselves.
    fn report(&mut self, bytes: u64) -> Result<Measured> {
        self.discards.begin(Pieces::Runs);
        let before = self.balloon.counters().reported_bytes;
        self.touch(bytes)?;
        let watch = self.watch()?;
        let reported = || self.balloon.counters().reported_bytes - before;
        self.until("the guest has reported its free pages", || reported() > bytes / 10 * 9)?;
        Ok(self.discards.end(watch.stop()?))
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// Its memory, whose discards are timed.
fn timed(ram: &Ram, discards: &Arc<Discards>) -> Result<Timed, MemoryError> {
    Ok(Timed { ram: GuestRam::from_front_end(ram, Strategy::Auto)?, discards: discards.clone() })
}

fn with_hints(measured: Measured, ranges: &[Range<u64>]) -> Measured {
    let bytes: u64 = ranges.iter().map(|range| range.end - range.start).sum();
    measured.with("blocks", ranges.len() as u64).with("hinted_mib", bytes >> 20)
}

/// A list of free pages, and when it was complete.
#[derive(Default)]
struct List(Mutex<(Vec<Range<u64>>, Option<Instant>)>);

impl List {
    fn lock(&self) -> MutexGuard<'_, (Vec<Range<u64>>, Option<Instant>)> {
        self.0.lock()
    }
}

impl FreePageSink for List {
    fn add_range(&self, range: Range<u64>) {
        self.lock().0.push(range);
    }

    fn complete(&self) {
        self.lock().1 = Some(Instant::now());
    }
}
