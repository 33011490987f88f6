//! A stored VM made small: packed by limosa, compared with `zstd` on the same pages; saved packed, compared with a
//! plain save and with the stream of QEMU through `zstd`, as libvirt stores it; restored lazily from a packed file,
//! compared with a plain one, until its guest has done fixed work: a word in each of many pages far from each other.
//!
//! The VM's memory is what disks have: text, tables, machine code, files that are compressed already, and zeros. The
//! increment is of the same VM after its guest has written a word into each of 8,192 pages next to each other.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use limosa_page::{to_micros, to_usize};
use limosa_qemu::monitor::MigrationStatus;
use rustix::fs::{SeekFrom, seek};
use serde_json::Value;

use crate::content::mixed_memory;
use crate::frame::{Contestant, Frame, Series, interleave};
use crate::guest::Task;
use crate::limosa::Prepared;
use crate::machine::Machine;
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::report::{Bound, NOT_RUN, Report, Target, figure, gib_or_mib, ratio};
use crate::restore::runs::{TO_BEAT, TO_WORK};
use crate::scratch::Scratch;
use crate::stored::{Stored, ask, wait_answer, wait_beat};
use crate::vm::{Ram, Role, Vm};

const ZSTD: &str = "zstd -3 of all stored pages";
const PACK: &str = "limosa pack";
const SECRET: &str = "limosa pack --encrypt";
const INCREMENT: &str = "limosa pack --base";
const PLAIN: &str = "plain";
const PACKED: &str = "packed";
const ENCRYPTED: &str = "packed and encrypted";
const ON_BASE: &str = "packed on a base";
const BY_QEMU: &str = "QEMU through zstd -3";

/// KiB of the file that was made.
const FILE: &str = "file_kib";
/// Microseconds that the VM was stopped.
const PAUSE: &str = "pause_us";

/// The names of the cases.
struct Cases {
    pack: String,
    save: String,
    restore: String,
}

impl Cases {
    fn new(size: u64) -> Self {
        let size = gib_or_mib(size);
        Self {
            pack: format!("{size} packed"),
            save: format!("{size} saved"),
            restore: format!("{size} restored lazily"),
        }
    }
}

/// The files that the contestants work on.
struct Files {
    plain: Stored,
    packed: Stored,
    secret: Stored,
    /// The same VM later, beside the packed one.
    later: PathBuf,
    /// The stored pages alone, for zstd; none without zstd.
    pages: Option<PathBuf>,
    key: Vec<String>,
    memory: File,
    folder: Scratch,
}

/// Runs the bench.
pub(crate) fn run(options: &Options) -> Result<Report> {
    let machine = Machine::this(&options.qemu);
    let size = options.size.unwrap_or(1 << 30).next_multiple_of(2 << 20);
    let cases = Cases::new(size);
    let lacking = machine.lacks_mapped_ram();
    let all = if lacking.is_none() { rounds(options, &cases, size)? } else { Vec::new() };
    let mut report = Report::new("packed", machine, options.rounds, &all);
    judge(&mut report, &all, &cases, lacking.as_deref().unwrap_or(NOT_RUN));
    Ok(report)
}

