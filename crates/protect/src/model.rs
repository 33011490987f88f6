//! The rule as a model: nothing is seen outside that the survivor does not know; memory and disk are of one instant.
//!
//! The gate's frames and the disk's epochs are the real ones; the VM, the directory and the keeper's order are made of
//! numbers. A VM writes to its disk, remembers that, and sends a frame that says it. It, the keeper and the disk's
//! server run in random steps, orders to the gate arrive late, the guard lets the VM go, and everything is killed at
//! some moment, or loses its power. In half of the schedules the directory is on another host: what the two ends say to
//! each other arrives late, or not at all, and the VM continues or stands still when the line is cut.
//! `LIMOSA_PROTECT_SCHEDULES=100000` tries that many; `LIMOSA_PROTECT_SEED=N` begins with that one.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use limosa_image::epochs::{EpochDisk, EpochError, EpochOptions, Recovered, recover};
use limosa_image::raw::{Raw, RawOptions};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};

use crate::gate::hold::{Hold, Offered};

const SECTOR: u64 = 512;
const SECTORS: u64 = 16;
const LOG_MOST: u64 = 8 << 20;
const BOOT: [u64; 2] = [1, 2];

/// The state of the VM that a checkpoint has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Memory {
    /// Turns of work that are done; each has written its number to a sector, and was announced by a frame.
    done: u64,
    /// The next one has written already.
    has_written: bool,
}

impl Memory {
    /// The numbers that the disk has at this instant.
    fn disk(self) -> Vec<u64> {
        let mut sectors = vec![0; usize::try_from(SECTORS).unwrap()];
        for turn in 0..self.done + u64::from(self.has_written) {
            sectors[usize::try_from(turn % SECTORS).unwrap()] = turn + 1;
        }
        sectors
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Vm {
    Runs,
    Stopped,
    Dead,
}

/// The place of the keeper in a turn, in the order of `series`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Stop,
    Receive,
    SealDisk,
    SealGate,
    CheckHeld,
    Loaded,
    Prepare,
    Commit,
    /// The word of a keeper on another host is waited for.
    Kept,
    Release,
    Keep,
    /// The series has ended by itself.
    Ended,
    Dead,
}

/// An order that is on its way to the gate.
#[derive(Debug, Clone, Copy)]
enum Order {
    Commit(u64),
    Abort,
}

/// The line to a keeper on another host, and what is on its way.
#[derive(Debug, Default)]
struct Line {
    is_cut: bool,
    /// The newest checkpoint that the keeper has whole, and may not count yet.
    received: Memory,
    /// Checkpoints whose disk is prepared.
    prepared: VecDeque<u64>,
    /// Checkpoints that count.
    kept: VecDeque<u64>,
    /// The VM stands still when the line is cut.
    pauses: bool,
    /// It does.
    is_lost: bool,
}

struct World {
    /// `None`: the directory is on the VM's host.
    line: Option<Line>,
    chance: SeededRandom,
    now: Instant,
    power: PowerCut,
    /// `None`: its server is dead.
    disk: Option<Arc<EpochDisk>>,
    durable: bool,
    vm: Vm,
    memory: Memory,
    hold: Hold,
    orders: VecDeque<Order>,
    /// The highest number in a frame that was seen outside.
    seen: u64,
    place: Place,
    turn: u64,
    received: Memory,
    let_go: bool,
    /// The newest checkpoint.
    directory: (u64, Memory),
    /// The VM has continued without protection: its checkpoint is old.
    is_unprotected: bool,
}

fn raw(file: Arc<dyn Storage>) -> Arc<dyn Disk> {
    Raw::open(file, &RawOptions::default()).unwrap()
}

fn options(boot: [u64; 2]) -> EpochOptions {
    EpochOptions::default().boot(boot)
}

fn contents(disk: &dyn Disk) -> Vec<u64> {
    let buffer = Buffer::zeroed(usize::try_from(SECTOR * SECTORS).unwrap());
    block_on(disk.read(GuestOffset(0), buffer.clone().into())).unwrap();
    buffer.to_vec().chunks(512).map(|sector| u64::from_le_bytes(sector[..8].try_into().unwrap())).collect()
}

fn frame(number: u64) -> Vec<u8> {
    [&8_u32.to_be_bytes()[..], &number.to_be_bytes()].concat()
}

impl World {
    /// A VM whose base counts.
    fn new(seed: u64) -> Self {
        let mut chance = SeededRandom::new(seed);
        let power = PowerCut::new();
        let file = power.add_storage("disk", vec![0; usize::try_from(SECTOR * SECTORS).unwrap()], SECTOR * SECTORS);
        let log = power.add_storage("log", Vec::new(), LOG_MOST);
        let disk = block_on(EpochDisk::begin(raw(file), log, &options(BOOT))).unwrap();
        let mut hold = Hold::new(1 << 20);
        hold.seal(0).unwrap();
        hold.commit(0, Instant::now(), |_| ()).unwrap();
        let line = chance.one_in(2).then(|| Line { pauses: chance.one_in(2), ..Line::default() });
        Self {
            line,
            durable: chance.one_in(2),
            chance,
            now: Instant::now(),
            power,
            disk: Some(disk),
            vm: Vm::Runs,
            memory: Memory::default(),
            hold,
            orders: VecDeque::new(),
            seen: 0,
            place: Place::Stop,
            turn: 1,
            received: Memory::default(),
            let_go: false,
            directory: (0, Memory::default()),
            is_unprotected: false,
        }
    }

