//! A VM that arrives: what makes it run, what does not, and what its source may rely on.

use crate::model;
use std::thread;
use std::time::Duration;

use crate::model::InOneLine;
use crate::model::vm::Vm;
use crate::model::{Kept, Memory, pair, say};
use limosa_channel::{Channel, Shutdown};
use limosa_memory::GuestMemory;
use limosa_migrate::live::LiveDestinationOptions;
use limosa_migrate::multifd::MultifdOptions;
use limosa_migrate::stored::{Destination, PrecopySource};
use limosa_migrate::{Handle, IncomingOutcome, IncomingVm, LiveDestination, MigrateError, VmError};
use limosa_page::{PAGE_LEN, PageNumber};
use limosa_stream::multifd::{PACKET_LEN, Packet};
use limosa_stream::postcopy::{PING_COMMIT, PING_READY};
use limosa_stream::ram::FLAG_MULTIFD_FLUSH;
use limosa_stream::{
    Command, Configuration, DeviceSections, OpaqueSection, RamBlock, RecordEncoder, RecordKind, ReturnMessage, ram,
    section,
};

/// The bytes of a live source: up to the PING that is answered, and after the answer.
struct Script {
    before: Vec<u8>,
    after: Vec<u8>,
}

fn blocks() -> Vec<RamBlock> {
    vec![RamBlock::new("ram", 64 * 4096), RamBlock::new("vga", 8 * 4096)]
}

fn vm() -> Vm {
    Vm::new(&[("vga", 8), ("ram", 64)])
}

/// Pages 1 to 3 of `ram` and page 7 of `vga` have contents, some come twice, page 2 becomes zero again.
fn script(join: bool, pages: bool) -> Script {
    let blocks = blocks();
    let mut before = Vec::new();
    Configuration::new("demo").encode(&mut before).unwrap();
    Command::OpenReturnPath.encode(&mut before).unwrap();
    Command::Ping(1).encode(&mut before).unwrap();
    ram::encode_ram_layout(2, &blocks, &mut before).unwrap();
    if join {
        before.extend_from_slice(&FLAG_MULTIFD_FLUSH.to_be_bytes());
    }
    ram::encode_eos(2, &mut before);
    let mut records = RecordEncoder::new(&blocks).unwrap();
    let mut page = |out: &mut Vec<u8>, block, page: u64, fill: u8| {
        let kind = if fill == 0 { RecordKind::Zero } else { RecordKind::Page };
        records.append(kind, block, page * 4096, out).unwrap();
        out.resize(out.len() + if fill == 0 { 0 } else { PAGE_LEN }, fill);
    };
    section::encode_part(2, &mut before);
    if pages {
        for (number, fill) in [(1, 9), (2, 2), (3, 3), (1, 1), (2, 0), (5, 0)] {
            page(&mut before, 0, number, fill);
        }
        page(&mut before, 1, 7, 7);
    }
    if join {
        before.extend_from_slice(&FLAG_MULTIFD_FLUSH.to_be_bytes());
    }
    ram::encode_eos(2, &mut before);
    section::encode_end(2, &mut before);
    ram::encode_eos(2, &mut before);
    let mut devices = DeviceSections::new();
    devices.push("timer", 0, 1, b"tick").unwrap();
    devices.push("serial", 1, 2, b"").unwrap();
    before.extend_from_slice(devices.bytes());
    Command::Ping(PING_READY).encode(&mut before).unwrap();
    let mut after = Vec::new();
    Command::Ping(PING_COMMIT).encode(&mut after).unwrap();
    section::encode_eof(&mut after);
    let json = devices.description();
    section::encode_description(&json, &mut after).unwrap();
    Script { before, after }
}

/// Nothing here is about patience: a limit for the stuck.
fn options() -> LiveDestinationOptions {
    LiveDestinationOptions { answer_timeout: Some(Duration::from_secs(120)), ..LiveDestinationOptions::default() }
}

/// All that comes on the return path until it ends.
fn answers(channel: &Channel) -> Vec<u8> {
    let mut heard = Vec::new();
    let mut room = [0; 256];
    while let Ok(got @ 1..) = channel.read(&mut room) {
        heard.extend_from_slice(&room[..got]);
    }
    heard
}

fn said(messages: &[ReturnMessage]) -> Vec<u8> {
    let mut bytes = Vec::new();
    messages.iter().for_each(|message| message.encode(&mut bytes).unwrap());
    bytes
}

