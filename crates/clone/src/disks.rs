//! The disks of a command line behind overlays: a pure rewriting.
//!
//! The law: **no two clones write to one file.** A disk that the snapshot froze gets an overlay of the clone's own; any other
//! that is writable and is not the clone's own by its name is refused.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use limosa_qemu::command_line::{CommandOption, Properties, options, program};
use serde_json::{Map, Value};

/// A writable disk as the snapshot recorded it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FrozenDisk {
    /// The file or block device.
    pub path: PathBuf,
    /// Its format, by QEMU's name.
    pub format: String,
}

/// An overlay to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverlayPlan {
    /// The frozen disk below it.
    pub disk: FrozenDisk,
    /// Its file name, in the clone's directory.
    pub name: String,
}

/// Options that take a disk image by its path alone.
const PLAIN: [&str; 6] = ["hda", "hdb", "hdc", "hdd", "sd", "mtdblock"];
/// Block drivers whose node is the file itself.
const PROTOCOLS: [&str; 2] = ["file", "host_device"];

/// Names for the overlays of these disks: `disk0.qcow2`, ...
pub(crate) fn plan(disks: &[FrozenDisk]) -> Vec<OverlayPlan> {
    let planned = disks.iter().enumerate();
    planned.map(|(at, disk)| OverlayPlan { disk: disk.clone(), name: format!("disk{at}.qcow2") }).collect()
}

/// Puts overlays, in `folder`, in the place of frozen disks. `same` says whether a name is that of a file.
///
/// # Errors
/// A frozen disk that the command line does not name, or names in a way that is not understood; another writable one whose name
/// is not below `folder`.
pub(crate) fn rewrite(
    words: &[OsString],
    overlays: &[OverlayPlan],
    folder: &Path,
    same: &dyn Fn(&str, &Path) -> bool,
) -> Result<Vec<OsString>, String> {
    let mut rewriting = Rewriting { overlays, folder, same, used: vec![false; overlays.len()], nodes: Vec::new() };
    let mut rewritten = words.to_vec();
    let all = options(words);
    if all.iter().any(|option| option.name == "snapshot") {
        return Err("-snapshot: clones have overlays of their own; leave it out".to_owned());
    }
    for option in &all {
        if let Some(value) = rewriting.option(option)?
            && let Some(word) = rewritten.get_mut(option.at)
        {
            *word = value.into();
        }
    }
    rewriting.positional(words, &all, &mut rewritten);
    // Formats are nodes of their own, which may stand before the files that they are of.
    for option in all.iter().filter(|option| option.name == "blockdev") {
        let Some(word) = rewritten.get_mut(option.at) else { continue };
        let value = word.to_str().unwrap_or_default().to_owned();
        if let Some(value) = rewriting.format_node(&value) {
            *word = value.into();
        }
    }
    if let Some(node) = rewriting.nodes.iter().find(|node| !node.has_format) {
        return Err(format!(
            "-blockdev node-name={}: a frozen disk that a device uses without a format node; add one with driver=raw",
            node.name
        ));
    }
    match rewriting.used.iter().zip(overlays).find(|(used, _)| !**used) {
        Some((_, overlay)) => Err(format!(
            "the snapshot froze the disk {}, which the command line does not name",
            overlay.disk.path.display()
        )),
        None => Ok(rewritten),
    }
}

/// A file node that became an overlay's.
struct FileNode {
    name: String,
    has_format: bool,
}

struct Rewriting<'a> {
    overlays: &'a [OverlayPlan],
    folder: &'a Path,
    same: &'a dyn Fn(&str, &Path) -> bool,
    used: Vec<bool>,
    nodes: Vec<FileNode>,
}