    /// Half a turn of the VM's work.
    fn work(&mut self) {
        if !self.memory.has_written {
            // Without its server it waits for its disk.
            let Some(disk) = &self.disk else { return };
            let (sector, number) = (self.memory.done % SECTORS, self.memory.done + 1);
            let bytes = number.to_le_bytes().repeat(64);
            block_on(disk.write(GuestOffset(sector * SECTOR), Buffer::from_slice(&bytes).into())).unwrap();
            self.memory.has_written = true;
            return;
        }
        self.memory = Memory { done: self.memory.done + 1, has_written: false };
        if self.hold.offer(&frame(self.memory.done), self.now) == Offered::Passed {
            self.seen = self.memory.done;
        }
    }

    /// Carries the first order out that is on its way to the gate.
    fn deliver(&mut self) {
        match self.orders.pop_front() {
            Some(Order::Commit(epoch)) => {
                let seen = &mut self.seen;
                let out = |frames: crate::gate::hold::Frames| {
                    let last = frames.bytes.last_chunk().copied().unwrap();
                    *seen = u64::from_be_bytes(last);
                };
                // One that an abort has overtaken is refused.
                let _ = self.hold.commit(epoch, self.now, out);
            }
            Some(Order::Abort) => {
                self.hold.abort();
                self.is_unprotected |= self.vm == Vm::Runs;
            }
            None => {}
        }
    }

