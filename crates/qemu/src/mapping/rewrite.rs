//! From a QEMU's command line to one whose memory is a snapshot.
//!
//! The law: **what cannot be mapped is refused by name, before a process is started.** Options that ask for memory of another
//! kind are never dropped in silence.

use std::ffi::OsString;

use limosa_snapshot::Snapshot;
use limosa_stream::mapped_ram::MappedBlock;
use serde_json::json;

use crate::command_line::{CommandOption, Properties, escaped, options, size};

/// A RAM block and its place in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPlace {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    /// Where its first byte lies in the file.
    pub offset: u64,
}

impl BlockPlace {
    /// All blocks of a snapshot.
    #[must_use]
    pub fn of(snapshot: &Snapshot) -> Vec<Self> {
        let blocks = snapshot.layout().blocks.iter();
        let place = |block: &MappedBlock| Self {
            name: block.block.name.clone(),
            length: block.block.used_length,
            offset: block.pages_offset,
        };
        blocks.map(place).collect()
    }

    /// Whether it looks like memory that a command line gives to the guest, and not like that of a device: `pc.ram`, the id of
    /// a memory backend; not `pc.bios`, `0000:00:02.0/vga.vram`.
    #[must_use]
    pub fn is_guest_memory(&self) -> bool {
        let name = self.name.strip_prefix("/objects/").unwrap_or(&self.name);
        let of_device = ["vram", "rom", "bios"].iter().any(|end| name.ends_with(end));
        !name.contains('/') && !name.contains("flash") && !of_device
    }

    /// The option value of a memory backend that maps the block, for `-object`.
    #[must_use]
    pub fn backend_option(&self, file: &str) -> String {
        let id = self.name.strip_prefix("/objects/").unwrap_or(&self.name);
        format!(
            "memory-backend-file,id={},size={},mem-path={},offset={},share=off,readonly=on,rom=off",
            escaped(id),
            self.length,
            escaped(file),
            self.offset
        )
    }
}

/// A command line whose memory is a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedCommandLine {
    /// The words, the program first.
    pub words: Vec<OsString>,
    /// The RAM blocks that are mapped.
    pub blocks: Vec<String>,
    /// What a person should know.
    pub notices: Vec<String>,
}

/// The size that QEMU gives a machine without `-m`.
const DEFAULT_MEMORY: u64 = 128 << 20;

/// Properties of a memory backend that ask for something that a mapped file does not have.
const UNMAPPABLE: [(&str, &str); 5] = [
    ("host-nodes", "memory of chosen host NUMA nodes"),
    ("policy", "a host NUMA policy"),
    ("pmem", "persistent memory"),
    ("hugetlbsize", "huge pages"),
    ("align", "an alignment of its own"),
];

/// Properties that the mapped backend takes over.
const KEPT: [&str; 2] = ["dump", "merge"];

/// Rewrites a command line (the program first) so that the guest's RAM blocks are mapped from `file`.
///
/// `file` is what QEMU is to open, for example `/srv/vm.limosa`, or `/dev/fd/7`.
///
/// # Errors
/// What in the command line, or in the snapshot, speaks against it.
pub fn map_memory(words: &[OsString], blocks: &[BlockPlace], file: &str) -> Result<MappedCommandLine, String> {
    let options = options(words);
    let mut machine = Machine::default();
    let mut notices = Vec::new();
    for option in &options {
        machine.read(option, &mut notices)?;
    }
    let mut rewritten = words.to_vec();
    let mut mapped = Vec::new();
    for object in &machine.objects {
        let Some(place) = blocks.iter().find(|place| object.is_of(&place.name)) else { continue };
        object.check(place)?;
        if let Some(word) = rewritten.get_mut(object.at) {
            *word = backend(&object.id, place, file, Some(&object.properties)).into();
        }
        mapped.push(place.name.clone());
    }
    match &machine.backend {
        Some(id) => {
            let main = machine.objects.iter().find(|object| object.id == *id);
            let main = main.ok_or_else(|| format!("-machine memory-backend={id} names no memory backend"))?;
            if let (Some(asked), Some(has)) = (machine.memory, main.size())
                && asked != has
            {
                return Err(format!("-m asks for {} MiB and memory backend {id} has {} MiB", asked >> 20, has >> 20));
            }
        }
        None if machine.has_node_memory => {}
        None => {
            let place = main_block(&machine, blocks)?;
            rewritten.push("-object".into());
            rewritten.push(backend(&place.name, place, file, None).into());
            rewritten.push("-machine".into());
            rewritten.push(format!("memory-backend={}", place.name).into());
            mapped.push(place.name.clone());
        }
    }
    if mapped.is_empty() {
        let known: Vec<_> = blocks.iter().map(|place| place.name.as_str()).collect();
        return Err(format!("no memory backend has the name of a RAM block of the snapshot ({})", known.join(", ")));
    }
    Ok(MappedCommandLine { words: rewritten, blocks: mapped, notices })
}

