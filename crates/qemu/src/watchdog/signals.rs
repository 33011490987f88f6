//! Ignoring the signals by which a terminal or an administrator ends limosa, in the watchdog only.

/// Ignores SIGINT, SIGHUP, SIGTERM, SIGQUIT and SIGPIPE in this process from here on.
pub(super) fn ignore() {
    for signal in [libc::SIGINT, libc::SIGHUP, libc::SIGTERM, libc::SIGQUIT, libc::SIGPIPE] {
        // SAFETY: SIG_IGN installs no handler, so no code of ours can run in a signal's context; the call has no other
        // precondition and cannot fail for these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