impl Rewriting<'_> {
    /// The overlay's path for a frozen disk's name.
    fn overlay(&mut self, name: &str) -> Option<String> {
        let at = self.overlays.iter().position(|overlay| (self.same)(name, &overlay.disk.path))?;
        *self.used.get_mut(at)? = true;
        Some(self.folder.join(&self.overlays.get(at)?.name).to_string_lossy().into_owned())
    }

    /// A writable image that is no frozen disk must be the clone's own.
    fn own(&self, option: &str, name: &str) -> Result<(), String> {
        if name.is_empty() || Path::new(name).starts_with(self.folder) {
            return Ok(());
        }
        Err(format!(
            "{option} {name}: all clones would write to it, and the snapshot did not freeze it; make it read-only, or give \
             each clone its own ({{dir}}, {{name}})"
        ))
    }

    fn option(&mut self, option: &CommandOption<'_>) -> Result<Option<String>, String> {
        match option.name {
            name if PLAIN.contains(&name) => match self.overlay(option.value) {
                Some(overlay) => Ok(Some(overlay)),
                None => self.own(&format!("-{name}"), option.value).map(|()| None),
            },
            "drive" => self.drive(option.value),
            "blockdev" => self.file_node(option.value),
            _ => Ok(None),
        }
    }

    fn drive(&mut self, value: &str) -> Result<Option<String>, String> {
        let mut list = Properties::read(value, "file");
        let name = list.get("file").unwrap_or_default().to_owned();
        if let Some(overlay) = self.overlay(&name) {
            list.set("file", &overlay);
            list.set("format", "qcow2");
            return Ok(Some(list.to_option()));
        }
        let read_only = ["readonly", "read-only"].iter().any(|key| list.is_on(key))
            || list.get("media") == Some("cdrom")
            || list.is_on("snapshot");
        if !read_only {
            self.own("-drive", &name)?;
        }
        Ok(None)
    }

    /// A node of a file, by itself or inside a format's node.
    fn file_node(&mut self, value: &str) -> Result<Option<String>, String> {
        let mut list = Properties::read(value, "driver");
        if let Some(object) = list.json_mut() {
            let found = self.json_node(object)?;
            return Ok(found.then(|| list.to_option()));
        }
        for key in ["filename", "file.filename"] {
            let Some(name) = list.get(key).map(str::to_owned) else { continue };
            if let Some(overlay) = self.overlay(&name) {
                list.set(key, &overlay);
                if key == "filename" {
                    self.remember(list.get("node-name"));
                } else {
                    list.set("driver", "qcow2");
                }
                return Ok(Some(list.to_option()));
            }
            if !["read-only", "file.read-only"].iter().any(|key| list.is_on(key)) {
                self.own("-blockdev", &name)?;
            }
        }
        Ok(None)
    }

    fn json_node(&mut self, object: &mut Map<String, Value>) -> Result<bool, String> {
        let read_only = object.get("read-only") == Some(&Value::Bool(true));
        if let Some(name) = object.get("filename").and_then(Value::as_str).map(str::to_owned) {
            if let Some(overlay) = self.overlay(&name) {
                object.insert("filename".to_owned(), overlay.into());
                let node = object.get("node-name").and_then(Value::as_str).map(str::to_owned);
                self.remember(node.as_deref());
                return Ok(true);
            }
            if !read_only {
                self.own("-blockdev", &name)?;
            }
            return Ok(false);
        }
        let Some(Value::Object(file)) = object.get_mut("file") else { return Ok(false) };
        let known = self.nodes.len();
        if read_only {
            file.entry("read-only").or_insert(Value::Bool(true));
        }
        if !self.json_node(file)? {
            return Ok(false);
        }
        // The file is this node's alone.
        self.nodes.truncate(known);
        object.insert("driver".to_owned(), "qcow2".into());
        Ok(true)
    }

    fn remember(&mut self, node: Option<&str>) {
        self.nodes.push(FileNode { name: node.unwrap_or_default().to_owned(), has_format: false });
    }

    /// A node of a format over a file that is an overlay's now.
    fn format_node(&mut self, value: &str) -> Option<String> {
        let mut list = Properties::read(value, "driver");
        if list.get("driver").is_some_and(|driver| PROTOCOLS.contains(&driver)) {
            return None;
        }
        let file = list.get("file")?.to_owned();
        let node = self.nodes.iter_mut().find(|node| node.name == file)?;
        node.has_format = true;
        list.set("driver", "qcow2");
        Some(list.to_option())
    }

    /// Images that stand on the command line without an option.
    fn positional(&mut self, words: &[OsString], all: &[CommandOption<'_>], rewritten: &mut [OsString]) {
        for (at, word) in words.iter().enumerate().skip(program(words) + 1) {
            let Some(name) = word.to_str().filter(|name| !name.starts_with('-')) else { continue };
            if all.iter().any(|option| option.at == at) {
                continue;
            }
            if let Some(overlay) = self.overlay(name)
                && let Some(word) = rewritten.get_mut(at)
            {
                *word = overlay.into();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn disks() -> Vec<OverlayPlan> {
        let disk = |path: &str, format: &str| FrozenDisk { path: path.into(), format: format.into() };
        plan(&[disk("/srv/root.img", "raw"), disk("/srv/data.qcow2", "qcow2")])
    }

    fn run(line: &str, overlays: &[OverlayPlan]) -> Result<String, String> {
        let same = |name: &str, path: &Path| Path::new(name) == path;
        let found = rewrite(&words(line), overlays, Path::new("/c/1"), &same)?;
        Ok(found.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn every_way_to_name_a_disk_gets_its_overlay() {
        for (line, wanted) in [
            (
                "-drive file=/srv/root.img,format=raw,if=virtio -hdb /srv/data.qcow2",
                "-drive file=/c/1/disk0.qcow2,format=qcow2,if=virtio -hdb /c/1/disk1.qcow2",
            ),
            (
                "-blockdev driver=file,node-name=f,filename=/srv/root.img -blockdev driver=raw,node-name=r,file=f,discard=unmap \
                 -blockdev qcow2,node-name=d,file.driver=file,file.filename=/srv/data.qcow2",
                "-blockdev driver=file,node-name=f,filename=/c/1/disk0.qcow2 -blockdev driver=qcow2,node-name=r,file=f,discard=unmap \
                 -blockdev driver=qcow2,node-name=d,file.driver=file,file.filename=/c/1/disk1.qcow2",
            ),
            (
                // The format's node comes first.
                "-blockdev driver=raw,node-name=r,file=f -blockdev driver=file,node-name=f,filename=/srv/root.img /srv/data.qcow2",
                "-blockdev driver=qcow2,node-name=r,file=f -blockdev driver=file,node-name=f,filename=/c/1/disk0.qcow2 /c/1/disk1.qcow2",
            ),
            (
                r#"-blockdev {"driver":"raw","node-name":"r","file":{"driver":"file","filename":"/srv/root.img"}} -hda /srv/data.qcow2"#,
                r#"-blockdev {"driver":"qcow2","node-name":"r","file":{"driver":"file","filename":"/c/1/disk0.qcow2"}} -hda /c/1/disk1.qcow2"#,
            ),
        ] {
            assert_eq!(
                run(&format!("qemu-system-x86_64 -m 1G {line}"), &disks()).unwrap(),
                format!("qemu-system-x86_64 -m 1G {wanted}")
            );
        }
    }

    #[test]
    fn what_clones_would_share_is_refused_and_what_is_their_own_is_not() {
        for (line, named) in [
            ("-drive file=/srv/other,format=raw", "/srv/other"),
            ("-hda /srv/other", "/srv/other"),
            ("-blockdev driver=file,node-name=f,filename=/srv/other", "/srv/other"),
            (r#"-blockdev {"driver":"file","node-name":"f","filename":"/srv/other"}"#, "/srv/other"),
            ("-snapshot", "-snapshot"),
        ] {
            let refused = run(&format!("qemu-system-x86_64 {line}"), &[]).unwrap_err();
            assert!(refused.contains(named), "{line}: {refused}");
        }
        for line in [
            "-drive file=/srv/iso,media=cdrom -cdrom /srv/other.iso",
            "-drive file=/srv/base,format=raw,readonly=on",
            "-blockdev driver=file,node-name=f,filename=/srv/base,read-only=on",
            r#"-blockdev {"driver":"raw","read-only":true,"file":{"driver":"file","filename":"/srv/base"}}"#,
            "-drive file=/c/1/scratch,format=raw",
            "-drive if=none,id=empty",
        ] {
            assert!(run(&format!("qemu-system-x86_64 {line}"), &[]).is_ok(), "{line}");
        }
    }

    #[test]
    fn a_frozen_disk_that_is_not_named_or_has_no_format_is_refused() {
        let refused = run("qemu-system-x86_64 -hda /srv/root.img", &disks()).unwrap_err();
        assert!(refused.contains("/srv/data.qcow2"), "{refused}");
        let line = "qemu-system-x86_64 -hda /srv/data.qcow2 -blockdev driver=file,node-name=f,filename=/srv/root.img -device virtio-blk-pci,drive=f";
        let refused = run(line, &disks()).unwrap_err();
        assert!(refused.contains("node-name=f"), "{refused}");
    }

    proptest! {
        #[test]
        fn any_command_line_is_rewritten_or_refused(line in proptest::collection::vec("[-a-z0-9=,{}\":/.]{0,30}", 0..10)) {
            let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            let _ = rewrite(&line, &disks(), Path::new("/c/1"), &|name, path| Path::new(name) == path);
        }
    }
}