fn rounds(options: &Options, cases: &Cases, size: u64) -> Result<Vec<Series>> {
    options.tell("saving and packing the VM");
    let files = &Files::make(options, size)?;
    let mut contestants = Vec::new();
    for (variant, arguments) in [(PACK, None), (SECRET, Some(false)), (INCREMENT, Some(true))] {
        if options.wants(&cases.pack, variant) {
            contestants.push(Contestant {
                case: cases.pack.clone(),
                variant: variant.to_owned(),
                run: Box::new(move |frame| files.pack(options, arguments, frame)),
            });
        }
    }
    if let Some(pages) = files.pages.as_ref().filter(|_| options.wants(&cases.pack, ZSTD)) {
        contestants.push(Contestant {
            case: cases.pack.clone(),
            variant: ZSTD.to_owned(),
            run: Box::new(move |frame| files.zstd(pages, frame)),
        });
    }
    let saves = [
        (PLAIN, Save::Plain, true),
        (PACKED, Save::Packed, true),
        (ON_BASE, Save::OnBase, true),
        (BY_QEMU, Save::ByQemu, has_zstd()),
    ];
    for (variant, how, is_there) in saves {
        if is_there && options.wants(&cases.save, variant) {
            contestants.push(Contestant {
                case: cases.save.clone(),
                variant: variant.to_owned(),
                run: Box::new(move |frame| files.save(options, size, how, frame)),
            });
        }
    }
    for (variant, stored) in [(PLAIN, &files.plain), (PACKED, &files.packed), (ENCRYPTED, &files.secret)] {
        if options.wants(&cases.restore, variant) {
            contestants.push(Contestant {
                case: cases.restore.clone(),
                variant: variant.to_owned(),
                run: Box::new(move |frame| restore(options, stored, frame)),
            });
        }
    }
    ensure!(!contestants.is_empty(), "{}", options.none_selected());
    let frame = Frame { touch: options.touch.unwrap_or(size) };
    interleave(&mut contestants, options.rounds, &frame, &mut |line| options.tell(line))
}

impl Files {
    fn make(options: &Options, size: u64) -> Result<Self> {
        let folder = Scratch::new_in(&options.dir.clone().unwrap_or_else(std::env::temp_dir))?;
        let (plain, vm) = Stored::mixed(options, size)?;
        let secret = folder.path().join("key");
        fs::write(&secret, b"0123456789abcdef0123456789abcdef").with_context(|| secret.display().to_string())?;
        let object = format!("secret,id=s,file={}", secret.display());
        let key = ["--object", &object, "--key-secret", "s"].map(str::to_owned).to_vec();
        let packed = plain.packed(options, &[], &[])?;
        let encrypted = plain.packed(options, &["--encrypt", "--iter-time", "10ms"], &key)?;
        // The guest writes, and is saved again.
        let later = folder.path().join("later");
        let mut serial = vm.serial()?;
        vm.run()?;
        ask(&mut serial, Task::Write)?;
        wait_answer(&mut serial, Task::Write)?;
        drop(serial);
        let save = Prepared::new(options, "save")?.path(Some("--qmp"), &vm.limosa_monitor()).path(None, &later);
        save.start()?.finish()?;
        drop(vm);
        let pages = has_zstd().then(|| folder.path().join("pages"));
        if let Some(pages) = &pages {
            stored_pages(&plain.path, pages)?;
        }
        let memory = mixed_memory(size)?;
        Ok(Self { plain, packed, secret: encrypted, later, pages, key, memory, folder })
    }

    /// Packs once. `how`: as it is, or encrypted (false), or on a base (true).
    fn pack(&self, options: &Options, how: Option<bool>, frame: &Frame) -> Result<Measured> {
        // A base is in the directory of its increment.
        let target = self.packed.path.with_file_name("new");
        let key: Vec<&str> = self.key.iter().map(String::as_str).collect();
        let mut limosa = Prepared::new(options, "pack")?;
        let source = if how == Some(true) { &self.later } else { &self.plain.path };
        limosa = match how {
            None => limosa,
            Some(false) => limosa.arguments(&["--encrypt", "--iter-time", "10ms"]).arguments(&key),
            Some(true) => limosa.path(Some("--base"), &self.packed.path),
        };
        let limosa = limosa.path(None, source).path(None, &target);
        crate::page_cache::warm(source)?;
        frame.touch()?;
        let watch = Stopwatch::start(&[])?;
        limosa.start()?.finish()?;
        finish(&watch, &target)
    }

    /// Compresses the pages alone, and makes the file durable as limosa does.
    fn zstd(&self, pages: &Path, frame: &Frame) -> Result<Measured> {
        let target = self.folder.path().join("pages.zst");
        crate::page_cache::warm(pages)?;
        frame.touch()?;
        let watch = Stopwatch::start(&[])?;
        let status = Command::new("zstd").args(["-3", "-T0", "-q", "-f", "-o"]).arg(&target).arg(pages).status();
        ensure!(status.context("zstd")?.success(), "zstd failed");
        let file = File::open(&target).with_context(|| target.display().to_string())?;
        file.sync_all().context("syncing what zstd made")?;
        finish(&watch, &target)
    }

