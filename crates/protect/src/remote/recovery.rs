//! A lost line: what becomes of the VM, and how it comes to be protected again.
//!
//! Law: **what the VM does without protection is what its user has chosen**: it continues, or it stands still.
//!
//! ```text
//! protected ─lost─► continue: COLO is ended, the VM runs ────────────── keeper there ─► base ─► protected
//!              └──► pause: the VM stands still ─ keeper there ─► COLO is ended, the VM runs ┘
//!                            └─ continued by its user ─► as continue
//! ```
//!
//! A VM that was failed over meanwhile does not run here again by limosa's doing.

use std::thread;
use std::time::{Duration, Instant};

use limosa_migrate::Handle;
use limosa_page::error_with_causes;
use limosa_qemu::monitor::{MigrationStatus, Monitor, RunState};

use super::connect::{Greeted, KeeperAddress};
use crate::error::ProtectError;
use crate::guard::{Guard, Seen};
use crate::options::{OnLoss, ProtectOptions};
use crate::preflight::Preflight;
use crate::primary::{check_stop, is_running};

/// How long QEMU may take to leave COLO.
const RELEASED_WITHIN: Duration = Duration::from_secs(30);
/// How long QEMU may take to obey before it is told again.
const AGAIN_AFTER: Duration = Duration::from_millis(200);
/// How often what is waited for is looked at.
const TICK: Duration = Duration::from_millis(20);
/// The first wait for a keeper, and the longest one.
const FIRST_WAIT: Duration = Duration::from_millis(250);
const LONGEST_WAIT: Duration = Duration::from_secs(10);
/// The longest attempt to connect.
const CONNECT_WITHIN: Duration = Duration::from_secs(2);

/// The state of a VM without protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unprotected {
    /// It runs, and COLO has been ended.
    Runs,
    /// It stands still, in COLO.
    StandsStill,
}

/// A VM whose keeper is lost.
pub(crate) struct Recovery<'a> {
    monitor: &'a Monitor,
    options: &'a ProtectOptions,
    handle: &'a Handle,
    notice: &'a (dyn Fn(&str) + Sync),
    keeper: &'a KeeperAddress,
    found: &'a Preflight,
    wait: Duration,
}

impl<'a> Recovery<'a> {
    pub(crate) fn new(
        monitor: &'a Monitor,
        options: &'a ProtectOptions,
        (handle, notice): (&'a Handle, &'a (dyn Fn(&str) + Sync)),
        keeper: &'a KeeperAddress,
        found: &'a Preflight,
    ) -> Self {
        Self { monitor, options, handle, notice, keeper, found, wait: FIRST_WAIT }
    }

    /// A base was kept: the next loss is another one.
    pub(crate) fn reset(&mut self) {
        self.wait = FIRST_WAIT;
    }

    /// Does with the VM what was chosen for a loss. `released` is called when it continues without protection, and its
    /// disks have all that it has written: until then its output must not leave.
    pub(crate) fn lose(&self, why: &ProtectError, released: &mut dyn FnMut()) -> Result<Unprotected, ProtectError> {
        let why = error_with_causes(why);
        let keeper = &self.keeper.uri;
        match self.options.on_loss {
            OnLoss::Continue => {
                self.release(released)?;
                (self.notice)(&format!(
                    "the keeper at {keeper} is lost ({why}); the VM continues without protection until it is back"
                ));
                Ok(Unprotected::Runs)
            }
            OnLoss::Pause => {
                // It stood still before the channel was closed, unless its base was on the way.
                if is_running(&self.monitor.status()?.state) {
                    self.monitor.stop()?;
                }
                (self.notice)(&format!("the keeper at {keeper} is lost ({why}); the VM stands still until it is back"));
                Ok(Unprotected::StandsStill)
            }
        }
    }

