//! The servers.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::Disk;
use crate::process::Process;

pub(super) const LIMOSA: &str = "limosa";
pub(super) const QEMU: &str = "qemu-storage-daemon";
pub(super) const NBDKIT: &str = "nbdkit";

/// The name of the export.
pub(super) const EXPORT: &str = "disk";

/// A server that can be started.
#[derive(Debug, Clone)]
pub(super) struct Server {
    name: &'static str,
    program: PathBuf,
}

/// Returns those that are installed.
pub(super) fn all(limosa: &Path) -> Vec<Server> {
    let found = |program: &Path| Command::new(program).arg("--version").stdout(Stdio::null()).status().is_ok();
    [(LIMOSA, limosa), (QEMU, Path::new(QEMU)), (NBDKIT, Path::new(NBDKIT))]
        .into_iter()
        .filter(|(_, program)| found(program))
        .map(|(name, program)| Server { name, program: program.to_owned() })
        .collect()
}

impl Server {
    pub(super) fn name(&self) -> &'static str {
        self.name
    }

    /// nbdkit has no plugin that writes qcow2 images.
    pub(super) fn serves(&self, disk: Disk) -> bool {
        self.name != NBDKIT || disk == Disk::Raw
    }

    /// Starts it.
    pub(super) fn start(&self, disk: Disk, file: &Path, socket: &Path) -> Result<Process> {
        let _ = std::fs::remove_file(socket);
        let text = |path: &Path| path.to_str().map(str::to_owned).context("a folder whose path is UTF-8");
        let (file, socket) = (text(file)?, text(socket)?);
        let format = if disk == Disk::Raw { "raw" } else { "qcow2" };
        let mut command = Command::new(&self.program);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        match self.name {
            LIMOSA => {
                command.args(["serve", "-f", format, &file, "--name", EXPORT, "--nbd", &format!("unix:{socket}")])
            }
            NBDKIT => command.args(["-f", "-U", &socket, "file", &file]),
            _ => command.args([
                "--blockdev",
                &format!("driver=file,node-name=file,filename={file},aio=io_uring,discard=unmap"),
                "--blockdev",
                &format!("driver={format},node-name=disk,file=file,discard=unmap"),
                "--nbd-server",
                &format!("addr.type=unix,addr.path={socket},max-connections=0"),
                "--export",
                &format!("type=nbd,id=export,node-name=disk,name={EXPORT},writable=on"),
            ]),
        };
        Process::start(command, None)
    }
}
