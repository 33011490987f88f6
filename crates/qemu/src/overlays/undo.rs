//! The overlays of a protection that is over, while its QEMU runs: all are merged into the image, which takes the place
//! of the uppermost one.
//!
//! Laws: **the ledger says first that the image is the disk of no checkpoint any more**, as what is merged then belongs
//! to none; and **it is gone before the VM writes to the image itself.** So whoever finds it may merge the overlays
//! once more, when QEMU was killed meanwhile.

use std::io;
use std::path::Path;
use std::time::Instant;

use limosa_page::error_with_causes;
use uuid::Uuid;

use super::ledger::{ImageState, Ledger};
use super::{file, found, job_of, remove};
use crate::job_record::OverlayChain;
use crate::monitor::Monitor;
use crate::qmp::QmpError;

/// Merges and removes the overlays of a disk by `limit`. Otherwise returns what a person must know.
///
/// # Errors
/// The connection's; then QEMU has ended, or its overlays are as they were.
pub(crate) fn undo(
    monitor: &Monitor,
    chain: &OverlayChain,
    overlays: Uuid,
    limit: Instant,
) -> Result<Option<String>, QmpError> {
    let OverlayChain { device, base, image: name, nodes } = chain;
    let image = Path::new(name);
    monitor.cancel_job(&job_of(nodes), limit)?;
    let left = |why: String, epoch: u64| {
        let top = file(image, overlays, epoch);
        Ok(Some(format!(
            "the disk {device} continues in {}, over {name}, because {why}; QEMU's block-commit of node {nodes}{epoch} \
             to {base} merges them",
            top.display()
        )))
    };
    let mut epochs = opened(monitor, nodes)?;
    // From the top down: a node keeps those below it.
    while let Some(epoch) = epochs.pop() {
        let node = format!("{nodes}{epoch}");
        match monitor.remove_node(&node) {
            Ok(_) => continue,
            Err(in_use) if in_use.is_refusal() => {}
            Err(other) => return Err(other),
        }
        let cannot = |what: &str, error: io::Error| {
            format!("{} cannot be {what} ({})", Ledger::path(image).display(), error_with_causes(&error))
        };
        if let Err(error) = note_ending(image, overlays) {
            return left(cannot("written", error), epoch);
        }
        let mut unremoved = None;
        let mut may_end = || {
            unremoved = Ledger::remove(image, overlays).err();
            unremoved.is_none()
        };
        let merged = monitor.merge_overlay_then(&node, base, limit, &mut may_end);
        let may_have_ended = matches!(merged, Ok(true));
        let why = match merged {
            Ok(_) if unremoved.is_some() => unremoved.map(|error| cannot("removed", error)).unwrap_or_default(),
            Ok(true) => "merging them failed (QEMU's log says why)".to_owned(),
            Ok(false) => "merging them took too long".to_owned(),
            Err(error) if error.is_refusal() => error.to_string(),
            Err(other) => return Err(other),
        };
        // The graph says whether the image is in its place again.
        match monitor.remove_node(&node) {
            Ok(_) => {}
            Err(error) if error.is_refusal() => {
                // The overlay still covers what it has brought to the image, unless the VM may write to that.
                if !may_have_ended && let Err(error) = note_ending(image, overlays) {
                    tracing::warn!("{}", cannot("written", error));
                }
                return left(why, epoch);
            }
            Err(other) => return Err(other),
        }
    }
    // Nothing was put, or all of it is merged.
    let removed = Ledger::remove(image, overlays).and_then(|()| {
        let files = found(image, overlays)?;
        files.into_iter().try_for_each(|epoch| remove(image, overlays, epoch))
    });
    Ok(removed.err().map(|error| format!("cannot remove the overlays beside {name}, which hold nothing more: {error}")))
}

/// Notes that all overlays are being merged.
fn note_ending(image: &Path, overlays: Uuid) -> io::Result<()> {
    Ledger::new(overlays, ImageState::Ending).write(image)
}

/// The epochs whose overlays QEMU has opened, in order.
fn opened(monitor: &Monitor, nodes: &str) -> Result<Vec<u64>, QmpError> {
    let names = monitor.node_names()?;
    let mut epochs: Vec<u64> = names.iter().filter_map(|name| name.strip_prefix(nodes)?.parse().ok()).collect();
    epochs.sort_unstable();
    Ok(epochs)
}
