//! Disk images as qemu-img sees them.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

/// Whether a qcow2 image holds anything itself, as opposed to what it stands on; the reason if that cannot be told.
pub(crate) fn has_data(image: &Path) -> Result<bool, String> {
    // -U: a QEMU may have it open.
    let mut command = Command::new("qemu-img");
    command.args(["map", "-U", "-f", "qcow2", "--output=json"]).arg(image).stdin(Stdio::null());
    let answer = command.output().map_err(|error| format!("qemu-img cannot be started: {error}"))?;
    if !answer.status.success() {
        return Err(String::from_utf8_lossy(&answer.stderr).trim().replace('\n', " "));
    }
    let map: Vec<Value> = serde_json::from_slice(&answer.stdout).map_err(|error| error.to_string())?;
    Ok(map.iter().any(|extent| {
        let own = extent.get("depth").and_then(Value::as_u64) == Some(0);
        own && extent.get("present").and_then(Value::as_bool) != Some(false)
    }))
}