    /// The next step of the keeper.
    fn keep(&mut self) {
        let next = match self.place {
            Place::Stop if self.vm == Vm::Dead => return self.end_series(),
            Place::Stop => {
                self.vm = Vm::Stopped;
                Place::Receive
            }
            Place::Receive if self.vm == Vm::Dead => return self.end_series(),
            Place::Receive => {
                self.received = self.memory;
                if let Some(line) = &mut self.line {
                    if line.is_cut {
                        return self.lose_line();
                    }
                    line.received = self.memory;
                }
                Place::SealDisk
            }
            Place::SealDisk => match &self.disk {
                Some(disk) if disk.seal(self.turn).is_ok() => Place::SealGate,
                _ => return self.end_series(),
            },
            Place::SealGate => {
                // Orders are carried out in the order in which they were sent, and a seal is waited for.
                while !self.orders.is_empty() {
                    self.deliver();
                }
                self.hold.seal(self.turn).unwrap();
                Place::CheckHeld
            }
            Place::CheckHeld if self.let_go => return self.end_series(),
            Place::CheckHeld => Place::Loaded,
            Place::Loaded => {
                if self.vm == Vm::Stopped {
                    self.vm = Vm::Runs;
                }
                Place::Prepare
            }
            Place::Prepare => match &self.disk {
                Some(disk) if block_on(disk.prepare(self.turn, self.durable)).is_ok() => Place::Commit,
                _ => return self.end_series(),
            },
            Place::Commit => match &mut self.line {
                Some(line) if line.is_cut => return self.lose_line(),
                Some(line) => {
                    line.prepared.push_back(self.turn);
                    Place::Kept
                }
                None => {
                    self.directory = (self.turn, self.received);
                    Place::Release
                }
            },
            Place::Kept => match self.line.as_mut().and_then(|line| line.kept.pop_front()) {
                Some(kept) => {
                    assert_eq!(kept, self.turn);
                    Place::Release
                }
                None if self.line.as_ref().is_none_or(|line| line.is_cut) => return self.lose_line(),
                None => Place::Kept,
            },
            Place::Release => {
                self.orders.push_back(Order::Commit(self.turn));
                Place::Keep
            }
            Place::Keep => {
                self.turn += 1;
                match &self.disk {
                    Some(disk) => {
                        block_on(disk.keep(self.turn - 1, false)).unwrap();
                        if self.chance.one_in(3) {
                            block_on(disk.merge()).unwrap();
                        }
                        Place::Stop
                    }
                    None => return self.end_series(),
                }
            }
            over @ (Place::Ended | Place::Dead) => over,
        };
        self.place = next;
    }

    /// The keeper on another host hears that a disk is prepared.
    fn hear(&mut self) {
        if let Some(line) = &mut self.line
            && let Some(epoch) = line.prepared.pop_front()
        {
            self.directory = (epoch, line.received);
            if !line.is_cut {
                line.kept.push_back(epoch);
            }
        }
    }

    /// The line is cut; what is on its way may be lost.
    fn cut(&mut self) {
        if let Some(line) = &mut self.line {
            line.is_cut = true;
            for words in [&mut line.prepared, &mut line.kept] {
                if self.chance.one_in(2) {
                    words.clear();
                }
            }
        }
    }

    /// The VM's side has noticed that its line is cut.
    fn lose_line(&mut self) {
        match &mut self.line {
            Some(line) if line.pauses => line.is_lost = true,
            _ => return self.end_series(),
        }
        self.place = Place::Ended;
        if self.vm == Vm::Runs {
            self.vm = Vm::Stopped;
        }
        self.orders.push_back(Order::Abort);
    }

    /// The keeper gives up, or its VM is gone.
    fn end_series(&mut self) {
        self.place = Place::Ended;
        self.orders.push_back(Order::Abort);
        self.let_vm_go();
    }

    /// Whoever ends a series lets the VM run, and has its disk end epochs.
    fn let_vm_go(&mut self) {
        if self.vm == Vm::Dead {
            return;
        }
        self.vm = Vm::Runs;
        self.is_unprotected = true;
        if let Some(disk) = &self.disk {
            block_on(disk.end()).unwrap();
            assert_eq!(contents(&**disk.image()), self.memory.disk(), "the VM has its disk");
        }
    }

    fn step(&mut self) {
        match self.chance.below(20) {
            0..=7 if self.vm == Vm::Runs && !self.is_unprotected => self.work(),
            8..=15 => self.keep(),
            16..=17 => self.deliver(),
            19 if self.chance.one_in(50) => self.cut(),
            19 => self.hear(),
            18 if self.vm == Vm::Stopped && self.place != Place::Ended && self.chance.one_in(4) => {
                // The guard says so before it does it.
                self.let_go = true;
                self.vm = Vm::Runs;
                // The watchdog of a keeper that was killed while the VM stood still without its line.
                self.is_unprotected |= self.line.as_ref().is_some_and(|line| line.is_lost);
            }
            _ => {}
        }
    }

