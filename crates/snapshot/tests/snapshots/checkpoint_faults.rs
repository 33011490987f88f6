//! Tests that `checkpoint.limosa` is whole, and the newest one, after kills, full disks and lost directories.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use limosa_migrate::stored::{PageSink, PageSource};
use limosa_page::{PAGE_LEN, PageNumber};
use limosa_snapshot::{
    CHECKPOINT_NAME, CheckpointDirectory, CheckpointOptions, CheckpointPair, Manifest, Snapshot, SnapshotError,
};
use limosa_testkit::{own_test, own_test_name, scratch};

use crate::checkpoints::{catch_up, open, pair, read};
use crate::fixture::{LARGE, devices, names, page, put, range, start, tail};

/// Set for this test binary when it runs as a child of another test: the directory.
const CHILD: &str = "LIMOSA_CHECKPOINT_TEST_CHILD";
/// Number of kills, where not the usual 50.
const ROUNDS: &str = "LIMOSA_CHECKPOINT_KILLS";

/// Pages of the VM that checkpoints are made of.
const PAGES: u64 = 400;

/// The contents of a page in checkpoint `number`; 0 is zero.
fn seed(number: u64, at: u64) -> u64 {
    // The newest checkpoint up to this one that has touched the page.
    let touched = (0..=number).rev().find(|number| touches(*number, at));
    touched.map_or(0, |number| if (number + at).is_multiple_of(5) { 0 } else { number * PAGES + at + 1 })
}

fn touches(number: u64, at: u64) -> bool {
    number == 0 || (at.wrapping_mul(0x9e37_79b9) ^ number.wrapping_mul(0x85eb_ca6b)) % 7 < 2
}

/// Hands a sink the pages that a checkpoint touches.
fn send(sink: &mut impl PageSink, number: u64) {
    for at in (0..PAGES).filter(|at| touches(number, *at)) {
        match seed(number, at) {
            0 => sink.put_zero(0, range(at, at + 1)).unwrap(),
            seed => put(sink, 0, at, &[seed]),
        }
    }
}

/// The number of the checkpoint that is there, which is whole.
fn whole_checkpoint(directory: &Path) -> u64 {
    let snapshot = open(directory);
    assert_eq!(snapshot.warnings(), [] as [&str; 0]);
    assert!(snapshot.is_mappable() && snapshot.has_checksums());
    snapshot.check_restorable().unwrap();
    snapshot.verify_all().unwrap();
    let number = snapshot.manifest().unwrap().checkpoint.unwrap();
    let mut contents = vec![0; usize::try_from(PAGES).unwrap() * PAGE_LEN];
    snapshot.read(0, range(0, PAGES), &mut contents).unwrap();
    for (at, found) in (0..).zip(contents.chunks(PAGE_LEN)) {
        let wanted = match seed(number, at) {
            0 => [0; PAGE_LEN],
            seed => page(seed),
        };
        assert!(found == wanted, "page {at} is not that of checkpoint {number}");
    }
    number
}

fn number_in(line: &str) -> Option<u64> {
    line.strip_prefix("checkpoint ")?.parse().ok()
}

#[test]
fn a_kill_at_any_moment_leaves_the_newest_checkpoint_whole() {
    let rounds: u32 = std::env::var(ROUNDS).map_or(50, |rounds| rounds.parse().unwrap());
    let directory = scratch().unwrap();
    let (mut last, mut beyond, mut most) = (None, 0, 0);
    for round in 0..rounds {
        let mut command = own_test!(child_that_makes_checkpoints_until_it_is_killed);
        command.env(CHILD, directory.path()).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.ends_with("begins")), "the child did not begin");
        // Some are killed in their base, most somewhere in one of the first checkpoints: a part of the time, or
        // more, that the step before has taken.
        let (mut began, mut took, mut said) = (Instant::now(), Duration::from_millis(5), None);
        for line in lines.by_ref().take(usize::try_from(round % 8).unwrap()) {
            said = number_in(&line);
            (began, took) = (Instant::now(), began.elapsed());
        }
        std::thread::sleep(took.mul_f64(f64::from(round * 7919 % 1500) / 1000.0));
        child.kill().unwrap();
        child.wait().unwrap();
        let said = lines.filter_map(|line| number_in(&line)).last().or(said);
        let found = directory.path().join(CHECKPOINT_NAME).exists().then(|| whole_checkpoint(directory.path()));
        match (said, found) {
            // The one that counts may not have been said yet.
            (Some(said), Some(found)) => {
                assert!((said..=said + 1).contains(&found), "{said} was said, {found} is there");
            }
            (None, found) => assert!(found == last || found == Some(0), "{found:?} instead of {last:?} or a base"),
            (Some(said), None) => panic!("checkpoint {said} is gone"),
        }
        let number = found.unwrap_or(0);
        (last, beyond, most) = (found, beyond + u32::from(number > 0), most.max(number));
    }
    println!("{beyond} of {rounds} were killed beyond their base, one at checkpoint {most}");
    assert!(beyond > rounds / 2);
    drop(CheckpointDirectory::open(directory.path()).unwrap());
    assert!(names(directory.path()).iter().all(|name| name == CHECKPOINT_NAME));
}

