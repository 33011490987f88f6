//! One node of QEMU's block layer as a command line describes it, in JSON or as a list of keys.
//!
//! An overlay is put over a node by making the node the overlay's backing image, as it is described: its driver, its
//! options and its references to the images below it stay. Only its name and how a guest's requests are treated go
//! up to the overlay.

use limosa_qemu::command_line::Properties;
use serde_json::{Map, Value};

use super::frozen::Layer;

/// Block drivers whose node is a file or a device of the host itself.
const PROTOCOLS: [&str; 3] = ["file", "host_device", "host_cdrom"];
/// Keys that are about a node's place in the graph and the requests that come to it, not about its image.
const UPPER: [&str; 4] = ["node-name", "discard", "detect-zeroes", "auto-read-only"];
/// Keys that hold for an overlay as they do for what is below it.
const BOTH: [&str; 2] = ["cache", "force-share"];
/// Keys of a file node that a node above it decides.
const OPENING: [&str; 2] = ["read-only", "auto-read-only"];
/// Block drivers whose image is on another host or behind another process: no file is named.
const REMOTE: [&str; 12] = [
    "nbd",
    "rbd",
    "iscsi",
    "nfs",
    "ssh",
    "gluster",
    "nvme",
    "nvme-io_uring",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "virtio-blk-vfio-pci",
    "vitastor",
];
/// Drivers that change requests on their way to a node below, and have no image of their own.
const FILTERS: [&str; 8] = [
    "throttle",
    "copy-on-read",
    "copy-before-write",
    "blkdebug",
    "blkverify",
    "blklogwrites",
    "compress",
    "preallocate",
];
/// Keys that show a node only a part of its image, or another one than its file says.
const PARTIAL: [&str; 2] = ["offset", "size"];

/// A node that a `-blockdev` describes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Node(Properties);

/// A file that a description names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedFile {
    /// Its name on the command line.
    pub(super) name: String,
    /// Whether nothing writes to it.
    pub(super) is_read_only: bool,
    /// Whether it is the node's own file: by itself, or the one below its format.
    pub(super) is_nodes_own: bool,
}

impl Node {
    /// Reads a `-drive`, which may leave out its driver.
    pub(super) fn of_drive(list: Properties) -> Self {
        Self(list)
    }

    /// The name of its driver.
    pub(super) fn driver(&self) -> &str {
        self.0.get("driver").unwrap_or_default()
    }

    /// Whether it rules out an image below its own.
    pub(super) fn has_no_backing(&self) -> bool {
        match self.0.json() {
            Some(object) => object.get("backing") == Some(&Value::Null),
            None => self.0.get("backing") == Some(""),
        }
    }

    /// Reads the value of a `-blockdev`; `None` if it cannot be understood.
    pub(super) fn read(value: &str) -> Option<Self> {
        let list = Properties::parse(value, "driver");
        list.get("driver").is_some().then_some(Self(list))
    }

    pub(super) fn to_option(&self) -> String {
        self.0.to_option()
    }

    /// Its name in the graph.
    pub(super) fn name(&self) -> &str {
        self.0.get("node-name").unwrap_or_default()
    }

    /// The node that it names as its file, if it does not describe it itself.
    pub(super) fn file_node(&self) -> Option<&str> {
        match self.0.json() {
            Some(object) => object.get("file").and_then(Value::as_str),
            None => self.0.get("file"),
        }
    }

    /// Whether it is a file or device of the host itself.
    pub(super) fn is_protocol(&self) -> bool {
        self.0.get("driver").is_some_and(|driver| PROTOCOLS.contains(&driver))
    }

    /// Whether it only passes requests on.
    pub(super) fn is_filter(&self) -> bool {
        self.0.get("driver").is_some_and(|driver| FILTERS.contains(&driver))
    }

    /// Whether nothing is written through it.
    pub(super) fn is_read_only(&self) -> bool {
        self.0.is_on("read-only")
    }

