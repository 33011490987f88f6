//! A process that writes to an image in a real file is killed with SIGKILL, again and again, and the image is used on
//! after each kill.
//!
//! What the process did it says in a file beside the image, a line before a request begins and one when it is over,
//! each by one appending write: the file outlives the process as the image does, and the order of its lines is the
//! order of what happened. A kill leaves what the kernel was given; what limosa keeps in memory until a flush is lost.
//! So after it the image is sound, of every sector there is what was written before the last completed flush or
//! something that came after it, and nothing else is there.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use limosa_image::Policy;
use limosa_image::chain::{self, OpenOptions as ChainOptions};
use limosa_image::luks::{Passphrase, Secrets};
use limosa_image::qcow2::{CheckOptions, JournalFolder, Qcow2Options, ReflinkMode, Repair, repair};
use limosa_image::reference::Reference;
use limosa_image::{Disk, GuestOffset};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{Buffer, CacheMode, FileOptions, FileStorage, block_on};
use limosa_testkit::scratch;

use crate::Verdict;
use crate::bed::{Bed, differs};
use crate::drive::Stamp;
use crate::guest::content;
use crate::history::{History, Value};
use crate::model::{read_all, whole};
use crate::recipe::{PASSPHRASE, Recipe, SECRET};

const SECTOR: u64 = 512;
const THREADS: u64 = 4;
/// Tells the process that it is the one to be killed: a seed, and the folder.
const CALL: &str = "LIMOSA_PROOF_KILLED";
/// Tells it where its record is, which has to survive what the image does not.
const RECORD: &str = "LIMOSA_PROOF_RECORD";

/// The folder of journals beside the image.
const JOURNALS: &str = "journals";

/// How the process ends, in a folder where its image is.
pub(crate) type End<'a> = dyn Fn(&mut Child) -> Verdict + 'a;

/// It is killed.
pub(crate) fn by_a_kill(child: &mut Child) -> Verdict {
    child.kill().and_then(|()| child.wait()).map(drop).map_err(|error| error.to_string())
}

/// A line of the record: `b`egun or `e`nded, the number of the request, its kind, its first byte and its end.
fn line(done: char, number: u64, what: char, range: &std::ops::Range<u64>) -> String {
    format!("{done} {number} {what} {} {}\n", range.start, range.end)
}

/// The image in the folder as limosa opens it; of the same seed, with the same options. It has a journal if there is a
/// folder for it.
fn open(folder: &Path, seed: u64, read_only: bool) -> Verdict<Arc<dyn Disk>> {
    let mut chance = SeededRandom::new(seed);
    let qcow2 = Qcow2Options::default()
        .cache_size(*chance.choose(&[0, 64 << 10, 32 << 20]))
        // Where the filesystem can: nothing else is asked of it twice.
        .reflink_mode(ReflinkMode::AtLeast(0))
        .allocate_ahead(*chance.choose(&[0, 64 << 10, 4 << 20]))
        .discard(chance.one_in(2));
    let journals = folder.join(JOURNALS);
    let journals = journals.exists().then(|| JournalFolder::open(&journals).unwrap());
    let options = ChainOptions::default()
        .read_only(read_only)
        .cache(CacheMode::Writeback)
        .policy(Policy::Follow)
        .qcow2(qcow2)
        .journals(journals);
    let mut secrets = Secrets::default();
    secrets.insert(SECRET, Passphrase::new(PASSPHRASE.as_bytes().to_vec()));
    let options = options.secrets(secrets);
    let reference = Reference::file(folder.join("image")).format(Some(limosa_image::Format::Qcow2));
    // An image that is not encrypted needs no secret.
    let reference = reference.key_secret(Some(SECRET.to_owned()));
    block_on(chain::open(&reference, &options)).map_err(|error| format!("open: {error}"))
}

