//! `ptrace` for user-mode Linux on processors that have more extended registers than it has room for.
//!
//! User-mode Linux (6.1) saves and sets 2,696 bytes of the XSAVE area of its processes. The host reads a part of the
//! area, but sets the whole only (Linux's `arch/x86/kernel/fpu/regset.c`). So what is behind the part is set to zeros:
//! that is the state of registers that were never used, and the header, which is in the part, names them as such.
//!
//! It stands in for the function of the C library, because it is preloaded. The kernel in user mode runs on one thread,
//! with stacks of a few pages: the area is static.

#![allow(unsafe_code, reason = "it stands in for a function of the C library")]

use std::cell::UnsafeCell;

use libc::{c_int, c_long, c_uint, c_void, iovec, pid_t};

/// `NT_X86_XSTATE`: the registers in the layout of XSAVE.
const XSTATE: usize = 0x202;

/// Room for the area of any processor, in bytes.
const ROOM: usize = 64 << 10;

#[repr(align(64))]
struct Area(UnsafeCell<[u8; ROOM]>);

// SAFETY: one thread calls `ptrace`; see above.
unsafe impl Sync for Area {}

static AREA: Area = Area(UnsafeCell::new([0; ROOM]));

/// Does what `ptrace(2)` describes; sets the XSAVE area of a process also by its first part.
///
/// # Safety
/// As for `ptrace`. One thread calls it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(request: c_uint, pid: pid_t, address: *mut c_void, data: *mut c_void) -> c_long {
    match request {
        // The kernel stores the word, and the C library returns it.
        libc::PTRACE_PEEKTEXT | libc::PTRACE_PEEKDATA | libc::PTRACE_PEEKUSER => {
            let mut word: c_long = 0;
            // SAFETY: the kernel writes a word.
            if unsafe { call(request, pid, address, (&raw mut word).cast()) } < 0 {
                return -1;
            }
            // SAFETY: the variable of this thread.
            unsafe { *libc::__errno_location() = 0 };
            word
        }
        libc::PTRACE_SETREGSET if address as usize == XSTATE => {
            // SAFETY: such a request has a vector.
            let part = unsafe { *data.cast::<iovec>() };
            let area: *mut u8 = AREA.0.get().cast();
            let mut whole = iovec { iov_base: area.cast(), iov_len: ROOM };
            // SAFETY: the kernel writes into the area, and its length into the vector.
            if unsafe { call(libc::PTRACE_GETREGSET, pid, address, (&raw mut whole).cast()) } < 0 {
                return -1;
            }
            if part.iov_len >= whole.iov_len {
                // SAFETY: the caller's request.
                return unsafe { call(request, pid, address, data) };
            }
            // SAFETY: the part is the caller's; it and the rest are inside the area, which no other thread uses.
            unsafe {
                std::ptr::copy_nonoverlapping(part.iov_base.cast(), area, part.iov_len);
                std::ptr::write_bytes(area.add(part.iov_len), 0, whole.iov_len - part.iov_len);
            }
            // SAFETY: the kernel reads the area.
            unsafe { call(request, pid, address, (&raw mut whole).cast()) }
        }
        // SAFETY: the caller's request.
        _ => unsafe { call(request, pid, address, data) },
    }
}

/// # Safety
/// As for `ptrace`.
unsafe fn call(request: c_uint, pid: pid_t, address: *mut c_void, data: *mut c_void) -> c_long {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_ptrace, c_long::from(request), c_int::from(pid), address, data) }
}