    /// The nodes that it names as its backing image, at any depth.
    pub(super) fn backing_nodes(&self) -> Vec<&str> {
        fn within<'a>(object: &'a Map<String, Value>, depth: usize, found: &mut Vec<&'a str>) {
            for (key, value) in object {
                match value {
                    Value::String(name) if key == "backing" => found.push(name),
                    Value::Object(below) if depth < DEPTH => within(below, depth + 1, found),
                    _ => {}
                }
            }
        }
        let mut found = Vec::new();
        match self.0.json() {
            Some(object) => within(object, 0, &mut found),
            None => {
                let is_backing = |key: &str| key.rsplit('.').next() == Some("backing");
                found.extend(self.0.iter().filter(|(key, _)| is_backing(key)).map(|(_, name)| name));
            }
        }
        found
    }

    /// A key by which only a part of the image is the disk.
    pub(super) fn partial_key(&self) -> Option<&'static str> {
        PARTIAL.into_iter().find(|key| self.0.get(key).is_some_and(|value| value != "0"))
    }

    /// All files that it names, at any depth.
    pub(super) fn files(&self) -> Vec<NamedFile> {
        let mut found = Vec::new();
        match self.0.json() {
            Some(object) => files_of(object, false, 0, &mut found),
            None => {
                for (key, name) in self.0.iter().filter(|(key, _)| is_file_key(key)) {
                    // What is read-only above is read-only below.
                    let above = key.match_indices('.').filter_map(|(at, _)| key.get(..at));
                    let mut places: Vec<_> = above.map(|place| format!("{place}.read-only")).collect();
                    places.insert(0, "read-only".to_owned());
                    // QEMU opens backing images read-only, unless it is said otherwise.
                    let said = places.iter().rev().find_map(|place| self.0.get(place).map(|_| self.0.is_on(place)));
                    let is_read_only = said.unwrap_or_else(|| key.split('.').any(|part| part == "backing"));
                    let is_nodes_own = key == "filename" || key == "file.filename";
                    found.push(NamedFile { name: name.to_owned(), is_read_only, is_nodes_own });
                }
                let is_driver = |key: &str| key.rsplit('.').next() == Some("driver");
                if self.0.iter().any(|(key, driver)| is_driver(key) && REMOTE.contains(&driver)) {
                    let name = self.to_option();
                    found.push(NamedFile { name, is_read_only: self.is_read_only(), is_nodes_own: false });
                }
            }
        }
        found
    }

    /// Makes it read-only.
    pub(super) fn set_read_only(&mut self) {
        match self.0.json_mut() {
            Some(object) => {
                object.insert("read-only".to_owned(), Value::Bool(true));
                object.remove("auto-read-only");
            }
            None => self.0.set("read-only", "on"),
        }
    }

    /// This node, read-only and under another name, to stand below an overlay.
    pub(super) fn lowered(&self, name: &str) -> Self {
        let mut lower = Self(match self.0.json() {
            Some(object) => {
                let lower = object.iter().filter(|(key, _)| !UPPER.contains(&key.as_str()));
                let mut lower: Map<_, _> = lower.map(|(key, value)| (key.clone(), value.clone())).collect();
                if let Some(Value::Object(file)) = lower.get_mut("file") {
                    OPENING.iter().for_each(|key| drop(file.remove(*key)));
                }
                lower.into()
            }
            None => {
                let opens_file = |key: &str| key.strip_prefix("file.").is_some_and(|key| OPENING.contains(&key));
                let mut lower = Properties::default();
                for (key, value) in self.0.iter().filter(|(key, _)| !is_of(key, &UPPER) && !opens_file(key)) {
                    lower.set(key, value);
                }
                lower
            }
        });
        lower.0.set("node-name", name);
        lower.set_read_only();
        lower
    }

    /// An overlay in the file `file`, under this node's own name, over the node `below`.
    pub(super) fn overlay(&self, file: &str, below: &str) -> Self {
        let is_kept = |key: &str| is_of(key, &UPPER) || is_of(key, &BOTH);
        Self(self.image_over("qcow2", [("driver", "file"), ("filename", file)], below, &is_kept))
    }

    /// A frozen image that was put over this node since, read-only, under the name `name` and over the node `below`.
    pub(super) fn between(&self, image: &Layer, name: &str, below: &str) -> Self {
        let protocol = if image.is_device { "host_device" } else { "file" };
        let file = [("driver", protocol), ("filename", &image.path.to_string_lossy())];
        let mut node = Self(self.image_over(&image.format, file, below, &|key| is_of(key, &BOTH)));
        node.0.set("node-name", name);
        node.set_read_only();
        node
    }

    /// An image of this format in this file, over the node `below`, with the keys of this node that are kept.
    fn image_over(
        &self,
        format: &str,
        file: [(&str, &str); 2],
        below: &str,
        is_kept: &dyn Fn(&str) -> bool,
    ) -> Properties {
        let Some(object) = self.0.json() else {
            let mut image = Properties::default();
            image.set("driver", format);
            self.0.iter().filter(|(key, _)| is_kept(key)).for_each(|(key, value)| image.set(key, value));
            file.iter().for_each(|(key, value)| image.set(&format!("file.{key}"), value));
            image.set("backing", below);
            return image;
        };
        let kept = object.iter().filter(|(key, _)| is_kept(key));
        let mut image: Map<_, _> = kept.map(|(key, value)| (key.clone(), value.clone())).collect();
        image.insert("driver".to_owned(), format.into());
        image.insert(
            "file".to_owned(),
            Value::Object(file.map(|(key, value)| (key.to_owned(), value.into())).into_iter().collect()),
        );
        image.insert("backing".to_owned(), below.into());
        image.into()
    }
}

