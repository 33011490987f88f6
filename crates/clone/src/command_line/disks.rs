//! The disks of a command line behind overlays.
//!
//! A disk that the snapshot froze gets an overlay of the clone's own. Any other that is writable and not the clone's
//! own is refused. `{dir}` stands for the clone's directory in what is returned.

use std::ffi::OsString;
use std::path::Path;

use limosa_qemu::command_line::{CommandOption, Properties, options, program_index};

use super::Ownership;
use super::frozen::{OverlayPlan, Overlays};
use super::graph::{Covered, cover_nodes};
use super::node::Node;

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

/// Puts overlays in the place of frozen disks. `same` says whether a name is that of a file.
///
/// # Errors
/// A frozen disk that the command line does not name, or names in a way that is not understood; another writable one
/// that is not the clone's own.
pub(crate) fn behind_overlays(
    args: &[OsString],
    plans: &[OverlayPlan],
    ownership: &Ownership<'_>,
    same: &dyn Fn(&str, &Path) -> bool,
) -> Result<Vec<OsString>, String> {
    let all = options(args);
    for (name, why) in UNSEEN {
        if all.iter().any(|option| option.name == name) {
            return Err(format!("-{name}: {why}"));
        }
    }
    let mut overlays = Overlays::new(plans, ownership, same);
    let mut rewritten = args.to_vec();
    let mut replace = |at: usize, value: Option<String>| {
        if let (Some(value), Some(arg)) = (value, rewritten.get_mut(at)) {
            *arg = value.into();
        }
    };
    for option in &all {
        let value = match option.name {
            name if PLAIN.contains(&name) => image(&mut overlays, &format!("-{name}"), option.value)?,
            "drive" => drive(&mut overlays, option.value)?,
            _ => None,
        };
        replace(option.index, value);
    }
    for (at, name) in positional(args, &all) {
        replace(at, image(&mut overlays, "the disk", name)?);
    }
    let nodes = cover_nodes(&mut overlays, args, &all)?;
    // The last one first: what is put in behind a node moves those that follow.
    for (at, Covered { below, node }) in nodes.into_iter().rev() {
        let below = below.iter().flat_map(|below| [below.to_option().into(), "-blockdev".into()]);
        let nodes: Vec<OsString> = below.chain([node.to_option().into()]).collect();
        rewritten.splice(at..=at, nodes);
    }
    match overlays.unused() {
        Some(plan) => Err(format!(
            "the snapshot froze the disk {}, which the command line does not name",
            plan.disk.path().display()
        )),
        None => Ok(rewritten),
    }
}

/// Images on the command line without an option.
fn positional<'a>(args: &'a [OsString], all: &[CommandOption<'_>]) -> Vec<(usize, &'a str)> {
    let images = args.iter().enumerate().skip(program_index(args) + 1);
    let images = images.filter_map(|(at, arg)| Some((at, arg.to_str()?)));
    images.filter(|(at, arg)| !arg.starts_with('-') && all.iter().all(|option| option.index != *at)).collect()
}

/// An image that is named by its path alone.
fn image(overlays: &mut Overlays<'_>, option: &str, name: &str) -> Result<Option<String>, String> {
    match overlays.find(name).map_err(|why| format!("{option} {why}"))? {
        Some(place) => overlays.take(place.disk).map(Some),
        None => overlays.own(option, name).map(|()| None),
    }
}