/// Sends `first`, waits for as many answers as `asked` has, sends `then` and ends. What was answered, and what came of
/// it.
fn run<'a>(vm: &'a Vm, first: &[u8], asked: &[ReturnMessage], then: &[u8]) -> (Vec<u8>, IncomingOutcome<'a, Vm>) {
    let (near, far) = pair();
    let handle = Handle::new();
    let (near, asked) = (&near, said(asked));
    let mut heard = vec![0; asked.len()];
    let outcome = thread::scope(|scope| {
        let heard = &mut heard;
        let sending = scope.spawn(move || {
            let _ = near.write_all(first);
            if near.read_exact(heard).is_ok() {
                let _ = near.write_all(then);
            }
            let _ = near.shutdown(Shutdown::Write);
            answers(near)
        });
        let outcome = LiveDestination::new(vm, far, &handle).options(options()).run();
        (sending.join().unwrap(), outcome)
    });
    heard.extend_from_slice(&outcome.0);
    (heard, outcome.1)
}

const READY: [ReturnMessage; 2] = [ReturnMessage::Pong(1), ReturnMessage::Pong(PING_READY)];

fn assert_memory(vm: &Vm) {
    let ram = vm.memory.index_of("ram").unwrap();
    let vga = vm.memory.index_of("vga").unwrap();
    let filled = |page| if matches!(page, 1 | 3) { u8::try_from(page).unwrap() } else { 0 };
    assert!((0..64).all(|page| vm.fill_of(ram, page) == filled(page)));
    assert!((0..8).all(|page| vm.fill_of(vga, page) == if page == 7 { 7 } else { 0 }));
}

#[test]
fn a_vm_runs_when_its_source_has_given_its_word() {
    let (vm, script) = (vm(), script(false, true));
    let (heard, outcome) = run(&vm, &script.before, &READY, &script.after);
    let IncomingOutcome::Running(stats) = outcome else { panic!("{outcome:?}") };
    assert_eq!(heard, said(&[READY[0].clone(), READY[1].clone(), ReturnMessage::Shut(0)]));
    assert_eq!((vm.started(), stats.acknowledge_error.is_none()), (1, true));
    assert_eq!((stats.received.normal_pages, stats.received.zero_pages, stats.received.resent_pages), (5, 2, 2));
    let loaded = vm.loaded.lock().unwrap().clone();
    assert_eq!(loaded, [("timer".into(), 0, b"tick".to_vec()), ("serial".into(), 1, Vec::new())]);
    assert_memory(&vm);
}

#[test]
fn a_stream_that_is_cut_anywhere_never_starts_the_vm() {
    let script = script(false, true);
    // Page contents are cut at a few places only.
    let interesting = |at: &usize| at.is_multiple_of(409) || *at + 200 > script.before.len() || *at < 300;
    for at in (0..script.before.len()).filter(interesting) {
        let vm = vm();
        let (_, outcome) = run(&vm, &script.before[..at], &[], &[]);
        assert!(matches!(outcome, IncomingOutcome::Failed(_)), "cut at {at}: {outcome:?}");
        assert_eq!(vm.started(), 0);
    }
}

#[test]
fn a_word_that_is_cut_anywhere_leaves_a_whole_vm_undecided() {
    let script = script(false, true);
    for at in 0..script.after.len() {
        let vm = vm();
        let (heard, outcome) = run(&vm, &script.before, &READY, &script.after[..at]);
        let IncomingOutcome::Undecided(arrived) = outcome else { panic!("cut at {at}: {outcome:?}") };
        assert_eq!((vm.started(), heard), (0, said(&READY)), "cut at {at}");
        assert!(arrived.why().to_string().contains("before it allowed the VM to run"), "{}", arrived.why());
        arrived.start().unwrap();
        assert_eq!(vm.started(), 1);
        assert_memory(&vm);
    }
}

#[test]
fn anything_else_than_the_word_leaves_it_undecided_too() {
    let Script { before, after } = script(false, true);
    let mut behind = after.clone();
    behind.push(0);
    for then in [&b"\x00"[..], b"\x08\0\x02\0\x04\0\0\0\x08", &after[9..], &behind] {
        let vm = vm();
        let (_, outcome) = run(&vm, &before, &READY, then);
        assert!(matches!(outcome, IncomingOutcome::Undecided(_)), "{then:02x?}: {outcome:?}");
        assert_eq!(vm.started(), 0);
    }
}

#[test]
fn a_device_that_does_not_take_its_state_leaves_the_vm_at_the_source() {
    let script = script(false, true);
    let vm = Vm { refuses: Some("serial"), ..vm() };
    let (heard, outcome) = run(&vm, &script.before, &READY, &script.after);
    let IncomingOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
    assert!(error.in_one_line().contains("device serial does not take it"), "{error}");
    assert!(heard.starts_with(&said(&READY[..1])) && vm.started() == 0);
}

