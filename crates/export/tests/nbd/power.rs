//! The power is cut at any moment of a server's life: the image is sound, and what was flushed is there.
//!
//! Two connections write versions of blocks of their own, and flush. A reply to a flush makes durable what was answered
//! before it, on this connection; what is written later may be there or not.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Header, ImageParts, Qcow2, Qcow2Options, check, create};
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::{Loss, PowerCut, SeededRandom};
use limosa_storage::{Buffer, MemoryStorage, Storage, block_on};
use limosa_testkit::{NbdClient, NbdCommand};

use crate::bed::{Bed, CONTEXTS};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 256;
const CONNECTIONS: u64 = 2;

fn open(file: Arc<dyn Storage>) -> Arc<Qcow2> {
    let header = block_on(Header::read(&*file)).unwrap();
    let options = Qcow2Options::default().cache_size(64 << 10);
    block_on(Qcow2::open(ImageParts::new(file, header), options)).unwrap()
}

fn contents(block: u64, version: u64) -> Vec<u8> {
    if version == 0 { vec![0; 4096] } else { (block << 32 | version).to_le_bytes().repeat(512) }
}

/// The versions that a connection has sent, and those that were durable at moments.
struct Written {
    sent: Vec<u64>,
    durable: Vec<(usize, Vec<u64>)>,
}

fn load(socket: &Path, number: u64, seed: u64, power: &PowerCut) -> Written {
    let mut chance = SeededRandom::new(seed ^ number << 40);
    let mut client = NbdClient::open(socket, "", &CONTEXTS).unwrap();
    let count = usize::try_from(BLOCKS / CONNECTIONS).unwrap();
    let (mut sent, mut durable) = (vec![0; count], vec![(0, vec![0; count])]);
    for _ in 0..30 {
        let mut cookies = HashMap::new();
        for _ in 0..1 + chance.below(12) {
            let place = usize::try_from(chance.below(count as u64)).unwrap();
            if cookies.values().any(|(other, _)| *other == place) {
                continue;
            }
            sent[place] += 1;
            let block = place as u64 * CONNECTIONS + number;
            let fua = chance.one_in(12);
            let cookie = client.send_write(u16::from(fua), block * BLOCK, &contents(block, sent[place])).unwrap();
            cookies.insert(cookie, (place, fua));
        }
        while !cookies.is_empty() {
            let reply = client.receive().unwrap();
            assert_eq!(reply.error, 0);
            let (place, fua) = cookies.remove(&reply.cookie).unwrap();
            if fua {
                let mut now = durable.last().unwrap().1.clone();
                now[place] = sent[place];
                durable.push((power.moments(), now));
            }
        }
        if chance.one_in(3) {
            assert_eq!(client.simple(NbdCommand::Flush, 0, 0, 0).unwrap(), 0);
            durable.push((power.moments(), sent.clone()));
        }
    }
    client.disconnect().unwrap();
    Written { sent, durable }
}

fn survives(seed: u64, cuts: u64) {
    let made = MemoryStorage::growing_to(64 << 20);
    let options = CreateOptions::default().size(BLOCKS * BLOCK).cluster_size(16 << 10);
    block_on(create(&made, None, &options)).unwrap();
    let power = PowerCut::new();
    let disk: Arc<dyn Disk> = open(power.add_storage("disk", made.contents(), 64 << 20));
    let bed = Bed::new(disk);
    let socket = bed.socket();
    let threads: Vec<_> = (0..CONNECTIONS)
        .map(|number| {
            let (socket, power) = (socket.clone(), power.clone());
            thread::spawn(move || load(&socket, number, seed, &power))
        })
        .collect();
    let written: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    bed.stop();
    let mut chance = SeededRandom::new(seed);
    for cut in 0..cuts {
        let moment = usize::try_from(chance.below(power.moments() as u64 + 1)).unwrap();
        let loss = match cut % 4 {
            0 => Loss::None,
            1 => Loss::All,
            _ => Loss::Some(chance.bits()),
        };
        let case = format!("seed {seed}: power cut at {moment}, {loss:?}");
        let file = Arc::new(MemoryStorage::with_contents(power.cut(moment, loss).remove(0), 64 << 20));
        let report = block_on(check(&*file, CheckOptions::default())).unwrap();
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{case}: {report:?}");
        let disk = open(file);
        let found = Buffer::zeroed(4096);
        for (number, Written { sent, durable }) in (0_u64..).zip(&written) {
            let (_, durable) = durable.iter().rev().find(|(at, _)| *at <= moment).unwrap();
            for (place, (durable, sent)) in (0_u64..).zip(durable.iter().zip(sent)) {
                let block = place * CONNECTIONS + number;
                block_on(disk.read(GuestOffset(block * BLOCK), found.clone().into())).unwrap();
                // A write that no flush covers may be there in part, in whole sectors.
                let sectors = found.to_vec();
                for (at, sector) in sectors.chunks(512).enumerate() {
                    let is = |version: u64| sector == &contents(block, version)[at * 512..][..512];
                    assert!((*durable..=*sent).any(is), "{case}: block {block}, sector {at}, {durable} to {sent}");
                }
            }
        }
    }
}

#[test]
fn a_power_cut_loses_nothing_that_was_flushed_over_any_connection() {
    for seed in 1..6 {
        survives(seed, 60);
    }
}