    /// Waits until the keeper takes the VM again; the VM runs then. `released` is called when it continues.
    pub(crate) fn wait(
        &mut self,
        vm: &mut Unprotected,
        seen: &mut Seen,
        released: &mut dyn FnMut(),
    ) -> Result<Greeted, ProtectError> {
        let mut said = None;
        loop {
            self.sleep(seen)?;
            let runs = is_running(&self.monitor.status()?.state);
            match *vm {
                Unprotected::StandsStill if runs => {
                    (self.notice)("the VM was continued without protection");
                    self.release(released)?;
                    *vm = Unprotected::Runs;
                }
                // A base would start a VM that its user has stopped.
                Unprotected::Runs if !runs => continue,
                Unprotected::Runs | Unprotected::StandsStill => {}
            }
            match self.keeper.greet(&self.found.series(), self.options.lost_after.min(CONNECT_WITHIN)) {
                Ok(greeted) => {
                    if *vm == Unprotected::StandsStill {
                        self.release(released)?;
                        *vm = Unprotected::Runs;
                    }
                    (self.notice)(&format!("the keeper at {} is back; it gets all of the VM", self.keeper.uri));
                    return Ok(greeted);
                }
                Err(error @ (ProtectError::LineLost { .. } | ProtectError::KeeperBusy { .. })) => {
                    let line = error_with_causes(&error);
                    tracing::info!("{line}");
                    if matches!(error, ProtectError::KeeperBusy { .. }) && said.as_ref() != Some(&line) {
                        (self.notice)(&line);
                        said = Some(line);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Waits before the next attempt to reach the keeper, longer each time.
    fn sleep(&mut self, seen: &mut Seen) -> Result<(), ProtectError> {
        let begun = Instant::now();
        while begun.elapsed() < self.wait {
            Guard::note_rest(self.monitor, seen);
            if seen.gone || seen.shutdown {
                return Err(ProtectError::QemuEnded);
            }
            seen.asked |= self.handle.control.stop_requested().is_some();
            check_stop(self.handle)?;
            thread::sleep(TICK);
        }
        self.wait = self.wait.saturating_mul(2).min(LONGEST_WAIT);
        Ok(())
    }

    /// Ends COLO, or what has become of it, and the epochs of the disks; the VM runs, unless its user had stopped it.
    fn release(&self, released: &mut dyn FnMut()) -> Result<(), ProtectError> {
        self.end_colo()?;
        // One that is lost with its server ends the protection.
        self.found.disks.end()?;
        released();
        Ok(())
    }

    fn end_colo(&self) -> Result<(), ProtectError> {
        let monitor = self.monitor;
        let stopped = self.options.on_loss == OnLoss::Continue && monitor.status()?.state == RunState::Paused;
        let (begun, mut told) = (Instant::now(), None::<Instant>);
        loop {
            let (vm, migration) = monitor.status_and_migration()?;
            let over = migration.status.is_over();
            match (vm.state, migration.status) {
                (state, _) if over && is_running(&state) => break,
                (RunState::Paused | RunState::Postmigrate, _) if over => monitor.cont()?,
                (_, MigrationStatus::Colo) if told.is_none_or(|told| told.elapsed() >= AGAIN_AFTER) => {
                    told = Some(Instant::now());
                    match monitor.end_colo() {
                        // It was told before, or is about to enter or to leave the state.
                        Err(error) if error.is_refusal() => tracing::debug!("{error}"),
                        ended => ended?,
                    }
                }
                // A base that has not arrived fails with its channel.
                (state, status) if begun.elapsed() >= RELEASED_WITHIN => {
                    return Err(ProtectError::Failed { reason: format!("the VM is {state}, its migration {status}") });
                }
                _ => {}
            }
            thread::sleep(TICK / 4);
        }
        // QEMU starts a VM that was stopped in COLO.
        if stopped {
            monitor.stop()?;
        }
        monitor.wait_migration_released(RELEASED_WITHIN)?;
        Ok(())
    }
}