/// The process that is killed. Run in any other way, it does nothing.
#[test]
#[ignore = "the other side of the kills: they run it"]
fn the_process_that_is_killed() {
    let Ok(call) = std::env::var(CALL) else { return };
    let (seed, folder) = call.split_once(':').unwrap();
    let seed = seed.parse().unwrap();
    let disk = open(Path::new(folder), seed, false).unwrap();
    let record = OpenOptions::new().append(true).open(std::env::var(RECORD).unwrap()).unwrap();
    let cluster = std::env::var("LIMOSA_PROOF_CLUSTER").unwrap().parse().unwrap();
    let all: Vec<_> = (0..THREADS)
        .map(|number| {
            let (disk, record) = (Arc::clone(&disk), record.try_clone().unwrap());
            thread::spawn(move || write_on(&*disk, &record, number, cluster, seed))
        })
        .collect();
    all.into_iter().for_each(|thread| thread.join().unwrap());
}

/// One of its threads, until the end comes. Threads have every fourth sector of the first half of the disk each; the
/// first one has the second half, for requests that are longer.
fn write_on(disk: &dyn Disk, mut record: &File, thread: u64, cluster: u64, seed: u64) {
    let mut chance = SeededRandom::new(seed ^ (thread << 32));
    let (half, sectors) = (disk.len() / SECTOR / 2, disk.len() / SECTOR);
    for step in 1..1 << 20 {
        let number = thread << 20 | step;
        let range = if thread == 0 && chance.one_in(2) {
            let start = half + chance.below(sectors - half);
            let most = (2 * cluster).min(256 << 10) / SECTOR;
            start * SECTOR..(start + 1 + chance.below(most)).min(sectors) * SECTOR
        } else {
            let sector = chance.below(half / THREADS) * THREADS + thread;
            sector * SECTOR..(sector + 1) * SECTOR
        };
        let what = match chance.below(16) {
            0..=12 => 'w',
            13 => 'f',
            14 => 'd',
            _ => 'z',
        };
        // Compressed writes are of whole clusters, which only the first thread has for itself.
        let end = range.end.next_multiple_of(cluster).min(disk.len());
        let clusters = range.start.next_multiple_of(cluster).min(end)..end;
        let compressor = (what == 'w' && range.start >= half && !clusters.is_empty() && chance.one_in(2))
            .then(|| disk.compressor(None).ok())
            .flatten();
        let (what, range) = if compressor.is_some() { ('c', clusters) } else { (what, range) };
        record.write_all(line('b', number, what, &range).as_bytes()).unwrap();
        let at = GuestOffset(range.start);
        let length = range.end - range.start;
        let result = match what {
            'w' => block_on(disk.write(at, Buffer::from_slice(&content(number, &range)).into())),
            'c' => {
                let bytes = Buffer::from_slice(&content(number, &range));
                let packed = compressor.map(|mut compressor| compressor.compress(&bytes.into()));
                block_on(disk.write_compressed(at, packed.unwrap()))
            }
            'f' => block_on(disk.flush()),
            'd' => block_on(disk.discard(at, length)),
            _ => block_on(disk.write_zeroes(at, length, chance.one_in(2))),
        };
        result.unwrap();
        record.write_all(line('e', number, what, &range).as_bytes()).unwrap();
    }
}