#[test]
fn other_memory_is_refused_before_a_page() {
    let script = script(false, true);
    for blocks in [&[("ram", 64)][..], &[("ram", 63), ("vga", 8)], &[("ram", 64), ("vga", 8), ("rom", 1)]] {
        let vm = Vm::new(blocks);
        let (_, outcome) = run(&vm, &script.before, &READY, &script.after);
        assert!(matches!(outcome, IncomingOutcome::Failed(MigrateError::Layout(_))), "{outcome:?}");
        assert!((0..vm.memory.blocks()[0].pages().len()).all(|page| vm.fill_of(0, page) == 0));
    }
}

#[test]
fn pages_of_packets_go_straight_to_their_places() {
    let script = script(true, false);
    let (vm, (near, far), (side, far_side)) = (vm(), pair(), pair());
    let handle = Handle::new();
    let packet = |sync, normal: &[u64], zero: &[u64], fill: u8| {
        let [normal, zero] = [normal, zero].map(|pages| pages.iter().map(|page| page * 4096).collect::<Vec<_>>());
        let mut header = [0; PACKET_LEN];
        let payload_len = u32::try_from(normal.len() * PAGE_LEN).unwrap();
        let block = if normal.len() + zero.len() > 0 { "ram" } else { "" };
        let packet = Packet { sync, block, normal: &normal, zero: &zero, payload_len, ..Packet::sync(0) };
        packet.encode(&mut header).unwrap();
        let mut bytes = header.to_vec();
        for page in &normal {
            bytes.resize(bytes.len() + PAGE_LEN, u8::try_from(page / 4096).unwrap() + fill);
        }
        bytes
    };
    let mut packets = packet(true, &[], &[], 0);
    packets.extend(packet(false, &[5, 6, 7, 40, 3, 2], &[1, 9], 0));
    packets.extend(packet(true, &[6], &[40], 100));
    let outcome = thread::scope(|scope| {
        scope.spawn(move || {
            near.write_all(&script.before).unwrap();
            near.read_exact(&mut vec![0; said(&READY).len()]).unwrap();
            near.write_all(&script.after).unwrap();
            answers(&near)
        });
        scope.spawn(move || side.write_all(&packets).and_then(|()| side.read(&mut [0])));
        let role = LiveDestination::new(&vm, far, &handle).options(options());
        role.channels(vec![far_side], MultifdOptions::default()).run()
    });
    let IncomingOutcome::Running(stats) = outcome else { panic!("{outcome:?}") };
    assert_eq!((stats.received.normal_pages, stats.received.zero_pages, stats.received.resent_pages), (7, 3, 2));
    let ram = vm.memory.index_of("ram").unwrap();
    let wanted = |page| match page {
        2 | 3 | 5 | 7 => u8::try_from(page).unwrap(),
        6 => 106,
        _ => 0,
    };
    assert!((0..64).all(|page| vm.fill_of(ram, page) == wanted(page)));
    assert_eq!(handle.progress.read().normal_pages, 7);
}

#[test]
fn a_stored_vm_is_sent_to_a_live_one_by_a_source_without_a_word() {
    let memory = Memory::new(&[40, 8], |block, page| block == 0 && page % 3 == 0);
    let vm = Vm::new(&[("block1", 8), ("block0", 40)]);
    let (near, far) = pair();
    let handle = Handle::new();
    thread::scope(|scope| {
        let sending = scope.spawn(|| PrecopySource::new(&memory, near, &Handle::new()).run());
        let outcome = LiveDestination::new(&vm, far, &handle).run();
        assert!(matches!(outcome, IncomingOutcome::Running(_)), "{outcome:?}");
        sending.join().unwrap().unwrap();
    });
    assert_eq!(vm.started(), 1);
    assert_eq!(*vm.loaded.lock().unwrap(), [("timer".into(), 0, b"12345678".to_vec())]);
    let here = vm.memory().block(1).unwrap();
    for page in 0..40 {
        let mut bytes = [0; PAGE_LEN];
        here.read(PageNumber(page).offset(), &mut bytes).unwrap();
        assert_eq!(bytes, memory.page(0, page));
    }
}

