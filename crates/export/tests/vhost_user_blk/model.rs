//! Random requests on several queues against a model of a disk.
//!
//! Everything follows from a seed, which a failure prints. `LIMOSA_BLK_SEQUENCES=2000` makes that many sequences;
//! `LIMOSA_BLK_SEED=N` begins with that one. Requests that are in flight together never overlap if one of them changes
//! bytes: the order of such requests is not defined. Rings are stopped and started, and memory is shared again, in
//! between.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use limosa_export::Export;
use limosa_image::qcow2::{CreateOptions, Header, ImageParts, Qcow2, Qcow2Options};
use limosa_image::{Disk, Format, GuestOffset};
use limosa_storage::testing::{Delayed, SeededRandom};
use limosa_storage::{Buffer, FileOptions, FileStorage, block_on};
use limosa_testkit::{BlkClient, BlkCommand, BlkReply, scratch};

use crate::images::{assert_clean, make_qcow2, open_image, pattern};
use crate::served::Served;

const SIZE: u64 = 4 << 20;
/// Requests of a sequence.
const STEPS: usize = 200;

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A request in flight.
#[derive(Debug)]
struct Asked {
    command: BlkCommand,
    range: Range<u64>,
    status: u8,
}

struct Run {
    client: BlkClient,
    asked: [HashMap<u16, Asked>; 2],
    bytes: Vec<u8>,
    /// Bytes that were discarded, and so may be zeros.
    discarded: Vec<bool>,
    chance: SeededRandom,
    seed: u64,
}

fn places(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}

impl Run {
    fn is_free(&self, range: &Range<u64>, changes: bool) -> bool {
        self.asked.iter().flat_map(HashMap::values).all(|asked| {
            let apart = asked.range.end <= range.start || range.end <= asked.range.start;
            apart || (!changes && matches!(asked.command, BlkCommand::Read(..)))
        })
    }

    fn change(&mut self, range: &Range<u64>, data: &[u8]) {
        self.bytes[places(range)].copy_from_slice(data);
        self.discarded[places(range)].fill(false);
    }

    /// Compares what was read, and learns what became of discarded bytes.
    fn compare(&mut self, range: &Range<u64>, found: &[u8]) {
        for (at, found) in places(range).zip(found) {
            let may_be_zero = std::mem::take(&mut self.discarded[at]) && *found == 0;
            if may_be_zero {
                self.bytes[at] = 0;
            }
            assert_eq!(*found, self.bytes[at], "seed {}: at {at} of {range:?}", self.seed);
        }
    }

    /// Draws sectors: whole clusters, pages, or any.
    fn draw_range(&mut self) -> Range<u64> {
        let unit = *self.chance.choose(&[64 << 10, 4096, 512]);
        let start = self.chance.below(SIZE / unit) * unit;
        let most = (*self.chance.choose(&[4096, 65536, 128 << 10]) / unit).max(1);
        start..(start + (1 + self.chance.below(most)) * unit).min(SIZE)
    }

    /// Submits a random request to a random queue that has room.
    fn submit(&mut self, step: usize) {
        let queue = u16::from(self.chance.one_in(2));
        let range = self.draw_range();
        let (sector, length) = (range.start / 512, range.end - range.start);
        let count = u32::try_from(length / 512).unwrap();
        let kind = self.chance.below(12);
        if !self.client.has_room(queue) || !self.is_free(&range, kind >= 4) {
            return;
        }
        let past_end = self.chance.one_in(20);
        let (command, range) = match kind {
            0..=3 if past_end => (BlkCommand::Read(SIZE / 512, 512), 0..0),
            0..=3 => (BlkCommand::Read(sector, usize::try_from(length).unwrap()), range),
            4..=7 if past_end => (BlkCommand::Write(SIZE / 512 - 1, vec![9; 1024]), 0..0),
            4..=7 => {
                let data = pattern(self.seed ^ (step as u64) << 32, usize::try_from(length).unwrap());
                self.change(&range, &data);
                (BlkCommand::Write(sector, data), range)
            }
            8 => {
                self.change(&range, &vec![0; usize::try_from(length).unwrap()]);
                let unmap = u32::from(self.chance.one_in(2));
                // In two ranges, if there are two sectors.
                let first = count / 2;
                let ranges = vec![(sector, first, unmap), (sector + u64::from(first), count - first, unmap)];
                (BlkCommand::WriteZeroes(ranges), range)
            }
            9 => {
                self.discarded[places(&range)].fill(true);
                (BlkCommand::Discard(vec![(sector, count, 0)]), range)
            }
            10 => (BlkCommand::GetId, 0..0),
            _ => (BlkCommand::Flush, 0..0),
        };
        let is_refused = past_end && kind < 8;
        let cut = usize::try_from(self.chance.below(length)).unwrap();
        let indirect = self.chance.one_in(2);
        let slot = self.client.submit(queue, &command, cut, indirect).unwrap();
        let asked = Asked { command, range, status: u8::from(is_refused) };
        assert!(self.asked[usize::from(queue)].insert(slot, asked).is_none());
        if self.chance.one_in(2) {
            self.client.kick(queue).unwrap();
        }
    }

