//! Annotations of the compiled standard library for the thread sanitizer.
//!
//! The standard library comes compiled, without the sanitizer's calls in it. What of a lock is inlined into our code
//! the sanitizer sees: taking a free lock, giving it back. What is not inlined it does not see: waiting for a lock that
//! is taken, for a condition, for a value that another thread makes. Each of those is wrapped here (`ld --wrap`, see
//! `xtask/src/tsan.rs`, which names the symbols): the wrapper calls the function, and says to the sanitizer on which
//! address threads met. It says nothing that the library does not promise.
//!
//! Linked into test programs that run under the sanitizer, and into nothing else.

#![no_std]
#![crate_type = "lib"]

use core::ffi::{c_int, c_void};
use core::time::Duration;

unsafe extern "C" {
    fn __tsan_acquire(address: *const c_void);
    fn __tsan_release(address: *const c_void);
    fn __real___tsan_atomic64_fetch_sub(address: *mut u64, value: u64, order: c_int) -> u64;
    fn __real___tsan_atomic64_compare_exchange_val(
        address: *mut u64,
        expected: u64,
        value: u64,
        order: c_int,
        failed: c_int,
    ) -> u64;
}

// The receivers are references; what is behind them is the library's own.
unsafe extern "Rust" {
    #[link_name = env!("REAL_MUTEX_LOCK_CONTENDED")]
    fn lock_contended(mutex: *const c_void);
    #[link_name = env!("REAL_RWLOCK_READ_CONTENDED")]
    fn read_contended(lock: *const c_void);
    #[link_name = env!("REAL_RWLOCK_WRITE_CONTENDED")]
    fn write_contended(lock: *const c_void);
    #[link_name = env!("REAL_CONDVAR_WAIT")]
    fn wait(condition: *const c_void, mutex: *const c_void);
    #[link_name = env!("REAL_CONDVAR_WAIT_TIMEOUT")]
    fn wait_timeout(condition: *const c_void, mutex: *const c_void, timeout: Duration) -> bool;
    #[link_name = env!("REAL_ONCE_CALL")]
    fn call(once: *const c_void, ignore_poisoning: bool, make: &mut dyn FnMut(*const c_void));
    #[link_name = env!("REAL_SCOPE_DECREMENT")]
    fn decrement(scope: *const c_void, panicked: bool);
}

/// A lock that another thread had.
#[unsafe(export_name = env!("WRAP_MUTEX_LOCK_CONTENDED"))]
unsafe fn announced_lock_contended(mutex: *const c_void) {
    // SAFETY: the caller's arguments, passed on.
    unsafe {
        lock_contended(mutex);
        __tsan_acquire(mutex);
    }
}

#[unsafe(export_name = env!("WRAP_RWLOCK_READ_CONTENDED"))]
unsafe fn announced_read_contended(lock: *const c_void) {
    // SAFETY: as above.
    unsafe {
        read_contended(lock);
        __tsan_acquire(lock);
    }
}

#[unsafe(export_name = env!("WRAP_RWLOCK_WRITE_CONTENDED"))]
unsafe fn announced_write_contended(lock: *const c_void) {
    // SAFETY: as above.
    unsafe {
        write_contended(lock);
        __tsan_acquire(lock);
    }
}

/// Gives the lock back, waits, and takes it again.
#[unsafe(export_name = env!("WRAP_CONDVAR_WAIT"))]
unsafe fn announced_wait(condition: *const c_void, mutex: *const c_void) {
    // SAFETY: as above.
    unsafe {
        __tsan_release(mutex);
        wait(condition, mutex);
        __tsan_acquire(mutex);
    }
}

#[unsafe(export_name = env!("WRAP_CONDVAR_WAIT_TIMEOUT"))]
unsafe fn announced_wait_timeout(condition: *const c_void, mutex: *const c_void, timeout: Duration) -> bool {
    // SAFETY: as above.
    unsafe {
        __tsan_release(mutex);
        let woken = wait_timeout(condition, mutex, timeout);
        __tsan_acquire(mutex);
        woken
    }
}

/// A value that is made once: reported before any thread can see that it exists.
#[unsafe(export_name = env!("WRAP_ONCE_CALL"))]
unsafe fn announced_call(once: *const c_void, ignore_poisoning: bool, make: &mut dyn FnMut(*const c_void)) {
    // SAFETY: as above.
    unsafe {
        call(once, ignore_poisoning, &mut |state| {
            make(state);
            __tsan_release(once);
        });
        __tsan_acquire(once);
    }
}

/// A thread of a scope ends: the scope's owner reads the count of them, in one of the first three words.
#[unsafe(export_name = env!("WRAP_SCOPE_DECREMENT"))]
unsafe fn announced_decrement(scope: *const c_void, panicked: bool) {
    // SAFETY: as above; the addresses are names here and not read.
    unsafe {
        for word in 0..3 {
            __tsan_release(scope.cast::<u64>().wrapping_add(word).cast());
        }
        decrement(scope, panicked);
    }
}

/// `memory_order_acquire` and `memory_order_acq_rel`.
const ACQUIRE: c_int = 2;
const ACQUIRE_RELEASE: c_int = 4;

/// `Arc` gives its count back with release order, and the last owner has a fence, which the sanitizer does not know. So
/// every count that is given back acquires too.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap___tsan_atomic64_fetch_sub(address: *mut u64, value: u64, _order: c_int) -> u64 {
    // SAFETY: as above.
    unsafe { __real___tsan_atomic64_fetch_sub(address, value, ACQUIRE_RELEASE) }
}

/// Nor does it know the fence of `Arc::try_unwrap`, which takes the last count away by a relaxed exchange: such a one
/// acquires.
#[unsafe(no_mangle)]
unsafe extern "C" fn __wrap___tsan_atomic64_compare_exchange_val(
    address: *mut u64,
    expected: u64,
    value: u64,
    order: c_int,
    failed: c_int,
) -> u64 {
    let order = if order == 0 { ACQUIRE } else { order };
    // SAFETY: as above.
    unsafe { __real___tsan_atomic64_compare_exchange_val(address, expected, value, order, failed) }
}
