//! Loading a VM into a QEMU that waits for one, and starting it: the one way of every restore that is not lazy, be the
//! QEMU one that was there, one that `run` has started, or a clone's.
//!
//! Laws:
//! - **Held until it is complete.** The VM arrives stopped, also if it was saved running; [`Loader::start`] starts it.
//!   What has to be done before the guest's first instruction is done before that call.
//! - **Every step has a limit**, except for a QEMU that reads a file by itself: it answers nothing meanwhile.
//! - **A VM that cannot be started is an error with QEMU's reason**, such as a disk that another process has open.

use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_migrate::MigrateError;
use limosa_migrate::multifd::MultifdSourceOptions;
use limosa_migrate::stats::PrecopyStats;
use limosa_migrate::stored::{PageSource as _, PrecopyOptions, PrecopySource};
use limosa_snapshot::Snapshot;
use limosa_stream::MultifdRules;
use serde_json::Value;

use crate::job::{JobContext, JobError};
use crate::monitor::{MigrationInfo, MigrationStatus, Monitor, RunState, VmStatus};
use crate::restore::incoming::{Channels, Rendezvous};

/// How long QEMU may take no byte of the stream, and how long it may load the devices.
const STALLED_AFTER: Duration = Duration::from_secs(60);
/// The first interval between questions whether QEMU is done. It doubles up to [`ASK_AT_LEAST_EVERY`], so that a load
/// of a millisecond is noticed after a millisecond, also by a monitor that reports no migration events.
const ASK_FIRST_AFTER: Duration = Duration::from_micros(250);
/// The longest such interval.
const ASK_AT_LEAST_EVERY: Duration = Duration::from_millis(20);

/// A VM on its way into a QEMU that waits for one.
#[derive(Debug)]
pub struct Loader<'a> {
    monitor: &'a Monitor,
    watch: JobContext<'a>,
}

impl<'a> Loader<'a> {
    /// Prepares the QEMU behind `monitor`: the VM will arrive stopped.
    ///
    /// # Errors
    /// The monitor's.
    pub fn new(monitor: &'a Monitor, watch: JobContext<'a>) -> Result<Self, JobError> {
        monitor.stop()?;
        Ok(Self { monitor, watch })
    }

    /// Has QEMU take the VM from a channel that it is passed over the monitor, and returns the other end.
    ///
    /// # Errors
    /// The monitor's, also if it cannot pass descriptors: one over tcp.
    pub fn connect(&self) -> Result<Channel, JobError> {
        let rendezvous = Rendezvous::new(self.monitor, None, Channels::One)?;
        self.monitor.migrate_incoming(&rendezvous.uri())?;
        Ok(rendezvous.connect()?)
    }

    /// Sends the VM over `channel`, and its memory over the multifd channels, if there are some.
    ///
    /// # Errors
    /// The engine's; a QEMU that takes no byte for a minute.
    pub fn send(
        &self,
        snapshot: &Snapshot,
        channel: Channel,
        multifd: Option<(Vec<Channel>, MultifdSourceOptions)>,
        options: PrecopyOptions,
    ) -> Result<PrecopyStats, JobError> {
        channel.set_timeouts(None, Some(STALLED_AFTER))?;
        let options = PrecopyOptions { answer_timeout: STALLED_AFTER, ..options };
        let source = PrecopySource::new(snapshot, channel, self.watch.handle).options(options);
        let source = match multifd {
            Some((channels, options)) => {
                let (named, version) = (snapshot.setup().configuration.multifd_rules(), self.monitor.version());
                let rules = named.or_older(MultifdRules::of_version(version.major, version.minor));
                source.channels(channels, MultifdSourceOptions { rules: Some(rules), ..options })?
            }
            None => source,
        };
        let stats = source.run()?;
        self.wait(Some(STALLED_AFTER))?;
        Ok(stats)
    }

    /// Waits until QEMU has loaded the VM or has failed to, for at most `limit`.
    ///
    /// A load cannot be called back, and a QEMU that reads a file by itself answers nothing while it does. So a
    /// cancellation waits all the same, and leaves the VM stopped.
    ///
    /// # Errors
    /// QEMU's reason; [`MigrateError::Cancelled`]; the limit.
    pub fn wait(&self, limit: Option<Duration>) -> Result<(), JobError> {
        let qmp = self.monitor.qmp();
        let end = limit.and_then(|limit| Instant::now().checked_add(limit));
        let mut interval = ASK_FIRST_AFTER;
        let mut cancelled = false;
        loop {
            let asked = qmp.send_command("query-migrate", Value::Null)?;
            let info = loop {
                if !cancelled && self.watch.handle.control.stop_requested().is_some() {
                    cancelled = true;
                    (self.watch.notice)(
                        "QEMU loads by itself and cannot be called back: waiting, to leave the VM paused",
                    );
                }
                if let Some(answer) = qmp.wait(&asked, ASK_AT_LEAST_EVERY)? {
                    break MigrationInfo::of(answer);
                }
                self.check_limit(end, limit)?;
            };
            match info.status {
                MigrationStatus::Completed if cancelled => return Err(MigrateError::Cancelled.into()),
                MigrationStatus::Completed => return Ok(()),
                MigrationStatus::Failed => {
                    let reason = info.error.unwrap_or_else(|| "it does not say why; its own log does".into());
                    return Err(JobError::Failed { reason });
                }
                _ => self.check_limit(end, limit)?,
            }
            let _ = qmp.wait_event(&["MIGRATION"], interval)?;
            interval = (interval * 2).min(ASK_AT_LEAST_EVERY);
        }
    }

    fn check_limit(&self, end: Option<Instant>, limit: Option<Duration>) -> Result<(), JobError> {
        match (end, limit) {
            (Some(end), Some(limit)) if Instant::now() >= end => Err(JobError::Failed {
                reason: format!("it has all of the VM and did not load it within {} s", limit.as_secs()),
            }),
            _ => Ok(()),
        }
    }

    /// Starts the VM that is loaded, if it is to run. Returns its state.
    ///
    /// # Errors
    /// [`JobError::Refused`] with QEMU's reason if the VM cannot run, for instance because another process has its
    /// disks open. Any other error is the monitor's: the VM may have run, and ended.
    pub fn start(self, runs: bool) -> Result<VmStatus, JobError> {
        let status = self.monitor.status()?;
        if !runs || status.running || status.state == RunState::Shutdown {
            return Ok(status);
        }
        match self.monitor.cont() {
            Ok(()) => {}
            Err(error) if error.is_refusal() => return Err(not_startable(error.desc().unwrap_or("without a reason"))),
            Err(error) => return Err(error.into()),
        }
        let status = self.monitor.status()?;
        match status.state {
            RunState::Inmigrate => Err(not_startable("its own log says why")),
            _ => Ok(status),
        }
    }
}

/// Returns the error for a QEMU that has all of the VM and cannot start it.
pub(crate) fn not_startable(reason: &str) -> JobError {
    JobError::refused(format!(
        "not restored: QEMU has the VM's memory but cannot start it ({reason}), most likely because another process \
         has its disks open; end this QEMU, free the disks and start a new one"
    ))
}
