//! The server is killed, or the power is cut, at any moment of a random schedule.
//!
//! Requests of a VM and commands of a keeper are in flight at the same time, and storage requests complete in any
//! order. After a cut the log is brought to the image, which is cut off, too, and begun again: the image has exactly
//! what a kept epoch had when it was sealed. `LIMOSA_EPOCH_SCHEDULES=10000` tries that many; `LIMOSA_EPOCH_SEED=N`
//! begins with that one.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use limosa_image::epochs::{EpochDisk, EpochError, EpochOptions, Recovered, recover};
use limosa_image::qcow2::{CheckOptions, check};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::{Loss, PowerCut, RequestHolder, SeededRandom};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};

use crate::bed::{Format, SECTOR, SIZE, sector, versions};

const SECTORS: u64 = SIZE / SECTOR;
const FIRST: u64 = 5;
const LOG_MOST: u64 = 16 << 20;
const BOOT: [u64; 2] = [1, 2];

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

fn options(boot: [u64; 2]) -> EpochOptions {
    EpochOptions::default().first(FIRST).boot(boot).file([3, 4]).limit(3 << 20)
}

/// The work of a task.
#[derive(Debug, Clone)]
enum Doing {
    /// Sectors get a version.
    Write(std::ops::Range<u64>, u64),
    Read(std::ops::Range<u64>, Buffer),
    Prepare(u64, bool),
    Keep(u64, bool),
    Merge,
    End(u64),
    Drop(u64),
}

type Task = (Doing, Pin<Box<dyn Future<Output = Result<(), EpochError>>>>);

/// When an epoch was asked to be prepared or kept, and when it was.
#[derive(Debug, Clone, Copy)]
struct Event {
    moment: usize,
    epoch: u64,
    durable: bool,
}

struct Run {
    chance: SeededRandom,
    power: PowerCut,
    held: RequestHolder,
    disk: Arc<EpochDisk>,
    tasks: Vec<Task>,
    /// The versions of all sectors.
    now: Vec<u64>,
    next_version: u64,
    /// The versions of all sectors when an epoch was sealed; the first one is that of the image.
    sealed: Vec<Vec<u64>>,
    begun: Vec<Event>,
    kept: Vec<Event>,
    preparing: Vec<Event>,
    prepared: Vec<Event>,
    /// Protection is being ended, or was; its epoch.
    end: Option<u64>,
    /// Writes after this epoch are being dropped.
    dropping: Option<u64>,
}

impl Run {
    fn new(format: Format, seed: u64) -> Self {
        let (power, held) = (PowerCut::new(), RequestHolder::new());
        held.release_all();
        let file = held.wrap(power.add_storage("disk", format.empty(), 64 << 20));
        let log = held.wrap(power.add_storage("log", Vec::new(), LOG_MOST));
        let disk = block_on(EpochDisk::begin(format.open(file), log, &options(BOOT))).unwrap();
        held.hold_again();
        let now = vec![0; usize::try_from(SECTORS).unwrap()];
        Self {
            chance: SeededRandom::new(seed),
            power,
            held,
            disk,
            tasks: Vec::new(),
            sealed: vec![now.clone()],
            now,
            next_version: 1,
            begun: Vec::new(),
            kept: Vec::new(),
            preparing: Vec::new(),
            prepared: Vec::new(),
            end: None,
            dropping: None,
        }
    }

    fn open(&self) -> u64 {
        FIRST + self.sealed.len() as u64 - 1
    }

    /// Sectors that no request in flight is about.
    fn free(&mut self) -> Option<std::ops::Range<u64>> {
        let start = self.chance.below(SECTORS);
        let range = start..SECTORS.min(start + 1 + self.chance.below(24));
        let is_busy = self.tasks.iter().any(|(doing, _)| match doing {
            Doing::Write(other, _) | Doing::Read(other, _) => other.start < range.end && range.start < other.end,
            _ => false,
        });
        (!is_busy).then_some(range)
    }

