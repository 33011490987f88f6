//! The disks of a command line behind overlays.
//!
//! A disk that the snapshot froze gets an overlay of the clone's own. Any other that is writable and not the clone's
//! own is refused. `{dir}` stands for the clone's directory in what is returned.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use limosa_qemu::command_line::{CommandOption, Properties, options, program};

use super::Ownership;
use super::node::Node;

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
const PLAIN: [&str; 9] = ["hda", "hdb", "hdc", "hdd", "sd", "mtdblock", "pflash", "fda", "fdb"];
/// Options that change the meaning of other options.
const UNSEEN: [(&str, &str); 5] = [
    ("snapshot", "clones have overlays of their own; leave it out"),
    ("readconfig", "disks that are configured there are not seen; give them on the command line"),
    ("set", "it changes other options; change them themselves"),
    ("chroot", "files are looked for before QEMU changes its root"),
    ("plugin", "the files that a plugin writes are not known; leave it out"),
];
/// Names for the overlays of these disks: `disk0.qcow2`, ...
pub(crate) fn plan(disks: &[FrozenDisk]) -> Vec<OverlayPlan> {
    let planned = disks.iter().enumerate();
    planned.map(|(at, disk)| OverlayPlan { disk: disk.clone(), name: format!("disk{at}.qcow2") }).collect()
}

/// Puts overlays in the place of frozen disks. `same` says whether a name is that of a file, `has_backing` whether the
/// disk's file names a backing image.
///
/// # Errors
/// A frozen disk that the command line does not name, or names in a way that is not understood; another writable one
/// that is not the clone's own.
pub(crate) fn behind_overlays(
    args: &[OsString],
    overlays: &[OverlayPlan],
    ownership: &Ownership<'_>,
    same: &dyn Fn(&str, &Path) -> bool,
    has_backing: &dyn Fn(&FrozenDisk) -> bool,
) -> Result<Vec<OsString>, String> {
    let all = options(args);
    for (name, why) in UNSEEN {
        if all.iter().any(|option| option.name == name) {
            return Err(format!("-{name}: {why}"));
        }
    }
    let mut rewriting = Rewriting { overlays, ownership, same, has_backing, used: vec![false; overlays.len()] };
    let mut rewritten = args.to_vec();
    let mut replace = |at: usize, value: Option<String>| {
        if let (Some(value), Some(arg)) = (value, rewritten.get_mut(at)) {
            *arg = value.into();
        }
    };
    for option in &all {
        let value = match option.name {
            name if PLAIN.contains(&name) => rewriting.image(&format!("-{name}"), option.value)?,
            "drive" => rewriting.drive(option.value)?,
            _ => None,
        };
        replace(option.at, value);
    }
    for (at, name) in positional(args, &all) {
        replace(at, rewriting.image("the disk", name)?);
    }
    let nodes = rewriting.graph(&all)?;
    // The last one first: what is put in behind a node moves those that follow.
    for (at, Covered { below, node }) in nodes.into_iter().rev() {
        let below = below.map(|below| [below.to_option().into(), "-blockdev".into()]);
        rewritten.splice(at..=at, below.into_iter().flatten().chain([node.to_option().into()]));
    }
    match rewriting.used.iter().zip(overlays).find(|(used, _)| !**used) {
        Some((_, overlay)) => Err(format!(
            "the snapshot froze the disk {}, which the command line does not name",
            overlay.disk.path.display()
        )),
        None => Ok(rewritten),
    }
}

/// Images on the command line without an option.
fn positional<'a>(args: &'a [OsString], all: &[CommandOption<'_>]) -> Vec<(usize, &'a str)> {
    let images = args.iter().enumerate().skip(program(args) + 1);
    let images = images.filter_map(|(at, arg)| Some((at, arg.to_str()?)));
    images.filter(|(at, arg)| !arg.starts_with('-') && all.iter().all(|option| option.at != *at)).collect()
}

/// A node of the block layer, and the frozen one below it if it is an overlay now.
#[derive(Debug, Clone, PartialEq)]
struct Covered {
    below: Option<Node>,
    node: Node,
}

struct Rewriting<'a> {
    overlays: &'a [OverlayPlan],
    ownership: &'a Ownership<'a>,
    same: &'a dyn Fn(&str, &Path) -> bool,
    has_backing: &'a dyn Fn(&FrozenDisk) -> bool,
    used: Vec<bool>,
}