/// Whether the first part of a key is one of these.
fn is_of(key: &str, keys: &[&str]) -> bool {
    key.split('.').next().is_some_and(|first| keys.contains(&first))
}

/// Keys whose value is a file, a device or a directory of the host, in any driver.
fn is_file_key(key: &str) -> bool {
    matches!(key.rsplit('.').next(), Some("filename" | "dir" | "path")) && !key.split('.').any(|part| part == "server")
}

/// Deeper descriptions than any chain of images has are not read.
const DEPTH: usize = 200;

fn files_of(object: &Map<String, Value>, is_read_only: bool, depth: usize, found: &mut Vec<NamedFile>) {
    let is_read_only = object.get("read-only").and_then(Value::as_bool).unwrap_or(is_read_only);
    if object.get("driver").and_then(Value::as_str).is_some_and(|driver| REMOTE.contains(&driver)) {
        let name = Value::Object(object.clone()).to_string();
        found.push(NamedFile { name, is_read_only, is_nodes_own: false });
    }
    for (key, value) in object {
        match value {
            Value::String(name) if is_file_key(key) => {
                found.push(NamedFile { name: name.clone(), is_read_only, is_nodes_own: depth == 0 });
            }
            Value::Object(below) if depth < DEPTH && key != "server" => {
                let before = found.len();
                // QEMU opens backing images read-only.
                files_of(below, is_read_only || key == "backing", depth + 1, found);
                if depth == 0 && key == "file" && below.contains_key("filename") {
                    found.iter_mut().skip(before).for_each(|file| file.is_nodes_own = true);
                }
            }
            Value::Array(list) if depth < DEPTH => {
                for below in list.iter().filter_map(Value::as_object) {
                    files_of(below, is_read_only, depth + 1, found);
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn behind(value: &str) -> [String; 2] {
        let node = Node::read(value).unwrap();
        [node.lowered("frozen"), node.overlay("{dir}/disk0.qcow2", "frozen")].map(|node| node.to_option())
    }

    #[test]
    fn a_node_becomes_the_backing_image_of_its_overlay_and_keeps_its_options() {
        let libvirt = r#"{"driver":"qcow2","node-name":"d","discard":"unmap","cache":{"direct":true},
            "file":{"driver":"file","filename":"/srv/d","auto-read-only":true},"backing":null}"#;
        let found = behind(libvirt).map(|text| serde_json::from_str::<Value>(&text).unwrap());
        assert_eq!(
            found,
            [
                json!({
                    "driver": "qcow2", "node-name": "frozen", "cache": { "direct": true }, "read-only": true, "backing": null,
                    "file": { "driver": "file", "filename": "/srv/d" }
                }),
                json!({
                    "driver": "qcow2", "node-name": "d", "discard": "unmap", "cache": { "direct": true }, "backing": "frozen",
                    "file": { "driver": "file", "filename": "{dir}/disk0.qcow2" }
                })
            ]
        );
        assert_eq!(
            behind("driver=qcow2,node-name=d,file=f,backing=base,cache.direct=on,read-only=off"),
            [
                "driver=qcow2,file=f,backing=base,cache.direct=on,read-only=on,node-name=frozen",
                "driver=qcow2,node-name=d,cache.direct=on,file.driver=file,file.filename={dir}/disk0.qcow2,backing=frozen"
            ]
        );
        assert_eq!(
            behind("qcow2,node-name=d,file.driver=file,file.filename=/srv/d,file.read-only=off"),
            [
                "driver=qcow2,file.driver=file,file.filename=/srv/d,node-name=frozen,read-only=on",
                "driver=qcow2,node-name=d,file.driver=file,file.filename={dir}/disk0.qcow2,backing=frozen"
            ]
        );
    }

    #[test]
    fn files_are_found_at_any_depth_with_what_is_written_to_them() {
        let quorum = r#"{"driver":"quorum","vote-threshold":1,"children":[{"driver":"raw","file":{"driver":"file","filename":"/a"}},
            {"driver":"raw","read-only":true,"file":{"driver":"file","filename":"/b"}}]}"#;
        let list = "driver=qcow2,file.driver=file,file.filename=/a,backing.file.driver=file,backing.file.filename=/b";
        for value in [quorum, list] {
            let files = Node::read(value).unwrap().files();
            let found: Vec<_> = files.iter().map(|file| (file.name.as_str(), file.is_read_only)).collect();
            assert_eq!(found, [("/a", false), ("/b", true)], "{value}");
        }
        let remote = Node::read("driver=raw,file.driver=nbd,file.server.type=unix,file.server.path=/s").unwrap();
        assert_eq!(remote.files().len(), 1);
        let remote =
            Node::read(r#"{"driver":"raw","read-only":true,"file":{"driver":"rbd","pool":"p","image":"i"}}"#).unwrap();
        assert!(remote.files()[0].is_read_only);
    }
}