    fn start(&mut self, doing: Doing) {
        let disk = Arc::clone(&self.disk);
        let is_zero = self.chance.one_in(5);
        let doing = match doing {
            Doing::Write(range, _) if is_zero => Doing::Write(range, 0),
            other => other,
        };
        let (what, unmap) = (doing.clone(), self.chance.one_in(2));
        let moment = self.power.moments();
        match &doing {
            Doing::Prepare(epoch, durable) => {
                self.preparing.push(Event { moment, epoch: *epoch, durable: *durable });
            }
            Doing::Keep(epoch, durable) => self.begun.push(Event { moment, epoch: *epoch, durable: *durable }),
            Doing::End(epoch) | Doing::Drop(epoch) => self.begun.push(Event { moment, epoch: *epoch, durable: true }),
            _ => {}
        }
        let future = async move {
            match what {
                Doing::Write(range, version) => {
                    let (at, length) = (GuestOffset(range.start * SECTOR), (range.end - range.start) * SECTOR);
                    if version == 0 {
                        disk.write_zeroes(at, length, unmap).await?;
                    } else {
                        let bytes = sector(version).repeat(usize::try_from(range.end - range.start).unwrap());
                        disk.write(at, Buffer::from_slice(&bytes).into()).await?;
                    }
                }
                Doing::Read(range, buffer) => disk.read(GuestOffset(range.start * SECTOR), buffer.into()).await?,
                Doing::Prepare(epoch, durable) => disk.prepare(epoch, durable).await?,
                Doing::Keep(epoch, durable) => disk.keep(epoch, durable).await?,
                Doing::Merge => drop(disk.merge().await?),
                Doing::End(_) => disk.end().await?,
                Doing::Drop(epoch) => disk.drop_after(epoch).await?,
            }
            Ok(())
        };
        self.tasks.push((doing, Box::pin(future)));
        self.poll(self.tasks.len() - 1);
    }

