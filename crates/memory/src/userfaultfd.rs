//! userfaultfd(2) as a pager needs it: one method a call, addresses of the process whose memory it is.
//!
//! **Law: no reference to the memory is made**: ranges are numbers to the kernel, which checks each against what was
//! registered. A call fills memory that was missing, or maps memory that is there already; none of them changes bytes
//! that were there. Protecting memory stops writes to it, and changes nothing either.
//!
//! Facts: the man pages userfaultfd(2), `UFFDIO_API`(2const) and those beside it; the kernel's
//! admin-guide/mm/userfaultfd.rst.
#![allow(unsafe_code, reason = "the ioctls of userfaultfd")]

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;
use rustix::ioctl::{Ioctl, IoctlOutput, Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;

/// What a userfaultfd may be able to do (`UFFD_FEATURE_*`): a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Features(u64);

impl Features {
    /// Nothing beyond missing faults of anonymous memory.
    pub(crate) const NONE: Self = Self(0);
    /// `EVENT_FORK`: a fork gives a descriptor for the child's memory.
    pub(crate) const EVENT_FORK: Self = Self(1 << 1);
    /// `EVENT_REMAP`: mremap(2) is reported.
    pub(crate) const EVENT_REMAP: Self = Self(1 << 2);
    /// `EVENT_REMOVE`: `MADV_DONTNEED` and `MADV_REMOVE` are reported.
    pub(crate) const EVENT_REMOVE: Self = Self(1 << 3);
    /// `MISSING_HUGETLBFS`.
    pub(crate) const MISSING_HUGETLBFS: Self = Self(1 << 4);
    /// `MISSING_SHMEM`.
    pub(crate) const MISSING_SHMEM: Self = Self(1 << 5);
    /// `EVENT_UNMAP`: munmap(2) is reported.
    pub(crate) const EVENT_UNMAP: Self = Self(1 << 6);
    /// `THREAD_ID`: a fault says which thread it stopped.
    pub(crate) const THREAD_ID: Self = Self(1 << 8);
    /// `MINOR_HUGETLBFS`.
    pub(crate) const MINOR_HUGETLBFS: Self = Self(1 << 9);
    /// `MINOR_SHMEM`.
    pub(crate) const MINOR_SHMEM: Self = Self(1 << 10);
    /// `PAGEFAULT_FLAG_WP`: writes to protected pages are reported (5.7).
    pub(crate) const PROTECT: Self = Self(1 << 0);
    /// `WP_HUGETLBFS_SHMEM`: memory of memfds and huge pages can be protected (5.19).
    pub(crate) const PROTECT_SHARED: Self = Self(1 << 12);
    /// `WP_UNPOPULATED`: private memory that is not populated can be protected (6.4).
    pub(crate) const PROTECT_UNPOPULATED: Self = Self(1 << 13);
    /// `WP_ASYNC`: the kernel itself lets the writer through, and remembers that (6.7).
    pub(crate) const PROTECT_ASYNC: Self = Self(1 << 15);

    /// Both sets.
    #[must_use]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `others` are in it.
    #[must_use]
    pub(crate) const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Those that are in both.
    #[must_use]
    pub(crate) const fn intersect(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }
}

/// What to report about registered memory (`UFFDIO_REGISTER_MODE_*`): a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegisterMode(u64);

impl RegisterMode {
    /// Accesses to pages that are not there.
    pub(crate) const MISSING: Self = Self(1);
    /// Accesses to pages that are there, and not mapped here.
    pub(crate) const MINOR: Self = Self(4);
    /// Writes to protected pages.
    pub(crate) const PROTECT: Self = Self(2);

    /// Both sets.
    #[must_use]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Whose faults are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultAccess {
    /// Those of threads and those that the kernel meets for them: KVM, read(2) into guest memory, vhost.
    #[default]
    Everything,
    /// Those of threads alone, which any user may have. Where the kernel meets a fault its call fails (`EFAULT`): not
    /// for a guest under KVM.
    UserOnly,
}

/// What a userfaultfd reports. Addresses are of the process whose memory it is.
#[derive(Debug)]
pub(crate) enum Message {
    /// A thread waits for a page.
    Fault {
        /// The first byte of the page.
        address: u64,
        /// A write (`UFFD_PAGEFAULT_FLAG_WRITE`).
        write: bool,
        /// The page is there and not mapped.
        minor: bool,
        /// The thread, if asked for.
        thread: u32,
    },
    /// The process forked; this is the userfaultfd of the child's memory.
    Fork(OwnedFd),
    /// Memory was moved.
    Remap {
        /// From here.
        from: u64,
        /// To here.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// Pages were or will in a moment be given back (`MADV_DONTNEED`, `MADV_REMOVE`).
    Remove(Range<u64>),
    /// Memory was unmapped.
    Unmap(Range<u64>),
    /// Something that a later kernel reports.
    Unknown(u8),
}

/// How far a call came: bytes done from the start on, and why it stopped there, if it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes.
    pub done: u64,
    /// `AGAIN`: something else changes the memory; `EXIST`: the page behind is there already.
    pub stopped: Option<Errno>,
}

#[repr(C)]
struct ApiArgument {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RangeArgument {
    start: u64,
    length: u64,
}

#[repr(C)]
struct RegisterArgument {
    range: RangeArgument,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct CopyArgument {
    to: u64,
    from: u64,
    length: u64,
    mode: u64,
    done: i64,
}

/// Of ZEROPAGE and CONTINUE alike.
#[repr(C)]
struct FillArgument {
    range: RangeArgument,
    mode: u64,
    done: i64,
}

#[repr(C)]
struct ProtectArgument {
    range: RangeArgument,
    mode: u64,
}

const GROUP: u8 = 0xaa;
const API: Opcode = opcode::read_write::<ApiArgument>(GROUP, 0x3f);
const REGISTER: Opcode = opcode::read_write::<RegisterArgument>(GROUP, 0x00);
const UNREGISTER: Opcode = opcode::read::<RangeArgument>(GROUP, 0x01);
const WAKE: Opcode = opcode::read::<RangeArgument>(GROUP, 0x02);
const COPY: Opcode = opcode::read_write::<CopyArgument>(GROUP, 0x03);
const ZEROPAGE: Opcode = opcode::read_write::<FillArgument>(GROUP, 0x04);
const WRITEPROTECT: Opcode = opcode::read_write::<ProtectArgument>(GROUP, 0x06);
const CONTINUE: Opcode = opcode::read_write::<FillArgument>(GROUP, 0x07);

/// Bytes of a message (`struct uffd_msg`).
const MESSAGE: usize = 32;
/// Messages that one read takes.
const MESSAGES: usize = 32;

/// `USERFAULTFD_IOC_NEW` of /dev/userfaultfd: gives a new descriptor.
struct NewDescriptor(usize);

// SAFETY: the ioctl takes its flags as the argument itself and returns a new descriptor.
unsafe impl Ioctl for NewDescriptor {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        opcode::none(GROUP, 0)
    }

    fn as_ptr(&mut self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0)
    }

    unsafe fn output_from_ptr(out: IoctlOutput, _: *mut c_void) -> rustix::io::Result<OwnedFd> {
        // SAFETY: the ioctl succeeded, so this is a descriptor without another owner.
        Ok(unsafe { OwnedFd::from_raw_fd(out) })
    }
}

/// A userfaultfd, never blocking in read.
#[derive(Debug)]
pub(crate) struct Userfaultfd(OwnedFd);

impl Userfaultfd {
    /// The abilities of this kernel.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn available(access: FaultAccess) -> io::Result<Features> {
        Ok(create(access)?.api(Features::NONE)?)
    }

    /// A new one with these features.
    ///
    /// # Errors
    /// `PermissionDenied`: what is missing is in [`NOT_ALLOWED`]; `EINVAL`: the kernel does not have all the features.
    pub(crate) fn open(access: FaultAccess, features: Features) -> io::Result<Self> {
        let new = create(access)?;
        new.api(features)?;
        Ok(new)
    }

    /// One that was passed, ready to use.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    fn api(&self, features: Features) -> rustix::io::Result<Features> {
        let mut argument = ApiArgument { api: 0xaa, features: features.0, ioctls: 0 };
        self.call::<API, _>(&mut argument)?;
        Ok(Features(argument.features))
    }

    /// Begins to report events of memory.
    ///
    /// # Errors
    /// `EINVAL`: not possible for this kind of memory; `EBUSY`: another userfaultfd has it.
    pub(crate) fn register(&self, memory: Range<u64>, mode: RegisterMode) -> rustix::io::Result<()> {
        self.call::<REGISTER, _>(&mut RegisterArgument { range: memory.into(), mode: mode.0, ioctls: 0 })
    }

    /// Stops reporting events of memory, and lets all threads go on that wait there: *what is not there reads as zero
    /// from now on*.
    ///
    /// # Errors
    /// `EINVAL`: it is not (all) mapped.
    pub(crate) fn unregister(&self, memory: Range<u64>) -> rustix::io::Result<()> {
        self.call::<UNREGISTER, _>(&mut RangeArgument::from(memory))
    }

    /// Lets all threads that wait there try again; one that still misses a page waits again, and is reported again.
    ///
    /// # Errors
    /// `EINVAL`: no range of whole pages.
    pub(crate) fn wake(&self, memory: Range<u64>) -> rustix::io::Result<()> {
        self.call::<WAKE, _>(&mut RangeArgument::from(memory))
    }

    /// Fills missing pages at `to` with a copy of `length` bytes at `from` and wakes who waits for them.
    ///
    /// # Safety
    /// The `length` bytes at `from`, in this process, are readable, or the call is to fail.
    ///
    /// # Errors
    /// All but [`Progress::stopped`].
    pub(crate) unsafe fn copy(&self, to: u64, from: *const u8, length: u64) -> rustix::io::Result<Progress> {
        let mut argument = CopyArgument { to, from: from.expose_provenance() as u64, length, mode: 0, done: 0 };
        let result = self.call::<COPY, _>(&mut argument);
        progress(result, argument.done, length)
    }

    /// Fills missing pages with zeros and wakes who waits for them; not possible for huge pages of the pool.
    ///
    /// # Errors
    /// All but [`Progress::stopped`].
    pub(crate) fn zero(&self, memory: Range<u64>) -> rustix::io::Result<Progress> {
        let length = memory.end.saturating_sub(memory.start);
        let mut argument = FillArgument { range: memory.into(), mode: 0, done: 0 };
        let result = self.call::<ZEROPAGE, _>(&mut argument);
        progress(result, argument.done, length)
    }

    /// Maps pages that are there and wakes who waits for them.
    ///
    /// # Errors
    /// All but [`Progress::stopped`]. `EFAULT`: there is no page.
    pub(crate) fn map_present(&self, memory: Range<u64>) -> rustix::io::Result<Progress> {
        let length = memory.end.saturating_sub(memory.start);
        let mut argument = FillArgument { range: memory.into(), mode: 0, done: 0 };
        let result = self.call::<CONTINUE, _>(&mut argument);
        progress(result, argument.done, length)
    }

    /// Protects memory (whole pages, huge ones too) from being written, or lets it be written and wakes who waits for
    /// that. When it returns, no processor goes by an older entry for it.
    ///
    /// # Errors
    /// `ENOENT`: it is not (all) registered for that.
    pub(crate) fn protect(&self, memory: Range<u64>, protect: bool) -> rustix::io::Result<()> {
        let mut argument = ProtectArgument { range: memory.into(), mode: u64::from(protect) };
        loop {
            match self.call::<WRITEPROTECT, _>(&mut argument) {
                // Another thread changes the address space.
                Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
                done => return done,
            }
        }
    }

    /// Reads the pending events: up to 32 messages; none if there is nothing at the moment.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub(crate) fn read(&self, into: &mut Vec<Message>) -> rustix::io::Result<()> {
        let mut bytes = [MaybeUninit::<u8>::uninit(); MESSAGE * MESSAGES];
        let read = match rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut bytes).map(|(read, _)| read.len()))
        {
            Ok(read) => read,
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error),
        };
        for message in bytes[..read].as_chunks::<MESSAGE>().0 {
            // SAFETY: the kernel has written the first `read` bytes.
            into.push(unsafe { decode(&message.map(|byte| byte.assume_init())) });
        }
        Ok(())
    }

    fn call<const OPCODE: Opcode, T>(&self, argument: &mut T) -> rustix::io::Result<()> {
        // SAFETY: the callers above pair each opcode with its argument type, and name no memory that the kernel may not
        // fill or map; `copy` has its caller's promise for what is read.
        unsafe { ioctl(&self.0, Updater::<OPCODE, T>::new(argument)) }
    }
}

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<Range<u64>> for RangeArgument {
    fn from(range: Range<u64>) -> Self {
        Self { start: range.start, length: range.end.saturating_sub(range.start) }
    }
}

