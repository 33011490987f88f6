//! The machine's memory as a command line describes it, and the options that rule out a mapped file.

use super::BlockPlace;
use crate::command_line::{CommandOption, Properties, parse_size};

/// The size that QEMU gives a machine without `-m`.
const DEFAULT_MEMORY: u64 = 128 << 20;

/// Properties of a memory backend that a mapped file cannot have.
const UNMAPPABLE: [(&str, &str); 5] = [
    ("host-nodes", "memory of chosen host NUMA nodes"),
    ("policy", "a host NUMA policy"),
    ("pmem", "persistent memory"),
    ("hugetlbsize", "huge pages"),
    ("align", "an alignment of its own"),
];

/// The source of a command line's main memory.
#[derive(Debug)]
pub(super) enum Main<'a> {
    /// From the memory backends of NUMA nodes.
    Nodes,
    /// From a memory backend that has a RAM block's name.
    Named(&'a Object),
    /// From a memory backend that gets this block's name.
    Renamed(&'a Object, &'a BlockPlace),
    /// From the machine itself; this block is its memory.
    Own(&'a BlockPlace),
}

/// The machine's memory as a command line describes it.
#[derive(Debug, Default)]
pub(super) struct Machine {
    pub(super) backend: Option<String>,
    pub(super) memory: Option<u64>,
    pub(super) objects: Vec<Object>,
    /// Ids of the memory backends that NUMA nodes and devices use.
    used: Vec<String>,
    /// Whether NUMA nodes have memory backends.
    has_node_memory: bool,
}

/// A memory backend.
#[derive(Debug)]
pub(super) struct Object {
    pub(super) id: String,
    pub(super) properties: Properties,
    /// Index of its argument.
    pub(super) at: usize,
}

impl Machine {
    /// Reads an option of the machine's memory.
    pub(super) fn read_memory(&mut self, option: &CommandOption<'_>) -> Result<(), String> {
        match option.name {
            "machine" | "M" => {
                let list = Properties::parse(option.value, "type");
                if let Some(id) = list.get("memory-backend") {
                    self.backend = Some(id.to_owned());
                }
            }
            "m" => {
                let list = Properties::parse(option.value, "size");
                if let Some(text) = list.get("size") {
                    let memory = parse_size(text, 1 << 20).ok_or_else(|| format!("-m {}: not a size", option.value))?;
                    self.memory = Some(memory);
                }
            }
            "object" => {
                let properties = Properties::parse(option.value, "qom-type");
                if properties.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-")) {
                    let id = properties.get("id").unwrap_or_default().to_owned();
                    self.objects.push(Object { id, properties, at: option.index });
                }
            }
            "numa" | "device" => {
                let list = Properties::parse(option.value, if option.name == "numa" { "type" } else { "driver" });
                if let Some(id) = list.get("memdev") {
                    self.used.push(id.to_owned());
                    self.has_node_memory |= option.name == "numa";
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Reads an option, and refuses one that memory mapped from a file cannot have.
    pub(super) fn read(&mut self, option: &CommandOption<'_>, notices: &mut Vec<String>) -> Result<(), String> {
        self.read_memory(option)?;
        match option.name {
            "machine" | "M" => {
                let list = Properties::parse(option.value, "type");
                if let Some(key) = list.first_of(&["confidential-guest-support", "memory-encryption"]) {
                    return Err(format!("-machine {key}: encrypted memory cannot be mapped from a file"));
                }
            }
            "object" => {
                let list = Properties::parse(option.value, "qom-type");
                if let Some(kind) = list.get("qom-type").filter(|kind| kind.contains("vhost-user")) {
                    return Err(format!("-object {kind}: it needs memory with share=on"));
                }
            }
            "numa" if Properties::parse(option.value, "type").get("mem").is_some() => {
                return Err("-numa with mem=: only nodes with memdev= can be mapped".to_owned());
            }
            "netdev" if Properties::parse(option.value, "type").get("type") == Some("vhost-user") => {
                return Err("-netdev vhost-user: it needs memory with share=on".to_owned());
            }
            "mem-path" => return Err("-mem-path: the guest's memory would be another file".to_owned()),
            "mem-prealloc" => return Err("-mem-prealloc: preallocated memory shares nothing".to_owned()),
            "overcommit" if Properties::parse(option.value, "").is_on("mem-lock") => {
                return Err("-overcommit mem-lock=on: locked memory shares nothing".to_owned());
            }
            "readconfig" => return Err("-readconfig: memory that is configured there is not seen".to_owned()),
            "device" => return device(option, notices),
            _ => {}
        }
        Ok(())
    }

    /// Whether no option is about memory.
    pub(super) fn says_nothing(&self) -> bool {
        self.memory.is_none() && self.backend.is_none() && self.objects.is_empty() && !self.has_node_memory
    }

    /// Returns the source of the main memory.
    pub(super) fn main<'a>(&'a self, blocks: &'a [BlockPlace]) -> Result<Main<'a>, String> {
        let is_named = |object: &Object| blocks.iter().any(|place| object.is_of(&place.name));
        let Some(id) = &self.backend else {
            if self.has_node_memory {
                return Ok(Main::Nodes);
            }
            let memory = self.memory.unwrap_or(DEFAULT_MEMORY);
            return self.block_of_size(blocks, memory).map(Main::Own);
        };
        let object = self.objects.iter().find(|object| object.id == *id);
        let object = object.ok_or_else(|| format!("-machine memory-backend={id} names no memory backend"))?;
        if is_named(object) {
            return Ok(Main::Named(object));
        }
        if self.used.contains(id) {
            return Err(format!("memory backend {id} is used by -numa or -device too: {}", Self::wanted(blocks)));
        }
        let memory = object.size().ok_or_else(|| format!("memory backend {id} has no size"))?;
        self.block_of_size(blocks, memory).map(|place| Main::Renamed(object, place))
    }

    /// Returns the one block that no memory backend of the command line makes.
    fn block_of_size<'a>(&self, blocks: &'a [BlockPlace], memory: u64) -> Result<&'a BlockPlace, String> {
        let is_made = |place: &&BlockPlace| self.objects.iter().any(|object| object.is_of(&place.name));
        let left: Vec<_> = blocks.iter().filter(|place| !is_made(place)).collect();
        match left.as_slice() {
            [place] if place.length == memory => Ok(place),
            [place] => Err(format!(
                "the machine has {} MiB of memory, but RAM block {} of the snapshot has {} MiB: give -m {2}M",
                memory >> 20,
                place.name,
                place.length >> 20
            )),
            _ => Err(format!("which memory is the machine's own is not clear: {}", Self::wanted(blocks))),
        }
    }

    /// Names the memory backends that make the blocks of a snapshot.
    fn wanted(blocks: &[BlockPlace]) -> String {
        let made =
            blocks.iter().map(|place| format!("-object memory-backend-ram,id={},size={}", place.id(), place.length));
        format!("the snapshot's RAM blocks are made by {}", made.collect::<Vec<_>>().join(" "))
    }
}

fn device(option: &CommandOption<'_>, notices: &mut Vec<String>) -> Result<(), String> {
    let list = Properties::parse(option.value, "driver");
    let kind = list.get("driver").unwrap_or_default();
    if kind.starts_with("vfio-") || kind.starts_with("vhost-vdpa") {
        return Err(format!("-device {kind}: an assigned host device pins all memory, so nothing would be shared"));
    }
    if kind.starts_with("virtio-mem") {
        return Err(format!("-device {kind}: its memory is plugged and unplugged, and cannot be mapped from a file"));
    }
    if kind.starts_with("vhost-user-") || kind == "x-pci-proxy-dev" {
        return Err(format!("-device {kind}: it needs memory with share=on"));
    }
    if kind.starts_with("virtio-balloon") {
        notices.push(format!("{kind}: memory that is mapped from a snapshot cannot be given back to the host"));
    }
    Ok(())
}

impl Object {
    /// Whether the RAM block of this name is its memory. Old machine types name the block by the object's whole path.
    pub(super) fn is_of(&self, block: &str) -> bool {
        block == self.id || block.strip_prefix("/objects/") == Some(&self.id)
    }

    pub(super) fn size(&self) -> Option<u64> {
        self.properties.get("size").and_then(|text| parse_size(text, 1))
    }

    pub(super) fn check(&self, place: &BlockPlace) -> Result<(), String> {
        let (id, list) = (&self.id, &self.properties);
        if self.size() != Some(place.length) {
            return Err(format!(
                "memory backend {id} has size={}, RAM block {} of the snapshot {} bytes",
                list.get("size").unwrap_or("?"),
                place.name,
                place.length
            ));
        }
        // A backend of type memfd is shared unless it says otherwise; only devices in other processes need that, and
        // they are refused.
        if list.is_on("share") {
            return Err(format!(
                "memory backend {id} has share=on (needed for vhost-user and virtiofs): what the guest writes would reach the file"
            ));
        }
        if list.is_on("hugetlb") {
            return Err(format!("memory backend {id} has hugetlb=on: huge pages cannot be mapped from a file"));
        }
        if list.is_on("prealloc") {
            return Err(format!("memory backend {id} has prealloc=on: preallocated memory shares nothing"));
        }
        // One that is opened read-only is the memory of another snapshot: the command line is that of a clone.
        if list.get("qom-type") == Some("memory-backend-file") && !list.is_on("readonly") {
            return Err(format!("memory backend {id} is a file already ({})", list.get("mem-path").unwrap_or("?")));
        }
        match UNMAPPABLE.iter().find(|(key, _)| list.get(key).is_some()) {
            Some((key, what)) => Err(format!("memory backend {id} has {key}=: {what} cannot be mapped from a file")),
            None => Ok(()),
        }
    }
}
