//! Disk images as qemu-img sees them.

use std::ops::ControlFlow;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::program::{self, Ended};

/// How long a look at an image may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest line of a map that is looked at; names of files are in them.
const LINE_LIMIT: usize = 64 << 10;

/// Who else may have an image open that is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    /// A QEMU may.
    Allowed,
    /// No other process: the file of an image that is being written does not show all writes yet.
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
    // One extent a line; the map of a large disk has many, and the first of its own decides.
    let (mut line, mut own) = (Vec::new(), false);
    let ended = program::run(&mut command, PATIENCE, |piece| {
        for &byte in piece {
            match byte {
                b'\n' => own |= is_own(&std::mem::take(&mut line)),
                _ if line.len() < LINE_LIMIT => line.push(byte),
                _ => {}
            }
        }
        if own { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match ended.map_err(|error| format!("qemu-img cannot be run: {error}"))? {
        Ended::Enough => Ok(true),
        Ended::Itself(status, _) if status.success() => Ok(own || is_own(&line)),
        Ended::Itself(_, said) => Err(said),
    }
}

/// Whether this line of the map is of an extent that the image itself has.
fn is_own(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    let line = line.strip_prefix(b"[").unwrap_or(line);
    let line = line.strip_suffix(b"]").unwrap_or(line);
    let extent: Value = serde_json::from_slice(line.strip_suffix(b",").unwrap_or(line)).unwrap_or_default();
    let own = extent.get("depth").and_then(Value::as_u64) == Some(0);
    own && extent.get("present").and_then(Value::as_bool) != Some(false)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};

    use super::*;

    #[test]
    fn the_lines_of_a_map_are_told_apart() {
        assert!(is_own(br#"[{ "start": 0, "length": 65536, "depth": 0, "present": true, "zero": false},"#));
        assert!(is_own(br#"{ "start": 0, "length": 65536, "depth": 0}]"#));
        assert!(!is_own(br#"{ "start": 0, "length": 65536, "depth": 0, "present": false, "zero": true}]"#));
        assert!(!is_own(br#"[{ "start": 0, "length": 65536, "depth": 1, "present": true, "zero": false}]"#));
        assert!(!is_own(b"[]") && !is_own(b"") && !is_own(b"\xff"));
    }

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