    fn poll(&mut self, number: usize) {
        let (doing, future) = &mut self.tasks[number];
        let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) else { return };
        let doing = doing.clone();
        drop(self.tasks.swap_remove(number));
        self.done(doing, result);
    }

    fn done(&mut self, doing: Doing, result: Result<(), EpochError>) {
        let index =
            |range: &std::ops::Range<u64>| usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap();
        let is_over = self.dropping.is_some() || self.end.is_some();
        match (doing, result) {
            (Doing::Write(range, version), Ok(())) => self.now[index(&range)].fill(version),
            (Doing::Read(range, found), Ok(())) => {
                let wanted: Vec<_> = self.now[index(&range)].iter().flat_map(|version| sector(*version)).collect();
                assert_eq!(found.to_vec(), wanted);
            }
            (Doing::Keep(epoch, durable), Ok(())) => {
                self.kept.push(Event { moment: self.power.moments(), epoch, durable });
            }
            (Doing::End(epoch) | Doing::Drop(epoch), Ok(())) => {
                self.kept.push(Event { moment: self.power.moments(), epoch, durable: true });
            }
            (Doing::Prepare(epoch, durable), Ok(())) => {
                self.prepared.push(Event { moment: self.power.moments(), epoch, durable });
            }
            (Doing::Merge, Ok(())) => {}
            // Later than an epoch that was kept meanwhile, or than the end.
            (Doing::Prepare(epoch, _) | Doing::Keep(epoch, _), Err(EpochError::NotSealed { kept, .. })) => {
                assert!(kept > epoch);
            }
            (Doing::Drop(epoch), Err(EpochError::NotSealed { kept, .. })) => {
                assert!(kept > epoch);
                self.dropping = None;
            }
            // The log is small.
            (Doing::Write(..), Err(EpochError::Image(_))) => {}
            (Doing::Prepare(..) | Doing::Keep(..) | Doing::Read(..), Err(_)) if is_over => {}
            (doing, Err(error)) => panic!("{doing:?}: {error}"),
        }
    }

    fn writes(&self) -> usize {
        self.tasks.iter().filter(|(doing, _)| matches!(doing, Doing::Write(..))).count()
    }

    fn seal(&mut self) {
        let open = self.open();
        match self.disk.seal(open) {
            Ok(()) => {
                assert_eq!(self.writes(), 0);
                self.sealed.push(self.now.clone());
            }
            Err(EpochError::InFlight { writes, .. }) => assert!((1..=self.writes() as u64).contains(&writes)),
            Err(EpochError::TooManySealed { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn step(&mut self) {
        match self.chance.below(20) {
            0..=4 => {
                if let Some(range) = self.free() {
                    let version = self.next_version;
                    self.next_version += 1;
                    self.start(Doing::Write(range, version));
                }
            }
            5..=6 => {
                if let Some(range) = self.free() {
                    let length = usize::try_from((range.end - range.start) * SECTOR).unwrap();
                    self.start(Doing::Read(range, Buffer::zeroed(length)));
                }
            }
            7..=8 => self.seal(),
            9..=10 => {
                let epoch = self.open().saturating_sub(1 + self.chance.below(2)).max(FIRST - 1);
                let durable = self.chance.one_in(3);
                let is_prepared = self.chance.one_in(2);
                self.start(if is_prepared { Doing::Prepare(epoch, durable) } else { Doing::Keep(epoch, durable) });
            }
            11 => self.start(Doing::Merge),
            12 => {
                // A request that is given up.
                let write = self.tasks.iter().position(|(doing, _)| matches!(doing, Doing::Write(..)));
                if let Some(write) = write.filter(|_| self.chance.one_in(4)) {
                    drop(self.tasks.swap_remove(write));
                }
            }
            _ => self.progress(),
        }
    }

    /// Carries out a storage request, and looks at all tasks.
    fn progress(&mut self) {
        let waiting = self.held.waiting();
        if !waiting.is_empty() {
            let number = self.chance.choose(&waiting).number;
            self.held.release(number);
        }
        for number in (0..self.tasks.len()).rev() {
            if number < self.tasks.len() {
                self.poll(number);
            }
        }
    }

    fn settle(&mut self) {
        while !self.tasks.is_empty() {
            self.progress();
        }
    }

    fn run(&mut self) {
        for _ in 0..20 + self.chance.below(120) {
            self.step();
        }
        match self.chance.below(4) {
            0 => {
                self.settle();
                let epoch = self.open();
                self.end = Some(epoch);
                self.sealed.push(self.now.clone());
                self.start(Doing::End(epoch));
            }
            1 => {
                // A server has no request in flight then.
                self.tasks.retain(|(doing, _)| !matches!(doing, Doing::Write(..) | Doing::Read(..)));
                let epoch = self.open().saturating_sub(1 + self.chance.below(2)).max(FIRST - 1);
                self.dropping = Some(epoch);
                self.start(Doing::Drop(epoch));
            }
            _ => {}
        }
        self.settle();
    }

    /// The last epoch of these events before a moment.
    fn last(events: &[Event], moment: usize, may_count: impl Fn(&Event) -> bool) -> u64 {
        let before = events.iter().filter(|event| event.moment <= moment && may_count(event));
        before.map(|event| event.epoch).max().unwrap_or(FIRST - 1)
    }

    /// The epochs that an image may be as of after a cut.
    fn allowed(&self, moment: usize, killed: bool) -> std::ops::RangeInclusive<u64> {
        let least = Self::last(&self.kept, moment, |event| killed || event.durable);
        least..=Self::last(&self.begun, moment, |_| true)
    }

    /// Brings a log to an image, and returns the epoch that the image then has: `as_of`, or if it was not decided one
    /// that was prepared.
    fn recovered(
        &self,
        format: Format,
        [file, log]: [Arc<dyn Storage>; 2],
        (boot, as_of): ([u64; 2], Option<u64>),
        (moment, chosen): (usize, u64),
    ) -> Result<u64, EpochError> {
        let image = format.open(file);
        let recovered = match block_on(recover(&image, Arc::clone(&log), (&options(boot), as_of))) {
            Err(EpochError::Undecided { kept, prepared, .. }) => {
                let allowed = self.allowed(moment, boot == BOOT);
                assert!(allowed.contains(&kept), "epoch {kept} of {allowed:?} is kept");
                let least = Self::last(&self.prepared, moment, |event| boot == BOOT || event.durable);
                let most = Self::last(&self.preparing, moment, |_| true).max(*allowed.end());
                assert!(least <= prepared && prepared <= most, "epoch {prepared} of {least} to {most} is prepared");
                let epoch = kept + chosen % (prepared - kept + 1);
                block_on(recover(&image, log, (&options(boot), Some(epoch))))?
            }
            other => other?,
        };
        let epoch = match recovered {
            Recovered::Cut { epoch, .. } => epoch,
            // Before it began, or behind its end.
            Recovered::Whole => {
                let ended = self.begun.iter().any(|event| Some(event.epoch) == self.end && event.moment <= moment);
                self.end.filter(|_| ended).unwrap_or(FIRST - 1)
            }
            other => panic!("{other:?}"),
        };
        let index = usize::try_from(epoch - (FIRST - 1)).unwrap();
        let wanted = self.sealed.get(index).unwrap_or_else(|| panic!("epoch {epoch} was never sealed"));
        assert_eq!(&versions(&*image), wanted, "epoch {epoch}");
        Ok(epoch)
    }

    fn cut(&mut self, format: Format, case: u64) {
        let moment = usize::try_from(self.chance.below(self.power.moments() as u64 + 1)).unwrap();
        let (loss, boot) = match case % 6 {
            0 => (Loss::None, BOOT),
            1 => (Loss::None, [9, 9]),
            2 => (Loss::All, [9, 9]),
            _ => (Loss::Some(self.chance.bits()), [9, 9]),
        };
        let allowed = self.allowed(moment, boot == BOOT);
        let contents: [_; 2] = self.power.cut(moment, loss).try_into().unwrap();
        // Cut off once more, while the log is brought to the image.
        let again = PowerCut::new();
        let most = [64 << 20, LOG_MOST];
        let mut most = most.into_iter();
        let both = contents.map(|bytes| again.add_storage("again", bytes, most.next().unwrap()));
        let chosen = self.chance.below(8);
        let first = self.recovered(format, both, (boot, None), (moment, chosen)).unwrap();
        let most = Self::last(&self.preparing, moment, |_| true).max(*allowed.end());
        let allowed = *allowed.start()..=most;
        assert!(allowed.contains(&first), "epoch {first} of {allowed:?}, {loss:?} at {moment}");
        let (second_cut, is_whole) = match self.chance.below(4) {
            0 => (again.moments(), true),
            _ => (usize::try_from(self.chance.below(again.moments() as u64 + 1)).unwrap(), false),
        };
        let loss = if self.chance.one_in(3) { Loss::All } else { Loss::Some(self.chance.bits()) };
        let contents: [_; 2] = again.cut(second_cut, loss).try_into().unwrap();
        let both = contents.map(|bytes| Arc::new(MemoryStorage::with_contents(bytes, 64 << 20)) as Arc<dyn Storage>);
        let file = Arc::clone(&both[0]);
        let second = match self.recovered(format, both.clone(), ([8, 8], Some(first)), (moment, 0)) {
            // It was not durable before.
            Err(EpochError::NotThere { last, .. }) if last < first => {
                self.recovered(format, both, ([8, 8], None), (moment, chosen)).unwrap()
            }
            other => other.unwrap(),
        };
        // What was not durable before may be lost until the image has it.
        let durable = self.allowed(moment, false);
        let least = if is_whole { first } else { *durable.start() };
        assert!((least..=first).contains(&second), "epoch {second} after {first}");
        if format == Format::Qcow2 {
            let report = block_on(check(&*file, CheckOptions::default())).unwrap();
            assert_eq!((report.corruptions, report.check_errors), (0, 0), "{report:?}");
        }
    }
}

#[test]
fn an_image_is_as_of_a_kept_epoch_after_any_cut() {
    let first = setting("LIMOSA_EPOCH_SEED", 1);
    for seed in first..first + setting("LIMOSA_EPOCH_SCHEDULES", 2000) {
        let format = if seed % 2 == 0 { Format::Raw } else { Format::Qcow2 };
        let outcome = std::panic::catch_unwind(|| {
            let mut run = Run::new(format, seed);
            run.run();
            (0..3).for_each(|case| run.cut(format, case + seed * 3 / 2));
        });
        assert!(outcome.is_ok(), "seed {seed}, {format:?}");
    }
}