impl Rewriting<'_> {
    /// The number of the overlay for a frozen disk's name.
    fn frozen(&self, name: &str) -> Option<usize> {
        let name = name.strip_prefix("file:").unwrap_or(name);
        self.overlays.iter().position(|overlay| (self.same)(name, &overlay.disk.path))
    }

    /// Takes an overlay for the one place of its disk.
    fn take(&mut self, overlay: usize) -> Result<String, String> {
        let plan = self.overlays.get(overlay).ok_or("there is no such overlay")?;
        match self.used.get_mut(overlay) {
            Some(used) if !*used => *used = true,
            _ => return Err(format!("the disk {} is named twice", plan.disk.path.display())),
        }
        Ok(format!("{{dir}}/{}", plan.name))
    }

    /// A writable image that is no frozen disk must be the clone's own.
    fn own(&self, option: &str, name: &str) -> Result<(), String> {
        if name.is_empty() || self.ownership.is_own(name) {
            return Ok(());
        }
        Err(format!(
            "{option} {name}: all clones would write to it, and the snapshot did not freeze it; make it read-only, or give \
             each clone its own ({{dir}}, {{name}})"
        ))
    }

    /// An image that is named by its path alone.
    fn image(&mut self, option: &str, name: &str) -> Result<Option<String>, String> {
        match self.frozen(name) {
            Some(overlay) => self.take(overlay).map(Some),
            None => self.own(option, name).map(|()| None),
        }
    }

    fn drive(&mut self, value: &str) -> Result<Option<String>, String> {
        let mut list = Properties::read(value, "file");
        let is_read_only = ["readonly", "read-only", "snapshot"].iter().any(|key| list.is_on(key))
            || list.get("media") == Some("cdrom")
            // A directory as a FAT disk, which is written to with `rw` alone.
            || list.get("file").is_some_and(|name| name.starts_with("fat:") && !name.contains(":rw"));
        let key = if list.get("file").is_some() { "file" } else { "file.filename" };
        let name = list.get(key).unwrap_or_default().to_owned();
        if let Some(overlay) = self.frozen(&name).filter(|_| !is_read_only) {
            let is_override = |(key, value): &(&str, &str)| {
                key.starts_with("backing") || matches!(*key, "offset" | "size") && *value != "0"
            };
            if let Some((key, _)) = list.iter().find(is_override) {
                return Err(format!(
                    "-drive {name}: {key}= says something else than the image; describe it with -blockdev"
                ));
            }
            list.set(key, &self.take(overlay)?);
            list.set(if list.get("driver").is_some() { "driver" } else { "format" }, "qcow2");
            return Ok(Some(list.to_option()));
        }
        if !is_read_only {
            self.own("-drive", &name)?;
            // What a driver of the block layer names in its own way.
            let files = Node::of_drive(list.clone()).files();
            for file in files.iter().filter(|file| !file.is_read_only) {
                self.own("-drive", &file.name)?;
            }
            if files.is_empty() && list.iter().any(|(key, _)| key.starts_with("file.")) {
                return Err(format!("-drive {value}: not understood; describe it with -blockdev"));
            }
        }
        Ok(None)
    }

    /// Returns the nodes of the block layer that change, by the index of their argument, in order.
    fn graph(&mut self, all: &[CommandOption<'_>]) -> Result<Vec<(usize, Covered)>, String> {
        let mut nodes = Vec::new();
        for option in all.iter().filter(|option| option.name == "blockdev") {
            let node = Node::read(option.value).ok_or_else(|| format!("-blockdev {}: not understood", option.value))?;
            nodes.push((option.at, Covered { below: None, node }));
        }
        let before = nodes.clone();
        seal_backing(&mut nodes, all);
        for at in 0..nodes.len() {
            self.node(&mut nodes, at)?;
        }
        let changed = nodes.into_iter().zip(before).filter(|(now, before)| now != before);
        Ok(changed.map(|(now, _)| now).collect())
    }

    /// Looks at the files of one node, and puts an overlay over it, or over the format that it is of.
    fn node(&mut self, nodes: &mut [(usize, Covered)], at: usize) -> Result<(), String> {
        let Some((_, Covered { node, .. })) = nodes.get(at) else { return Ok(()) };
        let mut overlay = None;
        for file in node.files().into_iter().filter(|file| !file.is_read_only) {
            match self.frozen(&file.name) {
                Some(frozen) if file.is_nodes_own => overlay = Some(frozen),
                Some(_) => {
                    return Err(format!(
                        "-blockdev node-name={}: the frozen disk {} is part of something else; give it a node of its own",
                        node.name(),
                        file.name
                    ));
                }
                // An overlay that was put there is the clone's own.
                None => self.own("-blockdev", &file.name)?,
            }
        }
        let Some(overlay) = overlay else { return Ok(()) };
        let name = node.name().to_owned();
        if !node.is_protocol() {
            return self.cover(nodes, at, overlay);
        }
        let formats: Vec<_> =
            nodes.iter().enumerate().filter(|(_, (_, covered))| covered.node.file_node() == Some(&name)).collect();
        let format = match formats.as_slice() {
            [(format, (_, covered))] if !covered.node.is_filter() => *format,
            _ => {
                return Err(format!(
                    "-blockdev node-name={name}: a frozen disk needs one format node above its file; add one with driver=raw"
                ));
            }
        };
        if let Some((_, covered)) = nodes.get_mut(at) {
            covered.node.set_read_only();
        }
        self.cover(nodes, format, overlay)
    }

    fn cover(&mut self, nodes: &mut [(usize, Covered)], at: usize, overlay: usize) -> Result<(), String> {
        let Some((_, Covered { below, node })) = nodes.get_mut(at) else { return Ok(()) };
        if let Some(plan) = self.overlays.get(overlay) {
            let (path, recorded) = (plan.disk.path.display(), &plan.disk.format);
            if node.driver() != recorded {
                return Err(format!(
                    "-blockdev node-name={}: driver={} reads the frozen disk {path}, whose format is {recorded}",
                    node.name(),
                    node.driver()
                ));
            }
            if node.has_no_backing() && (self.has_backing)(&plan.disk) {
                return Err(format!(
                    "-blockdev node-name={}: it says that nothing is below the frozen disk {path}, whose file names a \
                     backing image; leave \"backing\" out",
                    node.name()
                ));
            }
        }
        if let Some(key) = node.partial_key() {
            return Err(format!(
                "-blockdev node-name={}: {key}= makes a part of the frozen image the disk",
                node.name()
            ));
        }
        let path = self.take(overlay)?;
        if !node.is_read_only() {
            let (lower, above) = node.behind(&path, &format!("limosa-frozen{overlay}"));
            (*below, *node) = (Some(lower), above);
        }
        Ok(())
    }
}

