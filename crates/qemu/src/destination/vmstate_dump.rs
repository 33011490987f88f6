//! The device sections that a QEMU program reads, from its own list: `-dump-vmstate`.
//!
//! The program is run with an empty machine (`-machine none`), without configuration files and devices, and ends by
//! itself once it has written the list. The list has one entry for each type of device whose section is declared with
//! the type; sections that a machine registers in other ways (`timer`, `cpu`, `PCIBUS`, ...) are not in it.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde::Deserialize;

use crate::program::{self, Ended};
use crate::qmp::Version;

/// Longest list that is read: 64 MiB. That of QEMU 10.0 has 0.8 MB.
const LIST_LIMIT: usize = 64 << 20;
/// How long the program may take; it takes 0.2 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why a program's list could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VmstateDumpError {
    /// It cannot be run, or its output cannot be read.
    #[error("cannot run {}", program.display())]
    Run {
        /// The program.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It does not do what QEMU does.
    #[error("{} {what}; name the program that the destination runs", program.display())]
    NotQemu {
        /// The program.
        program: PathBuf,
        /// The reason.
        what: String,
    },
}

/// The versions of one section that a program reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Versions {
    /// The oldest.
    pub(super) oldest: u32,
    /// The newest, which is the one it writes.
    pub(super) newest: u32,
}

/// The sections that a program declares with its types of devices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmstateDump {
    /// By type: the section's name and versions.
    kinds: HashMap<String, (String, Versions)>,
    /// By the section's name: the widest range of versions over all types that write it.
    names: HashMap<String, Versions>,
    /// By the section's name: the subsections that any of these types knows.
    subsections: HashMap<String, HashSet<String>>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "Description")]
    description: Option<Handler>,
}

#[derive(Deserialize)]
struct Handler {
    name: String,
    version_id: u32,
    minimum_version_id: u32,
    #[serde(rename = "Subsections", default)]
    subsections: Vec<Subsection>,
}

#[derive(Deserialize)]
struct Subsection {
    name: String,
}

impl VmstateDump {
    /// Runs the program and reads its list, if it is of this version.
    ///
    /// # Errors
    /// It cannot be run, is another version, or prints no list.
    pub fn of(program: &Path, version: Version) -> Result<Self, VmstateDumpError> {
        let said = run(program, &["--version"])?;
        let said = String::from_utf8_lossy(&said);
        let first = said.lines().next().unwrap_or_default();
        let number = version.to_string();
        // The number is followed by a blank and the package, a suffix, or nothing.
        let same = first.split_ascii_whitespace().any(|word| word == number);
        if !same {
            let what = format!("is not the QEMU {number} that the destination runs (it says {first:?})");
            return Err(VmstateDumpError::NotQemu { program: program.to_path_buf(), what });
        }
        let options =
            ["-machine", "none", "-nodefaults", "-no-user-config", "-display", "none", "-dump-vmstate", "/dev/stdout"];
        Self::parse(&run(program, &options)?)
            .map_err(|what| VmstateDumpError::NotQemu { program: program.to_path_buf(), what })
    }

    /// Reads a list.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let entries: HashMap<String, Entry> =
            serde_json::from_slice(json).map_err(|error| format!("prints no list of device sections ({error})"))?;
        let mut dump = Self::default();
        for (kind, entry) in entries {
            let Some(handler) = entry.description else { continue };
            let versions = Versions { oldest: handler.minimum_version_id, newest: handler.version_id };
            let widest = dump.names.entry(handler.name.clone()).or_insert(versions);
            widest.oldest = widest.oldest.min(versions.oldest);
            widest.newest = widest.newest.max(versions.newest);
            let known = dump.subsections.entry(handler.name.clone()).or_default();
            known.extend(handler.subsections.into_iter().map(|subsection| subsection.name));
            dump.kinds.insert(kind, (handler.name, versions));
        }
        if dump.kinds.is_empty() {
            return Err("has no list of device sections".to_owned());
        }
        Ok(dump)
    }

    /// Name and versions of the section that a type of device has.
    pub(super) fn section_of(&self, kind: &str) -> Option<(&str, Versions)> {
        self.kinds.get(kind).map(|(name, versions)| (name.as_str(), *versions))
    }

    /// Whether a section of this name knows a subsection of that name; `None` if no type has such a section.
    pub(super) fn knows_subsection(&self, section: &str, subsection: &str) -> Option<bool> {
        self.subsections.get(section).map(|known| known.contains(subsection))
    }

    /// The versions in which any type of device writes a section of this name.
    pub(super) fn versions_of(&self, name: &str) -> Option<Versions> {
        self.names.get(name).copied()
    }
}

/// Runs the program to its end and returns what it printed.
fn run(path: &Path, arguments: &[&str]) -> Result<Vec<u8>, VmstateDumpError> {
    let not_qemu = |what: String| VmstateDumpError::NotQemu { program: path.to_path_buf(), what };
    let mut text = Vec::new();
    let ended = program::run(Command::new(path).args(arguments).stdin(Stdio::null()), PATIENCE, |piece| {
        text.extend_from_slice(piece);
        if text.len() > LIST_LIMIT { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match ended {
        Err(error) if error.kind() == io::ErrorKind::TimedOut => {
            let waited = PATIENCE.as_secs();
            Err(not_qemu(format!("does not end within {waited} s when it is asked for its list")))
        }
        Err(source) => Err(VmstateDumpError::Run { program: path.to_path_buf(), source }),
        Ok(Ended::Enough) => Err(not_qemu("prints more than any QEMU does".to_owned())),
        Ok(Ended::Itself(..)) if text.is_empty() => Err(not_qemu("prints nothing".to_owned())),
        Ok(Ended::Itself(..)) => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_versions_are_read_and_types_without_a_section_left_out() {
        let list = br#"{"vmschkmachine":{"Name":"none"},
            "virtio-net-device":{"Name":"virtio-net-device","version_id":11,"minimum_version_id":10,
                "Description":{"name":"virtio-net","version_id":11,"minimum_version_id":10,"Fields":[{"field":"x"}]}},
            "a":{"Description":{"name":"same","version_id":2,"minimum_version_id":2,"Subsections":[{"name":"same/x"}]}},
            "b":{"Description":{"name":"same","version_id":4,"minimum_version_id":3}}}"#;
        let dump = VmstateDump::parse(list).unwrap();
        let versions = Versions { oldest: 10, newest: 11 };
        assert_eq!(dump.section_of("virtio-net-device"), Some(("virtio-net", versions)));
        assert_eq!(dump.versions_of("virtio-net"), Some(versions));
        assert_eq!(dump.versions_of("same"), Some(Versions { oldest: 2, newest: 4 }));
        assert_eq!(dump.section_of("vmschkmachine"), None);
        assert_eq!(dump.knows_subsection("same", "same/x"), Some(true));
        assert_eq!(dump.knows_subsection("same", "same/y"), Some(false));
        assert_eq!(dump.knows_subsection("timer", "timer/x"), None);
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["", "[]", "{}", "{\"a\":{\"Description\":{\"name\":\"x\",\"version_id\":-1}}}"] {
            assert!(VmstateDump::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    #[test]
    fn programs_that_are_no_qemu_are_distinguished() {
        let version = Version::new(10, 0, 2);
        let error = |program: &str| VmstateDump::of(Path::new(program), version).unwrap_err().to_string();
        assert!(error("/nonexistent/qemu").contains("cannot run /nonexistent/qemu"));
        assert!(error("test").contains("prints nothing"), "{}", error("test"));
        assert!(error("echo").contains("is not the QEMU 10.0.2"), "{}", error("echo"));
    }
}
