//! A process that does not outlive this one.

use std::process::Child;

/// A child process. Killed with SIGKILL, and gone, when dropped.
#[derive(Debug)]
pub(crate) struct KilledChild(pub(crate) Child);

impl KilledChild {
    /// Kills it, and waits until it is gone.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for KilledChild {
    fn drop(&mut self) {
        self.kill();
    }
}
