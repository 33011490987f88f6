//! The parts of every job on the command line: a monitor, a control socket, signals, a bar.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use limosa_channel::Uri;
use limosa_control::{Commands, ControlSocket, JobKind};
use limosa_migrate::Handle;
use limosa_qemu::monitor::Monitor;
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp, QmpError, Version};
use limosa_qemu::{JobContext, SOCKET_PATH_MAX};

use crate::args::JobArgs;
use crate::bars::Bar;
use crate::holder::Holder;
use crate::remedy;
use crate::signals::SignalWatch;
use crate::usage::misused;
use limosa_console::say;

/// This program, for watchdogs: through /proc, so that it is this one even if its file was replaced meanwhile.
pub(crate) const THIS_PROGRAM: &str = "/proc/self/exe";

/// A QEMU greets its only client within this time, also on a busy host: it does so from a thread of its own.
const GREETED_WITHIN: Duration = Duration::from_secs(1);

/// Connects to QEMU's monitor.
pub(crate) fn connect(address: &MonitorAddress) -> anyhow::Result<Monitor> {
    let usual = Options::default();
    let qmp = match Qmp::connect(address, &Options { greeting_timeout: GREETED_WITHIN, ..usual.clone() }) {
        Err(QmpError::Busy { .. }) => {
            // A protection does not end by itself. To look for it takes as long as the machine has processes, so it is
            // not done for those that are greeted.
            if let Some(pid) = Holder::of(address).iter().find_map(Holder::protector) {
                bail!("the VM is protected by limosa protect (process {pid}), which holds {address}: end that first");
            }
            Qmp::connect(address, &usual)?
        }
        connected => connected?,
    };
    let package = &qmp.greeting().package;
    if qmp.version() == Version::new(0, 0, 0) && package.starts_with("limosa ") {
        bail!("{address} is a control socket of {package}, not the monitor of a QEMU (its -qmp socket)");
    }
    Ok(Monitor::new(qmp))
}

/// The handles that watch and steer a job while it runs.
pub(crate) struct JobHandles {
    pub(crate) engine: Handle,
    socket: Option<ControlSocket>,
    _signals: SignalWatch,
    _bar: Option<Bar>,
}

impl JobHandles {
    pub(crate) fn new(args: &JobArgs, job: JobKind, verb: &'static str, quiet: bool) -> anyhow::Result<Self> {
        let handles = Self::with_socket(args.steer.control.as_deref(), job, verb, quiet)?;
        handles.engine.control.set_max_bandwidth(args.steer.max_bandwidth);
        Ok(handles)
    }

    /// For a job without a QEMU monitor; `socket` is the path of its control socket.
    pub(crate) fn with_socket(
        socket: Option<&Path>,
        job: JobKind,
        verb: &'static str,
        quiet: bool,
    ) -> anyhow::Result<Self> {
        let engine = Handle::new();
        let socket = socket.map(|path| listen(path, job, &engine)).transpose()?;
        let bar = (!quiet).then(|| Bar::show(&engine.progress, verb));
        Self::of(engine, job, socket, bar)
    }

    /// For a job whose control socket has commands of its own, and that draws no bar.
    pub(crate) fn with_commands(
        socket: Option<&Path>,
        job: JobKind,
        commands: Arc<dyn Commands>,
    ) -> anyhow::Result<Self> {
        let engine = Handle::new();
        let listen = |path: &Path| {
            let socket = ControlSocket::listen_without_job(path, commands);
            socket.map_err(|error| remedy::without_control(path, &error))
        };
        let socket = socket.map(listen).transpose()?;
        if let Some(socket) = &socket {
            socket.set_job(job, &engine);
        }
        Self::of(engine, job, socket, None)
    }

    fn of(engine: Handle, job: JobKind, socket: Option<ControlSocket>, bar: Option<Bar>) -> anyhow::Result<Self> {
        let signals = SignalWatch::start(job, &engine)?;
        Ok(Self { engine, socket, _signals: signals, _bar: bar })
    }

    /// Publishes the address at which the job waits for its peer.
    pub(crate) fn set_listen_address(&self, uri: &Uri) {
        if let Some(socket) = &self.socket {
            socket.set_listen_address(uri);
        }
    }

    pub(crate) fn watch(&self) -> JobContext<'_> {
        let notice = &|line: &str| say!("limosa: {line}");
        JobContext::new(&self.engine, notice)
    }
}

/// Checks the address at which QEMU is to listen, where a mistake can be seen without it: a QEMU that cannot listen
/// there is lost.
pub(crate) fn check_listen(address: Option<&Uri>) -> anyhow::Result<()> {
    match address {
        None | Some(Uri::Tcp { .. }) => {}
        Some(Uri::Unix(path)) => {
            let path = std::path::absolute(path)?;
            if path.as_os_str().len() > SOCKET_PATH_MAX {
                misused(format_args!(
                    "--listen {}: the path of a socket has at most {SOCKET_PATH_MAX} bytes",
                    path.display()
                ));
            }
            if let Some(folder) = path.parent().filter(|folder| !folder.is_dir()) {
                bail!(
                    "--listen unix:{}: there is no directory {}; make it, for limosa and QEMU",
                    path.display(),
                    folder.display()
                );
            }
        }
        Some(other) => misused(format_args!("--listen {other}: must be unix:PATH or tcp:HOST:PORT")),
    }
    Ok(())
}

/// Opens the control socket at which programs watch and steer the job.
pub(crate) fn listen(path: &Path, job: JobKind, engine: &Handle) -> anyhow::Result<ControlSocket> {
    ControlSocket::listen(path, job, engine).map_err(|error| remedy::without_control(path, &error))
}
