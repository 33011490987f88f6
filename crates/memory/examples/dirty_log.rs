//! A RAM block: mapped, written, searched for pages that were never populated, and watched by a dirty log.
//!
//!     cargo run -p limosa-memory --example dirty_log

use std::sync::Arc;

use limosa_memory::dirty::{DirtyLogs, DirtyPages, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memory = Arc::new(GuestMemory::new(vec![BlockOptions::memfd("pc.ram", 16 << 20).map()?])?);
    let ram = memory.block(0)?;

    // Pages that were never written have no memory yet. They are found without being read.
    ram.write(3 * PAGE_SIZE, b"kernel")?;
    ram.write(100 * PAGE_SIZE, b"page tables")?;
    let populated = ram.populated(ram.pages())?;
    println!("{}: {} of {} pages are populated", ram.name(), populated.count(), ram.pages().len());
    assert!(populated.get(PageNumber(3)) && populated.get(PageNumber(100)));

    // From here on, each write is marked in the log by the device that makes it.
    let log = SoftwareDirtyLog::new(&memory, Writers::VCPUS);
    let marker = log.bitmap();
    let mut logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)])?;
    logs.start()?;
    ram.write(5 * PAGE_SIZE, b"contents")?;
    marker.mark(0, PageRange::starting_at(PageNumber(5), 1));

    let mut dirty = DirtyPages::new(&memory);
    logs.fetch(&mut dirty)?;
    println!("{} page was written since the log was started", dirty.count());
    assert!(dirty.block(0).is_some_and(|pages| pages.get(PageNumber(5))));

    // A fetch takes the marks out of the log: nothing was written since.
    let mut dirty = DirtyPages::new(&memory);
    logs.fetch(&mut dirty)?;
    assert_eq!(dirty.count(), 0);
    logs.stop()?;
    Ok(())
}
