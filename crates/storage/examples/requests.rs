//! Cost of direct requests of a file for a thread that waits for them in `block_on`, to compare two builds of this
//! crate.
//!
//! `cargo run --release -p limosa-storage --example requests -- FILE [COUNT]`
//!
//! The file has to be there, at least 64 MiB long, and is written to. Printed are microseconds of CPU time of the
//! thread for a request, after as many again that are not counted. On a machine that is not quiet the builds take
//! turns, often, and the ratios of turns side by side are compared.
#![allow(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "counts of a measurement are small")]

use anyhow::{Context, Result, ensure};
use futures_util::StreamExt;
use futures_util::stream::{FuturesUnordered, iter};
use limosa_storage::{Buffer, CacheMode, FileOptions, FileStorage, Io, Storage, StorageError, block_on};
use rustix::time::{ClockId, clock_gettime};

/// How much of the file is used.
const LENGTH: u64 = 64 << 20;

struct Load {
    write: bool,
    depth: usize,
    size: usize,
}

fn cpu() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
}

async fn requests(storage: &FileStorage, load: &Load, buffers: &[Buffer], count: usize) -> Result<(), StorageError> {
    let mut state = 7u64;
    let mut place = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % (LENGTH / load.size as u64) * load.size as u64
    };
    let mut request = |buffer: Buffer| {
        let (at, vector) = (place(), buffer.clone().into());
        let request = if load.write { storage.write(at, vector) } else { storage.read(at, vector) };
        async move { request.await.map(|()| buffer) }
    };
    let mut under: FuturesUnordered<_> = buffers.iter().cloned().map(&mut request).collect();
    for _ in buffers.len()..count {
        if let Some(done) = under.next().await {
            under.push(request(done?));
        }
    }
    under.flat_map(|done| iter(done.err())).next().await.map_or(Ok(()), Err)
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().context("which file is to be read and written?")?;
    let count: usize = arguments.next().map_or(Ok(4000), |count| count.parse())?;
    let options = FileOptions { cache: CacheMode::None, io: Io::Uring, ..FileOptions::default() };
    let storage = FileStorage::open(&path, &options)?;
    ensure!(storage.length()? >= LENGTH, "{path} has to be 64 MiB long");
    for size in [4096, 65536] {
        for (write, depth) in [(false, 1), (false, 16), (true, 1), (true, 16)] {
            let load = Load { write, depth, size };
            let buffers: Vec<_> = (0..load.depth).map(|_| Buffer::zeroed(load.size)).collect();
            block_on(requests(&storage, &load, &buffers, count))?;
            let before = cpu();
            block_on(requests(&storage, &load, &buffers, count))?;
            let used = (cpu() - before) / count as f64;
            println!("{} {size} {depth} {used:.3}", if load.write { "write" } else { "read" });
        }
    }
    Ok(())
}
