//! Random sequences of all commands, from several connections, against a model of a disk.
//!
//! Everything follows from a seed, which a failure prints. `LIMOSA_NBD_SEQUENCES=2000` makes that many sequences;
//! `LIMOSA_NBD_SEED=N` begins with that one. Requests that are in flight together never overlap if one of them changes
//! bytes: the order of such requests is not defined. Between them the disk becomes longer, gets overlays and is
//! quiesced.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use limosa_export::nbd::ServerOptions;
use limosa_export::{Export, ExportError, Exports};
use limosa_image::Format;
use limosa_image::qcow2::CreateOptions;
use limosa_storage::testing::SeededRandom;
use limosa_testkit::{NbdChunk, NbdClient, NbdCommand, NbdReply, scratch};

use crate::bed::{Bed, CONTEXTS, assert_clean, make_qcow2, open_image, pattern};

/// Bytes of the disk in the beginning.
const SIZE: u64 = 4 << 20;
/// Time for requests in flight.
const LONG: Duration = Duration::from_secs(60);
/// Requests of a sequence.
const STEPS: usize = 120;

fn setting(name: &str, usual: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A request in flight.
#[derive(Debug)]
struct Asked {
    what: What,
    range: Range<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Read,
    Change,
    /// A trim leaves the old bytes or zeros.
    Trim,
    Status,
    Nothing,
    /// It must fail with this error.
    Fails(u32),
}

/// A connection of one form of headers.
struct Peer {
    client: NbdClient,
    simple: bool,
    asked: HashMap<u64, Asked>,
}

impl Peer {
    fn new(socket: &Path, form: u64) -> Self {
        let mut client = NbdClient::unix(socket).unwrap();
        match form {
            0 => {}
            1 => client.use_structured().unwrap(),
            _ => client.use_extended().unwrap(),
        }
        if form > 0 {
            client.set_contexts("", &CONTEXTS).unwrap();
        }
        client.go("").unwrap();
        Self { client, simple: form == 0, asked: HashMap::new() }
    }
}

/// A model of the disk: its bytes, and which of them were trimmed and so may be zeros.
struct Model {
    bytes: Vec<u8>,
    trimmed: Vec<bool>,
}

fn places(range: &Range<u64>) -> Range<usize> {
    usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()
}

impl Model {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn grow(&mut self, size: u64) {
        let size = usize::try_from(size).unwrap();
        self.bytes.resize(size, 0);
        self.trimmed.resize(size, false);
    }

    fn write(&mut self, range: &Range<u64>, data: &[u8]) {
        self.bytes[places(range)].copy_from_slice(data);
        self.trimmed[places(range)].fill(false);
    }

    /// Compares what was read, and learns what became of trimmed bytes.
    fn read(&mut self, range: &Range<u64>, found: &[u8]) {
        for (at, found) in places(range).zip(found) {
            let may_be_zero = std::mem::take(&mut self.trimmed[at]) && *found == 0;
            if may_be_zero {
                self.bytes[at] = 0;
            }
            assert_eq!(*found, self.bytes[at], "at {at} of {range:?}");
        }
    }
}

/// Draws a range: whole clusters, whole sectors, or any bytes.
fn draw_range(chance: &mut SeededRandom, size: u64) -> Range<u64> {
    let unit = *chance.choose(&[64 << 10, 4096, 512, 1]);
    let start = chance.below(size / unit) * unit;
    let most = (*chance.choose(&[4096, 100_000, 1 << 20]) / unit).max(1);
    start..(start + (1 + chance.below(most)) * unit).min(size)
}

struct Run {
    export: Arc<Export>,
    /// The images, the one in use last.
    images: Vec<PathBuf>,
    peers: Vec<Peer>,
    model: Model,
    chance: SeededRandom,
    seed: u64,
}

impl Run {
    /// Whether a range may be asked for now: it overlaps with nothing in flight, if one of the two changes bytes.
    fn is_free(&self, range: &Range<u64>, changes: bool) -> bool {
        self.peers.iter().flat_map(|peer| peer.asked.values()).all(|asked| {
            let apart = asked.range.end <= range.start || range.end <= asked.range.start;
            apart || !(changes || matches!(asked.what, What::Change | What::Trim))
        })
    }

    /// Sends a request of a random kind on a random connection.
    fn send(&mut self, step: usize) {
        let range = draw_range(&mut self.chance, self.model.size());
        let (at, length) = (range.start, range.end - range.start);
        let kind = self.chance.below(16);
        if !self.is_free(&range, (5..13).contains(&kind)) {
            return;
        }
        let number = usize::try_from(self.chance.below(self.peers.len() as u64)).unwrap();
        let fua = u16::from(self.chance.one_in(6));
        let past_end = self.chance.one_in(20);
        let size = self.model.size();
        let peer = &mut self.peers[number];
        let client = &mut peer.client;
        let (what, cookie) = match kind {
            0..=3 => (What::Read, client.send(NbdCommand::Read, 0, at, length)),
            4 if !peer.simple => (What::Read, client.send(NbdCommand::Read, 1 << 2, at, length)),
            5..=8 => {
                let data = pattern(self.seed ^ (step as u64) << 32, usize::try_from(length).unwrap());
                if past_end {
                    (What::Fails(28), client.send_write(fua, size - 1, &data[..data.len().min(2)].repeat(2)))
                } else {
                    self.model.write(&range, &data);
                    (What::Change, client.send_write(fua, at, &data))
                }
            }
            9 | 10 => {
                let hole = if self.chance.one_in(2) { 1 << 1 } else { 0 };
                self.model.write(&range, &vec![0; usize::try_from(length).unwrap()]);
                (What::Change, client.send(NbdCommand::WriteZeroes, fua | hole, at, length))
            }
            11 | 12 => {
                self.model.trimmed[places(&range)].fill(true);
                (What::Trim, client.send(NbdCommand::Trim, fua, at, length))
            }
            13 if !peer.simple => (What::Status, client.send(NbdCommand::BlockStatus, 0, at, length)),
            14 if past_end => (What::Fails(22), client.send(NbdCommand::Read, 0, size - 1, 2)),
            14 => (What::Nothing, client.send(NbdCommand::Cache, 0, at, length)),
            _ => (What::Nothing, client.send(NbdCommand::Flush, 0, 0, 0)),
        };
        let range = if matches!(what, What::Nothing | What::Fails(_)) { 0..0 } else { range };
        peer.asked.insert(cookie.unwrap(), Asked { what, range });
    }

    /// Receives one reply on a connection that expects some.
    fn receive(&mut self) {
        let expecting: Vec<_> = (0..self.peers.len()).filter(|peer| !self.peers[*peer].asked.is_empty()).collect();
        if expecting.is_empty() {
            return;
        }
        let peer = &mut self.peers[*self.chance.choose(&expecting)];
        let reply = peer.client.receive().unwrap();
        let asked = peer.asked.remove(&reply.cookie).unwrap();
        let simple = peer.simple;
        self.check(&asked, &reply, simple);
    }

    fn check(&mut self, asked: &Asked, reply: &NbdReply, simple: bool) {
        let Asked { what, range } = asked;
        if let What::Fails(error) = what {
            return assert_eq!(reply.error, *error, "{asked:?}");
        }
        assert_eq!(reply.error, 0, "{asked:?}");
        match what {
            What::Read => {
                let length = usize::try_from(range.end - range.start).unwrap();
                let found = reply.bytes(if simple { 0 } else { range.start }, length).unwrap();
                self.model.read(range, &found);
            }
            What::Status => {
                let [NbdChunk::Status(1, extents), NbdChunk::Status(2, _)] = reply.chunks.as_slice() else {
                    panic!("{reply:?}")
                };
                let mut at = range.start;
                for (length, status) in extents {
                    let inside = at..(at + length).min(range.end);
                    // What is said to be zeros is zeros, or was trimmed.
                    if status & 2 != 0 {
                        let mut places = places(&inside);
                        assert!(places.all(|at| self.model.bytes[at] == 0 || self.model.trimmed[at]), "{inside:?}");
                    }
                    at += length;
                }
                assert!(at <= range.end && at > range.start);
            }
            What::Change | What::Trim | What::Nothing | What::Fails(_) => {}
        }
    }

    /// Changes the disk below the clients.
    fn steer(&mut self) {
        let fails = |asked: &Asked| matches!(asked.what, What::Fails(_));
        match self.chance.below(3) {
            0 => {
                self.export.quiesce(LONG).unwrap();
                self.export.resume().unwrap();
            }
            // One that is past the end now would not be.
            1 if !self.peers.iter().flat_map(|peer| peer.asked.values()).any(fails) => {
                let size = self.model.size() + 512 * (1 + self.chance.below(1000));
                self.export.resize(size, LONG).unwrap();
                self.model.grow(size);
            }
            _ => self.put_overlay(),
        }
    }

    fn put_overlay(&mut self) {
        let disk = self.export.disk();
        let (below, format) = (self.images.last().unwrap().clone(), disk.format());
        let overlay = below.with_file_name(format!("overlay{}", self.images.len()));
        let options = CreateOptions::default()
            .size(disk.len())
            .cluster_size(*self.chance.choose(&[4096, 65536]))
            .backing_file(Some(below.into()))
            .backing_format(Some(format.into()));
        make_qcow2(&overlay, &options);
        let open = || Ok::<_, ExportError>(open_image(&overlay, Format::Qcow2, false));
        self.export.replace_disk(LONG, open, || unreachable!()).unwrap();
        self.images.push(overlay);
    }

    fn run(&mut self) {
        let depth = 1 + self.chance.below(24);
        for step in 0..STEPS {
            self.send(step);
            if self.chance.one_in(40) {
                self.steer();
            }
            let in_flight = self.peers.iter().map(|peer| peer.asked.len() as u64).sum::<u64>();
            if in_flight >= depth || self.chance.one_in(3) {
                self.receive();
            }
        }
        while self.peers.iter().any(|peer| !peer.asked.is_empty()) {
            self.receive();
        }
        let whole = 0..self.model.size();
        for number in 0..self.peers.len() {
            let found = self.peers[number].client.read(0, self.model.bytes.len()).unwrap();
            self.model.read(&whole, &found);
        }
    }
}

fn sequence(seed: u64) {
    let mut chance = SeededRandom::new(seed);
    let folder = scratch().unwrap();
    let (base, path) = (folder.path().join("base"), folder.path().join("disk"));
    let mut bytes = vec![0; usize::try_from(SIZE).unwrap()];
    let raw = chance.one_in(4);
    if raw {
        std::fs::write(&path, &bytes).unwrap();
    } else {
        let mut options = CreateOptions::default().size(SIZE).cluster_size(*chance.choose(&[4096, 65536]));
        if chance.one_in(2) {
            bytes[1 << 20..3 << 20].copy_from_slice(&pattern(seed, 2 << 20));
            std::fs::write(&base, &bytes).unwrap();
            options = options.backing_file(Some("base".into())).backing_format(Some("raw".into()));
        }
        make_qcow2(&path, &options.version(*chance.choose(&[2, 3, 3])));
    }
    let disk = open_image(&path, if raw { Format::Raw } else { Format::Qcow2 }, false);
    let exports = Exports::new();
    exports.add(Export::new("", disk).unwrap()).unwrap();
    let bed = Bed::with(exports, ServerOptions::default());
    let peers = (0..1 + chance.below(4)).map(|_| Peer::new(&bed.socket(), chance.below(3))).collect();
    let trimmed = vec![false; bytes.len()];
    let export = bed.exports.find("").unwrap();
    let images = vec![path];
    let mut run = Run { export, images, peers, model: Model { bytes, trimmed }, chance, seed };
    run.run();
    let Run { peers, mut model, images, export, .. } = run;
    drop((peers, export));
    bed.stop();
    // And without the server.
    let is_raw = |number: usize| raw && number == 0;
    images.iter().enumerate().filter(|(number, _)| !is_raw(*number)).for_each(|(_, path)| assert_clean(path));
    let format = if is_raw(images.len() - 1) { Format::Raw } else { Format::Qcow2 };
    let disk = open_image(images.last().unwrap(), format, true);
    let found = limosa_storage::Buffer::zeroed(model.bytes.len());
    limosa_storage::block_on(disk.read(limosa_image::GuestOffset(0), found.clone().into())).unwrap();
    model.read(&(0..model.size()), &found.to_vec());
}

#[test]
fn random_requests_of_several_connections_do_what_a_model_of_a_disk_does() {
    let first = setting("LIMOSA_NBD_SEED", 1);
    for seed in first..first + setting("LIMOSA_NBD_SEQUENCES", 60) {
        let ran = std::panic::catch_unwind(|| sequence(seed));
        if let Err(panic) = ran {
            eprintln!("LIMOSA_NBD_SEED={seed} LIMOSA_NBD_SEQUENCES=1 repeats it");
            std::panic::resume_unwind(panic);
        }
    }
}