fn drive(overlays: &mut Overlays<'_>, value: &str) -> Result<Option<String>, String> {
    let mut list = Properties::parse(value, "file");
    let is_read_only = ["readonly", "read-only", "snapshot"].iter().any(|key| list.is_on(key))
        || list.get("media") == Some("cdrom")
        // A directory as a FAT disk, which is written to with `rw` alone.
        || list.get("file").is_some_and(|name| name.starts_with("fat:") && !name.contains(":rw"));
    if is_read_only {
        return Ok(None);
    }
    let key = if list.get("file").is_some() { "file" } else { "file.filename" };
    let name = list.get(key).unwrap_or_default().to_owned();
    if let Some(place) = overlays.find(&name).map_err(|why| format!("-drive {why}"))? {
        let is_override = |(key, value): &(&str, &str)| {
            key.starts_with("backing") || matches!(*key, "offset" | "size") && *value != "0"
        };
        if let Some((key, _)) = list.iter().find(is_override) {
            return Err(format!(
                "-drive {name}: {key}= says something else than the image; describe it with -blockdev"
            ));
        }
        list.set(key, &overlays.take(place.disk)?);
        list.set(if list.get("driver").is_some() { "driver" } else { "format" }, "qcow2");
        return Ok(Some(list.to_option()));
    }
    overlays.own("-drive", &name)?;
    // What a driver of the block layer names in its own way.
    let files = Node::of_drive(list.clone()).files();
    for file in files.iter().filter(|file| !file.is_read_only) {
        overlays.own("-drive", &file.name)?;
    }
    if files.is_empty() && list.iter().any(|(key, _)| key.starts_with("file.")) {
        return Err(format!("-drive {value}: not understood; describe it with -blockdev"));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::frozen::{FrozenDisk, Layer, plan};
    use super::*;

    fn args(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    fn layer(path: &str, format: &str) -> Layer {
        Layer { path: path.into(), format: format.into(), is_device: path.starts_with("/dev"), is_plain: true }
    }

    fn disks() -> Vec<OverlayPlan> {
        let disk = |layers: &[Layer]| FrozenDisk { length: 1 << 30, layers: layers.to_vec() };
        let data = [layer("/srv/data.qcow2", "qcow2"), layer("/srv/base", "raw")];
        plan(vec![disk(&[layer("/srv/root.img", "raw")]), disk(&data)])
    }

    fn run(line: &str, overlays: &[OverlayPlan]) -> Result<String, String> {
        let same = |name: &str, path: &Path| Path::new(name) == path;
        let found = behind_overlays(&args(line), overlays, &Ownership::new(Path::new("/c")), &same)?;
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

    /// A disk that was saved twice with overlays since its VM was started with `/srv/root.img`, and one of two images.
    fn saved_twice() -> Vec<OverlayPlan> {
        let root = [layer("/srv/two", "qcow2"), layer("/srv/one", "qcow2"), layer("/srv/root.img", "raw")];
        let data = [layer("/srv/data.qcow2", "qcow2"), layer("/dev/vg/base", "raw")];
        let disk = |layers: &[Layer]| FrozenDisk { length: 1 << 30, layers: layers.to_vec() };
        plan(vec![disk(&root), disk(&data)])
    }

    #[test]
    fn every_file_of_a_frozen_chain_means_that_disk() {
        const D0: &str = "{dir}/disk0.qcow2";
        const D1: &str = "{dir}/disk1.qcow2";
        for (line, wanted) in [
            (
                "-drive file=/srv/root.img,format=raw,if=virtio -hdb /dev/vg/base",
                format!("-drive file={D0},format=qcow2,if=virtio -hdb {D1}"),
            ),
            (
                "-drive driver=qcow2,file.driver=file,file.filename=/srv/one -hdb /srv/data.qcow2",
                format!("-drive driver=qcow2,file.driver=file,file.filename={D0} -hdb {D1}"),
            ),
            (
                // The images that were put over the file since stand between it and the overlay.
                "-blockdev file,node-name=f,filename=/srv/root.img -blockdev raw,node-name=r,file=f,discard=unmap,cache.direct=on -hda /dev/vg/base",
                format!(
                    "-blockdev driver=file,node-name=f,filename=/srv/root.img,read-only=on \
                     -blockdev driver=raw,file=f,cache.direct=on,node-name=limosa-frozen0-2,read-only=on \
                     -blockdev driver=qcow2,cache.direct=on,file.driver=file,file.filename=/srv/one,backing=limosa-frozen0-2,node-name=limosa-frozen0-1,read-only=on \
                     -blockdev driver=qcow2,cache.direct=on,file.driver=file,file.filename=/srv/two,backing=limosa-frozen0-1,node-name=limosa-frozen0,read-only=on \
                     -blockdev driver=qcow2,node-name=r,discard=unmap,cache.direct=on,file.driver=file,file.filename={D0},backing=limosa-frozen0 -hda {D1}"
                ),
            ),
            (
                // The command line of a clone of the first snapshot, whose names are taken.
                "-blockdev raw,node-name=limosa-frozen0,read-only=on,file.driver=file,file.filename=/srv/root.img \
                 -blockdev qcow2,node-name=d,file.driver=file,file.filename=/srv/one,backing=limosa-frozen0 -hda /dev/vg/base",
                format!(
                    "-blockdev raw,node-name=limosa-frozen0,read-only=on,file.driver=file,file.filename=/srv/root.img \
                     -blockdev driver=qcow2,file.driver=file,file.filename=/srv/one,backing=limosa-frozen0,node-name=limosa-frozen0-1,read-only=on \
                     -blockdev driver=qcow2,file.driver=file,file.filename=/srv/two,backing=limosa-frozen0-1,node-name=limosa-frozen0.1,read-only=on \
                     -blockdev driver=qcow2,node-name=d,file.driver=file,file.filename={D0},backing=limosa-frozen0.1 -hda {D1}"
                ),
            ),
        ] {
            assert_eq!(
                run(&format!("qemu-system-x86_64 {line}"), &saved_twice()).unwrap(),
                format!("qemu-system-x86_64 {wanted}")
            );
        }
    }

    #[test]
    fn a_lower_file_as_libvirt_describes_it_stands_below_the_images_over_it() {
        let line = r#"qemu-system-x86_64 -hda /srv/one -blockdev {"driver":"host_device","filename":"/dev/vg/base","node-name":"s","auto-read-only":true} -blockdev {"node-name":"f","driver":"raw","file":"s","backing":null}"#;
        let found = run(line, &saved_twice()).unwrap();
        let nodes: Vec<serde_json::Value> = found
            .split(' ')
            .filter(|word| word.starts_with('{'))
            .filter_map(|word| serde_json::from_str(word).ok())
            .collect();
        let file = |path: &str| serde_json::json!({ "driver": "file", "filename": path });
        assert_eq!(
            nodes,
            [
                serde_json::json!({"driver": "host_device", "filename": "/dev/vg/base", "node-name": "s", "read-only": true}),
                serde_json::json!({"driver": "raw", "file": "s", "backing": null, "node-name": "limosa-frozen1-1", "read-only": true}),
                serde_json::json!({"driver": "qcow2", "file": file("/srv/data.qcow2"), "backing": "limosa-frozen1-1", "node-name": "limosa-frozen1", "read-only": true}),
                serde_json::json!({"driver": "qcow2", "file": file("{dir}/disk1.qcow2"), "backing": "limosa-frozen1", "node-name": "f"}),
            ]
        );
    }

    #[test]
    fn a_lower_file_that_does_not_say_which_disk_or_how_it_is_read_is_refused() {
        let mut disks = saved_twice();
        // Both are below one golden image, and what was put over the second was named with more than its path.
        disks.iter_mut().for_each(|plan| plan.disk.layers.push(layer("/srv/golden", "raw")));
        disks[1].disk.layers[0].is_plain = false;
        for (line, named) in [
            ("-hda /srv/golden -hdb /srv/one", "/srv/golden is below the frozen disks /srv/two and /srv/data.qcow2"),
            ("-drive file=/srv/golden,format=raw -hdb /srv/data.qcow2", "-drive /srv/golden is below"),
            (
                "-blockdev raw,node-name=g,file.driver=file,file.filename=/srv/golden",
                "node-name=g: /srv/golden is below",
            ),
            ("-hda /srv/root.img -hdb /srv/one", "/srv/two is named twice"),
            (
                "-hda /srv/one -blockdev raw,node-name=b,file.driver=host_device,file.filename=/dev/vg/base",
                "describe /srv/data.qcow2 instead",
            ),
            (
                "-hda /dev/vg/base -blockdev raw,node-name=o,file.driver=file,file.filename=/srv/one",
                "reads the frozen disk /srv/one, whose format is qcow2",
            ),
            (
                r#"-hda /dev/vg/base -blockdev {"driver":"qcow2","node-name":"o","backing":null,"file":{"driver":"file","filename":"/srv/one"}}"#,
                "names a backing image",
            ),
        ] {
            let refused = run(&format!("qemu-system-x86_64 {line}"), &disks).expect_err(line);
            assert!(refused.contains(named), "{line}: {refused}");
        }
    }

    proptest! {
        #[test]
        fn any_command_line_is_rewritten_or_refused(line in proptest::collection::vec("[-a-z0-9=,{}\":/.]{0,30}", 0..10)) {
            let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
            let same = |name: &str, path: &Path| Path::new(name) == path;
            let _ = behind_overlays(&line, &disks(), &Ownership::new(Path::new("/c")), &same);
        }
    }
}
