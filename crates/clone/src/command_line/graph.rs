//! Nodes of the block layer (`-blockdev`) behind overlays.
//!
//! The node of a frozen disk keeps its name for the overlay, so what uses it by that name gets the overlay. What was
//! described under that name becomes read-only below it, under a name that is free; images that were put over it since
//! stand between the two.

use std::ffi::OsString;

use limosa_qemu::command_line::{CommandOption, Properties};

use super::frozen::{Overlays, Place};
use super::node::Node;

/// Longest name of a node, in bytes (QEMU's block layer has room for 31 and a zero byte).
const NODE_NAME_MAX: usize = 31;

/// A node of the block layer, and the frozen ones below it, the lowest first, if it is an overlay now.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Covered {
    pub(super) below: Vec<Node>,
    pub(super) node: Node,
}

/// Returns the nodes that change, by the index of their argument, in order.
///
/// # Errors
/// A node that is not understood, or that all clones would write to; a frozen disk that cannot be covered as it is
/// described.
pub(super) fn cover_nodes(
    overlays: &mut Overlays<'_>,
    args: &[OsString],
    all: &[CommandOption<'_>],
) -> Result<Vec<(usize, Covered)>, String> {
    let mut nodes = Vec::new();
    for option in all.iter().filter(|option| option.name == "blockdev") {
        let node = Node::read(option.value).ok_or_else(|| format!("-blockdev {}: not understood", option.value))?;
        nodes.push((option.index, Covered { below: Vec::new(), node }));
    }
    let before = nodes.clone();
    seal_backing(&mut nodes, all);
    for at in 0..nodes.len() {
        if let Some((format, place)) = frozen_format(overlays, &mut nodes, at)?
            && let Some((_, covered)) = nodes.get_mut(format)
        {
            cover(overlays, args, covered, place)?;
        }
    }
    let changed = nodes.into_iter().zip(before).filter(|(now, before)| now != before);
    Ok(changed.map(|(now, _)| now).collect())
}

/// Looks at the files of one node. Returns the frozen image that is its own, and the index of that image's format node;
/// its file is read-only then.
fn frozen_format(
    overlays: &Overlays<'_>,
    nodes: &mut [(usize, Covered)],
    at: usize,
) -> Result<Option<(usize, Place)>, String> {
    let Some((_, Covered { node, .. })) = nodes.get(at) else { return Ok(None) };
    let name = node.name().to_owned();
    let mut own = None;
    for file in node.files().into_iter().filter(|file| !file.is_read_only) {
        match overlays.find(&file.name).map_err(|why| format!("-blockdev node-name={name}: {why}"))? {
            Some(place) if file.is_nodes_own => own = Some(place),
            Some(_) => {
                return Err(format!(
                    "-blockdev node-name={name}: the frozen disk {} is part of something else; give it a node of its own",
                    file.name
                ));
            }
            // An overlay that was put there is the clone's own.
            None => overlays.own("-blockdev", &file.name)?,
        }
    }
    let Some(place) = own else { return Ok(None) };
    if !node.is_protocol() {
        return Ok(Some((at, place)));
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
    Ok(Some((format, place)))
}

/// Puts the overlay of a disk over a node that describes an image of the disk, and the images above that one between
/// the two.
fn cover(overlays: &mut Overlays<'_>, args: &[OsString], covered: &mut Covered, place: Place) -> Result<(), String> {
    let Covered { below, node } = covered;
    let refused = |why: String| Err(format!("-blockdev node-name={}: {why}", node.name()));
    let plan = overlays.plan(place.disk)?;
    let (above, rest) = plan.disk.layers.split_at_checked(place.layer).unwrap_or_default();
    let Some((image, lower)) = rest.split_first() else {
        return refused(format!("there is no image {} of the frozen disk {}", place.layer, place.disk));
    };
    let (path, recorded) = (image.path.display(), &image.format);
    if node.driver() != recorded {
        return refused(format!("driver={} reads the frozen disk {path}, whose format is {recorded}", node.driver()));
    }
    if node.has_no_backing() && !lower.is_empty() {
        return refused(format!(
            "it says that nothing is below the frozen disk {path}, whose file names a backing image; leave \"backing\" \
             out"
        ));
    }
    if let Some(key) = node.partial_key() {
        return refused(format!("{key}= makes a part of the frozen image the disk"));
    }
    if let Some(layer) = above.iter().find(|layer| !layer.is_plain) {
        return refused(format!(
            "{} is above {path}, and is named there with more than its path; describe {} instead",
            layer.path.display(),
            plan.disk.path().display()
        ));
    }
    let file = overlays.take(place.disk)?;
    if node.is_read_only() {
        return Ok(());
    }
    let mut name = free_name(args, place)?;
    below.push(node.lowered(&name));
    for (layer, image) in above.iter().enumerate().rev() {
        let next = free_name(args, Place { layer, ..place })?;
        below.push(node.between(image, &next, &name));
        name = next;
    }
    *node = node.overlay(&file, &name);
    Ok(())
}

/// A name for the node of a frozen image, which occurs nowhere in the command line: `limosa-frozen0`, below it
/// `limosa-frozen0-1`. The command line of a clone has such nodes already.
fn free_name(args: &[OsString], Place { disk, layer }: Place) -> Result<String, String> {
    let wanted = if layer == 0 { format!("limosa-frozen{disk}") } else { format!("limosa-frozen{disk}-{layer}") };
    let is_free = |name: &String| args.iter().filter_map(|arg| arg.to_str()).all(|arg| !arg.contains(name.as_str()));
    let others = (1_u32..).map(|number| format!("{wanted}.{number}"));
    let mut names = std::iter::once(wanted.clone()).chain(others).take_while(|name| name.len() <= NODE_NAME_MAX);
    names.find(is_free).ok_or_else(|| format!("no name like {wanted} is free for a node of the block layer"))
}

/// Makes nodes read-only that are nothing but backing images of others, as QEMU uses them, and the files below them.
fn seal_backing(nodes: &mut [(usize, Covered)], all: &[CommandOption<'_>]) {
    let devices = all.iter().filter(|option| option.name == "device");
    let mut drives: Vec<_> = devices
        .filter_map(|option| Properties::parse(option.value, "driver").get("drive").map(str::to_owned))
        .collect();
    for option in all.iter().filter(|option| matches!(option.name, "machine" | "M")) {
        let list = Properties::parse(option.value, "type");
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
