//! Signals that only interrupt.
#![allow(unsafe_code, reason = "installs a signal handler")]

use std::sync::Once;

extern "C" fn nothing(_signal: libc::c_int) {}

/// A handler for `SIGUSR1` that does nothing, without `SA_RESTART`: every blocking call returns EINTR. For the rest of
/// this process.
///
/// # Panics
/// The system does not take it.
pub fn let_usr1_interrupt() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: all zero is a valid action; the handler touches nothing, so it may run at any point.
        let answer = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as libc::sighandler_t;
            libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut())
        };
        assert_eq!(answer, 0);
    });
}