/// What a command line says of the machine's memory.
#[derive(Debug, Default)]
struct Machine {
    backend: Option<String>,
    memory: Option<u64>,
    objects: Vec<Object>,
    /// Whether NUMA nodes have memory backends.
    has_node_memory: bool,
}

/// A memory backend.
#[derive(Debug)]
struct Object {
    id: String,
    properties: Properties,
    /// The index of its word.
    at: usize,
}

impl Machine {
    fn read(&mut self, option: &CommandOption<'_>, notices: &mut Vec<String>) -> Result<(), String> {
        match option.name {
            "machine" | "M" => {
                let list = Properties::read(option.value, "type");
                if let Some(id) = list.get("memory-backend") {
                    self.backend = Some(id.to_owned());
                }
                if let Some(key) = list.first_of(&["confidential-guest-support", "memory-encryption"]) {
                    return Err(format!("-machine {key}: encrypted memory cannot be mapped from a file"));
                }
            }
            "m" => {
                let list = Properties::read(option.value, "size");
                if let Some(text) = list.get("size") {
                    let memory = size(text, 1 << 20).ok_or_else(|| format!("-m {}: not a size", option.value))?;
                    self.memory = Some(memory);
                }
            }
            "object" => {
                let properties = Properties::read(option.value, "qom-type");
                if properties.get("qom-type").is_some_and(|kind| kind.starts_with("memory-backend-")) {
                    let id = properties.get("id").unwrap_or_default().to_owned();
                    self.objects.push(Object { id, properties, at: option.at });
                }
            }
            "numa" => {
                let list = Properties::read(option.value, "type");
                if list.get("mem").is_some() {
                    return Err("-numa with mem=: only nodes with memdev= can be mapped".to_owned());
                }
                self.has_node_memory |= list.get("memdev").is_some();
            }
            "mem-path" => return Err("-mem-path: the guest's memory is to be another file".to_owned()),
            "mem-prealloc" => return Err("-mem-prealloc: preallocated memory shares nothing".to_owned()),
            "overcommit" if Properties::read(option.value, "").is_on("mem-lock") => {
                return Err("-overcommit mem-lock=on: locked memory shares nothing".to_owned());
            }
            "readconfig" => return Err("-readconfig: memory that is configured there is not seen".to_owned()),
            "device" => return device(option, notices),
            _ => {}
        }
        Ok(())
    }
}

fn device(option: &CommandOption<'_>, notices: &mut Vec<String>) -> Result<(), String> {
    let list = Properties::read(option.value, "driver");
    let kind = list.get("driver").unwrap_or_default();
    if kind.starts_with("vfio-") || kind.starts_with("vhost-vdpa") {
        return Err(format!("-device {kind}: an assigned host device pins all memory, so nothing would be shared"));
    }
    if kind.starts_with("virtio-mem") {
        return Err(format!("-device {kind}: its memory is plugged and unplugged, and cannot be mapped from a file"));
    }
    if kind.starts_with("vhost-user-") {
        return Err(format!("-device {kind}: it needs memory with share=on"));
    }
    if kind.starts_with("virtio-balloon") {
        notices.push(format!("{kind}: memory that is mapped from a snapshot cannot be given back to the host"));
    }
    Ok(())
}

impl Object {
    /// Whether the RAM block of this name is its memory. Machine types of old name the block by the object's whole path.
    fn is_of(&self, block: &str) -> bool {
        block == self.id || block.strip_prefix("/objects/") == Some(&self.id)
    }

    fn size(&self) -> Option<u64> {
        self.properties.get("size").and_then(|text| size(text, 1))
    }

    fn check(&self, place: &BlockPlace) -> Result<(), String> {
        let (id, list) = (&self.id, &self.properties);
        if self.size() != Some(place.length) {
            return Err(format!(
                "memory backend {id} has size={}, RAM block {} of the snapshot {} bytes",
                list.get("size").unwrap_or("?"),
                place.name,
                place.length
            ));
        }
        // A backend of type memfd is shared unless it says otherwise; only devices in other processes need that.
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
        if list.get("qom-type") == Some("memory-backend-file") {
            return Err(format!("memory backend {id} is a file already ({})", list.get("mem-path").unwrap_or("?")));
        }
        match UNMAPPABLE.iter().find(|(key, _)| list.get(key).is_some()) {
            Some((key, what)) => Err(format!("memory backend {id} has {key}=: {what} cannot be mapped from a file")),
            None => Ok(()),
        }
    }
}

