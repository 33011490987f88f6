//! The start of a VM, which happens once or never.

use limosa_page::{BrokenInvariant, invariant};
use parking_lot::Mutex;

use crate::error::MigrateError;
use crate::live::VmError;

/// The state of a VM that is brought up here.
///
/// ```text
/// loading ──► starting ──► running
///    │            │
///    └────────────┴──────► given up
/// ```
///
/// A VM whose start panics stays in `starting`: it may run, so it counts as running.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Loading,
    Starting,
    Running,
    GivenUp,
}

impl State {
    /// Whether the state may come next to another one.
    fn can_follow(self, before: Self) -> bool {
        match self {
            Self::Loading => false,
            Self::Starting => before == Self::Loading,
            Self::Running => before == Self::Starting,
            Self::GivenUp => matches!(before, Self::Loading | Self::Starting),
        }
    }

    fn enter(&mut self, next: Self) -> Result<(), BrokenInvariant> {
        invariant(next.can_follow(*self), "a VM is started once, or given up before it runs")?;
        *self = next;
        Ok(())
    }
}

/// The start of a VM.
#[derive(Debug, Default)]
pub(super) struct StartOnce(Mutex<State>);

impl StartOnce {
    /// Starts the VM, unless it was given up.
    pub(super) fn start(&self, start: impl FnOnce() -> Result<(), VmError>) -> Result<(), MigrateError> {
        let mut state = self.0.lock();
        match *state {
            State::Loading => state.enter(State::Starting)?,
            State::Starting | State::Running | State::GivenUp => {
                return Err(MigrateError::Protocol("the VM was given up before its devices were loaded".into()));
            }
        }
        match start() {
            Ok(()) => Ok(state.enter(State::Running)?),
            Err(source) => {
                state.enter(State::GivenUp)?;
                Err(MigrateError::Vm { what: "run", source })
            }
        }
    }

    /// Gives the VM up unless it runs. Returns whether it will not run.
    pub(super) fn abort(&self) -> bool {
        let mut state = self.0.lock();
        match *state {
            State::Loading => *state = State::GivenUp,
            State::Starting | State::Running | State::GivenUp => {}
        }
        *state == State::GivenUp
    }

    /// Whether the VM runs, or may.
    pub(super) fn is_running(&self) -> bool {
        matches!(*self.0.lock(), State::Starting | State::Running)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::is_noticed;

    #[test]
    fn a_vm_is_started_once_and_never_after_it_was_given_up() {
        let vm = StartOnce::default();
        vm.start(|| Ok(())).unwrap();
        assert!(vm.start(|| panic!("twice")).is_err());
        assert!(!vm.abort() && vm.is_running());
        let vm = StartOnce::default();
        assert!(vm.abort() && vm.abort());
        assert!(vm.start(|| panic!("it was given up")).is_err() && !vm.is_running());
        let vm = StartOnce::default();
        assert!(vm.start(|| Err("a vCPU does not run".into())).is_err());
        assert!(vm.abort() && !vm.is_running());
    }

    #[test]
    fn a_vm_whose_start_panics_may_run() {
        let vm = StartOnce::default();
        let start = std::panic::AssertUnwindSafe(|| vm.start(|| panic!("half-way")));
        assert!(std::panic::catch_unwind(start).is_err());
        assert!(vm.is_running() && !vm.abort());
        assert!(is_noticed(|| State::Running.enter(State::Starting)), "it runs already");
    }
}