#[test]
fn child_that_makes_checkpoints_until_it_is_killed() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    println!("begins");
    let mut options = CheckpointOptions::default();
    options.checksum = true;
    let mut base = CheckpointDirectory::open(Path::new(&directory)).unwrap().receive_base(options).unwrap();
    base.begin(&start(LARGE)).unwrap();
    send(&mut base, 0);
    let mut pair = base.finish(&tail("running"), Manifest::new()).unwrap();
    println!("checkpoint 0");
    for number in 1.. {
        catch_up(&mut pair);
        send(&mut pair, number);
        if number % 4 == 0 {
            pair.abort();
            catch_up(&mut pair);
            send(&mut pair, number);
        }
        println!("checkpoint {}", pair.commit(&devices("running")).unwrap().number);
    }
}

/// Runs one test of this binary in a child process whose disk is small.
fn child_with_a_small_disk(test: &str, directory: &Path) -> Child {
    // A limit on the size of files is another error number than a full disk, and the same error.
    let limit = "trap '' XFSZ; exec \"$@\"";
    let mut command = Command::new("sh");
    command.args(["-c", limit, "sh"]).arg(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, directory);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

#[test]
fn a_full_disk_costs_the_checkpoint_that_meets_it_and_no_other() {
    let directory = scratch().unwrap();
    let child = child_with_a_small_disk(own_test_name!(child_whose_disk_is_full_for_a_while), directory.path());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("was full for a while"), "{said}");
    assert_eq!(read(&open(directory.path()), 0, 3000), page(7));
}

/// Sets the longest file that this process may write, in bytes.
fn limit_files(bytes: Option<u64>) {
    let limits = rustix::process::Rlimit { current: bytes, maximum: None };
    rustix::process::setrlimit(rustix::process::Resource::Fsize, limits).unwrap();
}

#[test]
fn child_whose_disk_is_full_for_a_while() {
    let Some(directory) = std::env::var_os(CHILD) else { return };
    let directory = Path::new(&directory);
    let mut pair = pair(directory, CheckpointOptions::default());
    let places = open(directory).layout().clone();
    let full = |error: &SnapshotError| assert!(error.is_full(), "{error}");
    // No room for a page, for the frame, for the device state, for a part of the trailer.
    let page_place = places.blocks[0].pages_offset + 3000 * 4096;
    let trailer = places.tail_offset + tail("running").len() as u64;
    for room in [page_place, page_place + 2048, places.blocks[1].end(), places.tail_offset + 10, trailer, trailer + 100]
    {
        limit_files(Some(room));
        let contents = page(7);
        let put = pair.put_pages(0, PageNumber(3000), &[std::io::IoSlice::new(&contents)]);
        match put {
            Err(error) => {
                full(&error.downcast::<SnapshotError>().unwrap());
                pair.abort();
            }
            Ok(()) => full(&pair.commit(&devices("running")).unwrap_err()),
        }
        assert_eq!(pair.number(), 0);
        let snapshot = open(directory);
        assert_eq!((read(&snapshot, 0, 12), snapshot.stored_bitmap(0).count()), (page(12), 10));
        // What is put back was there before, and needs no more room.
        catch_up(&mut pair);
    }
    limit_files(None);
    put(&mut pair, 0, 3000, &[7]);
    assert_eq!(pair.commit(&devices("running")).unwrap().number, 1);
    // The checkpoint counts, but there is no room for its copy.
    limit_files(Some(page_place));
    full(&pair.catch_up(1000).unwrap_err());
    assert_eq!(read(&open(directory), 0, 3000), page(7));
    limit_files(None);
    catch_up(&mut pair);
    assert_eq!(pair.commit(&devices("running")).unwrap().number, 2);
    println!("was full for a while");
}

#[test]
fn a_directory_that_is_gone_is_an_error_and_one_that_was_moved_is_not() {
    let folder = scratch().unwrap();
    let [first, moved] = ["first", "moved"].map(|name| folder.path().join(name));
    let mut pair = pair(&first, CheckpointOptions::default());
    let step = |pair: &mut CheckpointPair, seed| {
        put(pair, 0, 12, &[seed]);
        let committed = pair.commit(&devices("running"));
        committed.and_then(|_| pair.catch_up(u64::MAX))
    };
    std::fs::rename(&first, &moved).unwrap();
    step(&mut pair, 1).unwrap();
    step(&mut pair, 2).unwrap();
    assert_eq!(read(&open(&moved), 0, 12), page(2));
    let kept = Snapshot::open(&moved.join(CHECKPOINT_NAME)).unwrap();
    std::fs::remove_dir_all(&moved).unwrap();
    let error = step(&mut pair, 3).unwrap_err();
    assert!(matches!(error, SnapshotError::Target { .. }), "{error}");
    assert_eq!(read(&kept, 0, 12), page(2), "whoever has it open still has it whole");
    assert!(pair.catch_up(u64::MAX).is_err(), "no new spare can be made");
    assert_eq!(read(&kept, 0, 12), page(2));
    drop(pair);
}
