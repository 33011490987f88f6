//! A keeper that throws all of it away: the least that a checkpoint can cost.

use std::io::IoSlice;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use limosa_channel::{Channel, Listener, Options, Uri};
use limosa_migrate::checkpoints::NextCheckpoint;
use limosa_migrate::stored::{Destination, DestinationOptions, PageError, PageSink, StreamSetup};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::{PAGE_LEN, PageNumber, PageRange};
use limosa_qemu::monitor::Settings;

use crate::vm::Vm;

/// How long QEMU may take for what is expected of it.
const LIMIT: Duration = Duration::from_secs(60);

/// A keeper on a thread of its own.
pub(super) struct Bare {
    thread: JoinHandle<Result<(), MigrateError>>,
}

impl Bare {
    /// Has the VM's checkpoints come here, and returns when the first one may.
    pub(super) fn start(vm: &Vm, period: u64) -> Result<Self> {
        let settings = Settings::new()
            .capability("x-colo", true)
            .capability("return-path", true)
            .parameter("x-checkpoint-delay", period)
            .parameter("max-bandwidth", 0);
        vm.monitor.apply_settings(&settings)?;
        let uri = Uri::Unix(vm.at("checkpoints"));
        let listener = Listener::bind(&uri, &Options::default()).context("listening for QEMU")?;
        vm.monitor.migrate(&uri.to_string(), false)?;
        let channel = listener.accept(Some(LIMIT)).context("QEMU does not connect")?;
        let (begun, wait) = std::sync::mpsc::channel();
        let begun = move || {
            // The receiver is gone after the first one.
            let _ = begun.send(());
        };
        let keep = move || keep(channel, &begun);
        let thread = thread::Builder::new().name("keeper".into()).spawn(keep).context("a thread")?;
        match wait.recv_timeout(LIMIT) {
            Ok(()) => Ok(Self { thread }),
            Err(_) if thread.is_finished() => bail!("the keeper has ended: {:?}", thread.join()),
            Err(_) => bail!("QEMU makes no checkpoint"),
        }
    }

    /// Ends the series.
    pub(super) fn finish(self, vm: &Vm) -> Result<()> {
        vm.monitor.end_colo()?;
        let end = Instant::now() + LIMIT;
        while !self.thread.is_finished() {
            if Instant::now() >= end {
                bail!("QEMU does not end its checkpoints");
            }
            thread::sleep(Duration::from_millis(2));
        }
        // How it ended does not matter any more: the channel was cut.
        drop(self.thread.join());
        Ok(())
    }
}

fn keep(channel: Channel, begun: &dyn Fn()) -> Result<(), MigrateError> {
    let mut sink = Nowhere;
    let options = DestinationOptions { colo: true, ..DestinationOptions::default() };
    let base = Destination::new(&mut sink, channel, &Handle::new()).options(options).run()?;
    let mut checkpoints = base.into_checkpoints()?;
    checkpoints.begin()?;
    while checkpoints.wait_request(None)? == NextCheckpoint::Requested {
        begun();
        checkpoints.reply()?;
        checkpoints.receive(&mut sink, Some(LIMIT))?;
        checkpoints.loaded()?;
    }
    Ok(())
}

/// Takes all pages, and has none.
struct Nowhere;

impl PageSink for Nowhere {
    fn begin(&mut self, _: &StreamSetup) -> Result<(), PageError> {
        Ok(())
    }

    fn put_pages(&mut self, _: usize, _: PageNumber, _: &[IoSlice<'_>]) -> Result<(), PageError> {
        Ok(())
    }

    fn put_zero(&mut self, _: usize, _: PageRange) -> Result<(), PageError> {
        Ok(())
    }

    fn read_back(&mut self, _: usize, _: PageNumber, _: &mut [u8; PAGE_LEN]) -> Result<(), PageError> {
        Err("nothing was kept".into())
    }
}
