//! A server that is killed under load: the image is sound, and nothing that was acknowledged is lost; without a journal
//! nothing that was flushed.
//!
//! Each connection has blocks of its own and writes versions of them. After a kill a block has the version that was
//! acknowledged last, or that of the last completed flush, or a later one that was sent. The image is used on after
//! each kill. `LIMOSA_NBD_KILLS=200` kills that often; `LIMOSA_NBD_SEED=N` begins with that seed.

use std::collections::BTreeSet;
use std::path::Path;
use std::thread;
use std::time::Duration;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{NbdClient, NbdCommand, kill9};

use crate::bed::{Bed, JOURNALS};
use crate::needs_qemu;
use crate::versions::{BLOCK, Versions, contents, setting};

const BLOCKS: u64 = 4096;
const CONNECTIONS: u64 = 4;

/// Writes until the server is gone. Returns what it knows of its blocks.
fn load(socket: &Path, number: u64, seed: u64, mut blocks: Vec<Versions>) -> Vec<Versions> {
    let mut chance = SeededRandom::new(seed ^ number << 48);
    let Ok(mut client) = NbdClient::open(socket, "", &[]) else { return blocks };
    let at = |place: usize| (place as u64 * CONNECTIONS + number) * BLOCK;
    let mut step = || -> anyhow::Result<()> {
        let count = 1 + chance.below(16);
        let places: BTreeSet<_> =
            (0..count).map(|_| usize::try_from(chance.below(blocks.len() as u64)).unwrap()).collect();
        let mut cookies = std::collections::HashMap::new();
        for place in places {
            blocks[place].sent += 1;
            let data = contents(at(place) / BLOCK, blocks[place].sent);
            let fua = u16::from(chance.one_in(40));
            cookies.insert(client.send_write(fua, at(place), &data)?, (place, fua));
        }
        while !cookies.is_empty() {
            let reply = client.receive()?;
            let (place, fua) = cookies.remove(&reply.cookie).unwrap();
            assert_eq!(reply.error, 0);
            blocks[place].acknowledged = blocks[place].sent;
            if fua == 1 {
                blocks[place].durable = blocks[place].sent;
            }
        }
        if chance.one_in(4) {
            assert_eq!(client.simple(NbdCommand::Flush, 0, 0, 0)?, 0);
            blocks.iter_mut().for_each(|block| block.durable = block.acknowledged);
        }
        Ok(())
    };
    while step().is_ok() {}
    blocks
}

#[test]
fn a_server_that_is_killed_loses_nothing() {
    needs_qemu!();
    let bed = Bed::new();
    let seed = setting("LIMOSA_NBD_SEED", 1);
    let mut chance = SeededRandom::new(seed);
    std::fs::write(bed.path("base"), vec![0; 16 << 20]).unwrap();
    let size = (BLOCKS * BLOCK).to_string();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "@disk", &size]);
    let mut blocks = vec![vec![Versions::default(); usize::try_from(BLOCKS / CONNECTIONS).unwrap()]; 4];
    for kill in 0..setting("LIMOSA_NBD_KILLS", 5) {
        let has_journal = kill % 4 != 3;
        let words = if has_journal { vec!["disk"] } else { vec!["disk", "--journal", "off"] };
        let serving = bed.serve("nbd", &words);
        let (socket, seed) = (bed.path("nbd"), chance.bits());
        let threads: Vec<_> = (0..)
            .zip(std::mem::take(&mut blocks))
            .map(|(number, blocks)| {
                let socket = socket.clone();
                thread::spawn(move || load(&socket, number, seed, blocks))
            })
            .collect();
        // Not a measure: any moment will do.
        thread::sleep(Duration::from_micros(chance.below(200_000)));
        kill9(serving.pid()).unwrap();
        blocks = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        drop(serving);
        bed.wait_unlocked("disk");
        bed.assert_sound("disk");
        let serving = bed.serve("nbd", &words);
        let mut client = serving.client();
        for (number, blocks) in (0_u64..).zip(&mut blocks) {
            for (place, block) in (0_u64..).zip(blocks.iter_mut()) {
                let index = place * CONNECTIONS + number;
                let found = client.read(index * BLOCK, 4096).unwrap();
                let oldest = if has_journal { block.acknowledged } else { block.durable };
                let version = block.find(index, oldest, &found);
                let version = version.unwrap_or_else(|| panic!("seed {seed}, kill {kill}, block {index}: {block:?}"));
                *block = Versions { sent: block.sent, acknowledged: version, durable: 0 };
            }
        }
        // What is there now is durable after a flush.
        assert_eq!(client.simple(NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
        blocks.iter_mut().flatten().for_each(|block| block.durable = block.acknowledged);
        drop(client);
        serving.stop();
    }
}

#[test]
fn an_image_with_changes_in_a_journal_is_not_served_without_them() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "16M"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "disk", "-F", "qcow2", "@top"]);
    let serving = bed.serve("nbd", &["disk"]);
    assert_eq!(serving.client().write(0, 1 << 20, &[7; 65536]).unwrap(), 0);
    kill9(serving.pid()).unwrap();
    drop(serving);
    bed.wait_unlocked("disk");
    for words in [&["--read-only", "disk"][..], &["top"]] {
        let refused = bed.refused(&[words, &["--nbd", "unix:refused"]].concat());
        refused.one_line(&["disk: 1 changes", "acknowledged", JOURNALS, "without --read-only"]);
    }
    // As it is.
    let shared = bed.serve("shared", &["--read-only", "--shared", "disk"]);
    assert_eq!(shared.client().read(1 << 20, 512).unwrap(), [0; 512]);
    shared.stop();
    let serving = bed.serve("nbd", &["disk"]);
    assert!(serving.said().contains("1 changes were taken from its journal"), "{}", serving.said());
    serving.stop();
    let serving = bed.serve("nbd", &["--read-only", "disk"]);
    assert_eq!(serving.client().read(1 << 20, 512).unwrap(), [7; 512]);
    serving.stop();
}
