//! The inputs that the fuzz targets and their seeds have in common.

pub mod blk;
pub mod colo;
pub mod image;
pub mod nbd;
pub mod postcopy;

/// Length of the file that a mapped-ram input stands for.
pub const FILE_LENGTH: u64 = 1 << 34;

/// Where byte `offset` of a fuzzed mapped-ram file stands in the fuzzer's input.
///
/// A real file has its blocks megabytes apart, with nothing in between that a decoder reads. Folding keeps the inputs
/// small: the first 1024 bytes stand for the file's beginning, and each of 64 slots of 128 bytes behind them for the
/// beginning of some 4 KiB pages of the file.
pub fn folded(offset: u64) -> Option<usize> {
    let (page, inside) = (offset / 4096, offset % 4096);
    match page {
        0 => (inside < 1024).then_some(inside as usize),
        _ => (inside < 128).then_some(1024 + ((page / 256 * 4 + page % 256) % 64 * 128 + inside) as usize),
    }
}

/// Reads the file that `data` stands for: a `limosa_stream::ReadAt`.
pub fn read_folded(data: &[u8], offset: u64, buffer: &mut [u8]) -> usize {
    let mut came = 0;
    for (at, byte) in (offset..FILE_LENGTH).zip(buffer.iter_mut()) {
        *byte = folded(at).and_then(|at| data.get(at)).copied().unwrap_or(0);
        came += 1;
    }
    came
}
