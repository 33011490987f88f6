//! The servers.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::client::{Front, Load};
use crate::process::Process;

pub(crate) const LIMOSA: &str = "limosa";
/// limosa without a journal: a server that is killed loses what clients have not flushed.
pub(super) const UNRECORDED: &str = "limosa, no journal";
/// limosa with a log beside the image, for a disk whose writes belong to checkpoints.
pub(super) const EPOCHS: &str = "limosa, epochs";
pub(crate) const QEMU: &str = "qemu-storage-daemon";
pub(super) const NBDKIT: &str = "nbdkit";

/// The name of the export.
pub(crate) const EXPORT: &str = "disk";

/// The address of a server.
#[derive(Debug, Clone)]
pub(crate) enum Address {
    Unix(PathBuf),
    /// A port of the loopback address.
    Tcp(u16),
    /// The socket of a device of this number of queues.
    Device(PathBuf, u16),
}

/// The control socket of the server of a file.
pub(super) fn control(file: &Path) -> PathBuf {
    file.with_file_name("control")
}

/// The disk that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disk {
    /// A raw file with contents.
    Raw,
    /// A qcow2 image with all contents.
    Qcow2,
    /// A new qcow2 image over a raw one, for each run.
    Overlay,
    /// QEMU's and nbdkit's null devices; of limosa, which has none, an empty raw file.
    Null,
}

/// A server that can be started.
#[derive(Debug, Clone)]
pub(super) struct Server {
    name: &'static str,
    program: PathBuf,
}

/// Returns those that are installed.
pub(super) fn all(limosa: &Path) -> Vec<Server> {
    let found = |program: &Path| Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    [(LIMOSA, limosa), (UNRECORDED, limosa), (EPOCHS, limosa), (QEMU, Path::new(QEMU)), (NBDKIT, Path::new(NBDKIT))]
        .into_iter()
        .filter(|(_, program)| found(program))
        .map(|(name, program)| Server { name, program: program.to_owned() })
        .collect()
}

impl Server {
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// nbdkit has no plugin that writes qcow2 images, and no devices. Only new clusters are in the journal.
    pub(super) fn serves(&self, disk: Disk, load: &Load) -> bool {
        match self.name {
            UNRECORDED => disk == Disk::Overlay,
            EPOCHS => load.write && load.front == Front::Unix && load.connections == 1 && disk != Disk::Null,
            NBDKIT => matches!(disk, Disk::Raw | Disk::Null) && load.front != Front::Device,
            _ => true,
        }
    }

    /// Starts it.
    pub(super) fn start(&self, disk: Disk, file: &Path, address: &Address) -> Result<Process> {
        let text = |path: &Path| path.to_str().map(str::to_owned).context("a folder whose path is UTF-8");
        // What a server that was ended has left there is of an image that is no more.
        let journal = file.with_file_name("journal");
        let _ = std::fs::remove_dir_all(&journal);
        let journal = if self.name == UNRECORDED { "off".to_owned() } else { text(&journal)? };
        let (control, folder) = (control(file), text(file.parent().context("a file in a folder")?)?);
        let _ = std::fs::remove_file(&control);
        let (file, size) = (text(file)?, std::fs::metadata(file)?.len());
        let format = if matches!(disk, Disk::Raw | Disk::Null) { "raw" } else { "qcow2" };
        let mut command = Command::new(&self.program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        match self.name {
            LIMOSA | UNRECORDED | EPOCHS => {
                command.args(["serve", "-f", format, &file, "--name", EXPORT, "--journal", &journal]);
                if self.name == EPOCHS {
                    command.arg("--control").arg(&control).args(["--allow-dir", &folder]);
                }
                match address {
                    Address::Unix(socket) => command.args(["--nbd", &format!("unix:{}", text(socket)?)]),
                    Address::Tcp(port) => command.args(["--nbd", &format!("tcp:127.0.0.1:{port}")]),
                    Address::Device(socket, queues) => {
                        command.args(["--vhost-user-blk", &text(socket)?, "--queues", &queues.to_string()])
                    }
                }
            }
            NBDKIT => {
                match address {
                    Address::Unix(socket) => command.args(["-f", "-U", &text(socket)?]),
                    Address::Tcp(port) => command.args(["-f", "-i", "127.0.0.1", "-p", &port.to_string()]),
                    Address::Device(..) => bail!("nbdkit has no devices"),
                };
                match disk {
                    Disk::Null => command.args(["null", &size.to_string()]),
                    _ => command.args(["file", &file]),
                }
            }
            _ => {
                let server_address = address;
                let address = match address {
                    Address::Unix(socket) | Address::Device(socket, _) => {
                        format!("addr.type=unix,addr.path={}", text(socket)?)
                    }
                    Address::Tcp(port) => format!("addr.type=inet,addr.host=127.0.0.1,addr.port={port}"),
                };
                let nodes = match disk {
                    Disk::Null => vec![format!("driver=null-co,node-name=disk,size={size},read-zeroes=off")],
                    _ => vec![
                        format!("driver=file,node-name=file,filename={file},aio=io_uring,discard=unmap"),
                        format!("driver={format},node-name=disk,file=file,discard=unmap"),
                    ],
                };
                nodes.iter().for_each(|node| _ = command.args(["--blockdev", node]));
                if let Address::Device(_, queues) = server_address {
                    let how = format!("{address},num-queues={queues},writable=on");
                    command.args(["--export", &format!("type=vhost-user-blk,id=export,node-name=disk,{how}")])
                } else {
                    command.args([
                        "--nbd-server",
                        &format!("{address},max-connections=0"),
                        "--export",
                        &format!("type=nbd,id=export,node-name=disk,name={EXPORT},writable=on"),
                    ])
                }
            }
        };
        Process::start(command, None)
    }
}
