//! The parts of every job on the command line: a monitor, a control socket, signals, a bar.

use std::path::Path;

use anyhow::Context;
use limosa_channel::Uri;
use limosa_migrate::{Control, ControlSocket, Job, Progress};
use limosa_qemu::Watch;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};

use crate::args::JobArgs;
use crate::bars::Bar;
use crate::signals::SignalWatch;
use limosa_console::say;

/// This program, for watchdogs: through /proc, so that it is this one even if its file was replaced meanwhile.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// Connects to QEMU's monitor.
pub(crate) fn connect(address: &MonitorAddress) -> anyhow::Result<Monitor> {
    Ok(Monitor::new(Qmp::connect(address, &Options::default())?))
}

/// The handles that watch and steer a job while it runs.
pub(crate) struct JobHandles {
    pub(crate) control: Control,
    pub(crate) progress: Progress,
    socket: Option<ControlSocket>,
    _signals: SignalWatch,
    _bar: Option<Bar>,
}

impl JobHandles {
    pub(crate) fn new(args: &JobArgs, job: Job, verb: &'static str, quiet: bool) -> anyhow::Result<Self> {
        let handles = Self::with_socket(args.steer.control.as_deref(), job, verb, quiet)?;
        handles.control.set_max_bandwidth(args.steer.max_bandwidth);
        Ok(handles)
    }

    /// For a job without a QEMU monitor; `socket` is the path of its control socket.
    pub(crate) fn with_socket(
        socket: Option<&Path>,
        job: Job,
        verb: &'static str,
        quiet: bool,
    ) -> anyhow::Result<Self> {
        let (control, progress) = (Control::new(), Progress::new());
        let socket = socket.map(|path| listen(path, job, &control, &progress)).transpose()?;
        let signals = SignalWatch::start(job, &control, &progress)?;
        let bar = (!quiet).then(|| Bar::show(&progress, verb));
        Ok(Self { control, progress, socket, _signals: signals, _bar: bar })
    }

    /// Says to programs where the job waits for its peer.
    pub(crate) fn set_listen_address(&self, uri: &Uri) {
        if let Some(socket) = &self.socket {
            socket.set_listen_address(uri);
        }
    }

    pub(crate) fn watch(&self) -> Watch<'_> {
        let notice = &|line: &str| say!("limosa: {line}");
        Watch { control: &self.control, progress: &self.progress, notice, not_converging: None }
    }
}

/// Listens where programs are to watch and steer the job.
pub(crate) fn listen(path: &Path, job: Job, control: &Control, progress: &Progress) -> anyhow::Result<ControlSocket> {
    ControlSocket::listen(path, job, control.clone(), progress.clone())
        .with_context(|| format!("cannot listen at {} (--control)", path.display()))
}