    /// Kills something: the VM, the keeper, the server.
    fn kill(&mut self, victim: u64) {
        match victim {
            0 => self.vm = Vm::Dead,
            1 => self.place = Place::Dead,
            _ => self.disk = None,
        }
    }

    /// Continues the VM from its newest checkpoint: the numbers on its disk.
    fn fail_over(&mut self, power_is_lost: bool) -> Option<Vec<u64>> {
        let (epoch, _) = self.directory;
        if let Some(disk) = self.disk.take().filter(|_| !power_is_lost) {
            block_on(disk.drop_after(epoch)).unwrap();
            return Some(contents(&**disk.image()));
        }
        let (loss, boot) = match power_is_lost {
            true => (Loss::Some(self.chance.bits()), [9, 9]),
            false => (Loss::None, BOOT),
        };
        let [file, log]: [_; 2] = self.power.cut(self.power.moments(), loss).try_into().unwrap();
        let image = raw(Arc::new(MemoryStorage::with_contents(file, SECTOR * SECTORS)));
        let log = Arc::new(MemoryStorage::with_contents(log, LOG_MOST));
        match block_on(recover(&image, log, (&options(boot), Some(epoch)))) {
            Ok(Recovered::Cut { epoch: found, .. }) => assert_eq!(found, epoch),
            // What is not kept durably does not survive the loss of power, and is refused.
            Err(EpochError::NotThere { last, .. }) if power_is_lost && !self.durable => {
                assert!(last < epoch);
                return None;
            }
            other => panic!("{other:?}"),
        }
        Some(contents(&*image))
    }

    /// Everything is killed within moments, in some order; orders that are on their way may still arrive.
    fn lose(&mut self) {
        let power_is_lost = self.chance.one_in(4);
        let mut victims = vec![0, 1, 2];
        while !victims.is_empty() {
            let victim = victims.swap_remove(usize::try_from(self.chance.below(victims.len() as u64)).unwrap());
            // A server that lives drops what was written since.
            if victim == 2 && self.chance.one_in(2) {
                continue;
            }
            self.kill(victim);
            (0..self.chance.below(12)).for_each(|_| self.step());
        }
        self.vm = Vm::Dead;
        self.place = Place::Dead;
        while !self.orders.is_empty() && self.chance.one_in(2) {
            self.deliver();
        }
        if self.chance.one_in(2) {
            self.hear();
        }
        if self.is_unprotected {
            return;
        }
        let (epoch, memory) = self.directory;
        assert!(self.seen <= memory.done, "turn {} was seen, and checkpoint {epoch} has {memory:?}", self.seen);
        if let Some(disk) = self.fail_over(power_is_lost) {
            assert_eq!(disk, memory.disk(), "checkpoint {epoch}");
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap())
}

#[test]
fn nothing_is_seen_that_the_survivor_does_not_know_and_no_write_of_it_is_lost() {
    let first = setting("LIMOSA_PROTECT_SEED", 1);
    let (mut protected, mut checkpoints) = (0, 0);
    for seed in first..first + setting("LIMOSA_PROTECT_SCHEDULES", 10_000) {
        let outcome = std::panic::catch_unwind(|| {
            let mut world = World::new(seed);
            (0..world.chance.below(200)).for_each(|_| world.step());
            world.lose();
            (!world.is_unprotected, world.directory.0)
        });
        let (is_protected, number) = outcome.unwrap_or_else(|_| panic!("seed {seed}"));
        protected += u64::from(is_protected);
        checkpoints += number;
    }
    // Otherwise nothing was tried.
    assert!(protected > 0 && checkpoints > protected, "{protected} failovers, {checkpoints} checkpoints");
}
