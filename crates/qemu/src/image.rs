//! Disk images as qemu-img sees them.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

/// Who else may have an image open that is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// A QEMU may.
    Allowed,
    /// Nobody: of an image that somebody writes to, what is written already is not the whole truth.
    Refused,
}

/// Whether a qcow2 image holds anything itself, as opposed to what it stands on; the reason if that cannot be told.
pub(crate) fn has_data(image: &Path, others: Others) -> Result<bool, String> {
    let mut command = Command::new("qemu-img");
    command.arg("map");
    if others == Others::Allowed {
        command.arg("-U");
    }
    command.args(["-f", "qcow2", "--output=json"]).arg(image).stdin(Stdio::null());
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

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};

    use super::*;

    #[test]
    fn an_image_that_somebody_writes_to_is_not_judged_by_what_is_written_already() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("overlay");
        let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").status();
        if made.is_err() {
            eprintln!("skipped: there is no qemu-img");
            return;
        }
        assert_eq!(has_data(&image, Others::Refused), Ok(false));
        let mut writer = Command::new("qemu-io");
        writer.args(["-f", "qcow2"]).arg(&image).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut writer = writer.spawn().unwrap();
        let mut commands = writer.stdin.take().unwrap();
        commands.write_all(b"length\n").unwrap();
        let mut answer = String::new();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut answer).unwrap();
        assert_eq!(has_data(&image, Others::Allowed), Ok(false));
        assert!(has_data(&image, Others::Refused).unwrap_err().contains("lock"));
        drop(commands);
        writer.wait().unwrap();
        assert_eq!(has_data(&image, Others::Refused), Ok(false));
    }
}
