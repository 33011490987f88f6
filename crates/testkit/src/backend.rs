//! The backing of a guest's RAM, and how the test reads it.

use std::fs::File;
use std::os::fd::AsRawFd as _;

use anyhow::{Context as _, Result, bail};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};

/// The kind of memory behind the guest's RAM. The memory backend's id, and with it the name of the RAM block in a
/// migration stream, is always `mem`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MemoryBackend {
    /// `memory-backend-ram`: private anonymous memory.
    #[default]
    Anonymous,
    /// `memory-backend-memfd,share=on`.
    Memfd,
    /// `memory-backend-file,share=on` on an unnamed file of the tmpfs at /dev/shm (a memfd where it does not exist).
    File,
    /// `memory-backend-memfd,hugetlb=on,share=on` with pages of 2 MiB; reserve them with [`HugePages`].
    HugeMemfd,
}

impl MemoryBackend {
    /// The `-object` argument, and the file that the test keeps open if it made one.
    pub(crate) fn prepare(self, bytes: u64) -> Result<(String, Option<File>)> {
        Ok(match self {
            Self::Anonymous => (format!("memory-backend-ram,id=mem,size={bytes}"), None),
            Self::Memfd => (format!("memory-backend-memfd,id=mem,size={bytes},share=on"), None),
            Self::HugeMemfd => {
                (format!("memory-backend-memfd,id=mem,size={bytes},share=on,hugetlb=on,hugetlbsize=2M"), None)
            }
            Self::File => {
                let file = unnamed_file()?;
                file.set_len(bytes).with_context(|| format!("a memory file of {bytes} bytes"))?;
                // The file never has a name, so a killed test leaves no gigabytes behind; QEMU opens it through us.
                let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
                (format!("memory-backend-file,id=mem,size={bytes},share=on,mem-path={path}"), Some(file))
            }
        })
    }

    /// Opens the memory of a running QEMU, where that is possible from outside.
    pub(crate) fn open_of(self, pid: u32) -> Result<File> {
        if !matches!(self, Self::Memfd | Self::HugeMemfd) {
            bail!("the memory backend {self:?} cannot be opened from outside");
        }
        let folder = format!("/proc/{pid}/fd");
        for entry in std::fs::read_dir(&folder).with_context(|| folder.clone())? {
            let path = entry?.path();
            let target = std::fs::read_link(&path).unwrap_or_default();
            if target.to_string_lossy().starts_with("/memfd:memory-backend-memfd") {
                return File::options().read(true).write(true).open(&path).with_context(|| path.display().to_string());
            }
        }
        bail!("{folder}: no memfd of a memory backend");
    }
}

fn unnamed_file() -> Result<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let fd = match open("/dev/shm", flags, Mode::RUSR | Mode::WUSR) {
        Ok(fd) => fd,
        Err(_) => memfd_create("limosa-testkit", MemfdFlags::CLOEXEC).context("a memory file")?,
    };
    Ok(File::from(fd))
}

/// Huge pages reserved for one test; given back when dropped.
#[derive(Debug)]
pub struct HugePages {
    pages: u64,
    /// The kernel's count, locked while it is changed so that tests in several processes do not undo each other's
    /// change.
    lock: File,
}

const HUGE_PAGE_COUNT: &str = "/proc/sys/vm/nr_hugepages";

impl HugePages {
    /// Reserves `bytes` of 2 MiB pages on top of what others have reserved.
    ///
    /// # Errors
    /// We are not root, or memory is too fragmented or too small: the message says so.
    pub fn reserve(bytes: u64) -> Result<Self> {
        let pages = bytes.div_ceil(2 << 20);
        let mut reserved = Self { pages: 0, lock: File::open(HUGE_PAGE_COUNT).context(HUGE_PAGE_COUNT)? };
        for _ in 0..5 {
            let missing = pages - reserved.pages;
            let (before, after) =
                reserved.change_count(|count| count + missing).context("huge pages (root is needed)")?;
            // Only what there is now and was not before is ours to give back.
            reserved.pages += after.saturating_sub(before).min(missing);
            if reserved.pages == pages {
                break;
            }
            // Memory may be free and in pieces; where the kernel cannot mend that, the count below says so.
            let _ = std::fs::write("/proc/sys/vm/compact_memory", "1");
        }
        let free = free_huge_pages()?;
        if free < pages {
            bail!("{pages} huge pages wanted, the kernel has {free} free: memory is too small or too fragmented");
        }
        Ok(reserved)
    }

    /// The requested and the actual count: the kernel may reach less than requested.
    fn change_count(&self, new: impl Fn(u64) -> u64) -> Result<(u64, u64)> {
        self.lock.lock().context(HUGE_PAGE_COUNT)?;
        let changed = (|| {
            let count = || -> std::io::Result<u64> {
                Ok(std::fs::read_to_string(HUGE_PAGE_COUNT)?.trim().parse().unwrap_or(0))
            };
            let before = count()?;
            std::fs::write(HUGE_PAGE_COUNT, new(before).to_string())?;
            Ok::<_, std::io::Error>((before, count()?))
        })();
        self.lock.unlock().context(HUGE_PAGE_COUNT)?;
        changed.context(HUGE_PAGE_COUNT)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // A failure cannot be reported any more; the pages stay reserved until the next boot.
        let _ = self.change_count(|count| count.saturating_sub(self.pages));
    }
}

fn free_huge_pages() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo")?;
    let value = text.lines().find_map(|line| line.strip_prefix("HugePages_Free:"));
    value.and_then(|text| text.trim().parse().ok()).context("/proc/meminfo has no HugePages_Free")
}
