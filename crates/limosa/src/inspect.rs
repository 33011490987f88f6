//! `limosa inspect`.

use limosa_console::quantity;
use std::fmt;
use std::process::ExitCode;

use anyhow::{Context, anyhow, bail};
use comfy_table::{Cell, CellAlignment, Table, presets};
use limosa_qemu::{BlockPlace, Mappers};
use limosa_snapshot::{
    BlockSummary, ByteOrder, DeviceSummary, Manifest, PackedImage, PackedSummary, SaveImageSummary, Snapshot, Summary,
};
use serde::Serialize;

use crate::args::InspectArgs;
use crate::changed;
use crate::checkpoints;
use crate::compare;
use crate::import::Stored;
use crate::packed;
use crate::remote;
use crate::report;
use crate::usage::misused;
use crate::vm_state;
use crate::working_set::ShownWorkingSet;
use limosa_console::{check_stdout, error_line, print_out, say};

pub(crate) fn run(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    packed::define_key(&args.key)?;
    if args.diff || args.against_qmp.is_some() {
        return Ok(compare::run(args));
    }
    if args.qemu_args {
        return qemu_args(args);
    }
    if args.changed {
        return changed::run(args);
    }
    if args.vm.is_given() {
        misused("--qmp and --pid name a VM for --changed: add it");
    }
    if args.file.is_dir() {
        return checkpoints::inspect(&args.file, args.json);
    }
    let (summary, snapshot) = match &args.tag {
        Some(tag) => {
            let (foreign, feeder) = vm_state::open(&args.file, tag, &args.disk, args.force_share)?;
            let converted = Stored::Foreign(foreign).snapshot("to look into it", true);
            (feeder.after(converted)?.summary(), None)
        }
        None => compare::open(&args.file)?,
    };
    let working_set = snapshot.as_ref().and_then(ShownWorkingSet::of);
    let is_remote = snapshot.as_ref().is_some_and(Snapshot::is_remote);
    let images = snapshot.as_ref().map_or_else(|| Ok(Vec::new()), Snapshot::images);
    let images = images.unwrap_or_else(|error| {
        say!("limosa: what is in which image cannot be shown: {}", error_line(&error));
        Vec::new()
    });
    let mapped_by = snapshot.as_ref().filter(|_| !is_remote).and_then(mappers);
    let shown = Shown { summary, working_set, mapped_by, images, is_remote };
    if args.json {
        let mut object = serde_json::to_value(&shown)?;
        remote::add_cost(&mut object);
        print_out!("{object}");
    } else {
        show(&shown);
        remote::tell_cost();
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// The contents of a file, and what is known of those who use it.
#[derive(Serialize)]
struct Shown {
    #[serde(flatten)]
    summary: Summary,
    /// The working set beside a snapshot, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    working_set: Option<ShownWorkingSet>,
    /// The processes that map a snapshot; none if they cannot be looked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    mapped_by: Option<Mappers>,
    /// The images of a packed snapshot, the topmost one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    images: Vec<PackedImage>,
    /// Whether it is in an object store.
    #[serde(skip)]
    is_remote: bool,
}

/// Finds the processes that map a snapshot. A host without /proc has none that can be seen.
fn mappers(snapshot: &Snapshot) -> Option<Mappers> {
    Mappers::of(snapshot).inspect_err(|error| tracing::info!("processes that map the file: {error}")).ok()
}

/// Prints the options of a QEMU that maps the snapshot.
fn qemu_args(args: &InspectArgs) -> anyhow::Result<ExitCode> {
    let snapshot = packed::open(&args.file)?;
    snapshot.check_restorable()?;
    let shown = args.file.display();
    if !snapshot.is_mappable() {
        bail!("{}", packed::unmappable(&snapshot));
    }
    let path = std::fs::canonicalize(&args.file).with_context(|| shown.to_string())?;
    let path = path.to_str().with_context(|| format!("{shown}: QEMU takes no file name that is not UTF-8"))?;
    let memory = BlockPlace::guest_memory_of(&snapshot).map_err(|why| anyhow!("{shown}: cannot be mapped: {why}"))?;
    let mut options = match memory.as_slice() {
        [] => bail!("{shown}: no RAM block of it is known to be the guest's memory; save it again with this version"),
        [main] => vec![
            "-machine".to_owned(),
            format!("{},memory-backend={}", snapshot.layout().configuration.machine, main.id()),
            "-m".to_owned(),
            format!("{}M", main.length >> 20),
        ],
        // Which is the machine's own, a NUMA node's or a DIMM's is said by options that are no part of a snapshot.
        _ => {
            say!(
                "limosa: the VM had {} memory backends: give these options in place of the -object options of the same ids, and \
                 leave -m, -numa, -machine and -device as they were",
                memory.len()
            );
            Vec::new()
        }
    };
    for block in &memory {
        options.extend(["-object".to_owned(), block.backend_option(path)]);
    }
    options.extend(["-incoming".to_owned(), "defer".to_owned()]);
    if args.json {
        print_out!("{}", serde_json::json!({ "arguments": options }));
    } else {
        for option in options.chunks(2) {
            print_out!("{}", option.iter().map(|word| shell_word(word)).collect::<Vec<_>>().join(" "));
        }
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Quotes a word for a shell.
fn shell_word(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./,=:+@%".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

fn show(Shown { summary, working_set, mapped_by, images, is_remote }: &Shown) {
    print_out!(
        "{}: {} ({} {})",
        summary.path,
        quantity::bytes(summary.length),
        quantity::bytes(summary.allocated),
        if *is_remote { "in the store" } else { "on disk" }
    );
    if let Some(packed) = &summary.packed {
        show_packed(packed, images, *is_remote);
    }
    print_out!("machine       {}", summary.machine);
    if !summary.capabilities.is_empty() {
        print_out!("capabilities  {}", summary.capabilities.join(", "));
    }
    if let Some(uuid) = &summary.uuid {
        print_out!("stream uuid   {uuid}");
    }
    print_out!("run state     {}", summary.run_state.as_deref().unwrap_or("not recorded"));
    if let Some(number) = summary.manifest.as_ref().and_then(|manifest| manifest.checkpoint) {
        print_out!("checkpoint    {number}");
    }
    if let Some(image) = &summary.libvirt {
        show_save_image(image);
    }
    match &summary.manifest {
        Some(manifest) => show_manifest(manifest, summary),
        None => {
            let remedy = if summary.importable { "; limosa import makes one of it" } else { "" };
            print_out!("limosa        {}{remedy}", summary.missing_manifest_reason.as_deref().unwrap_or("no trailer"));
        }
    }
    if let Some(set) = working_set {
        print_out!("working set   {set}");
    }
    if let Some(mappers) = mapped_by {
        show_mappers(mappers);
    }
    print_out!("\n{}", blocks(&summary.blocks));
    print_out!("\n{}", devices(&summary.devices));
    for warning in &summary.warnings {
        print_out!("warning: {warning}");
    }
}

fn show_packed(packed: &PackedSummary, images: &[PackedImage], is_remote: bool) {
    let encrypted = if packed.encrypted { ", encrypted" } else { "" };
    let cluster = quantity::bytes(packed.cluster_size);
    print_out!("packed        {}, clusters of {cluster}{encrypted}", packed.compression);
    for (index, image) in images.iter().enumerate() {
        print_out!(
            "{}{}: {} of it, in {}",
            if index == 0 { "images        " } else { "              on " },
            image.name,
            quantity::bytes(image.contents),
            quantity::bytes(image.length)
        );
    }
    let total = |figure: fn(&PackedImage) -> u64| images.iter().map(figure).fold(0, u64::saturating_add);
    let (contents, length) = (total(|image| image.contents), total(|image| image.length));
    print_out!("ratio         {:.2}, of {}", share(contents, length), quantity::bytes(contents));
    if is_remote {
        print_out!("fetched       at most {} for all of it", quantity::bytes(length));
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}

fn show_save_image(image: &SaveImageSummary) {
    let order = match image.header.byte_order {
        ByteOrder::Little => "",
        ByteOrder::Big => ", big-endian",
    };
    print_out!(
        "libvirt       save image version {}{order}, format {}; the VM {} when it was saved",
        image.header.version,
        image.header.format.name(),
        if image.header.was_running { "ran" } else { "was paused" }
    );
    print_out!("domain        {}", image.name.as_deref().unwrap_or("without a name"));
    if let Some(uuid) = &image.uuid {
        print_out!("domain uuid   {uuid}");
    }
}

fn show_manifest(manifest: &Manifest, summary: &Summary) {
    print_out!("id            {}", manifest.id);
    if let Some(name) = &manifest.vm_name {
        print_out!("VM            {name}");
    }
    if let Some(uuid) = &manifest.vm_uuid {
        print_out!("VM uuid       {uuid}");
    }
    print_out!("QEMU          {}", manifest.qemu_version.as_deref().unwrap_or("unknown"));
    print_out!(
        "limosa        {}, checksums {}",
        manifest.limosa_version,
        if summary.checksums { "recorded" } else { "not recorded" }
    );
    print_out!(
        "saved         {}, {} pages sent again",
        report::date(manifest.finished),
        quantity::count(manifest.pages.resent)
    );
    let mappable = match (manifest.mappable, &summary.packed) {
        (true, None) => "yes",
        (true, Some(_)) => "when it is unpacked",
        (false, None) => "no: limosa snapshot seal makes it so",
        (false, Some(_)) => "no",
    };
    print_out!("mappable      {mappable}");
    if let Some(hinted @ 1..) = manifest.pages.hinted {
        let memory = quantity::bytes(hinted.saturating_mul(limosa_page::PAGE_SIZE));
        print_out!(
            "left out      {} pages ({memory}) that were never sent: free in the guest",
            quantity::count(hinted)
        );
    }
    for disk in &manifest.disks {
        print_out!(
            "disk          {} {} ({}, {})",
            disk.device.as_deref().unwrap_or(&disk.node),
            disk.path.display(),
            disk.format,
            quantity::bytes(disk.size)
        );
        for below in &disk.backing {
            print_out!("              on {}", below.path.display());
        }
        if let Some(overlay) = &disk.overlay {
            print_out!("              frozen; the VM went on in {}", overlay.display());
        }
    }
}

fn show_mappers(mappers: &Mappers) {
    let mut label = "mapped by";
    for process in &mappers.processes {
        let writes = if process.writes_reach_file { ", SHARED: what it writes reaches the file" } else { "" };
        print_out!("{label:<14}{} (pid {}): {}{writes}", plain(&process.name), process.pid, process.blocks.join(", "));
        label = "";
    }
    if mappers.unseen > 0 {
        let others = quantity::count(mappers.unseen);
        print_out!("{label:<14}other processes may: {others} cannot be looked at by this user");
    }
}

/// The name of a process, with what a terminal would act upon escaped.
pub(crate) fn plain(name: &str) -> impl fmt::Display {
    name.escape_debug()
}

pub(crate) fn table(header: &[&str], numbers: usize) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(header.iter().enumerate().map(|(at, name)| {
        let cell = Cell::new(name);
        if at >= numbers { cell.set_alignment(CellAlignment::Right) } else { cell }
    }));
    table
}

pub(crate) fn number(value: u64) -> Cell {
    Cell::new(quantity::count(value)).set_alignment(CellAlignment::Right)
}

fn blocks(blocks: &[BlockSummary]) -> Table {
    let mut table = table(&["RAM block", "used", "pages", "stored", "zero"], 1);
    for block in blocks {
        let used = Cell::new(quantity::bytes(block.used)).set_alignment(CellAlignment::Right);
        table.add_row([Cell::new(&block.name), used, number(block.pages), number(block.stored), number(block.zero)]);
    }
    table
}

fn devices(devices: &[DeviceSummary]) -> Table {
    let mut table = table(&["device section", "instance", "version", "bytes"], 1);
    for device in devices {
        table.add_row([
            Cell::new(&device.name),
            number(device.instance.into()),
            number(device.version.into()),
            number(device.size),
        ]);
    }
    table
}
