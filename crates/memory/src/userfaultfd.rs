//! userfaultfd(2) for a pager: one method for each system call, with addresses of the VM's process.
//!
//! **Law: no reference to the memory is made**: ranges are numbers for the kernel, which checks each against the
//! registered memory. A call fills missing memory, or maps memory that is present; none changes present bytes.
//! Protecting memory stops writes, and changes no bytes either.
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

/// A set of features of userfaultfd (`UFFD_FEATURE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Features(u64);

impl Features {
    /// No feature beyond missing faults of anonymous memory.
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
    /// `WP_ASYNC`: the kernel itself lifts the protection, and records that (6.7).
    pub(crate) const PROTECT_ASYNC: Self = Self(1 << 15);

    /// Returns both sets.
    #[must_use]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the set contains all of `others`.
    #[must_use]
    pub(crate) const fn contains(self, others: Self) -> bool {
        self.0 & others.0 == others.0
    }

    /// Returns the features in both.
    #[must_use]
    pub(crate) const fn intersect(self, others: Self) -> Self {
        Self(self.0 & others.0)
    }
}

/// A set of faults to report (`UFFDIO_REGISTER_MODE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegisterMode(u64);

impl RegisterMode {
    /// Accesses to missing pages.
    pub(crate) const MISSING: Self = Self(1);
    /// Accesses to present pages that are not mapped.
    pub(crate) const MINOR: Self = Self(4);
    /// Writes to protected pages.
    pub(crate) const PROTECT: Self = Self(2);

    /// Returns both sets.
    #[must_use]
    pub(crate) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The origin of reported faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FaultOrigin {
    /// Faults of threads and of the kernel: KVM, read(2) into guest memory, vhost.
    #[default]
    Everything,
    /// Faults of threads only, which needs no privilege. A fault of the kernel fails its system call (`EFAULT`):
    /// unsuitable for KVM.
    UserOnly,
}

/// A message of a userfaultfd. Addresses are of the VM's process.
#[derive(Debug)]
pub(crate) enum Message {
    /// A thread waits for a page.
    Fault {
        /// The first byte of the page.
        address: u64,
        /// A write (`UFFD_PAGEFAULT_FLAG_WRITE`).
        write: bool,
        /// The page is present and not mapped.
        minor: bool,
        /// The thread, if requested.
        thread: u32,
    },
    /// The process forked; this is the userfaultfd of the child's memory.
    Fork(OwnedFd),
    /// Memory was moved.
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Bytes.
        length: u64,
    },
    /// Pages are being discarded (`MADV_DONTNEED`, `MADV_REMOVE`).
    Remove(Range<u64>),
    /// Memory was unmapped.
    Unmap(Range<u64>),
    /// An event of a later kernel.
    Unknown(u8),
}

/// Progress of a call: the bytes done from the start on, and why it stopped, if it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Bytes.
    pub done: u64,
    /// `AGAIN`: another thread changes the memory; `EXIST`: the next page is present already.
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

