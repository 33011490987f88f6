//! A destination that may have less memory than the guest is large: what is zero costs nothing, what does not fit is
//! refused while the source still has the VM. Needs control groups, so root.

use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::thread;

use crate::model::InOneLine;
use crate::model::pair;
use crate::model::vm::Vm;
use limosa_channel::Channel;
use limosa_memory::BlockOptions;
use limosa_migrate::{Handle, IncomingOutcome, LiveDestination};
use limosa_page::PAGE_LEN;
use limosa_stream::postcopy::{PING_COMMIT, PING_READY};
use limosa_stream::{Command, Configuration, DeviceSections, RamBlock, RecordEncoder, RecordKind, ram, section};
use limosa_testkit::MemoryGroup;

const CASE: &str = "LIMOSA_TEST_LIMITED";
const LIMIT: u64 = 192 << 20;
/// Sixteen times the limit.
const PAGES: u64 = (3 << 30) / 4096;

/// A guest whose runs of `run` pages with contents are `gap` apart, up to page `end`; all other pages are zero and sent
/// so.
fn send(channel: &Channel, run: u64, gap: u64, end: u64) {
    let blocks = [RamBlock::new("ram", PAGES * 4096)];
    let mut bytes = Vec::new();
    Configuration::new("demo").encode(&mut bytes).unwrap();
    Command::OpenReturnPath.encode(&mut bytes).unwrap();
    ram::encode_ram_start(2, &blocks, &mut bytes).unwrap();
    section::encode_part(2, &mut bytes);
    let mut records = RecordEncoder::new(&blocks).unwrap();
    for page in 0..PAGES {
        let contents = page < end && page % gap < run;
        let kind = if contents { RecordKind::Page } else { RecordKind::Zero };
        records.append(kind, 0, page * 4096, &mut bytes).unwrap();
        bytes.resize(bytes.len() + if contents { PAGE_LEN } else { 0 }, 7);
        if bytes.len() > 1 << 18 {
            if channel.write_all(&bytes).is_err() {
                return;
            }
            bytes.clear();
        }
    }
    ram::encode_eos(2, &mut bytes);
    let mut devices = DeviceSections::new();
    devices.push("timer", 0, 1, b"tick").unwrap();
    bytes.extend_from_slice(devices.bytes());
    Command::Ping(PING_READY).encode(&mut bytes).unwrap();
    let _ = channel.write_all(&bytes);
    if channel.read_exact(&mut [0; 8]).is_err() {
        return;
    }
    bytes.clear();
    Command::Ping(PING_COMMIT).encode(&mut bytes).unwrap();
    section::encode_eof(&mut bytes);
    let json = devices.description();
    section::encode_description(&json, &mut bytes).unwrap();
    let _ = channel.write_all(&bytes);
    let _ = channel.read_exact(&mut [0; 8]);
}

/// The other process of the tests below.
#[test]
fn limited_process() {
    let Ok(case) = std::env::var(CASE) else { return };
    // Until it is in its control group.
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let (kind, contents) = case.split_once(' ').unwrap();
    let block = match kind {
        "private" => BlockOptions::anonymous("ram", PAGES * 4096),
        _ => BlockOptions::memfd("ram", PAGES * 4096),
    };
    let vm = Vm::of(vec![block]);
    let (near, far) = pair();
    // 96 MiB in long runs or short ones; or 384 MiB, which do not fit.
    let (run, gap, end) = match contents {
        "long" => (4096, 1 << 16, PAGES / 2),
        "short" => (3, 48, PAGES / 2),
        _ => (1, 1, 384 << 8),
    };
    let handle = Handle::new();
    let outcome = thread::scope(|scope| {
        scope.spawn(move || send(&near, run, gap, end));
        LiveDestination::new(&vm, far, &handle).run()
    });
    if contents == "much" {
        let IncomingOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        assert!(error.in_one_line().contains("out of memory for RAM block ram"), "{error}");
        assert_eq!(vm.started(), 0);
        return;
    }
    let IncomingOutcome::Running(stats) = outcome else { panic!("{outcome:?}") };
    let block = vm.memory.block(0).unwrap();
    let taken = block.populated(block.pages()).unwrap().count();
    let came = stats.received.normal_pages;
    assert_eq!(came, (0..end).filter(|page| page % gap < run).count() as u64);
    assert!(taken >= came && taken * 100 <= came * 105, "{taken} pages for {came} with contents");
    assert_eq!((vm.fill_of(0, gap * 3), vm.fill_of(0, gap * 3 + run), vm.started()), (7, 0, 1));
}

fn limited(case: &str) {
    let group = MemoryGroup::create(&format!("live-{}", case.replace(' ', "-")), LIMIT).unwrap();
    let mut command = limosa_testkit::own_test!(limited_process);
    command.env(CASE, case);
    let mut limited = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    group.add(limited.id()).unwrap();
    limited.stdin.take().unwrap().write_all(&[1]).unwrap();
    let output = limited.wait_with_output().unwrap();
    assert!(output.status.success(), "{case}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(group.killed().unwrap(), 0, "{case}");
}

#[test]
fn a_guest_of_many_zeros_takes_the_memory_of_its_other_pages_and_little_more() {
    ["private long", "shared long", "private short", "shared short"].into_iter().for_each(limited);
}

#[test]
fn a_guest_that_does_not_fit_is_refused_and_no_process_is_killed() {
    ["private much", "shared much"].into_iter().for_each(limited);
}