    /// Waits for one request of a queue.
    fn receive(&mut self, queue: u16) {
        self.client.kick(queue).unwrap();
        let reply = self.client.reply(queue).unwrap_or_else(|error| panic!("seed {}: {error:?}", self.seed));
        self.check(queue, &reply);
    }

    fn check(&mut self, queue: u16, reply: &BlkReply) {
        let asked = self.asked[usize::from(queue)].remove(&reply.slot).expect("it was asked");
        assert_eq!(reply.status, asked.status, "seed {}: {asked:?}", self.seed);
        if let BlkCommand::Read(_, length) = asked.command
            && asked.status == 0
        {
            assert_eq!(usize::try_from(reply.written).unwrap(), length + 1);
            self.compare(&asked.range, &reply.data);
        }
    }

    fn run(&mut self) {
        let depth = 1 + usize::try_from(self.chance.below(28)).unwrap();
        for step in 0..STEPS {
            self.submit(step);
            if self.chance.one_in(40) {
                let queue = u16::from(self.chance.one_in(2));
                let base = self.client.stop_queue(queue).unwrap();
                self.client.start_queue(queue, base).unwrap();
            }
            if self.chance.one_in(60) {
                self.client.share_again().unwrap();
            }
            let queue = u16::from(self.asked[1].len() > self.asked[0].len());
            let in_flight = self.asked[0].len() + self.asked[1].len();
            if in_flight >= depth || (in_flight > 0 && self.chance.one_in(3)) {
                self.receive(queue);
            }
        }
        for queue in [0, 1] {
            while !self.asked[usize::from(queue)].is_empty() {
                self.receive(queue);
            }
        }
        let step = 128 << 10;
        for start in (0..SIZE).step_by(step) {
            let reply = self.client.run(0, &BlkCommand::Read(start / 512, step)).unwrap();
            self.compare(&(start..start + step as u64), &reply.data);
        }
    }
}

fn sequence(seed: u64) {
    let mut chance = SeededRandom::new(seed);
    let folder = scratch().unwrap();
    let (base, path) = (folder.path().join("base"), folder.path().join("disk"));
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    let mut options = CreateOptions::default().size(SIZE).cluster_size(*chance.choose(&[4096, 65536]));
    if chance.one_in(2) {
        bytes[1 << 20..3 << 20].copy_from_slice(&pattern(seed, 2 << 20));
        std::fs::write(&base, &bytes).unwrap();
        options = options.backing_file(Some("base".into())).backing_format(Some("raw".into()));
    }
    make_qcow2(&path, &options);
    let disk = open_image(&path, Format::Qcow2, false);
    let served = Served::with(Export::new("", disk).unwrap(), 2, 1 + usize::from(chance.one_in(2)));
    let without = *chance.choose(&[0, 1 << 29, 1 << 11, 1 << 9 | 1 << 11]);
    let client = served.client_without(without);
    let discarded = vec![false; bytes.len()];
    let mut run = Run { client, asked: Default::default(), bytes, discarded, chance, seed };
    run.run();
    let Run { client, bytes, discarded, .. } = run;
    drop(client);
    served.stop();
    assert_clean(&path);
    // And without the server.
    let disk = open_image(&path, Format::Qcow2, true);
    let buffer = Buffer::zeroed(bytes.len());
    block_on(disk.read(GuestOffset(0), buffer.clone().into())).unwrap();
    block_on(disk.close()).unwrap();
    let found = buffer.to_vec();
    assert!((0..bytes.len()).all(|at| found[at] == bytes[at] || (discarded[at] && found[at] == 0)), "seed {seed}");
}

#[test]
fn random_sequences_of_requests_do_what_the_model_does() {
    let first = setting("LIMOSA_BLK_SEED", 1);
    (first..first + setting("LIMOSA_BLK_SEQUENCES", 12)).for_each(sequence);
}

/// Requests overtake each other, and writes of one queue wait for those of another.
#[test]
fn random_sequences_on_a_disk_that_is_slow_do_the_same() {
    let first = setting("LIMOSA_BLK_SEED", 1);
    for seed in first..first + setting("LIMOSA_BLK_SEQUENCES", 3) {
        let folder = scratch().unwrap();
        let path = folder.path().join("disk");
        make_qcow2(&path, &CreateOptions::default().size(SIZE));
        let file = FileStorage::open(&path, &FileOptions::default()).unwrap();
        let slow = Delayed::new(seed, Duration::from_millis(2)).wrap(file);
        let header = block_on(Header::read(&*slow)).unwrap();
        let disk: Arc<dyn Disk> =
            block_on(Qcow2::open(ImageParts::new(slow, header), Qcow2Options::default())).unwrap();
        let served = Served::with(Export::new("", disk).unwrap(), 2, 2);
        let (client, chance) = (served.client(), SeededRandom::new(seed));
        let length = usize::try_from(SIZE).unwrap();
        let (bytes, discarded) = (vec![0; length], vec![false; length]);
        let mut run = Run { client, asked: Default::default(), bytes, discarded, chance, seed };
        run.run();
        drop(run);
        served.stop();
        assert_clean(&path);
    }
}
