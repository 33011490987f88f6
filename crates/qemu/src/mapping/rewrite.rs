//! From a QEMU's command line to one whose memory is a snapshot.
//!
//! The law: **what cannot be mapped is refused by name, before a process is started.** Options that ask for memory of
//! another kind are never dropped in silence.

use std::ffi::OsString;

use limosa_snapshot::Snapshot;
use serde_json::json;

use super::machine::{Machine, Main};
use super::{BlockPlace, MemoryConflict};
use crate::command_line::{Properties, escaped, options};

/// A command line whose memory is a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MappedCommandLine {
    /// The arguments, the program first.
    pub args: Vec<OsString>,
    /// The RAM blocks that are mapped.
    pub blocks: Vec<String>,
    /// Notices for a person.
    pub notices: Vec<String>,
}

/// Properties that the mapped backend takes over.
const KEPT: [&str; 2] = ["dump", "merge"];

/// Rewrites a command line (the program first) so that the guest's RAM blocks are mapped from `file`.
///
/// `file` is what QEMU is to open, for example `/srv/vm.limosa`, or `/dev/fd/7`.
///
/// # Errors
/// The option, or the RAM block of the snapshot, that rules it out.
pub fn rewrite_for_mapping(
    args: &[OsString],
    blocks: &[BlockPlace],
    file: &str,
) -> Result<MappedCommandLine, MemoryConflict> {
    let options = options(args);
    let mut machine = Machine::default();
    let mut notices = Vec::new();
    for option in &options {
        machine.read(option, &mut notices)?;
    }
    let mut rewritten = args.to_vec();
    let mut mapped = Vec::new();
    for object in &machine.objects {
        let Some(place) = blocks.iter().find(|place| object.is_of(&place.name)) else { continue };
        object.check(place)?;
        if let Some(arg) = rewritten.get_mut(object.at) {
            *arg = backend(&object.id, place, file, Some(&object.properties)).into();
        }
        mapped.push(place.name.clone());
    }
    match machine.main(blocks)? {
        Main::Nodes => {}
        Main::Named(object) => {
            if let (Some(asked), Some(has)) = (machine.memory, object.size())
                && asked != has
            {
                return Err(format!(
                    "-m asks for {} MiB and memory backend {} has {} MiB",
                    asked >> 20,
                    object.id,
                    has >> 20
                )
                .into());
            }
        }
        Main::Renamed(object, place) => {
            object.check(place)?;
            if let Some(arg) = rewritten.get_mut(object.at) {
                *arg = backend(place.id(), place, file, Some(&object.properties)).into();
            }
            rewritten.extend(["-machine".into(), format!("memory-backend={}", escaped(place.id())).into()]);
            mapped.push(place.name.clone());
        }
        Main::Own(place) => {
            rewritten.extend(["-object".into(), backend(place.id(), place, file, None).into()]);
            rewritten.extend(["-machine".into(), format!("memory-backend={}", escaped(place.id())).into()]);
            mapped.push(place.name.clone());
        }
    }
    if mapped.is_empty() {
        return Err(format!("no memory backend has the name of a RAM block of the snapshot ({})", names(blocks)).into());
    }
    Ok(MappedCommandLine { args: rewritten, blocks: mapped, notices })
}

/// Gives the memory backend of a command line the name of the snapshot's RAM block, if there is one block and the sizes
/// agree. QEMU would find no memory for the block otherwise. Nothing is mapped. A snapshot that does not record which
/// blocks are the guest's memory leaves the command line as it is.
///
/// # Errors
/// The command line has no memory for a block: its name, and the option that makes it.
pub fn name_memory_backend(args: &[OsString], snapshot: &Snapshot) -> Result<Vec<OsString>, MemoryConflict> {
    let is_recorded = snapshot.manifest().is_some_and(|manifest| !manifest.guest_memory.is_empty());
    match BlockPlace::guest_memory_of(snapshot) {
        Ok(blocks) if is_recorded => name_blocks(args, &blocks),
        _ => Ok(args.to_vec()),
    }
}