    /// Saves a running VM once.
    fn save(&self, options: &Options, size: u64, how: Save, frame: &Frame) -> Result<Measured> {
        // A base is in the directory of its increment.
        let target = self.packed.path.with_file_name("saved");
        let vm = Vm::start(&options.qemu, size, Ram::Shared(&self.memory), Role::Source)?;
        let mut serial = vm.serial()?;
        vm.run()?;
        wait_beat(&mut serial)?;
        let limosa = Prepared::new(options, "save")?;
        let limosa = match how {
            Save::Plain => limosa,
            Save::Packed => limosa.arguments(&["--pack", "zstd"]),
            Save::OnBase => limosa.arguments(&["--pack", "zstd"]).path(Some("--base"), &self.packed.path),
            Save::ByQemu => return save_by_qemu(&vm, &target, frame),
        };
        let limosa = limosa.path(Some("--qmp"), &vm.limosa_monitor()).path(None, &target);
        frame.touch()?;
        let watch = Stopwatch::start(&[vm.pid()])?;
        let said = limosa.start()?.finish()?;
        let pause = said.pointer("/downtime_ms").and_then(Value::as_f64).context("the time that the VM was stopped")?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a time of less than an hour")]
        let pause = (pause * 1000.0) as u64;
        Ok(finish(&watch, &target)?.with(PAUSE, pause))
    }
}

/// How a VM is saved.
#[derive(Debug, Clone, Copy)]
enum Save {
    Plain,
    Packed,
    /// As an increment of the packed one, whose memory is nearly the same.
    OnBase,
    ByQemu,
}

/// Saves a VM as `virsh save` does with `save_image_format = "zstd"`: stopped, by the stream, through a program.
fn save_by_qemu(vm: &Vm, target: &Path, frame: &Frame) -> Result<Measured> {
    frame.touch()?;
    let watch = Stopwatch::start(&[vm.pid()])?;
    vm.stop()?;
    vm.monitor.migrate(&format!("exec:zstd -3 -q -f -o {}", target.display()), false)?;
    vm.wait_migration(&MigrationStatus::Completed)?;
    File::open(target).and_then(|file| file.sync_all()).with_context(|| target.display().to_string())?;
    let pause = to_micros(watch.elapsed());
    Ok(finish(&watch, target)?.with(PAUSE, pause))
}

/// Restores a VM once, and has its guest work.
fn restore(options: &Options, stored: &Stored, frame: &Frame) -> Result<Measured> {
    let vm = Vm::start(&options.qemu, stored.memory, Ram::Own { content: None }, Role::Destination)?;
    let mut serial = vm.serial()?;
    stored.warm()?;
    let key: Vec<&str> = stored.key.iter().map(String::as_str).collect();
    let restore = Prepared::new(options, "restore")?.arguments(&["--memory", "lazy", "--run"]).arguments(&key);
    let restore = restore.path(Some("--qmp"), &vm.limosa_monitor()).path(None, &stored.path);
    frame.touch()?;
    let watch = Stopwatch::start(&[vm.pid()])?;
    let limosa = restore.start()?;
    wait_beat(&mut serial)?;
    let beat = watch.elapsed();
    ask(&mut serial, Task::WriteScattered)?;
    wait_answer(&mut serial, Task::WriteScattered)?;
    let work = watch.elapsed();
    limosa.finish()?;
    Ok(watch.stop()?.with(TO_BEAT, to_micros(beat)).with(TO_WORK, to_micros(work)))
}

/// Stops the clock, and takes the size of a file, which is removed.
fn finish(watch: &Stopwatch, target: &Path) -> Result<Measured> {
    let measured = watch.stop()?;
    let metadata = fs::metadata(target).with_context(|| target.display().to_string())?;
    fs::remove_file(target).with_context(|| target.display().to_string())?;
    Ok(measured.with(FILE, metadata.blocks() / 2))
}

fn has_zstd() -> bool {
    Command::new("zstd").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
}

