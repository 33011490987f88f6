//! The VM's disks: what a stored VM depends on besides its memory.
//!
//! `query-block` lists every block device front end with its top node, pflash of firmware variables included. Disks
//! that another process serves (vhost-user) are not in it: see [`super::Device::is_external_disk`].

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{Monitor, need_list};
use crate::file_identity::is_same_file;
use crate::qmp::QmpError;

/// A disk that is attached to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Disk {
    /// The drive's name (`-drive id=`), or the path of the device for one that was made with `-blockdev`.
    pub device: String,
    /// The name of the top node.
    pub node: String,
    /// QEMU's name for the file, unchanged.
    pub filename: String,
    /// The file at the protocol layer, if it is one of a host's file system. Absolute, where QEMU's directory is known.
    pub path: Option<PathBuf>,
    /// The format's name: `raw`, `qcow2`, ...
    pub format: String,
    /// Bytes that the guest sees.
    pub virtual_size: u64,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether QEMU goes past the host's page cache.
    pub direct: bool,
    /// Whether QEMU ignores the guest's flushes.
    pub no_flush: bool,
    /// The images that it stands on, the uppermost first; `None` for one that is no file of a host.
    pub backing: Vec<Option<PathBuf>>,
    /// The first option given to QEMU that is not part of the image file (`offset`, `data-file`, another backing
    /// file, ...).
    pub overriding_option: Option<String>,
}

/// A disk's file as it is on the host at this moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskFile {
    /// Bytes.
    pub size: u64,
    /// Last modification: seconds since 1970 and nanoseconds.
    pub modified: (i64, i64),
}

impl Disk {
    /// Looks at the file. `Ok(None)` if the disk has no file on a host.
    ///
    /// # Errors
    /// The kernel's, for example if limosa may not look or runs on another host.
    pub fn file(&self) -> io::Result<Option<DiskFile>> {
        let Some(path) = &self.path else { return Ok(None) };
        let found = std::fs::metadata(path)?;
        Ok(Some(DiskFile { size: found.len(), modified: (found.mtime(), found.mtime_nsec()) }))
    }

    /// The host's files that it stands on, the uppermost first. A filter above an image appears in QEMU's list with the
    /// image's own file, which comes once.
    pub fn lower_files(&self) -> impl Iterator<Item = &Path> {
        let mut last = self.path.as_deref();
        self.backing.iter().filter_map(Option::as_deref).filter(move |path| last.replace(path) != Some(path))
    }

    fn of(entry: &Value, directory: Option<&Path>) -> Option<Self> {
        let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let inserted = entry.get("inserted")?;
        let yes = |value: &Value, key: &str| value.get(key).and_then(Value::as_bool).unwrap_or(false);
        let name = text(entry, "device");
        let filename = text(inserted, "file");
        let image = inserted.get("image");
        let absolute = |path: PathBuf| match directory {
            Some(directory) => directory.join(path),
            None => path,
        };
        let mut backing = Vec::new();
        let mut below = image.and_then(|image| image.get("backing-image"));
        while let Some(image) = below {
            backing.push(host_path(&text(image, "filename")).map(absolute));
            below = image.get("backing-image");
        }
        let header = image.and_then(|image| host_path(image.get("full-backing-filename")?.as_str()?)).map(absolute);
        let cache = inserted.get("cache").unwrap_or(&Value::Null);
        let same_backing = match (&header, backing.first()) {
            // A header may name the file by a relative path, which QEMU does not shorten.
            (Some(header), Some(Some(first))) => is_same_file(header, first),
            (header, first) => header.is_none() && first.is_none_or(Option::is_none),
        };
        Some(Self {
            overriding_option: override_key(&filename, same_backing),
            writable: !yes(inserted, "ro"),
            direct: yes(cache, "direct"),
            no_flush: yes(cache, "no-flush"),
            backing,
            device: if name.is_empty() { text(entry, "qdev") } else { name },
            node: text(inserted, "node-name"),
            path: host_path(&filename).map(absolute),
            filename,
            format: text(inserted, "drv"),
            virtual_size: image.and_then(|image| image.get("virtual-size")?.as_u64()).unwrap_or_default(),
        })
    }
}

