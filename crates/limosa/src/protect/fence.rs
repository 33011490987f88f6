//! Fencing: the old VM is refused, or off, before another one continues.
//!
//! Law: **at most one side runs the VM.** The user says that the VM is off, or gives a command that makes sure of it;
//! or everything by which it reaches the world refuses it: the gates of its networks and the servers of its disks.
//!
//! Law: **a failover that is refused leaves the VM alone.** All are asked before the first of them is told.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};
use limosa_protect::find_uncovered;
use limosa_protect::gate::{GateFence, fence_gate, query_gate};
use limosa_qemu::{
    DroppedDisk, bring_overlays, check_bringable_overlays, check_droppable_disks, drop_disks_after, find_unfenced_disks,
};
use limosa_snapshot::Manifest;

use super::gate::ANSWER_WITHIN;

/// Has a command make sure that the protected VM is off.
pub(super) fn run_command(command: &OsStr) -> anyhow::Result<()> {
    let ended = Command::new("sh").arg("-c").arg(command).status().context("cannot run the fence command")?;
    if !ended.success() {
        let command = command.to_string_lossy();
        bail!("`{command}`, the fence command, failed ({ended}): the protected VM may still run");
    }
    Ok(())
}

/// Everything that keeps the VM of a checkpoint from the world.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fence<'a> {
    /// The control sockets of gates.
    pub(super) gates: &'a [PathBuf],
    /// The control sockets of servers of disks; `None`: its disks are not looked at.
    pub(super) disk_servers: Option<&'a [PathBuf]>,
    /// The VM is known to be off.
    pub(super) is_off: bool,
}

impl Fence<'_> {
    /// Asks everything that fences the VM of a checkpoint, and brings its disks to it, whether it would. Nothing
    /// changes: the VM may be healthy.
    ///
    /// # Errors
    /// The VM is not known to be off, and not everything would refuse it; a disk cannot be brought to the checkpoint; a
    /// gate or a server does not answer.
    pub(super) fn look(self, manifest: &Manifest) -> anyhow::Result<()> {
        if let (Some([]), [disk, ..]) = (self.disk_servers, manifest.protected_disks.as_slice()) {
            bail!(
                "the checkpoint has the disk {} ({}), which the server at {} served: give --disk-server, or --disks ignore",
                disk.device,
                disk.path.display(),
                disk.control.display()
            );
        }
        // First what no fence would help with.
        if let Some(servers) = self.disk_servers {
            let epoch = manifest.checkpoint.unwrap_or(0);
            check_bringable_overlays(&manifest.overlaid_disks, epoch)?;
            check_droppable_disks(&manifest.protected_disks, epoch, servers)?;
        }
        self.check(manifest)?;
        for gate in self.gates {
            self.check_gate(gate, query_gate(gate, ANSWER_WITHIN, manifest.protection.unwrap_or_default())?)?;
        }
        Ok(())
    }

    /// Fences the VM of a checkpoint and brings its disks to it. Returns what refuses the VM, for people.
    ///
    /// # Errors
    /// As of [`look`](Self::look): nothing has changed then. A gate or a server fails.
    pub(super) fn close(self, manifest: &Manifest) -> anyhow::Result<Vec<String>> {
        self.look(manifest)?;
        let mut closed = Vec::new();
        if let Err(error) = self.fence(manifest, &mut closed) {
            if closed.is_empty() {
                return Err(error);
            }
            // A fence is not taken back: another failover may rely on it.
            return Err(
                error.context(format!("repeat the failover: the VM is refused already by {}", closed.join(", ")))
            );
        }
        Ok(closed)
    }

    /// Has everything refuse the VM, which is then in `closed`. The disks come last, as nothing takes their drop back.
    fn fence(self, manifest: &Manifest, closed: &mut Vec<String>) -> anyhow::Result<()> {
        let epoch = manifest.checkpoint.unwrap_or(0);
        for gate in self.gates {
            let fenced = fence_gate(gate, ANSWER_WITHIN, manifest.protection.unwrap_or_default(), epoch)?;
            self.check_gate(gate, fenced)?;
            if let GateFence::Refused(process) = fenced {
                closed.push(format!("the gate at {}{}", gate.display(), processes(process.as_slice())));
            }
        }
        if let Some(servers) = self.disk_servers {
            bring_overlays(&manifest.overlaid_disks, epoch)?;
            let dropped = drop_disks_after(&manifest.protected_disks, epoch, servers, !self.is_off)?;
            closed.extend(dropped.iter().map(server_line));
        }
        Ok(())
    }

    /// Checks that everything will refuse a VM that is not known to be off.
    fn check(self, manifest: &Manifest) -> anyhow::Result<()> {
        if self.is_off {
            return Ok(());
        }
        let mut missing: Vec<String> = find_uncovered(manifest, self.gates).iter().map(ToString::to_string).collect();
        match self.disk_servers {
            Some(servers) => missing.extend(
                (find_unfenced_disks(&manifest.protected_disks, servers).iter())
                    .map(|device| format!("the server of the disk {device} could not tell it from its survivor")),
            ),
            None if !manifest.protected_disks.is_empty() => missing.push("its disks are not looked at".into()),
            None => {}
        }
        if missing.is_empty() {
            return Ok(());
        }
        bail!(
            "the protected VM may still run, and not everything would refuse it: {}; give --fence COMMAND, or --fenced if \
             it is off, or the --gate of each of its networks",
            missing.join("; ")
        );
    }

    /// Checks that a gate refuses a VM that is not known to be off.
    fn check_gate(self, gate: &Path, fenced: GateFence) -> anyhow::Result<()> {
        let place = gate.display();
        match fenced {
            GateFence::Refused(_) => Ok(()),
            _ if self.is_off => Ok(()),
            GateFence::Unidentified => {
                bail!("the gate at {place} cannot tell the protected VM from its survivor; say --fenced if it is off")
            }
            _ => bail!(
                "the gate at {place} has not held output of this protection, or was started since; say --fenced if the \
                 protected VM is off"
            ),
        }
    }
}

fn server_line(disk: &DroppedDisk) -> String {
    format!("the server of the disk {}{}", disk.device, processes(&disk.refused))
}

/// The processes that are refused, for people.
fn processes(pids: &[u32]) -> String {
    let names: Vec<String> = pids.iter().map(ToString::to_string).collect();
    if names.is_empty() { String::new() } else { format!(" (process {} is refused)", names.join(", ")) }
}