/// The block of a machine that has no memory backend of its own.
fn main_block<'a>(machine: &Machine, blocks: &'a [BlockPlace]) -> Result<&'a BlockPlace, String> {
    let memory = machine.memory.unwrap_or(DEFAULT_MEMORY);
    // Machines name it pc.ram, mach-virt.ram, ...; what devices own has a slash in its name, and not this suffix.
    let is_main = |place: &&BlockPlace| place.name.ends_with("ram") && place.is_guest_memory();
    let main = blocks.iter().find(is_main).ok_or_else(|| {
        let known: Vec<_> = blocks.iter().map(|place| place.name.as_str()).collect();
        format!("the saved VM had a memory backend (RAM blocks {}), this command line has none", known.join(", "))
    })?;
    if main.length == memory {
        return Ok(main);
    }
    Err(format!(
        "the machine is to have {} MiB of memory (-m), the snapshot has {} MiB",
        memory >> 20,
        main.length >> 20
    ))
}

/// The option value of a memory backend that maps a block.
fn backend(id: &str, place: &BlockPlace, file: &str, of: Option<&Properties>) -> String {
    let mut object = json!({
        "qom-type": "memory-backend-file",
        "id": id,
        "size": place.length,
        "mem-path": file,
        "offset": place.offset,
        "share": false,
        "readonly": true,
        "rom": "off",
    });
    if place.name == id {
        // Machine types before 4.1 would name the block by its whole path.
        object["x-use-canonical-path-for-ramblock-id"] = false.into();
    }
    for key in KEPT {
        if of.is_some_and(|list| list.get(key).is_some()) {
            object[key] = of.is_some_and(|list| list.is_on(key)).into();
        }
    }
    object.to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn place(name: &str, mebibytes: u64, offset: u64) -> BlockPlace {
        BlockPlace { name: name.into(), length: mebibytes << 20, offset }
    }

    fn vm() -> Vec<BlockPlace> {
        vec![place("pc.ram", 1024, 1 << 20), place("vga.vram", 16, 2 << 30), place("pc.bios", 1, 3 << 30)]
    }

    fn mapped(line: &str, blocks: &[BlockPlace]) -> Result<MappedCommandLine, String> {
        map_memory(&words(line), blocks, "/srv/a,b")
    }

    #[test]
    fn the_default_memory_of_a_machine_is_mapped_whichever_way_its_size_is_said() {
        for line in [
            "qemu-system-x86_64 -m 1G",
            "qemu-system-x86_64 --m 1024",
            "qemu-system-x86_64 -m size=1G,slots=2,maxmem=4G -machine q35 -machine accel=kvm",
            "qemu-system-x86_64 -M pc,smm=off -m 1024M",
            "nice -n 5 /usr/libexec/qemu-kvm -m 1048576k",
        ] {
            let found = mapped(line, &vm()).unwrap();
            assert_eq!(found.blocks, ["pc.ram"], "{line}");
            let (kept, added) = found.words.split_at(words(line).len());
            assert_eq!(kept, words(line));
            assert_eq!((&added[0], &added[2]), (&"-object".into(), &"-machine".into()));
            assert_eq!(added[3], "memory-backend=pc.ram");
            let object: Value = serde_json::from_str(added[1].to_str().unwrap()).unwrap();
            assert_eq!(
                object,
                json!({ "qom-type": "memory-backend-file", "id": "pc.ram", "size": 1 << 30, "mem-path": "/srv/a,b",
                        "offset": 1 << 20, "share": false, "readonly": true, "rom": "off",
                        "x-use-canonical-path-for-ramblock-id": false })
            );
        }
        assert!(mapped("qemu-system-x86_64", &[place("pc.ram", 128, 0)]).is_ok(), "without -m it is 128 MiB");
    }

    #[test]
    fn memory_backends_are_replaced_where_they_stand() {
        let blocks = [place("mem", 1024, 1 << 20), place("dimm1", 256, 2 << 30), place("vga.vram", 16, 3 << 30)];
        let line = "qemu-system-x86_64 -m 1G,slots=1,maxmem=2G -object memory-backend-ram,id=mem,size=1G,merge=off -machine \
                    q35,memory-backend=mem -object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"dimm1\",\"size\":268435456,\"share\":false} \
                    -device pc-dimm,memdev=dimm1 -object iothread,id=io";
        let found = mapped(line, &blocks).unwrap();
        assert_eq!(found.blocks, ["mem", "dimm1"]);
        assert_eq!(found.words.len(), words(line).len());
        let objects: Vec<Value> = found
            .words
            .iter()
            .filter_map(|word| serde_json::from_str(word.to_str()?).ok())
            .filter(Value::is_object)
            .collect();
        assert_eq!(
            (&objects[0]["id"], &objects[0]["offset"], &objects[0]["merge"]),
            (&json!("mem"), &json!(1 << 20), &json!(false))
        );
        assert_eq!((&objects[1]["id"], &objects[1]["offset"]), (&json!("dimm1"), &json!(2_u64 << 30)));
        let nodes = "qemu-system-x86_64 -m 1280 -object memory-backend-ram,id=mem,size=1G -object memory-backend-ram,id=dimm1,size=256M \
                     -numa node,memdev=mem -numa node,nodeid=1,memdev=dimm1";
        assert_eq!(mapped(nodes, &blocks).unwrap().blocks, ["mem", "dimm1"]);
        let old = mapped(
            "qemu-system-x86_64 -machine memory-backend=mem -object memory-backend-ram,id=mem,size=1G",
            &[place("/objects/mem", 1024, 1 << 20)],
        )
        .unwrap();
        assert!(!old.words.iter().any(|word| word.to_str().unwrap().contains("canonical")));
    }

    #[test]
    fn what_cannot_be_mapped_is_refused_by_name() {
        let mem =
            |more: &str| format!("-machine memory-backend=pc.ram -object memory-backend-memfd,id=pc.ram,size=1G{more}");
        for (line, named) in [
            ("-m 2G".to_owned(), "2048 MiB"),
            ("-m 1X".to_owned(), "not a size"),
            ("-m 1G -mem-path /dev/hugepages".to_owned(), "-mem-path"),
            ("-m 1G -mem-prealloc".to_owned(), "-mem-prealloc"),
            ("-m 1G -overcommit cpu-pm=on,mem-lock=on".to_owned(), "mem-lock"),
            ("-m 1G -device vfio-pci,host=1".to_owned(), "vfio-pci"),
            ("-m 1G -device virtio-mem-pci,memdev=x".to_owned(), "virtio-mem-pci"),
            ("-m 1G -device {\"driver\":\"vhost-user-fs-pci\"}".to_owned(), "vhost-user-fs-pci"),
            ("-m 1G -numa node,mem=1G".to_owned(), "mem="),
            ("-m 1G -readconfig x".to_owned(), "-readconfig"),
            ("-m 1G -machine q35,confidential-guest-support=sev0".to_owned(), "encrypted"),
            ("-machine memory-backend=other -m 1G".to_owned(), "other"),
            (mem(",share=on"), "share=on"),
            (mem(",hugetlb=on"), "hugetlb=on"),
            (mem(",prealloc=on"), "prealloc=on"),
            (mem(",host-nodes=0,policy=bind"), "host-nodes"),
            (mem("") + " -m 2G", "-m asks for 2048 MiB"),
            ("-machine memory-backend=pc.ram -object memory-backend-ram,id=pc.ram,size=2G".to_owned(), "size=2G"),
            (
                "-machine memory-backend=pc.ram -object memory-backend-file,id=pc.ram,size=1G,mem-path=/x".to_owned(),
                "/x",
            ),
            ("-machine memory-backend=m -object memory-backend-ram,id=m,size=1G".to_owned(), "pc.ram, vga.vram"),
        ] {
            let refused = mapped(&format!("qemu-system-x86_64 {line}"), &vm()).unwrap_err();
            assert!(refused.contains(named), "{line}: {refused}");
        }
        let refused = mapped("qemu-system-x86_64 -m 1G", &[place("mem", 1024, 0)]).unwrap_err();
        assert!(refused.contains("memory backend"), "{refused}");
    }

    #[test]
    fn the_guests_memory_is_told_from_that_of_devices() {
        for (name, is_memory) in [
            ("pc.ram", true),
            ("mem", true),
            ("/objects/mem", true),
            ("mach-virt.ram", true),
            ("vga.vram", false),
            ("0000:00:02.0/vga.vram", false),
            ("/rom@etc/acpi/tables", false),
            ("pc.bios", false),
            ("pc.rom", false),
            ("system.flash0", false),
        ] {
            assert_eq!(place(name, 64, 0).is_guest_memory(), is_memory, "{name}");
        }
        let option = place("/objects/a,b", 1, 4096).backend_option("/srv/x,y");
        let list = Properties::read(&option, "qom-type");
        assert_eq!(
            (list.get("id"), list.get("mem-path"), list.get("size")),
            (Some("a,b"), Some("/srv/x,y"), Some("1048576"))
        );
        assert!(list.is_on("readonly") && !list.is_on("rom") && !list.is_on("share"));
    }

    #[test]
    fn a_balloon_is_a_notice() {
        let found = mapped("qemu-system-x86_64 -m 1G -device virtio-balloon-pci,id=b", &vm()).unwrap();
        assert_eq!(found.notices.len(), 1);
        assert!(found.notices[0].contains("virtio-balloon-pci"));
    }

    proptest! {
        #[test]
        fn any_command_line_is_rewritten_or_refused(line in proptest::collection::vec("[-a-z0-9=,{}\"]{0,24}", 0..12)) {
            let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            let _ = map_memory(&line, &vm(), "/srv/vm");
        }
    }
}
