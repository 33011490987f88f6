//! Faults in memory that another process fills: that of a VM, mapped by the process of a vhost-user device, while it
//! comes by postcopy.
//!
//! The VMM reads the faults from a descriptor that this process opens and passes to it. It brings the page into the
//! file that both have mapped, and wakes who waits here.
//!
//! **Law: memory is registered before it is touched.** A missing page that is touched earlier becomes a page of zeros
//! for the VM as well, and its contents are never brought.
#![allow(unsafe_code, reason = "advises the kernel about mappings")]

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mm::{Advice, madvise};

use crate::userfaultfd::{FaultOrigin, Features, RegisterMode, Userfaultfd, open_device};

/// Opens descriptors for [`ForwardedFaults`], also where files cannot be opened any more.
#[derive(Debug)]
pub struct ForwardedFaultsSource {
    /// `/dev/userfaultfd`, where the system call is not permitted.
    device: Option<OwnedFd>,
}

impl ForwardedFaultsSource {
    /// Finds out how this process may open them.
    ///
    /// # Errors
    /// `PermissionDenied`: it may not: that requires access to `/dev/userfaultfd`, the sysctl
    /// `vm.unprivileged_userfaultfd = 1`, or `CAP_SYS_PTRACE`; the kernel has none for shared memory (4.11).
    pub fn find() -> io::Result<Self> {
        let source = match Userfaultfd::open_by_call(FaultOrigin::Everything) {
            Ok(_) => Self { device: None },
            Err(error) => Self { device: Some(open_device().map_err(|_| error)?) },
        };
        source.open()?;
        Ok(source)
    }

    /// Opens a descriptor, for memory of memfds, tmpfs and hugetlbfs.
    ///
    /// # Errors
    /// As [`find`](Self::find); no descriptor is left.
    pub fn open(&self) -> io::Result<ForwardedFaults> {
        let descriptor = match &self.device {
            None => Userfaultfd::open_by_call(FaultOrigin::Everything)?,
            Some(device) => Userfaultfd::open_by_device(device, FaultOrigin::Everything)?,
        };
        descriptor.enable(Features::MISSING_SHMEM.and(Features::MISSING_HUGETLBFS))?;
        Ok(ForwardedFaults { descriptor, registered: Vec::new() })
    }
}

/// A descriptor from which another process reads the faults of this one. Dropped, no memory is registered any more, and
/// nobody waits.
#[derive(Debug)]
pub struct ForwardedFaults {
    descriptor: Userfaultfd,
    registered: Vec<Range<u64>>,
}

impl ForwardedFaults {
    /// Registers a mapping of shared memory: threads and the kernel wait from now on where a page is missing.
    ///
    /// # Errors
    /// The kernel's: it is no shared memory, or registered already.
    pub fn register(&mut self, start: *mut u8, length: usize) -> io::Result<()> {
        // A huge page would be filled as a whole by what is brought for a part of it.
        // SAFETY: advice about the size of pages does not change contents, whoever has memory there.
        match unsafe { madvise(start.cast(), length, Advice::LinuxNoHugepage) } {
            // The kernel has no transparent huge pages, or it is of hugetlbfs.
            Ok(()) | Err(rustix::io::Errno::INVAL) => {}
            Err(error) => return Err(error.into()),
        }
        let first = start.expose_provenance() as u64;
        let range = first..first.saturating_add(length as u64);
        self.descriptor.register(range.clone(), RegisterMode::MISSING)?;
        self.registered.push(range);
        Ok(())
    }
}

impl AsFd for ForwardedFaults {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for ForwardedFaults {
    fn drop(&mut self) {
        for range in self.registered.drain(..) {
            // A mapping that is gone is not registered any more; one that took its place was not.
            let _ = self.descriptor.unregister(range);
        }
    }
}