/// The host file that one of QEMU's file names means. Names with a protocol (`nbd://...`) mean none; a `json:` name
/// means the file at the end of its `file` keys.
fn host_path(filename: &str) -> Option<PathBuf> {
    if let Some(json) = filename.strip_prefix("json:") {
        let mut node: &Value = &serde_json::from_str(json).ok()?;
        loop {
            if let Some(next) = node.get("file").filter(|next| next.is_object()) {
                node = next;
                continue;
            }
            let driver = node.get("driver").and_then(Value::as_str)?;
            let local = matches!(driver, "file" | "host_device" | "host_cdrom");
            return node.get("filename").and_then(Value::as_str).filter(|_| local).map(PathBuf::from);
        }
    }
    let name = filename.strip_prefix("file:").unwrap_or(filename);
    // A protocol's name ends at the first colon, unless a slash comes before it.
    let before_slash = name.split('/').next().unwrap_or_default();
    let protocol = filename.len() == name.len() && before_slash.contains(':');
    (!name.is_empty() && !protocol).then(|| PathBuf::from(name))
}

/// Returns the first key of a `json:` name beyond a format and a file. QEMU uses such a name only where a plain one
/// would lead to something else. Overriding the backing file is nothing if the header names the same one
/// (`same_backing`).
fn override_key(filename: &str, same_backing: bool) -> Option<String> {
    let json = filename.strip_prefix("json:")?;
    let Ok(Value::Object(top)) = serde_json::from_str::<Value>(json) else { return Some("its name".to_owned()) };
    let plain = |key: &&String| matches!(key.as_str(), "driver" | "file") || key.as_str() == "backing" && same_backing;
    if let Some(key) = top.keys().find(|key| !plain(key)) {
        return Some(key.clone());
    }
    let file = top.get("file").and_then(Value::as_object);
    file.and_then(|file| file.keys().find(|key| !matches!(key.as_str(), "driver" | "filename"))).cloned()
}

impl Monitor {
    /// The writable disks, in QEMU's order.
    ///
    /// # Errors
    /// The connection's.
    pub fn disks(&self) -> Result<Vec<Disk>, QmpError> {
        let mut disks = self.all_disks()?;
        disks.retain(|disk| disk.writable);
        Ok(disks)
    }

    /// The disks, in QEMU's order.
    ///
    /// # Errors
    /// The connection's.
    pub fn all_disks(&self) -> Result<Vec<Disk>, QmpError> {
        const COMMAND: &str = "query-block";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        // Relative names are relative to the directory in which QEMU runs.
        let process = self.qmp().process();
        let directory = process.and_then(|process| std::fs::read_link(format!("/proc/{process}/cwd")).ok());
        Ok(need_list(COMMAND, &answer)?.iter().filter_map(|entry| Disk::of(entry, directory.as_deref())).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_files_are_told_from_other_protocols() {
        let path = |name: &str| host_path(name).map(|path| path.display().to_string());
        assert_eq!(path("/vm/disk.qcow2").as_deref(), Some("/vm/disk.qcow2"));
        assert_eq!(path("disk.raw").as_deref(), Some("disk.raw"));
        assert_eq!(path("/vm/a:b").as_deref(), Some("/vm/a:b"));
        assert_eq!(path("file:a:b").as_deref(), Some("a:b"));
        assert_eq!(path("nbd://host/export"), None);
        assert_eq!(path("nbd+unix:///x?socket=/s"), None);
        assert_eq!(path(""), None);
        let json = r#"json:{"driver": "qcow2", "lazy": true, "file": {"driver": "file", "filename": "/vm/d"}}"#;
        assert_eq!(path(json).as_deref(), Some("/vm/d"));
        assert_eq!(path(r#"json:{"driver": "nbd", "filename": "/vm/d"}"#), None);
        assert_eq!(path("json:{"), None);
    }

    #[test]
    fn a_name_that_tells_more_than_a_file_is_noticed() {
        let file = r#""driver": "raw", "file": {"driver": "file", "filename": "/d"}"#;
        assert_eq!(override_key("/d", false), None);
        assert_eq!(override_key(&format!("json:{{{file}}}"), false), None);
        assert_eq!(override_key(&format!(r#"json:{{"offset": 512, {file}}}"#), true).as_deref(), Some("offset"));
        let backing = format!(r#"json:{{"backing": {{{file}}}, {file}}}"#);
        assert_eq!(override_key(&backing, false).as_deref(), Some("backing"));
        assert_eq!(override_key(&backing, true), None);
        assert_eq!(override_key("json:{", true).as_deref(), Some("its name"));
        let nested = r#"json:{"driver": "qcow2", "file": {"driver": "raw", "file": {}}}"#;
        assert_eq!(override_key(nested, true).as_deref(), Some("file"));
    }
}