#[test]
fn a_vm_that_does_not_start_stays_at_a_source_that_takes_it_back_by_itself() {
    let memory = Memory::new(&[40, 8], |block, page| block == 0 && page % 3 == 0);
    let vm = Vm { refuses: Some("start"), ..Vm::new(&[("block1", 8), ("block0", 40)]) };
    let (near, far) = pair();
    let handle = Handle::new();
    thread::scope(|scope| {
        let sending = scope.spawn(|| PrecopySource::new(&memory, near, &Handle::new()).run());
        let outcome = LiveDestination::new(&vm, far, &handle).run();
        let IncomingOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
        assert!(error.in_one_line().contains("a vCPU does not run"), "{error}");
        let heard = sending.join().unwrap();
        assert!(matches!(heard, Err(MigrateError::Refused { status: 1 })), "{heard:?}");
    });
    assert_eq!(vm.started(), 0);
}

#[test]
fn a_vm_that_does_not_start_with_its_sources_word_may_be_started_once_more() {
    let script = script(false, true);
    let vm = Vm { refuses: Some("start"), ..vm() };
    let (heard, outcome) = run(&vm, &script.before, &READY, &script.after);
    let IncomingOutcome::Undecided(arrived) = outcome else { panic!("{outcome:?}") };
    // Nothing is said of it: the source has given the VM away, and a person decides.
    assert_eq!(heard, said(&READY));
    assert!(arrived.start().is_err());
    assert_eq!(vm.started(), 0);
}

/// The whole stream of a source without a word: its devices do not say where they end.
fn stock_stream() -> Vec<u8> {
    let mut stream = script(false, true).before;
    let mut devices = DeviceSections::new();
    devices.push("timer", 0, 1, b"tick").unwrap();
    devices.push("serial", 1, 2, b"").unwrap();
    let mut ready = Vec::new();
    Command::Ping(PING_READY).encode(&mut ready).unwrap();
    stream.truncate(stream.len() - ready.len() - devices.bytes().len());
    let (sections, json) = model::device_tail();
    stream.extend_from_slice(&sections);
    section::encode_eof(&mut stream);
    section::encode_description(&json, &mut stream).unwrap();
    stream
}

/// A VM whose source continues while its devices are loaded.
struct Interrupted<'a> {
    vm: Vm,
    near: &'a Channel,
}

impl IncomingVm for Interrupted<'_> {
    fn memory(&self) -> &GuestMemory {
        &self.vm.memory
    }

    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
        self.near.write_all(b"and more")?;
        self.vm.load_device(section)
    }

    fn start(&self) -> Result<(), VmError> {
        self.vm.start()
    }
}

#[test]
fn what_looked_like_an_end_and_was_none_does_not_start_the_vm() {
    let ((near, far), handle) = (pair(), Handle::new());
    near.write_all(&stock_stream()).unwrap();
    let vm = Interrupted { vm: vm(), near: &near };
    let outcome = LiveDestination::new(&vm, far, &handle).options(options()).run();
    let IncomingOutcome::Failed(error) = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("continues behind what looked like its end"), "{error}");
    assert_eq!((vm.vm.started(), vm.vm.loaded.lock().unwrap().len()), (0, 1));
    let mut heard = vec![0; said(&[READY[0].clone(), ReturnMessage::Shut(1)]).len()];
    near.read_exact(&mut heard).unwrap();
    assert_eq!(heard, said(&[READY[0].clone(), ReturnMessage::Shut(1)]));
}

#[test]
fn a_source_without_a_word_that_is_gone_before_the_vm_runs_leaves_it_undecided() {
    let stream = stock_stream();
    let (vm, (near, far), handle) = (vm(), pair(), Handle::new());
    near.write_all(&stream).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    let outcome = LiveDestination::new(&vm, far, &handle).options(options()).run();
    let IncomingOutcome::Undecided(arrived) = outcome else { panic!("{outcome:?}") };
    assert!(arrived.why().to_string().contains("the source is gone"), "{}", arrived.why());
    assert_eq!((vm.started(), vm.loaded.lock().unwrap().len()), (0, 1));
    arrived.start().unwrap();
    assert_eq!(vm.started(), 1);
    assert_memory(&vm);
}

#[test]
fn a_live_vm_is_received_into_a_file_without_the_words_between() {
    let script = script(false, true);
    let (near, far) = pair();
    let mut kept = Kept::default();
    let incoming = thread::scope(|scope| {
        scope.spawn(|| {
            near.write_all(&script.before).unwrap();
            near.read_exact(&mut vec![0; said(&READY).len()]).unwrap();
            near.write_all(&script.after).unwrap();
        });
        Destination::new(&mut kept, far, &Handle::new()).run()
    });
    let incoming = incoming.unwrap();
    assert_eq!(incoming.devices.sections.len(), 2);
    let located = limosa_stream::devices::find_tail_end(&incoming.tail, 0, 1 << 20).unwrap();
    assert_eq!(located, incoming.devices);
    say(&near, &ReturnMessage::Shut(0));
}
