//! System calls: those that a server makes, found by tracing all of its tests (seccomp).
//!
//! A call that is not in the list fails with `ENOSYS`, as in a kernel that does not have it. So a library falls back
//! where it can, and a server under attack does not die with its disks. A ring carries requests past this list; files
//! and connections that it would open are restricted by landlock all the same.

use std::collections::BTreeMap;

use anyhow::Context as _;
use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use super::Needs;

/// Calls with any arguments.
const CALLS: &[c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    // Threads and time.
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_tgkill,
    // Descriptors.
    libc::SYS_close,
    libc::SYS_eventfd2,
    libc::SYS_fcntl,
    libc::SYS_fstat,
    libc::SYS_getcwd,
    libc::SYS_newfstatat,
    libc::SYS_ppoll,
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_statx,
    libc::SYS_unlinkat,
    libc::SYS_write,
    libc::SYS_writev,
    // Images.
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_io_uring_setup,
    libc::SYS_lseek,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_preadv2,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    // Connections that exist, and those that are accepted.
    libc::SYS_accept4,
    libc::SYS_getpeername,
    libc::SYS_getsockname,
    libc::SYS_getsockopt,
    libc::SYS_pidfd_open,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
];

/// Calls for front ends over vhost-user: queues wait for kicks and for memory that comes by postcopy, and share what is
/// in flight with the next server.
const DEVICE_CALLS: &[c_long] = &[
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_memfd_create,
    libc::SYS_pipe2,
    libc::SYS_userfaultfd,
];

/// A call that newer architectures do not have.
#[cfg(target_arch = "x86_64")]
const OLDER_CALLS: &[c_long] = &[libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_CALLS: &[c_long] = &[];

/// Requests of `ioctl(2)`: of block devices, of extents and clones of files, and whether a descriptor blocks.
const IOCTLS: [u32; 6] = [0x127f, 0x1268, 0x8008_1272, 0x4020_940d, 0xc020_660b, 0x5421];

/// Requests of userfaultfd: a new descriptor, its features, and memory that is registered or not any more.
const DEVICE_IOCTLS: [u32; 4] = [0xaa00, 0xc018_aa3f, 0xc020_aa00, 0x8010_aa01];

/// Restricts this thread. Returns false if the kernel has no seccomp filters.
pub(super) fn restrict(needs: &Needs) -> anyhow::Result<bool> {
    let forbidden = SeccompAction::Errno(u32::try_from(libc::ENOSYS).context("ENOSYS")?);
    let architecture = std::env::consts::ARCH.try_into()?;
    let filter = SeccompFilter::new(rules(needs)?, forbidden, SeccompAction::Allow, architecture)?;
    let program: BpfProgram = filter.try_into()?;
    match seccompiler::apply_filter(&program) {
        Ok(()) => Ok(true),
        Err(seccompiler::Error::Seccomp(error)) if is_missing(&error) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn is_missing(error: &std::io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EINVAL))
}

fn rules(needs: &Needs) -> anyhow::Result<BTreeMap<i64, Vec<SeccompRule>>> {
    let devices = if needs.devices { DEVICE_CALLS } else { &[] };
    let calls = CALLS.iter().chain(OLDER_CALLS).chain(devices);
    let mut rules: BTreeMap<_, _> = calls.map(|call| (*call, Vec::new())).collect();
    // Memory is never code: what an attacker writes cannot be run.
    let no_code = || masked(2, libc::PROT_EXEC, 0);
    rules.insert(libc::SYS_mmap, vec![no_code()?]);
    rules.insert(libc::SYS_mprotect, vec![no_code()?]);
    // Threads, and no processes. The newer call has its flags in memory, where they cannot be looked at.
    let thread = libc::CLONE_THREAD | libc::CLONE_VM;
    rules.insert(libc::SYS_clone, vec![masked(0, thread, thread)?]);
    rules.insert(libc::SYS_prctl, vec![masked(0, -1, libc::PR_SET_NAME)?]);
    if needs.image_folders.is_empty() {
        // No file is created, made empty, or opened to be written.
        let made = libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY) | libc::O_TRUNC;
        rules.insert(libc::SYS_openat, vec![masked(2, made | libc::O_ACCMODE, 0)?]);
    } else {
        // Images that are added, and overlays; where, landlock says.
        rules.insert(libc::SYS_openat, Vec::new());
        rules.insert(libc::SYS_renameat2, Vec::new());
    }
    let device_ioctls = if needs.devices { &DEVICE_IOCTLS[..] } else { &[] };
    let requests = IOCTLS.iter().chain(device_ioctls);
    let requests = requests.map(|request| condition(1, u64::from(u32::MAX), u64::from(*request)));
    rules.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    Ok(rules)
}

/// A rule about an argument's bits: those of the mask have these values.
fn masked(argument: u8, mask: i32, value: i32) -> anyhow::Result<SeccompRule> {
    // The kernel looks at 32 bits: those of the sign are cut off.
    condition(argument, u64::from(mask.cast_unsigned()), u64::from(value.cast_unsigned()))
}

fn condition(argument: u8, mask: u64, value: u64) -> anyhow::Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(mask), value)?;
    Ok(SeccompRule::new(vec![condition])?)
}