/// Copies what a sparse file stores, without its holes.
fn stored_pages(sparse: &Path, target: &Path) -> Result<()> {
    let (file, into) = (File::open(sparse)?, File::create(target)?);
    let (mut at, mut written) = (0, 0);
    let mut buffer = vec![0; 1 << 20];
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = start;
        let end = seek(&file, SeekFrom::Hole(start)).context("SEEK_HOLE")?;
        while at < end {
            let part = buffer.get_mut(..to_usize((end - at).min(1 << 20))).context("a piece")?;
            file.read_exact_at(part, at).with_context(|| sparse.display().to_string())?;
            into.write_all_at(part, written).with_context(|| target.display().to_string())?;
            (at, written) = (at + part.len() as u64, written + part.len() as u64);
        }
    }
    Ok(())
}

/// The targets of packed snapshots.
fn judge(report: &mut Report, all: &[Series], cases: &Cases, why: &str) {
    let Cases { pack, save, restore } = cases;
    let median = |case: &str, of: &str, to: &str, figure: &str| ratio(all, case, of, to, figure);
    let found = [
        (format!("{pack}: size of {PACK} / {ZSTD}"), Bound::AtMost(1.05), median(pack, PACK, ZSTD, FILE)),
        (format!("{pack}: CPU of {PACK} / {ZSTD}"), Bound::AtMost(1.15), median(pack, PACK, ZSTD, "cpu")),
        (format!("{pack}: size of {INCREMENT} / {PACK}"), Bound::AtMost(0.05), median(pack, INCREMENT, PACK, FILE)),
        (format!("{save}: pause of {PACKED} / {PLAIN}"), Bound::AtMost(1.1), median(save, PACKED, PLAIN, PAUSE)),
    ];
    for (name, bound, ratio) in found {
        let got = ratio.as_ref().map(|ratio| ratio.median);
        report.targets.push(Target::new(name, bound, got, why));
        report.ratios.extend(ratio);
    }
    for (of, to, figure) in [(SECRET, PACK, "cpu"), (PACK, ZSTD, "wall")] {
        report.ratios.extend(ratio(all, pack, of, to, figure));
    }
    for figure in ["wall", FILE, PAUSE] {
        report.ratios.extend(ratio(all, save, PACKED, BY_QEMU, figure));
    }
    for (of, figure) in
        [(PACKED, "wall"), (PACKED, "cpu"), (PACKED, TO_WORK), (ENCRYPTED, "wall"), (ENCRYPTED, TO_WORK)]
    {
        report.ratios.extend(ratio(all, restore, of, PLAIN, figure));
    }
    let beat = |variant: &str| Some(figure(all, restore, variant, TO_BEAT)?.median / 1e3);
    let more = beat(PACKED).zip(beat(PLAIN)).map(|(packed, plain)| packed - plain);
    let name = format!("{restore}: ms more until the first beat, {PACKED} than {PLAIN}");
    report.targets.push(Target::new(name, Bound::AtMost(5.0), more, why));
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn series(case: &str, variant: &str, name: &'static str, value: u64) -> Series {
        let run = Measured { wall: Duration::from_secs(2), cpu: Duration::from_secs(3), ..Measured::default() };
        Series { case: case.into(), variant: variant.into(), runs: vec![run.with(name, value)] }
    }

    #[test]
    fn each_target_is_judged_by_its_own_figures() {
        let cases = Cases::new(1 << 30);
        let all = [
            series(&cases.pack, PACK, FILE, 108),
            series(&cases.pack, ZSTD, FILE, 100),
            series(&cases.pack, INCREMENT, FILE, 4),
            series(&cases.save, PLAIN, PAUSE, 20),
            series(&cases.save, PACKED, PAUSE, 21),
            series(&cases.restore, PLAIN, TO_BEAT, 20_000),
            series(&cases.restore, PACKED, TO_BEAT, 27_000),
        ];
        let mut report = Report::new("packed", Machine::this("/none"), 1, &all);
        judge(&mut report, &all, &cases, NOT_RUN);
        let found: Vec<_> = report.targets.iter().map(|target| target.met).collect();
        assert_eq!(found, [Some(false), Some(true), Some(true), Some(true), Some(false)]);
    }
}
