//! How long it takes until a file of N MiB is durable, with and without write-back while it is being written.
//!
//! `cargo run --release -p limosa-snapshot --example write_behind -- DIRECTORY MIB [ROUNDS]`

use std::error::Error;
use std::io::IoSlice;
use std::path::Path;
use std::time::{Duration, Instant};

use limosa_migrate::stored::{PageSink, StreamSetup};
use limosa_page::PageNumber;
use limosa_snapshot::{Manifest, SnapshotWriter, UnnamedFile, WriteOptions};
use limosa_stream::{Configuration, RamBlock};

type Failure = Box<dyn Error + Send + Sync>;

const TAIL: &[u8] = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x0112345678\x7e\0\0\0\x03\0\x06\0\0\0\x5a{\"devices\":[{\"name\":\"timer\",\"instance_id\":0,\"fields\":[{\"name\":\"t\",\"type\":\"b\",\"size\":8}]}]}";

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let directory = arguments.next().ok_or("which directory?")?;
    let mib: u64 = arguments.next().ok_or("how many MiB?")?.parse()?;
    let rounds: u32 = arguments.next().map_or(Ok(3), |rounds| rounds.parse())?;
    let target = Path::new(&directory).join("write-behind-measurement");
    for round in 0..rounds {
        for write_behind in [round % 2 == 0, round % 2 != 0] {
            let (received, durable) = run(&target, mib, write_behind)?;
            println!("write_behind {write_behind:5}  pages in the file {received:.2?}  durable {durable:.2?}");
        }
    }
    Ok(())
}

fn run(target: &Path, mib: u64, write_behind: bool) -> Result<(Duration, Duration), Failure> {
    let chunk: Vec<u8> = (0..1_u32 << 18).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    let pages: Vec<_> = chunk.chunks_exact(4096).map(IoSlice::new).collect();
    let mut options = WriteOptions::new();
    options.write_behind = write_behind;
    let mut writer = SnapshotWriter::new(UnnamedFile::create(target, true)?, options)?;
    writer.begin(&StreamSetup {
        configuration: Configuration::new("pc-q35-10.0"),
        section_id: 2,
        blocks: vec![RamBlock::new("pc.ram", mib << 20)],
    })?;
    let begin = Instant::now();
    for at in 0..mib {
        writer.put_pages(0, PageNumber(at * 256), &pages)?;
    }
    let received = begin.elapsed();
    writer.finish(TAIL, Manifest::new())?;
    let durable = begin.elapsed();
    std::fs::remove_file(target)?;
    Ok((received, durable))
}
