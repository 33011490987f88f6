//! CPU time of this process, for what an end says of itself.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A reading of the process's CPU clock.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CpuTime(Duration);

impl CpuTime {
    pub(crate) fn now() -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = time.tv_sec.cast_unsigned();
        Self(Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0)))
    }

    /// CPU time used since, in milliseconds.
    pub(crate) fn since_ms(self) -> f64 {
        Self::now().0.saturating_sub(self.0).as_secs_f64() * 1e3
    }
}
