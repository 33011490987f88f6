//! Files in the page cache, and on disk alone.

use std::fs::File;
use std::path::Path;

use anyhow::{Context, Result};
use limosa_page::to_usize;
use rustix::fs::{Advice, SeekFrom, fadvise, fdatasync, seek, sendfile};

/// Has the kernel drop a file from the page cache. Parts that a process maps, or that are not written yet, stay.
pub(crate) fn chill(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    fdatasync(&file).context("fdatasync")?;
    fadvise(&file, 0, None, Advice::DontNeed).context("POSIX_FADV_DONTNEED")
}

/// Brings a file into the page cache, even if the kernel has dropped parts of it meanwhile. Holes are left alone: to
/// read them would fill the cache with nothing.
pub(crate) fn warm(path: &Path) -> Result<()> {
    let file = File::open(path).with_context(|| path.display().to_string())?;
    let nowhere = File::options().write(true).open("/dev/null").context("/dev/null")?;
    let mut at = 0;
    loop {
        let end = match seek(&file, SeekFrom::Data(at)) {
            Ok(start) => {
                at = start;
                seek(&file, SeekFrom::Hole(start)).context("SEEK_HOLE")?
            }
            Err(rustix::io::Errno::NXIO) => return Ok(()),
            Err(error) => return Err(error).context("SEEK_DATA"),
        };
        while at < end {
            // Without a copy, because the bytes are not used.
            let most = to_usize(end - at).min(1 << 30);
            let sent = sendfile(&nowhere, &file, Some(&mut at), most);
            if sent.with_context(|| format!("reading {}", path.display()))? == 0 {
                return Ok(());
            }
        }
    }
}
