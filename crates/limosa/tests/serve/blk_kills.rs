//! A server of vhost-user-blk that is killed under load: the next one takes over what was in flight, by the area that
//! the front end keeps, and the driver notices a pause only.
//!
//! Each queue has blocks of its own and writes versions of them. All requests that were submitted are answered, each
//! once, by this server or the next, and no acknowledged write is lost, whether it was flushed or not: of a qcow2 image
//! because of its journal. `LIMOSA_BLK_KILLS=200` kills that often; `LIMOSA_BLK_SEED=N` begins with that seed.

use std::time::{Duration, Instant};

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{BlkClient, BlkCommand, BlkSettings, kill9};

use crate::bed::Bed;
use crate::needs_qemu;
use crate::versions::{BLOCK, Versions, contents, setting};

const BLOCKS: usize = 1024;
const QUEUES: u16 = 2;

/// The subject of a request: a block, or a flush that makes durable what was acknowledged before it.
#[derive(Debug, Clone)]
enum Asked {
    Write(usize),
    Flush(Vec<u64>),
}

struct Load {
    client: BlkClient,
    chance: SeededRandom,
    /// Blocks of each queue.
    blocks: [Vec<Versions>; 2],
    /// Requests in flight of each queue, by slot.
    asked: [std::collections::HashMap<u16, Asked>; 2],
}

impl Load {
    /// Submits requests to a queue and takes replies, without waiting.
    fn step(&mut self, queue: u16) {
        let index = usize::from(queue);
        while self.client.has_room(queue) && !self.chance.one_in(4) {
            let (command, asked) = if self.chance.one_in(16) {
                let acknowledged = self.blocks[index].iter().map(|block| block.acknowledged).collect();
                (BlkCommand::Flush, Asked::Flush(acknowledged))
            } else {
                let place = usize::try_from(self.chance.below(BLOCKS as u64)).unwrap();
                if self.asked[index].values().any(|asked| matches!(asked, Asked::Write(other) if *other == place)) {
                    continue;
                }
                let block = &mut self.blocks[index][place];
                block.sent += 1;
                let number = (place * usize::from(QUEUES) + index) as u64;
                let data = contents(number, block.sent);
                (BlkCommand::Write(number * BLOCK / 512, data), Asked::Write(place))
            };
            let slot = self.client.submit(queue, &command, 512, self.chance.one_in(2)).unwrap();
            assert!(self.asked[index].insert(slot, asked).is_none());
        }
        self.client.kick(queue).unwrap();
        while let Some(reply) = self.client.try_reply(queue).unwrap() {
            self.done(queue, reply.slot, reply.status);
        }
    }

    fn done(&mut self, queue: u16, slot: u16, status: u8) {
        let index = usize::from(queue);
        assert_eq!(status, 0);
        match self.asked[index].remove(&slot).expect("a request is answered once") {
            Asked::Write(place) => {
                let block = &mut self.blocks[index][place];
                block.acknowledged = block.sent;
            }
            Asked::Flush(acknowledged) => {
                for (block, version) in self.blocks[index].iter_mut().zip(acknowledged) {
                    block.durable = block.durable.max(version);
                }
            }
        }
    }

    /// Waits for all requests in flight.
    fn settle(&mut self) {
        for queue in 0..QUEUES {
            while !self.asked[usize::from(queue)].is_empty() {
                let reply = self.client.reply(queue).unwrap();
                self.done(queue, reply.slot, reply.status);
            }
        }
    }

    /// Looks at all blocks. What is there now is what was written.
    fn compare(&mut self, what: &str) {
        for index in 0..usize::from(QUEUES) {
            for place in 0..BLOCKS {
                let number = (place * usize::from(QUEUES) + index) as u64;
                let reply = self.client.run(0, &BlkCommand::Read(number * BLOCK / 512, 4096)).unwrap();
                let block = &mut self.blocks[index][place];
                let version = block.find(number, block.acknowledged, &reply.data);
                block.acknowledged = version.unwrap_or_else(|| panic!("{what}, block {number}: {block:?}"));
            }
        }
        assert_eq!(self.client.run(0, &BlkCommand::Flush).unwrap().status, 0);
        self.blocks.iter_mut().flatten().for_each(|block| block.durable = block.acknowledged);
    }
}

/// Kills servers of an image of this format.
fn kill_servers(format: &str) {
    let bed = Bed::new();
    let seed = setting("LIMOSA_BLK_SEED", 1);
    let size = (BLOCKS as u64 * u64::from(QUEUES) * BLOCK).to_string();
    bed.qemu_img(&["create", "-q", "-f", format, "@disk", &size]);
    let words = ["-f", format, "disk", "--queues", "2"];
    let mut serving = bed.serve_blk("blk", &words);
    let settings = BlkSettings { queues: QUEUES, without: 0 };
    let client = BlkClient::connect(&bed.path("blk"), settings).unwrap();
    let blocks = [vec![Versions::default(); BLOCKS], vec![Versions::default(); BLOCKS]];
    let mut load = Load { client, chance: SeededRandom::new(seed), blocks, asked: Default::default() };
    let mut replayed = 0;
    for kill in 0..setting("LIMOSA_BLK_KILLS", 5) {
        // Not a measure: any moment will do.
        let end = Instant::now() + Duration::from_micros(load.chance.below(150_000));
        while Instant::now() < end {
            (0..QUEUES).for_each(|queue| load.step(queue));
        }
        kill9(serving.pid()).unwrap();
        drop(serving);
        // More is offered while there is no server.
        (0..QUEUES).for_each(|queue| load.step(queue));
        bed.wait_unlocked("disk");
        if format == "qcow2" {
            bed.assert_sound("disk");
        }
        serving = bed.serve_blk("blk", &words);
        replayed += load.asked.iter().map(std::collections::HashMap::len).sum::<usize>();
        load.client.reconnect(&bed.path("blk")).unwrap();
        load.settle();
        load.compare(&format!("{format}, seed {seed}, kill {kill}"));
    }
    assert!(replayed > 0, "no request was in flight at any kill");
    drop(load);
    serving.stop();
    if format == "qcow2" {
        bed.qemu_img(&["check", "-q", "-r", "leaks", "@disk"]);
    }
}

#[test]
fn the_next_server_of_a_raw_image_goes_on_and_loses_nothing() {
    needs_qemu!();
    kill_servers("raw");
}

#[test]
fn the_next_server_of_a_qcow2_image_goes_on_and_loses_nothing() {
    needs_qemu!();
    kill_servers("qcow2");
}