fn name_blocks(args: &[OsString], blocks: &[BlockPlace]) -> Result<Vec<OsString>, MemoryConflict> {
    let options = options(args);
    let mut machine = Machine::default();
    for option in &options {
        machine.read_memory(option)?;
    }
    let mut rewritten = args.to_vec();
    // A script, or a file of options, has them where they are not seen.
    if machine.says_nothing() || options.iter().any(|option| option.name == "readconfig") {
        return Ok(rewritten);
    }
    match machine.main(blocks)? {
        Main::Nodes | Main::Named(_) => {}
        Main::Renamed(object, place) => {
            let mut properties = object.properties.clone();
            properties.set("id", place.id());
            if let Some(arg) = rewritten.get_mut(object.at) {
                *arg = properties.to_option().into();
            }
            rewritten.extend(["-machine".into(), format!("memory-backend={}", escaped(place.id())).into()]);
        }
        // QEMU makes its own memory under the name that the machine type has for it.
        Main::Own(place) if is_default_name(&place.name) => {}
        Main::Own(place) => {
            let object = format!("memory-backend-ram,id={},size={}", escaped(place.id()), place.length);
            rewritten.extend(["-object".into(), object.into()]);
            rewritten.extend(["-machine".into(), format!("memory-backend={}", escaped(place.id())).into()]);
        }
    }
    Ok(rewritten)
}

/// Refuses a command line with a memory backend that maps a snapshot shared: the guest would write into the file.
/// `same` returns whether a name is the snapshot's file.
///
/// # Errors
/// Such a backend, by its id.
pub fn check_snapshot_not_shared(args: &[OsString], same: &dyn Fn(&str) -> bool) -> Result<(), MemoryConflict> {
    for option in options(args).iter().filter(|option| option.name == "object") {
        let list = Properties::parse(option.value, "qom-type");
        if let Some(path) = list.get("mem-path").filter(|path| list.is_on("share") && same(path)) {
            return Err(format!(
                "memory backend {} maps {path} with share=on: the guest would write into the snapshot",
                list.get("id").unwrap_or_default()
            )
            .into());
        }
    }
    Ok(())
}

fn names(blocks: &[BlockPlace]) -> String {
    blocks.iter().map(|place| place.name.as_str()).collect::<Vec<_>>().join(", ")
}