/// Puts the record into a history; returns the number of completed requests.
fn report(record: &str, history: &mut History, recipe: &Recipe, size: u64) -> u64 {
    let cluster = recipe.cluster;
    let mut requests = std::collections::HashMap::new();
    let (mut clock, mut over) = (0, 0);
    // The last line may be cut short by the kill.
    let whole_lines = record.rfind('\n').map_or("", |end| &record[..end]);
    for line in whole_lines.lines() {
        clock += 1;
        let now = Stamp { clock, moment: 0 };
        let words: Vec<_> = line.split(' ').collect();
        let number = |place: usize| words[place].parse::<u64>().unwrap();
        let range = number(3)..number(4);
        let value = if matches!(words[2], "w" | "c") { Value::Written(number(1)) } else { Value::Zeros };
        let inside = if words[2] == "d" { whole(&range, cluster) } else { range };
        match (words[0], words[2]) {
            ("b", "f") => drop(requests.insert(number(1), (0, now))),
            ("b", what) => {
                requests.insert(number(1), (history.begins(&inside, value, now), now));
                let tail = size / cluster * cluster;
                if what == "d" && number(4) == size && number(3) <= tail {
                    // A last cluster that is not whole may be discarded or not.
                    history.begins(&(tail.max(number(3))..size), value, now);
                }
            }
            (_, what) => {
                let (request, began) = requests.remove(&number(1)).unwrap();
                over += 1;
                match what {
                    "f" => history.flushed(began, now),
                    // What is discarded need not read as zeros where nothing can say so.
                    "d" if recipe.version2 => {}
                    _ => history.ends(&inside, request, now),
                }
            }
        }
    }
    over
}

/// Kills the process in the middle of its work `times` times, and looks at the image after each.
pub(crate) fn run(recipe: &Recipe, seed: u64, times: u64) -> Verdict {
    run_on(&Bed::new(recipe, seed), seed, times, &by_a_kill)
}

/// Has the process end in the middle of its work `times` times, and looks at the image after each.
pub(crate) fn run_on(bed: &Bed, seed: u64, times: u64, end: &End<'_>) -> Verdict {
    let (recipe, folder) = (&bed.recipe, bed.folder.path());
    let mut chance = SeededRandom::new(seed ^ 0x9111);
    let mut before = bed.first.clone();
    for kill in 0..times {
        let seed = chance.bits() >> 1;
        let record = kill_one(folder, seed, recipe.cluster, &mut chance, end)?;
        let mut history = History::new(before.clone(), SECTOR);
        let over = report(&record, &mut history, recipe, before.len() as u64);
        let failed = |error| format!("kill {kill}, seed {seed}, after {over} requests: {error}");
        if recipe.lazy && chance.one_in(2) {
            // Its refcounts are late, which only a repair can make up for: limosa's own, for a change.
            let image = FileStorage::open(folder.join("image"), &FileOptions::default()).unwrap();
            block_on(repair(&*image, Repair::All, CheckOptions::default()))
                .map_err(|error| failed(error.to_string()))?;
        }
        bed.check_files(true).map_err(failed)?;
        let found = bed.seen();
        history.survived(&found, 1).map_err(failed)?;
        bed.snapshots_are_unchanged().map_err(failed)?;
        // And it is used on.
        let disk = open(folder, seed, false).map_err(failed)?;
        let own = read_all(&*disk).map_err(failed)?;
        if let Some(at) = differs(&own, &found) {
            return Err(failed(format!("limosa and the stock tools read something else at {at:#x}")));
        }
        before = found;
        let (at, bytes) = (chance.below(disk.len() / SECTOR) * SECTOR, chance.bytes(512));
        let write = block_on(async {
            disk.write(GuestOffset(at), Buffer::from_slice(&bytes).into()).await?;
            disk.close().await
        });
        write.map_err(|error| failed(format!("written on: {error}")))?;
        let place = usize::try_from(at).unwrap();
        before[place..place + 512].copy_from_slice(&bytes);
        drop(disk);
        bed.check_files(true).map_err(|error| failed(format!("written on: {error}")))?;
    }
    Ok(())
}