/// What gives a process userfaultfd (userfaultfd(2)).
pub(crate) const NOT_ALLOWED: &str = "it requires read and write access to /dev/userfaultfd, the sysctl \
                               vm.unprivileged_userfaultfd = 1, or the capability CAP_SYS_PTRACE";

fn create(access: FaultAccess) -> io::Result<Userfaultfd> {
    let mut flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    if access == FaultAccess::UserOnly {
        // UFFD_USER_MODE_ONLY
        flags |= UserfaultfdFlags::from_bits_retain(1);
    }
    // SAFETY: the descriptor can do nothing before memory is registered with it.
    let error = match unsafe { rustix::mm::userfaultfd(flags) } {
        Ok(fd) => return Ok(Userfaultfd(fd)),
        Err(error) => error,
    };
    // A kernel before 5.11 does not know the flag, and then there is nothing a device could change.
    if !matches!(error, Errno::PERM | Errno::ACCESS | Errno::NOSYS) {
        return Err(error.into());
    }
    let device = match open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(device) => device,
        Err(_) => return Err(error.into()),
    };
    // SAFETY: as above.
    Ok(Userfaultfd(unsafe { ioctl(&device, NewDescriptor(flags.bits() as usize)) }?))
}

/// What came of a call that may stop on its way: the kernel says with EAGAIN that it did part of it (the count is above
/// 0 then), or nothing (the count is an error or was not written).
fn progress(result: rustix::io::Result<()>, done: i64, length: u64) -> rustix::io::Result<Progress> {
    match result {
        Ok(()) => Ok(Progress { done: length, stopped: None }),
        Err(stopped @ (Errno::AGAIN | Errno::EXIST)) => {
            Ok(Progress { done: done.max(0).cast_unsigned().min(length), stopped: Some(stopped) })
        }
        Err(error) => Err(error),
    }
}

/// # Safety
/// The message is one of the kernel's: a descriptor in it is new and has no other owner.
unsafe fn decode(message: &[u8; MESSAGE]) -> Message {
    let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| message[at + byte]));
    let half = |at: usize| u32::from_ne_bytes(std::array::from_fn(|byte| message[at + byte]));
    match message[0] {
        0x12 => {
            let flags = word(8);
            Message::Fault { address: word(16), write: flags & 1 != 0, minor: flags & 4 != 0, thread: half(24) }
        }
        // SAFETY: the kernel has opened this descriptor for us.
        0x13 => Message::Fork(unsafe { OwnedFd::from_raw_fd(half(8).cast_signed()) }),
        0x14 => Message::Remap { from: word(8), to: word(16), length: word(24) },
        0x15 => Message::Remove(word(8)..word(16)),
        0x16 => Message::Unmap(word(8)..word(16)),
        other => Message::Unknown(other),
    }
}
