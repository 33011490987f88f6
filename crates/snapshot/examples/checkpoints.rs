//! Measures the parts of a checkpoint: receiving its pages (the VM stands still), sealing, exchanging the names,
//! catching up.
//!
//! `cargo run --release -p limosa-snapshot --example checkpoints -- DIRECTORY [MIB] [ROUNDS] [synced]`
//!
//! The VM has 1 GiB of memory, 512 MiB of it stored. A round sends MIB (57) in runs of 64 pages or as single pages:
//! fresh pages (zero before), changed ones, equal ones, or zeros. The last lines are the same pages written to a plain
//! file.

use std::error::Error;
use std::fs::File;
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use limosa_migrate::stored::{PageSink, StreamSetup};
use limosa_page::{PageNumber, PageRange};
use limosa_snapshot::{CheckpointDirectory, CheckpointOptions, CheckpointPair, Durability, Manifest};
use limosa_stream::{Configuration, RamBlock};

type Failure = Box<dyn Error + Send + Sync>;

const PAGE: usize = 4096;
/// Pages that the base stores, and the first of those that it does not.
const STORED: u64 = 512 << 8;
const DEVICES: &[u8] = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x0112345678\x7e\0\0\0\x03\0";
const DESCRIPTION: &[u8] =
    b"\x06\0\0\0\x5a{\"devices\":[{\"name\":\"timer\",\"instance_id\":0,\"fields\":[{\"name\":\"t\",\"type\":\"b\",\"size\":8}]}]}";

/// The pages that a round sends.
#[derive(Debug, Clone, Copy)]
enum Sent {
    Fresh,
    Changed,
    Equal,
    Zero,
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().ok_or("which directory?")?;
    let mib: u64 = arguments.next().map_or(Ok(57), |mib| mib.parse())?;
    let rounds: u64 = arguments.next().map_or(Ok(5), |rounds| rounds.parse())?;
    let directory = Path::new(&directory).join("checkpoints-measurement");
    let mut options = CheckpointOptions::new();
    if arguments.next().is_some() {
        options.durability = Durability::Synced;
    }
    let mut base = CheckpointDirectory::open(&directory)?.receive_base(options)?;
    base.begin(&StreamSetup {
        configuration: Configuration::new("pc-q35-11.1"),
        section_id: 2,
        blocks: vec![RamBlock::new("pc.ram", 1 << 30)],
    })?;
    send(&mut base, PageRange::whole_block(STORED), 0, 64)?;
    let mut pair = base.finish(&[DEVICES, DESCRIPTION].concat(), Manifest::new())?;
    println!("first spare {:.3?}", catch_up(&mut pair)?);
    let pages = mib << 8;
    for (run, name) in [(64, "runs of 64"), (1, "single pages")] {
        for sent in [Sent::Fresh, Sent::Changed, Sent::Equal, Sent::Zero] {
            for round in 0..rounds {
                let range = match sent {
                    // Those of the round before are zero again.
                    Sent::Fresh => PageRange::starting_at(PageNumber(STORED), pages),
                    _ => PageRange::whole_block(pages),
                };
                let began = Instant::now();
                match sent {
                    Sent::Fresh | Sent::Changed => send(&mut pair, range, round + 1, run)?,
                    Sent::Equal => send(&mut pair, range, rounds, run)?,
                    Sent::Zero => range.chunks(run).try_for_each(|pages| pair.put_zero(0, pages))?,
                }
                let taken = began.elapsed();
                let checkpoint = pair.commit(DEVICES)?;
                let caught_up = catch_up(&mut pair)?;
                println!(
                    "{name:12} {:8} taken {taken:8.2?} seal {:8.2?} flip {:8.2?} catch-up {caught_up:8.2?} equal {}",
                    format!("{sent:?}"),
                    checkpoint.seal,
                    checkpoint.flip,
                    checkpoint.pages.equal,
                );
                undo(&mut pair, sent, range, rounds)?;
            }
        }
    }
    for run in [64, 1] {
        println!("without looking, runs of {run}: {:.2?}", plain(&directory, pages, run)?);
    }
    drop(pair);
    std::fs::remove_dir_all(&directory)?;
    Ok(())
}

/// Makes the pages of a round what they were before it.
fn undo(pair: &mut CheckpointPair, sent: Sent, pages: PageRange, rounds: u64) -> Result<(), Failure> {
    match sent {
        Sent::Fresh => pair.put_zero(0, pages)?,
        Sent::Zero => send(pair, pages, rounds, 64)?,
        Sent::Changed | Sent::Equal => return Ok(()),
    }
    pair.commit(DEVICES)?;
    catch_up(pair).map(|_| ())
}

/// Sends pages that are those of `seed`.
fn send(sink: &mut impl PageSink, pages: PageRange, seed: u64, run: u64) -> Result<(), Failure> {
    let contents = contents(seed);
    let slices: Vec<_> = contents.chunks_exact(PAGE).map(IoSlice::new).collect();
    for pages in pages.chunks(run) {
        let count = usize::try_from(pages.len())?;
        sink.put_pages(0, pages.start, &slices[..count])?;
    }
    Ok(())
}

fn contents(seed: u64) -> Vec<u8> {
    let words = (0..64 * PAGE as u64 / 8).map(|word| (word + seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    words.flat_map(u64::to_le_bytes).collect()
}

fn catch_up(pair: &mut CheckpointPair) -> Result<Duration, Failure> {
    let began = Instant::now();
    while pair.catch_up(u64::MAX)? > 0 {}
    Ok(began.elapsed())
}

/// Writes as many pages to a file that has them already.
fn plain(directory: &Path, pages: u64, run: u64) -> Result<Duration, Failure> {
    let file = File::create_new(directory.join("plain"))?;
    let bytes = contents(0);
    let part = &bytes[..usize::try_from(run)? * PAGE];
    let mut last = Duration::ZERO;
    for _ in 0..2 {
        let began = Instant::now();
        for pages in PageRange::whole_block(pages).chunks(run) {
            file.write_all_at(part, pages.bytes().start)?;
        }
        last = began.elapsed();
    }
    std::fs::remove_file(directory.join("plain"))?;
    Ok(last)
}
