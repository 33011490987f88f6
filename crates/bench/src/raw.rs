//! The system calls that have no safe form, each behind a function that does.
//!
//! Nothing else in the crate is `unsafe`, but for the loops that the bench of zero pages compares. Memory handed out
//! here belongs to the bench alone: no guest and no other process writes it, so references to it are sound.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::ptr::NonNull;
use std::time::Duration;

/// An anonymous or file mapping, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is owned by this value alone; access follows the borrow of the value.
unsafe impl Send for Mapping {}
// SAFETY: through a shared borrow it is only read.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Private memory with huge pages where the kernel has them.
    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        // SAFETY: a new private mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        let mapping = Self::checked(address, len)?;
        // SAFETY: the range is the mapping made above. A kernel without huge pages refuses; nothing depends on it.
        unsafe { libc::madvise(mapping.address.as_ptr().cast(), len, libc::MADV_HUGEPAGE) };
        Ok(mapping)
    }

    /// The first `len` bytes of `file`, shared. No other process may write or truncate the file while it is mapped.
    pub(crate) fn of_file(file: &File, len: usize) -> io::Result<Self> {
        // SAFETY: as in `anonymous`; the descriptor is valid for the duration of the call.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_fd().as_raw_fd(),
                0,
            )
        };
        Self::checked(address, len)
    }

    fn checked(address: *mut libc::c_void, len: usize) -> io::Result<Self> {
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Self { address, len })
    }

    /// Makes every page present and writable now, so that no later access faults.
    pub(crate) fn populate(&mut self) -> io::Result<()> {
        // SAFETY: the range is the mapping, which is exclusively borrowed.
        let result = unsafe { libc::madvise(self.address.as_ptr().cast(), self.len, libc::MADV_POPULATE_WRITE) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `address` is valid for `len` bytes until drop, and the mapping is exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`, with a shared borrow.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by this value and no borrow of it outlives it.
        unsafe { libc::munmap(self.address.as_ptr().cast(), self.len) };
    }
}

/// Has the child of `command` killed when the thread that starts it ends, and passes it a descriptor under its number
/// here. The descriptor has to stay open until the child has been started.
pub(crate) fn bind_child(command: &mut Command, hand: Option<BorrowedFd<'_>>) {
    let parent = std::process::id();
    let hand = hand.map(|fd| fd.as_raw_fd());
    let prepare = move || {
        // SAFETY: prctl(2) takes numbers here.
        if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // A parent that ended before that call has sent no signal.
        // SAFETY: getppid(2) takes nothing and cannot fail.
        if u32::try_from(unsafe { libc::getppid() }) != Ok(parent) {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        if let Some(fd) = hand {
            // SAFETY: fcntl(2) takes numbers here; the table of descriptors is the child's own.
            if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe calls are allowed: these are plain system calls, and nothing
    // is allocated, also not for the errors.
    unsafe { command.pre_exec(prepare) };
}

/// Has the child of `command` live in the network namespace behind a descriptor.
pub(crate) fn enter_network(command: &mut Command, namespace: OwnedFd) {
    let enter = move || {
        // SAFETY: setns(2) takes numbers; the child has one thread, whose namespace this changes.
        if unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: as in `bind_child`.
    unsafe { command.pre_exec(enter) };
}

/// Moves the calling thread, and it alone, into a new network namespace.
pub(crate) fn leave_network() -> io::Result<()> {
    // SAFETY: unshare(2) takes a number; a network namespace is nothing that other code of this thread relies on in
    // memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// CPU time, user and system, of all children that have ended and been waited for.
pub(crate) fn children_cpu() -> io::Result<Duration> {
    // SAFETY: `rusage` is plain numbers: all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a live, writable `rusage`.
    if unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let duration = |time: libc::timeval| {
        let seconds = time.tv_sec.cast_unsigned();
        let micros = time.tv_usec.cast_unsigned();
        Duration::from_secs(seconds) + Duration::from_micros(micros)
    };
    Ok(duration(usage.ru_utime) + duration(usage.ru_stime))
}

/// Waits for a child's end and returns its peak resident memory in KiB. The child can still be waited for.
///
/// A child that was forked has this process's memory until it executes its program: no less than that is found.
pub(crate) fn peak_of_child_kib(pid: u32) -> io::Result<u64> {
    // SAFETY: both are plain numbers: all zeros is a value.
    let (mut about, mut usage): (libc::siginfo_t, libc::rusage) = unsafe { std::mem::zeroed() };
    loop {
        // glibc's waitid has no usage, the kernel's has.
        // SAFETY: the pointers are to a live, writable `siginfo_t` and `rusage`; the rest are numbers.
        let result = unsafe {
            libc::syscall(
                libc::SYS_waitid,
                libc::P_PID,
                pid,
                &raw mut about,
                libc::WEXITED | libc::WNOWAIT,
                &raw mut usage,
            )
        };
        match result {
            0 => return u64::try_from(usage.ru_maxrss).map_err(io::Error::other),
            _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(io::Error::last_os_error()),
        }
    }
}

/// CPU time of a process and all its threads, also of those that have ended.
pub(crate) fn process_cpu(pid: u32) -> io::Result<Duration> {
    let pid = libc::pid_t::try_from(pid).map_err(io::Error::other)?;
    let mut clock: libc::clockid_t = 0;
    // SAFETY: the pointer is to a live, writable clock id.
    let errno = unsafe { libc::clock_getcpuclockid(pid, &raw mut clock) };
    if errno != 0 {
        return Err(io::Error::from_raw_os_error(errno));
    }
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live, writable time.
    if unsafe { libc::clock_gettime(clock, &raw mut time) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let seconds = u64::try_from(time.tv_sec).map_err(io::Error::other)?;
    Ok(Duration::new(seconds, u32::try_from(time.tv_nsec).map_err(io::Error::other)?))
}
