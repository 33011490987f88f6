//! The load, put on by limosa.

use std::time::Instant;

use anyhow::{Context, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use limosa_image::bench::{BenchOptions, bench};
use limosa_image::qcow2::Qcow2Options;
use limosa_image::{Disk, GuestOffset};
use limosa_storage::{Buffer, CacheMode, Create, FileCounters, Storage, block_on};

use super::image::{Base, Copies, Shape, open};
use crate::measure::{Measured, Stopwatch, millis};

/// Requests a second.
pub(super) const IOPS: &str = "iops";
/// All operations that the files were asked for.
pub(super) const OPERATIONS: &str = "operations";

/// A load and its image.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) case: String,
    pub(super) shape: Shape,
    pub(super) load: Load,
    /// Whether stock QEMU can put the same load on the same image.
    pub(super) stock: bool,
}

/// Names a size in MiB, or in KiB if it is not a whole number of MiB.
pub(super) fn size_name(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) { format!("{}M", bytes >> 20) } else { format!("{}K", bytes >> 10) }
}

/// Writes.
#[derive(Debug, Clone)]
pub(super) struct Load {
    pub(super) count: u64,
    pub(super) depth: u64,
    /// Bytes of each.
    pub(super) size: u64,
    pub(super) offset: u64,
    /// Bytes from one to the next; `None`: anywhere, one after the other.
    pub(super) step: Option<u64>,
    /// The clock ends when they are durable, not when they are done.
    pub(super) durable: bool,
    /// Threads that make the requests in turn, each with `depth` of its own in flight.
    pub(super) queues: u64,
}

/// Puts it on a fresh image.
pub(super) fn run(base: &Base, shape: &Shape, load: &Load, copies: Copies, how: Qcow2Options) -> Result<Measured> {
    let image = base.open(shape, copies, how)?;
    let disk = image.disk();
    let before = image.counters();
    let watch = Stopwatch::start(&[])?;
    match load.step {
        Some(step) => in_queues(disk, load, step)?,
        None => block_on(anywhere(disk, load))?,
    }
    if load.durable {
        block_on(disk.flush()).context("flushing")?;
    }
    let measured = watch.stop()?;
    let after = image.counters();
    let counts = image.counts();
    let closing = Instant::now();
    block_on(disk.close()).context("closing")?;
    let measured = measured
        .with("close_ms", millis(closing.elapsed()))
        .with("joined", counts.joined)
        .with("l2_writes", counts.l2_writes.operations)
        .with("refcount_reads", counts.refcount_reads.operations)
        .with("refcount_writes", counts.refcount_writes.operations);
    Ok(rated(counted(measured, &before, &after), load.count))
}

/// Requests a step apart, dealt out to the queues in turn.
fn in_queues(disk: &dyn Disk, load: &Load, step: u64) -> Result<()> {
    let size = usize::try_from(load.size)?;
    std::thread::scope(|scope| {
        let queue = |number: u64| {
            let options = BenchOptions::new(load.count / load.queues, load.depth, size)
                .offset(load.offset + number * step)
                .step(step * load.queues)
                .write_pattern(Some(0x5a));
            scope.spawn(move || block_on(bench(disk, &options, &|_| std::ops::ControlFlow::Continue(()))))
        };
        let queues: Vec<_> = (0..load.queues).map(queue).collect();
        for queue in queues {
            queue.join().map_err(|_| anyhow::anyhow!("a queue panicked"))??;
        }
        Ok(())
    })
}

/// One after the other, each anywhere: the same places every time.
async fn anywhere(disk: &dyn Disk, load: &Load) -> Result<()> {
    let buffer = Buffer::from_slice(&vec![0x5a; usize::try_from(load.size)?]);
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..load.count {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let at = state % (disk.len() / load.size) * load.size;
        disk.write(GuestOffset(at), buffer.clone().into()).await?;
    }
    Ok(())
}

/// The rate at which the device takes first writes of 64 KiB, one for each request of the load, as many at once.
pub(super) fn device(base: &Base, load: &Load) -> Result<Measured> {
    let path = base.folder.join("device");
    let _ = std::fs::remove_file(&path);
    let file = open(&path, CacheMode::None, false, Create::New)?;
    block_on(file.set_len(load.count << 16))?;
    let watch = Stopwatch::start(&[])?;
    block_on(async {
        let buffer = Buffer::from_slice(&[0x5a; 64 << 10]);
        let writes = (0..load.count).map(|number| file.write(number << 16, buffer.clone().into()));
        stream::iter(writes).buffer_unordered(usize::try_from(load.depth).unwrap_or(1)).try_collect::<()>().await
    })?;
    let measured = watch.stop()?;
    drop(file);
    std::fs::remove_file(&path)?;
    Ok(rated(measured, load.count))
}

/// With what the files were asked meanwhile.
fn counted(measured: Measured, before: &FileCounters, after: &FileCounters) -> Measured {
    let operations = [
        ("reads", after.reads.operations - before.reads.operations),
        ("writes", after.writes.operations - before.writes.operations),
        ("zeroes", after.zeroes.operations - before.zeroes.operations),
        ("allocations", after.allocations.operations - before.allocations.operations),
        ("clones", after.clones.operations - before.clones.operations),
        ("flushes", after.flushes - before.flushes),
    ];
    let all = operations.iter().map(|(_, count)| count).sum();
    let measured = measured
        .with(OPERATIONS, all)
        .with("read_bytes", after.reads.bytes - before.reads.bytes)
        .with("written_bytes", after.writes.bytes - before.writes.bytes)
        .with("cloned_bytes", after.clones.bytes - before.clones.bytes);
    operations.into_iter().fold(measured, |measured, (name, count)| measured.with(name, count))
}

/// With requests a second.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a figure for people"
)]
pub(super) fn rated(measured: Measured, requests: u64) -> Measured {
    let seconds = measured.wall.as_secs_f64().max(1e-9);
    measured.with(IOPS, (requests as f64 / seconds) as u64)
}