/// Kills the process in the middle of its work `times` times. With a journal all that it had acknowledged is there when
/// the image is opened again, whether it was flushed or not.
pub(crate) fn run_with_journal(recipe: &Recipe, seed: u64, times: u64) -> Verdict {
    let bed = Bed::new(recipe, seed);
    let folder = bed.folder.path();
    let journals = folder.join(JOURNALS);
    std::fs::create_dir(&journals).unwrap();
    let mut chance = SeededRandom::new(seed ^ 0x10c5);
    let mut before = bed.first.clone();
    for kill in 0..times {
        let seed = chance.bits() >> 1;
        let mut record = kill_one(folder, seed, recipe.cluster, &mut chance, &by_a_kill)?;
        // As if the next process was asked to flush, and nothing else.
        record.truncate(record.rfind('\n').map_or(0, |end| end + 1));
        record.extend(['b', 'e'].map(|done| line(done, 0, 'f', &(0..0))));
        let mut history = History::new(before.clone(), SECTOR);
        let over = report(&record, &mut history, recipe, before.len() as u64);
        let failed = |error| format!("kill {kill}, seed {seed}, after {over} requests: {error}");
        let disk = open(folder, seed, false).map_err(failed)?;
        let own = read_all(&*disk).map_err(failed)?;
        history.survived(&own, 1).map_err(failed)?;
        block_on(disk.close()).map_err(|error| failed(error.to_string()))?;
        drop(disk);
        let left = std::fs::read_dir(&journals).unwrap().count();
        if left > 0 {
            return Err(failed(format!("{left} journals are left of an image that was closed")));
        }
        bed.check_files(false).map_err(failed)?;
        before = bed.seen();
        if let Some(at) = differs(&own, &before) {
            return Err(failed(format!("limosa and the stock tools read something else at {at:#x}")));
        }
        bed.snapshots_are_unchanged().map_err(failed)?;
    }
    Ok(())
}

/// Runs the process until it has said so much, has it end, and returns what it has said.
fn kill_one(folder: &Path, seed: u64, cluster: u64, chance: &mut SeededRandom, end: &End<'_>) -> Verdict<String> {
    let kept = scratch().unwrap();
    let [record, said] = ["record", "said"].map(|name| kept.path().join(name));
    std::fs::write(&record, "").unwrap();
    let mut command = limosa_testkit::own_test!(the_process_that_is_killed);
    command.arg("--test-threads=1");
    command.env(CALL, format!("{seed}:{}", folder.display())).env("LIMOSA_PROOF_CLUSTER", cluster.to_string());
    let output = File::create(&said).unwrap();
    command.env(RECORD, &record);
    command.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output);
    let mut child = command.spawn().unwrap();
    // Not by the clock: a slow machine has done as much when the end comes as a fast one.
    let enough = 60 + chance.below(24 << 10);
    while std::fs::metadata(&record).unwrap().len() < enough {
        if child.try_wait().unwrap().is_some() {
            return Err(format!("it ended by itself: {}", std::fs::read_to_string(&said).unwrap()));
        }
        thread::sleep(Duration::from_micros(chance.below(3000)));
    }
    end(&mut child)?;
    // The kernel ends what a ring has under way, and only then closes its files, after the process is gone. Until then
    // they are locked.
    for name in ["image", "data"].map(|name| folder.join(name)).iter().filter(|path| path.exists()) {
        while let Err(error) = FileStorage::open(name, &FileOptions::default()) {
            if error.kind() != std::io::ErrorKind::ResourceBusy {
                return Err(error.to_string());
            }
            thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(std::fs::read_to_string(&record).unwrap())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_record_of_a_killed_process_says_what_has_to_be_there() {
        let record = "b 1 w 0 512\ne 1 w 0 512\nb 2 f 0 0\nb 3 w 512 1024\ne 2 f 0 0\ne 3 w 512 1024\nb 4 w 0 512\ne 4";
        let mut history = History::new(vec![7; 1024], SECTOR);
        assert_eq!(report(record, &mut history, &Recipe::usual(65536), 1024), 3);
        let found = |first: &[u8], second: &[u8]| history.survived(&[first, second].concat(), 1);
        let [one, three, four] =
            [(1, 0..512), (3, 512..1024), (4, 0..512)].map(|(number, range)| content(number, &range));
        let before = [7; 512];
        found(&before, &three).expect_err("it was flushed");
        found(&one, &before).unwrap();
        found(&four, &three).unwrap();
        found(&one, &four).expect_err("that was never written there");
    }
}