/// Whether a machine type makes memory of this name by itself: `pc.ram`, `mach-virt.ram`, `ppc_spapr.ram`, ...
fn is_default_name(name: &str) -> bool {
    name.ends_with(".ram")
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

    fn args(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn place(name: &str, mebibytes: u64, offset: u64) -> BlockPlace {
        BlockPlace { name: name.into(), length: mebibytes << 20, offset }
    }

    fn vm() -> Vec<BlockPlace> {
        vec![place("pc.ram", 1024, 1 << 20)]
    }

    fn mapped(line: &str, blocks: &[BlockPlace]) -> Result<MappedCommandLine, String> {
        rewrite_for_mapping(&args(line), blocks, "/srv/a,b").map_err(|conflict| conflict.to_string())
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
            let (inherited_fds, added) = found.args.split_at(args(line).len());
            assert_eq!(inherited_fds, args(line));
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
        assert_eq!(found.args.len(), args(line).len());
        let objects: Vec<Value> = found
            .args
            .iter()
            .filter_map(|arg| serde_json::from_str(arg.to_str()?).ok())
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
        // The command line of a clone, whose memory is another snapshot.
        let of_clone = "qemu-system-x86_64 -object memory-backend-file,id=mem,size=1G,mem-path=/dev/fd/5,offset=1048576,\
                        share=off,readonly=on,rom=off -machine q35,memory-backend=mem";
        let found = mapped(of_clone, &[place("mem", 1024, 1 << 21)]).unwrap();
        let object = found.args.iter().find_map(|arg| serde_json::from_str::<Value>(arg.to_str()?).ok()).unwrap();
        assert_eq!((&object["mem-path"], &object["offset"]), (&json!("/srv/a,b"), &json!(1 << 21)));
        let old = mapped(
            "qemu-system-x86_64 -machine memory-backend=mem -object memory-backend-ram,id=mem,size=1G",
            &[place("/objects/mem", 1024, 1 << 20)],
        )
        .unwrap();
        assert!(!old.args.iter().any(|arg| arg.to_str().unwrap().contains("canonical")));
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
            ("-m 1G -netdev vhost-user,id=n,chardev=c".to_owned(), "-netdev vhost-user"),
            ("-m 1G -object cryptodev-vhost-user,id=c,chardev=c".to_owned(), "cryptodev-vhost-user"),
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
            ("-machine memory-backend=m -object memory-backend-ram,id=m,size=2G".to_owned(), "RAM block pc.ram"),
        ] {
            let refused = mapped(&format!("qemu-system-x86_64 {line}"), &vm()).unwrap_err();
            assert!(refused.contains(named), "{line}: {refused}");
        }
    }

    #[test]
    fn a_block_of_another_name_is_given_to_the_one_backend_of_its_size() {
        let blocks = [place("mem", 1024, 1 << 20)];
        let own = mapped("qemu-system-x86_64 -m 1G", &blocks).unwrap();
        let other = "qemu-system-x86_64 -machine q35,memory-backend=ram0 -object memory-backend-memfd,id=ram0,size=1G,merge=off";
        let renamed = mapped(other, &blocks).unwrap();
        for found in [own, renamed] {
            assert_eq!(found.blocks, ["mem"]);
            let text = found.args.join(" ".as_ref()).into_string().unwrap();
            assert!(text.contains(r#""id":"mem""#) && text.contains("-machine memory-backend=mem"), "{text}");
            assert!(!text.contains(r#""id":"ram0""#), "{text}");
        }
        let named = |line: &str| {
            name_blocks(&args(line), &blocks)
                .map_err(|conflict| conflict.to_string())
                .map(|args| args.join(" ".as_ref()).into_string().unwrap())
        };
        let copied = named(other).unwrap();
        assert!(copied.contains("memory-backend-memfd,id=mem,size=1G,merge=off"), "{copied}");
        assert!(copied.ends_with("-machine memory-backend=mem"), "{copied}");
        let own = named("qemu-system-x86_64 -m 1G").unwrap();
        assert!(own.contains("memory-backend-ram,id=mem,size=1073741824"), "{own}");
        let default = name_blocks(&args("qemu-system-x86_64 -m 1G"), &vm()[..1]).unwrap();
        assert_eq!(default, args("qemu-system-x86_64 -m 1G"), "the machine makes pc.ram by itself");
        for line in ["-m 2G", "-machine memory-backend=x -object memory-backend-ram,id=x,size=2G"] {
            let refused = named(&format!("qemu-system-x86_64 {line}")).unwrap_err();
            assert!(refused.contains("RAM block mem") && refused.contains("1024 MiB"), "{refused}");
        }
        for unseen in ["start-my-vm --name x", "qemu-system-x86_64 -m 4G -readconfig vm.cfg"] {
            assert_eq!(named(unseen).unwrap(), unseen, "its memory is said elsewhere");
        }
        let used = format!("{other} -numa node,memdev=ram0");
        let refused = named(&used).unwrap_err();
        assert!(refused.contains("-object memory-backend-ram,id=mem,size=1073741824"), "{refused}");
    }

    #[test]
    fn a_backend_that_shares_the_snapshots_file_is_refused() {
        let same = |name: &str| name == "/srv/vm";
        for (line, is_refused) in [
            ("memory-backend-file,id=m,size=1G,mem-path=/srv/vm,share=on", true),
            ("memory-backend-file,id=m,size=1G,mem-path=/srv/vm,share=off", false),
            ("memory-backend-file,id=m,size=1G,mem-path=/srv/other,share=on", false),
            (r#"{"qom-type":"memory-backend-file","id":"m","mem-path":"/srv/vm","share":true}"#, true),
        ] {
            let refused = check_snapshot_not_shared(&args(&format!("qemu-system-x86_64 -object {line}")), &same);
            assert_eq!(refused.is_err(), is_refused, "{line}: {refused:?}");
        }
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
            let _ = rewrite_for_mapping(&line, &vm(), "/srv/vm");
        }
    }
}
