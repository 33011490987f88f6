//! A stock QEMU that is fed with checkpoints as they come, and continues the VM at once.
//!
//! Law: **it is given a whole VM once, when the VM may run here.** Until then it has all of the memory of the newest
//! checkpoint that counts, and no device state: it cannot run. So a standby never runs beside the primary: its stream
//! ends with the keeper, and QEMU with it. It is started with that stream, so that this is true from its first moment.
//!
//! ```text
//! stream:  header, RAM layout │ PART: the base │ PART: what checkpoint 1 changed │ ... │ END, devices of checkpoint n
//!                             └── each when it counts ─────────────────────────────┘   └── at the failover
//! ```
//!
//! Facts about QEMU 11.1 that it rests on: an incoming migration takes any number of PART sections, and waits as long
//! as it must between them.

mod feed;

use std::ffi::OsString;
use std::os::fd::AsFd as _;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::Channel;
use limosa_migrate::stored::StreamSetup;
use limosa_qemu::monitor::{MigrationStatus, Monitor, RunState};
use limosa_qemu::qmp::Options;
use limosa_qemu::{IncomingFrom, launch};
use limosa_snapshot::CheckpointPair;
use serde_json::Value;

use crate::error::ProtectError;
use feed::Feed;

/// How long it may take until its VM runs.
const RUNS_WITHIN: Duration = Duration::from_secs(30);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// How long a QEMU that is not needed may take to end by itself.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A QEMU that waits for a VM.
#[derive(Debug)]
pub(crate) struct Standby {
    process: Process,
    monitor: Monitor,
    channel: Channel,
    feed: Option<Feed>,
    /// The device state of the newest checkpoint that it was fed.
    tail: Vec<u8>,
    /// The number of that checkpoint; `None`: it has none, or a part of one.
    holds: Option<u64>,
}

/// A VM that continues here.
#[derive(Debug)]
#[non_exhaustive]
pub struct Continued {
    /// Its QEMU; a child of this process.
    pub child: Child,
    /// Its monitor.
    pub monitor: Monitor,
    /// From the end of fencing until it ran.
    pub elapsed: Duration,
}

/// A child that is killed when it is dropped.
#[derive(Debug)]
struct Process(Option<Child>);

impl Drop for Process {
    fn drop(&mut self) {
        let Some(child) = &mut self.0 else { return };
        // It has no VM that could be lost.
        let _ = child.kill();
        let _ = child.wait();
    }
}

impl Standby {
    /// Starts a QEMU with this command line, which has `start_within` to open its monitor, and may take no bytes for
    /// `takes_within`.
    pub(crate) fn start(
        command: &[OsString],
        start_within: Duration,
        takes_within: Duration,
    ) -> Result<Self, ProtectError> {
        let (channel, far) = Channel::pair()?;
        channel.set_timeouts(None, Some(takes_within))?;
        let launched = launch(command, IncomingFrom::Stream(far.as_fd()), &[])?;
        drop(far);
        let (child, greeted) = launched.connect(&Options { greeting_timeout: start_within, ..Options::default() });
        let process = Process(Some(child));
        let monitor = Monitor::new(greeted?);
        Ok(Self { process, monitor, channel, feed: None, tail: Vec::new(), holds: None })
    }

    /// Feeds the newest checkpoint of a pair: all of it the first time, later what has changed since the one before.
    /// `working` is called again and again.
    pub(crate) fn feed(
        &mut self,
        setup: &StreamSetup,
        pair: &CheckpointPair,
        working: &dyn Fn() -> Result<(), ProtectError>,
    ) -> Result<(), ProtectError> {
        // What is cut off in the middle is the end of it.
        if self.holds.take().is_none() && self.feed.is_some() {
            return Err(ProtectError::Standby { reason: "it has a part of a checkpoint".into() });
        }
        match &mut self.feed {
            Some(feed) => feed.changes(&self.channel, pair, working)?,
            None => {
                let mut feed = Feed::begin(&self.channel, setup)?;
                feed.all(&self.channel, pair, working)?;
                self.feed = Some(feed);
            }
        }
        self.tail.clear();
        self.tail.extend_from_slice(pair.tail());
        self.holds = Some(pair.number());
        Ok(())
    }

    /// The number of the checkpoint that it has all of.
    pub(crate) const fn holds(&self) -> Option<u64> {
        self.holds
    }

    /// Has it run the VM. Nobody else may run it from now on.
    pub(crate) fn continue_vm(mut self) -> Result<Continued, ProtectError> {
        let begun = Instant::now();
        let failed = |reason: String| ProtectError::Standby { reason };
        let feed = self.feed.as_mut().ok_or_else(|| failed("it has no checkpoint".into()))?;
        feed.end(&self.channel, &self.tail)?;
        loop {
            let (vm, migration) = self.monitor.status_and_migration()?;
            match migration.status {
                MigrationStatus::Failed | MigrationStatus::Cancelled => {
                    return Err(failed(migration.error.unwrap_or_else(|| "it does not say why".into())));
                }
                // It comes in the state in which the VM was.
                _ if vm.state == RunState::Running || vm.state == RunState::Suspended => break,
                MigrationStatus::Completed if vm.state == RunState::Paused => break,
                _ if begun.elapsed() >= RUNS_WITHIN => {
                    return Err(failed(format!("the VM is {}, its migration {}", vm.state, migration.status)));
                }
                _ => thread::sleep(LOOK_EVERY),
            }
        }
        let Self { mut process, monitor, channel, .. } = self;
        drop(channel);
        let child = process.0.take().ok_or_else(|| failed("it has ended".into()))?;
        Ok(Continued { child, monitor, elapsed: begun.elapsed() })
    }

    /// Ends it: it has no VM.
    pub(crate) fn end(mut self) {
        let _ = self.monitor.qmp().execute_within("quit", Value::Null, END_WITHIN);
        let begun = Instant::now();
        while let Some(child) = &mut self.process.0
            && matches!(child.try_wait(), Ok(None))
            && begun.elapsed() < END_WITHIN
        {
            thread::sleep(Duration::from_millis(2));
        }
    }
}