/// The argument of ZEROPAGE and CONTINUE.
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
    /// Returns the features of this kernel.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn available(access: FaultOrigin) -> io::Result<Features> {
        Ok(create(access)?.api(Features::NONE)?)
    }

    /// Opens a userfaultfd with these features.
    ///
    /// # Errors
    /// `PermissionDenied`: see [`NOT_ALLOWED`]; `EINVAL`: the kernel does not have all the features.
    pub(crate) fn open(access: FaultOrigin, features: Features) -> io::Result<Self> {
        let new = create(access)?;
        new.api(features)?;
        Ok(new)
    }

    /// Opens one by the system call, without features yet.
    ///
    /// # Errors
    /// `EPERM`: only the device may permit it.
    pub(crate) fn open_by_call(access: FaultOrigin) -> rustix::io::Result<Self> {
        // SAFETY: the descriptor can do nothing before memory is registered with it.
        Ok(Self(unsafe { rustix::mm::userfaultfd(flags(access)) }?))
    }

    /// Opens one by [the device](open_device), without features yet.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn open_by_device(device: &OwnedFd, access: FaultOrigin) -> rustix::io::Result<Self> {
        // SAFETY: the descriptor can do nothing before memory is registered with it.
        Ok(Self(unsafe { ioctl(device, NewDescriptor(flags(access).bits() as usize)) }?))
    }

    /// Enables features, which comes before everything else.
    ///
    /// # Errors
    /// `EINVAL`: the kernel does not have all of them.
    pub(crate) fn enable(&self, features: Features) -> rustix::io::Result<()> {
        self.api(features).map(drop)
    }

    /// Wraps a passed descriptor.
    pub(crate) fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    fn api(&self, features: Features) -> rustix::io::Result<Features> {
        let mut argument = ApiArgument { api: 0xaa, features: features.0, ioctls: 0 };
        self.call::<API, _>(&mut argument)?;
        Ok(Features(argument.features))
    }

    /// Registers memory: its events are reported.
    ///
    /// # Errors
    /// `EINVAL`: not possible for this kind of memory; `EBUSY`: another userfaultfd has it.
    pub(crate) fn register(&self, memory: Range<u64>, mode: RegisterMode) -> rustix::io::Result<()> {
        self.call::<REGISTER, _>(&mut RegisterArgument { range: memory.into(), mode: mode.0, ioctls: 0 })
    }

    /// Unregisters memory, and wakes all threads that wait there: *missing pages read as zero from now on*.
    ///
    /// # Errors
    /// `EINVAL`: it is not (all) mapped.
    pub(crate) fn unregister(&self, memory: Range<u64>) -> rustix::io::Result<()> {
        self.call::<UNREGISTER, _>(&mut RangeArgument::from(memory))
    }

    /// Wakes all threads that wait there; one whose page is still missing waits again, and is reported again.
    ///
    /// # Errors
    /// `EINVAL`: no range of whole pages.
    pub(crate) fn wake(&self, memory: Range<u64>) -> rustix::io::Result<()> {
        self.call::<WAKE, _>(&mut RangeArgument::from(memory))
    }

    /// Fills missing pages at `to` with a copy of `length` bytes at `from`, and wakes threads that wait for them.
    ///
    /// # Safety
    /// The `length` bytes at `from`, in this process, are readable, or the call is to fail.
    ///
    /// # Errors
    /// Every error but those in [`Progress::stopped`].
    pub(crate) unsafe fn copy(&self, to: u64, from: *const u8, length: u64) -> rustix::io::Result<Progress> {
        let mut argument = CopyArgument { to, from: from.expose_provenance() as u64, length, mode: 0, done: 0 };
        let result = self.call::<COPY, _>(&mut argument);
        progress(result, argument.done, length)
    }

    /// Fills missing pages with zeros, and wakes threads that wait for them. Unsupported for huge pages of the pool.
    ///
    /// # Errors
    /// Every error but those in [`Progress::stopped`].
    pub(crate) fn zero(&self, memory: Range<u64>) -> rustix::io::Result<Progress> {
        let length = memory.end.saturating_sub(memory.start);
        let mut argument = FillArgument { range: memory.into(), mode: 0, done: 0 };
        let result = self.call::<ZEROPAGE, _>(&mut argument);
        progress(result, argument.done, length)
    }

    /// Maps present pages, and wakes threads that wait for them.
    ///
    /// # Errors
    /// Every error but those in [`Progress::stopped`]. `EFAULT`: there is no page.
    pub(crate) fn map_present(&self, memory: Range<u64>) -> rustix::io::Result<Progress> {
        let length = memory.end.saturating_sub(memory.start);
        let mut argument = FillArgument { range: memory.into(), mode: 0, done: 0 };
        let result = self.call::<CONTINUE, _>(&mut argument);
        progress(result, argument.done, length)
    }

    /// Write-protects memory (whole pages, huge ones too), or lifts the protection and wakes waiting threads. When it
    /// returns, no processor uses an older page table entry.
    ///
    /// # Errors
    /// `ENOENT`: it is not (all) registered for that.
    pub(crate) fn protect(&self, memory: Range<u64>, protect: bool) -> rustix::io::Result<()> {
        let mut argument = ProtectArgument { range: memory.into(), mode: u64::from(protect) };
        loop {
            match self.call::<WRITEPROTECT, _>(&mut argument) {
                // Another thread is changing the address space.
                Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
                done => return done,
            }
        }
    }

    /// Reads the pending events: up to 32 messages, possibly none.
    ///
    /// # Errors
    /// An error of the kernel.
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

/// The permissions that userfaultfd requires (userfaultfd(2)).
pub(crate) const NOT_ALLOWED: &str = "it requires read and write access to /dev/userfaultfd, the sysctl \
                               vm.unprivileged_userfaultfd = 1, or the capability CAP_SYS_PTRACE";

fn flags(access: FaultOrigin) -> UserfaultfdFlags {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    match access {
        FaultOrigin::Everything => flags,
        // UFFD_USER_MODE_ONLY
        FaultOrigin::UserOnly => flags | UserfaultfdFlags::from_bits_retain(1),
    }
}

/// Opens `/dev/userfaultfd`, by which who may open it gets descriptors.
///
/// # Errors
/// The kernel's.
pub(crate) fn open_device() -> rustix::io::Result<OwnedFd> {
    open("/dev/userfaultfd", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
}

fn create(access: FaultOrigin) -> io::Result<Userfaultfd> {
    let error = match Userfaultfd::open_by_call(access) {
        Ok(descriptor) => return Ok(descriptor),
        Err(error) => error,
    };
    // A kernel before 5.11 does not know the flag; the device does not exist there.
    if !matches!(error, Errno::PERM | Errno::ACCESS | Errno::NOSYS) {
        return Err(error.into());
    }
    let device = open_device().map_err(|_| error)?;
    Ok(Userfaultfd::open_by_device(&device, access)?)
}

/// Converts the result of a call that may stop early: with EAGAIN the kernel did a part (a count above 0), or nothing
/// (the count is an error or was not written).
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
