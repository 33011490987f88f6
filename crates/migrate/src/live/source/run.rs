//! One attempt, from the first answer to the last: the list of its phases.

use super::attempt::Attempt;
use super::link::{Link, Terms};
use super::outcome::Ended;
use super::owned::Owned;
use super::phase::{Commit, Phase, Switch};
use super::reports::Reports;
use crate::error::MigrateError;
use crate::live::LiveVm;
use crate::source::postcopy::OpenPreempt;

/// How the VM is handed over, when nothing else is left to be done.
pub(super) enum Ready<'v> {
    Commit(Commit),
    Postcopy(Switch<'v>),
}

/// Moves the VM over a stream that is open.
pub(super) fn run<'e, 'v, V: LiveVm + ?Sized>(
    link: &'e Link<'e, 'v>,
    terms: &'e Terms<'e>,
    mut vm: Owned<'v, V>,
    reports: &mut Reports<'e>,
    open_preempt: Option<OpenPreempt<'e>>,
) -> Ended<'v, V> {
    match (Attempt { link, terms, vm: &mut vm, reports }).prepare() {
        Ok(Ready::Commit(commit)) => commit.hand_over(link, terms, vm),
        Ok(Ready::Postcopy(switch)) => switch.hand_over(link, terms, vm, open_preempt),
        Err(error) => Ended::Kept { vm, error },
    }
}

impl<'e, 'v, V: LiveVm + ?Sized> Attempt<'_, 'e, 'v, V> {
    /// Runs everything up to the hand-over. A failure leaves the VM here.
    fn prepare(&mut self) -> Result<Ready<'v>, MigrateError> {
        let mut phase = Phase::Setup;
        loop {
            phase = match phase {
                Phase::Commit(commit) => return Ok(Ready::Commit(commit)),
                Phase::Postcopy(switch) => return Ok(Ready::Postcopy(switch)),
                phase => self.next(phase)?,
            };
        }
    }

    /// Does the work of a phase, and returns the next one. The last ones, which hand the VM over, are left as they are.
    pub(super) fn next(&mut self, phase: Phase<'e, 'v>) -> Result<Phase<'e, 'v>, MigrateError> {
        let before = phase.step();
        let next = match phase {
            Phase::Setup => self.setup()?,
            Phase::Hints(rounds) => self.ask_for_hints(*rounds)?,
            Phase::Precopy(precopy) => self.precopy(*precopy)?,
            Phase::Pause(left) => self.pause(left)?,
            Phase::LastRound(last) => self.last_round(*last)?,
            Phase::DeviceState => self.device_state()?,
            last @ (Phase::Commit(_) | Phase::Postcopy(_)) => return Ok(last),
        };
        next.step().check_follows(before)?;
        Ok(next)
    }
}
