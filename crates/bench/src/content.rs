//! Contents of memory: bytes that no page detection takes for zeros and that do not compress.

use std::fs::File;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::raw::Mapping;

/// Fills memory with random words.
pub(crate) fn fill_random(memory: &mut [u8]) {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for word in memory.as_chunks_mut::<8>().0 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        *word = state.to_le_bytes();
    }
}

/// Makes a file in memory of `bytes` random bytes. It has no name, so nothing is left of it after this process.
pub(crate) fn random_memory(bytes: u64) -> Result<File> {
    let fd: OwnedFd = memfd_create("limosa-bench", MemfdFlags::CLOEXEC).context("memfd_create")?;
    let file = File::from(fd);
    file.set_len(bytes).with_context(|| format!("a memfd of {bytes} bytes"))?;
    let len = usize::try_from(bytes).context("--size")?;
    let mut memory = Mapping::of_file(&file, len).with_context(|| format!("mapping {bytes} bytes"))?;
    memory.populate().with_context(|| format!("not enough memory for {bytes} bytes"))?;
    fill_random(memory.bytes_mut());
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn no_page_of_random_memory_is_zero() {
        let file = random_memory(1 << 20).expect("fills");
        let mut page = [0; 4096];
        for at in 0..256 {
            file.read_exact_at(&mut page, at * 4096).expect("reads");
            assert_ne!(page, [0; 4096]);
        }
    }
}