/// Makes nodes read-only that are nothing but backing images of others, as QEMU uses them, and the files below them.
fn seal_backing(nodes: &mut [(usize, Covered)], all: &[CommandOption<'_>]) {
    let devices = all.iter().filter(|option| option.name == "device");
    let mut drives: Vec<_> =
        devices.filter_map(|option| Properties::read(option.value, "driver").get("drive").map(str::to_owned)).collect();
    for option in all.iter().filter(|option| matches!(option.name, "machine" | "M")) {
        let list = Properties::read(option.value, "type");
        drives.extend(["pflash0", "pflash1"].iter().filter_map(|key| list.get(key).map(str::to_owned)));
    }
    let mut below: Vec<String> =
        nodes.iter().flat_map(|(_, covered)| covered.node.backing_nodes()).map(str::to_owned).collect();
    let mut next = 0;
    while let Some(name) = below.get(next).cloned() {
        next += 1;
        let mut named = nodes.iter().map(|(_, covered)| &covered.node).filter(|node| node.name() == name);
        let file = named.next().and_then(Node::file_node);
        let is_new = |file: &&str| !below.iter().any(|known| known == *file);
        let file = file.filter(is_new).map(str::to_owned);
        below.extend(file);
    }
    // A file all of whose formats are read-only.
    let is_of = |covered: &Covered, file: &str| covered.node.file_node() == Some(file);
    let all_read_only = |file: &str| {
        let mut above = nodes.iter().map(|(_, covered)| covered).filter(|covered| is_of(covered, file)).peekable();
        above.peek().is_some() && above.all(|covered| covered.node.is_read_only())
    };
    let files: Vec<_> = nodes.iter().map(|(_, covered)| covered.node.name().to_owned()).collect();
    below.extend(files.into_iter().filter(|name| !name.is_empty() && all_read_only(name)));
    for (_, Covered { node, .. }) in nodes.iter_mut() {
        if below.iter().any(|name| name == node.name()) && !drives.iter().any(|drive| drive == node.name()) {
            node.set_read_only();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn args(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn disks() -> Vec<OverlayPlan> {
        let disk = |path: &str, format: &str| FrozenDisk { path: path.into(), format: format.into() };
        plan(&[disk("/srv/root.img", "raw"), disk("/srv/data.qcow2", "qcow2")])
    }

    fn run(line: &str, overlays: &[OverlayPlan]) -> Result<String, String> {
        let same = |name: &str, path: &Path| Path::new(name) == path;
        let has_backing = |disk: &FrozenDisk| disk.path == Path::new("/srv/data.qcow2");
        let found = behind_overlays(&args(line), overlays, &Ownership::new(Path::new("/c")), &same, &has_backing)?;
        Ok(found.iter().map(|arg| arg.to_str().unwrap()).collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn every_way_to_name_a_disk_gets_its_overlay() {
        const D0: &str = "{dir}/disk0.qcow2";
        const D1: &str = "{dir}/disk1.qcow2";
        for (line, wanted) in [
            (
                "-drive file=/srv/root.img,format=raw,if=virtio -hdb /srv/data.qcow2",
                format!("-drive file={D0},format=qcow2,if=virtio -hdb {D1}"),
            ),
            (
                "-drive driver=raw,file.driver=file,file.filename=/srv/root.img,if=none -pflash /srv/data.qcow2",
                format!("-drive driver=qcow2,file.driver=file,file.filename={D0},if=none -pflash {D1}"),
            ),
            (
                // The format's node comes first.
                "-blockdev driver=raw,node-name=r,file=f,discard=unmap -blockdev driver=file,node-name=f,filename=/srv/root.img /srv/data.qcow2",
                format!(
                    "-blockdev driver=raw,file=f,node-name=limosa-frozen0,read-only=on \
                     -blockdev driver=qcow2,node-name=r,discard=unmap,file.driver=file,file.filename={D0},backing=limosa-frozen0 \
                     -blockdev driver=file,node-name=f,filename=/srv/root.img,read-only=on {D1}"
                ),
            ),
            (
                // A lower node without read-only=on, which must not lead past the frozen layer.
                "-blockdev driver=file,node-name=bf,filename=/srv/base -blockdev driver=raw,node-name=b,file=bf \
                 -blockdev qcow2,node-name=d,file.driver=file,file.filename=/srv/data.qcow2,backing=b -hda file:/srv/root.img",
                format!(
                    "-blockdev driver=file,node-name=bf,filename=/srv/base,read-only=on \
                     -blockdev driver=raw,node-name=b,file=bf,read-only=on \
                     -blockdev driver=qcow2,file.driver=file,file.filename=/srv/data.qcow2,backing=b,node-name=limosa-frozen1,read-only=on \
                     -blockdev driver=qcow2,node-name=d,file.driver=file,file.filename={D1},backing=limosa-frozen1 -hda {D0}"
                ),
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
            ("-drive file.filename=/srv/other,format=raw", "/srv/other"),
            ("-drive file={dir}/../other,format=raw", "/../other"),
            ("-drive file=nbd://host/x,format=raw", "nbd://host/x"),
            ("-drive driver=raw,file.driver=nbd,file.server.path=/s", "nbd"),
            ("-drive if=virtio,format=raw,file.driver=nbd,file.server.type=unix,file.server.path=/s", "nbd"),
            ("-drive format=file,filename=/srv/x", "/srv/x"),
            ("-drive format=raw,file.driver=raw,file.file.filename=/srv/x", "/srv/x"),
            ("-drive format=raw,file.driver=unknown", "not understood"),
            ("-blockdev driver=nbd,node-name=disk-{n},server.path=/s", "nbd"),
            (
                "-blockdev qcow2,node-name=d,read-only=on,file.filename=/a,backing.read-only=off,backing.file.filename=/b",
                "/b",
            ),
            ("-drive file=fat:rw:/srv/folder", "/srv/folder"),
            ("-hda /srv/other", "/srv/other"),
            ("-pflash /srv/other", "/srv/other"),
            ("-fda /srv/other", "/srv/other"),
            ("-m 1G /srv/other", "/srv/other"),
            ("-blockdev driver=file,node-name=f,filename=/srv/other", "/srv/other"),
            (r#"-blockdev {"driver":"file","node-name":"f","filename":"/srv/other"}"#, "/srv/other"),
            (r#"-blockdev {"driver":"quorum","children":[{"driver":"file","filename":"/srv/other"}]}"#, "/srv/other"),
            ("-blockdev {\"driver\":", "not understood"),
            ("-snapshot", "-snapshot"),
            ("-readconfig /srv/vm.cfg", "-readconfig"),
            ("-set drive.x.file=/srv/other", "-set"),
            ("-plugin /usr/lib/libexeclog.so,ifilter=x", "-plugin"),
        ] {
            let refused = run(&format!("qemu-system-x86_64 {line}"), &[]).expect_err(line);
            assert!(refused.contains(named), "{line}: {refused}");
        }
        for line in [
            "-drive file=/srv/iso,media=cdrom -cdrom /srv/other.iso",
            "-drive file=/srv/base,format=raw,readonly=on",
            "-blockdev driver=file,node-name=f,filename=/srv/base,read-only=on",
            r#"-blockdev {"driver":"raw","read-only":true,"file":{"driver":"file","filename":"/srv/base"}}"#,
            "-drive file={dir}/scratch,format=raw -hda /srv/scratch-{n}.img",
            "-drive if=none,id=empty",
            "-drive file=fat:/srv/folder,format=raw",
            // As libvirt describes firmware: the file's node says only auto-read-only.
            r#"-blockdev {"driver":"file","filename":"/srv/code.fd","node-name":"s","auto-read-only":true} -blockdev {"node-name":"f","read-only":true,"driver":"raw","file":"s"} -machine q35,pflash0=f"#,
        ] {
            run(&format!("qemu-system-x86_64 {line}"), &[]).expect(line);
        }
    }

    #[test]
    fn a_frozen_disk_that_is_not_named_or_not_named_so_that_it_can_be_covered_is_refused() {
        for (line, named) in [
            ("-hda /srv/root.img", "/srv/data.qcow2"),
            (
                "-hda /srv/data.qcow2 -blockdev driver=file,node-name=f,filename=/srv/root.img -device virtio-blk-pci,drive=f",
                "node-name=f",
            ),
            ("-hda /srv/data.qcow2 -hdb /srv/root.img -hdc /srv/root.img", "twice"),
            (
                "-hda /srv/root.img -blockdev raw,node-name=d,file.driver=file,file.filename=/srv/data.qcow2",
                "whose format is qcow2",
            ),
            (
                r#"-hda /srv/root.img -blockdev {"driver":"qcow2","node-name":"d","backing":null,"file":{"driver":"file","filename":"/srv/data.qcow2"}}"#,
                "names a backing image",
            ),
            ("-hda /srv/data.qcow2 -drive file=/srv/root.img,format=raw,offset=512", "offset"),
            ("-hda /srv/root.img -drive file=/srv/data.qcow2,backing.driver=null-co", "backing"),
            (
                "-hda /srv/data.qcow2 -blockdev raw,node-name=r,size=512,file.driver=file,file.filename=/srv/root.img",
                "size",
            ),
            (
                "-hda /srv/data.qcow2 -blockdev {\"driver\":\"quorum\",\"children\":[{\"driver\":\"file\",\"filename\":\"/srv/root.img\"}]}",
                "/srv/root.img",
            ),
        ] {
            let refused = run(&format!("qemu-system-x86_64 {line}"), &disks()).expect_err(line);
            assert!(refused.contains(named), "{line}: {refused}");
        }
    }

    proptest! {
        #[test]
        fn any_command_line_is_rewritten_or_refused(line in proptest::collection::vec("[-a-z0-9=,{}\":/.]{0,30}", 0..10)) {
            let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            let same = |name: &str, path: &Path| Path::new(name) == path;
            let _ = behind_overlays(&line, &disks(), &Ownership::new(Path::new("/c")), &same, &|_| true);
        }
    }
}
