//! Moves on one host: memory that both ends have is not sent, and only the VM writes it.

use std::ops::Range;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use crate::model::InOneLine;
use crate::model::live::TestVm;
use crate::model::pair;
use limosa_channel::{Channel, Listener, Shutdown};
use limosa_memory::{
    BlockOptions, BlockRole, FreePageHinting, FreePageSink, FreePagesError, GuestMemory, GuestRegion, PassedBlock,
};
use limosa_migrate::control::{Control, Progress};
use limosa_migrate::live::{LiveDestinationOptions, PostcopyMode, SharedMemoryMode, TimeoutStrategy};
use limosa_migrate::multifd::{MultifdOptions, MultifdSourceOptions};
use limosa_migrate::stats::LiveStats;
use limosa_migrate::{
    Handle, IncomingOutcome, IncomingVm, LiveDestination, LiveOutcome, LiveSource, MigrationParams, VmError,
};
use limosa_page::{PAGE_LEN, PAGE_SIZE};
use limosa_stream::multifd::{INITIAL_LEN, InitialPacket};
use limosa_stream::postcopy::PING_READY;
use limosa_stream::{
    Command, Configuration, DeviceSections, OpaqueSection, RamBlock, RecordEncoder, RecordKind, ram, section,
};

/// A VM that has a block of private memory and takes the others.
struct Heir {
    /// Mapped before the stream comes, if it is not to be passed.
    memory: OnceLock<GuestMemory>,
    passed: Mutex<Vec<String>>,
    refuses: bool,
    started: AtomicU32,
}

const RAM: u64 = 300;
const VIDEO: u64 = 40;

fn video() -> BlockOptions {
    BlockOptions::anonymous("vga", VIDEO * PAGE_SIZE).role(BlockRole::Video)
}

impl Heir {
    fn new() -> Self {
        let (memory, passed, started) = (OnceLock::new(), Mutex::default(), AtomicU32::new(0));
        Self { memory, passed, refuses: false, started }
    }

    /// That has mapped what `source` has.
    fn with_memory_of(source: &TestVm) -> Self {
        let heir = Self::new();
        let (file, offset) = source.memory.block(0).unwrap().file().unwrap();
        let ram = BlockOptions::file("ram", RAM * PAGE_SIZE, file.try_clone_to_owned().unwrap(), offset);
        let memory = GuestMemory::new(vec![video().map().unwrap(), ram.map().unwrap()]);
        heir.memory.set(memory.unwrap()).unwrap();
        heir
    }
}

impl IncomingVm for Heir {
    fn memory(&self) -> &GuestMemory {
        self.memory.get().expect("asked for too early")
    }

    fn map_passed_memory(&self, blocks: Vec<PassedBlock>) -> Result<(), VmError> {
        let mut mapped = vec![video().map()?];
        for block in blocks {
            self.passed.lock().unwrap().push(block.name().to_owned());
            mapped.push(block.into_options().map()?);
        }
        self.memory.set(GuestMemory::new(mapped)?).map_err(|_| "adopted twice".into())
    }

    fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
        if self.refuses { Err(format!("{} does not take it", section.name).into()) } else { Ok(()) }
    }

    fn start(&self) -> Result<(), VmError> {
        self.started.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

fn source() -> TestVm {
    let vm = TestVm::of(vec![BlockOptions::memfd("ram", RAM * PAGE_SIZE), video()]);
    vm.fill(0, |page| page % 3 != 0);
    vm.fill(1, |page| page % 2 == 0);
    vm
}

/// The guest's writes meanwhile.
struct Guest {
    writes: bool,
    free: Option<Arc<dyn FreePageHinting>>,
}

/// It writes.
const WRITES: Guest = Guest { writes: true, free: None };

/// How a VM is moved.
struct Move {
    /// The treatment of shared memory, at the source and at the destination.
    shared: [SharedMemoryMode; 2],
    /// The two ends of the main channel.
    ends: (Channel, Channel),
    /// Multifd channels.
    channels: usize,
    guest: Guest,
}

impl From<[SharedMemoryMode; 2]> for Move {
    /// Over a socket pair, while the guest writes.
    fn from(shared: [SharedMemoryMode; 2]) -> Self {
        Self { shared, ends: pair(), channels: 0, guest: WRITES }
    }
}

/// Returns the outcomes of a move from `source` to `heir`.
fn migrate(source: &TestVm, heir: &Heir, how: impl Into<Move>) -> (Result<LiveStats, String>, Result<(), String>) {
    let Move { shared: [here, there], ends: (near, far), channels, guest } = how.into();
    let (logs, marker) = source.logs();
    let (near_page_channels, far_page_channels): (Vec<_>, Vec<_>) = (0..channels).map(|_| pair()).unzip();
    let params = MigrationParams::default()
        .stalled_rounds(Some(4))
        .timeout_strategy(TimeoutStrategy::Pause)
        .downtime_limit(Duration::from_micros(200))
        .answer_timeout(Duration::from_secs(20));
    let handle = Handle::new();
    let (there_control, there_progress) = (Control::new(), Progress::new());
    thread::scope(|scope| {
        let arriving = scope.spawn(|| {
            for channel in &far_page_channels {
                let mut first = [0; INITIAL_LEN];
                channel.read_exact(&mut first).map_err(|error| error.to_string())?;
                InitialPacket::decode(&first).unwrap();
            }
            let options = LiveDestinationOptions { shared_memory: there, ..LiveDestinationOptions::default() };
            let role = LiveDestination::new(
                heir,
                far,
                &Handle { control: there_control.clone(), progress: there_progress.clone() },
            )
            .options(options);
            match role.channels(far_page_channels, MultifdOptions::default()).run() {
                IncomingOutcome::Running(_) => Ok(()),
                IncomingOutcome::Failed(error) => Err(error.in_one_line()),
                other => panic!("{other:?}"),
            }
        });
        if guest.writes {
            source.write_on(scope, marker, 7, Duration::from_micros(20));
        }
        let mut role = LiveSource::new(source, logs, near, &handle).options(params).shared_memory(here);
        if let Some(free) = guest.free {
            role = role.hint_free_pages(free);
        }
        let outcome = role.channels(near_page_channels, MultifdSourceOptions::default()).unwrap().run();
        source.over.store(true, Ordering::Relaxed);
        let sent = match outcome {
            LiveOutcome::Completed(stats) => Ok(stats),
            LiveOutcome::Resumed { error, .. } => Err(error.in_one_line()),
            other => panic!("{other:?}"),
        };
        (sent, arriving.join().unwrap())
    })
}

fn check_moved(source: &TestVm, heir: &Heir, stats: &LiveStats) {
    assert_eq!(heir.started.load(Ordering::SeqCst), 1);
    for (index, name) in ["ram", "vga"].into_iter().enumerate() {
        let there = heir.memory().block(heir.memory().index_of(name).unwrap()).unwrap();
        let mut bytes = vec![0; usize::try_from(there.len()).unwrap()];
        there.read(0, &mut bytes).unwrap();
        assert!(bytes == source.contents(index), "{name} differs");
    }
    // All that went out was the other block, as often as it was written.
    let of_ram = stats.rounds.iter().filter(|round| round.pages > VIDEO).count();
    assert_eq!(of_ram, 0, "{stats:#?}");
    // It is the same memory, not a copy of it.
    let ram = heir.memory().block(heir.memory().index_of("ram").unwrap()).unwrap();
    ram.write(5 * PAGE_SIZE, b"the same").unwrap();
    let mut bytes = [0; 8];
    source.memory.block(0).unwrap().read(5 * PAGE_SIZE, &mut bytes).unwrap();
    assert_eq!(&bytes, b"the same");
}

#[test]
fn memory_is_passed_and_no_page_of_it_is_sent() {
    for channels in [0, 2] {
        let (source, heir) = (source(), Heir::new());
        let (sent, arrived) = migrate(&source, &heir, Move { channels, ..Move::from([SharedMemoryMode::Passed; 2]) });
        arrived.unwrap();
        check_moved(&source, &heir, &sent.unwrap());
        assert_eq!(*heir.passed.lock().unwrap(), ["ram"]);
    }
}

#[test]
fn ends_that_have_mapped_the_same_file_need_nothing_passed() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &Default::default()).unwrap();
    let near = Channel::connect(listener.local_uri(), &Default::default()).unwrap();
    let far = listener.accept(None).unwrap();
    let source = source();
    let heir = Heir::with_memory_of(&source);
    let (sent, arrived) =
        migrate(&source, &heir, Move { ends: (near, far), ..Move::from([SharedMemoryMode::Mapped; 2]) });
    arrived.unwrap();
    check_moved(&source, &heir, &sent.unwrap());
}

#[test]
fn ends_that_do_not_share_alike_part_before_a_page() {
    use SharedMemoryMode::{Mapped, Passed, Sent};
    for (ends, said) in [
        ([Sent, Mapped], "the source sends shared memory"),
        ([Sent, Passed], "the source sends shared memory"),
        ([Mapped, Sent], "which is not shared here"),
        ([Passed, Sent], "which is not shared here"),
        ([Mapped, Passed], "0 descriptors came with a stream of 2 RAM blocks"),
    ] {
        let source = source();
        let before = source.contents(0);
        let heir = if ends[1] == Passed { Heir::new() } else { Heir::with_memory_of(&source) };
        let (sent, arrived) = migrate(&source, &heir, ends);
        assert!(sent.is_err() && source.runs());
        let error = arrived.unwrap_err();
        assert!(error.contains(said), "{ends:?}: {error}");
        assert_eq!(heir.started.load(Ordering::SeqCst), 0);
        // The VM wrote on; the destination wrote nothing.
        assert!(source.contents(0).len() == before.len());
    }
}

#[test]
fn a_destination_that_has_the_file_mapped_can_be_passed_it_all_the_same() {
    let source = source();
    let heir = Heir::with_memory_of(&source);
    let (sent, arrived) = migrate(&source, &heir, [SharedMemoryMode::Passed, SharedMemoryMode::Mapped]);
    arrived.unwrap();
    check_moved(&source, &heir, &sent.unwrap());
}

#[test]
fn a_refused_device_leaves_the_vm_at_the_source_and_its_memory_as_the_vm_wrote_it() {
    let source = source();
    let heir = Heir { refuses: true, ..Heir::new() };
    let (sent, arrived) = migrate(&source, &heir, [SharedMemoryMode::Passed; 2]);
    assert!(arrived.unwrap_err().contains("does not take it"));
    assert!(sent.is_err() && source.runs());
    // And another attempt succeeds.
    source.over.store(false, Ordering::Relaxed);
    let next = Heir::new();
    let (sent, arrived) = migrate(&source, &next, [SharedMemoryMode::Passed; 2]);
    arrived.unwrap();
    check_moved(&source, &next, &sent.unwrap());
}

#[test]
fn shared_memory_and_postcopy_exclude_each_other() {
    let source = source();
    let (logs, _) = source.logs();
    let (near, far) = pair();
    let handle = Handle::new();
    let role = LiveSource::new(&source, logs, near, &handle);
    let outcome = role.shared_memory(SharedMemoryMode::Passed).postcopy(PostcopyMode::Allowed).run();
    let LiveOutcome::Resumed { error, .. } = outcome else { panic!("{outcome:?}") };
    assert!(error.to_string().contains("in postcopy shared memory has to be sent"), "{error}");
    assert_eq!(far.counters().bytes_in, 0);
    assert!(source.runs());
}

#[test]
fn memory_is_not_passed_where_descriptors_cannot_be() {
    let listener = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &Default::default()).unwrap();
    let near = Channel::connect(listener.local_uri(), &Default::default()).unwrap();
    let far = listener.accept(None).unwrap();
    let source = source();
    let (sent, arrived) =
        migrate(&source, &Heir::new(), Move { ends: (near, far), ..Move::from([SharedMemoryMode::Passed; 2]) });
    assert!(arrived.unwrap_err().contains("unix socket"));
    assert!(sent.is_err() && source.runs());
}

/// A stream with this many descriptors that sends pages of the block of this number.
fn hostile(descriptors: usize, pages_of: usize, address: u64) -> (Result<(), String>, Vec<u8>, Vec<u8>) {
    let source = source();
    let blocks = ["ram", "vga"].map(|name| {
        let length = if name == "ram" { RAM } else { VIDEO } * PAGE_SIZE;
        RamBlock { address: Some(address), ..RamBlock::new(name, length) }
    });
    let mut bytes = Vec::new();
    Configuration::new("pc-q35-10.0").with_ignore_shared().encode(&mut bytes).unwrap();
    Command::OpenReturnPath.encode(&mut bytes).unwrap();
    ram::encode_ram_layout(2, &blocks, &mut bytes).unwrap();
    ram::encode_eos(2, &mut bytes);
    section::encode_part(2, &mut bytes);
    let mut records = RecordEncoder::new(&blocks).unwrap();
    for kind in [RecordKind::Page, RecordKind::Zero] {
        records.append(kind, pages_of, 4096, &mut bytes).unwrap();
        bytes.resize(bytes.len() + if kind == RecordKind::Page { PAGE_LEN } else { 0 }, 0xee);
    }
    ram::encode_eos(2, &mut bytes);
    section::encode_end(2, &mut bytes);
    ram::encode_eos(2, &mut bytes);
    let mut devices = DeviceSections::new();
    devices.push("cpu", 0, 1, b"state").unwrap();
    bytes.extend_from_slice(devices.bytes());
    // All pages are in their places before this is answered.
    Command::Ping(PING_READY).encode(&mut bytes).unwrap();
    let before = source.contents(0);
    let (near, far) = pair();
    let heir = Heir::new();
    let handle = Handle::new();
    let options =
        LiveDestinationOptions { shared_memory: SharedMemoryMode::Passed, ..LiveDestinationOptions::default() };
    let arrived = thread::scope(|scope| {
        let arriving = scope.spawn(|| LiveDestination::new(&heir, far, &handle).options(options).run());
        let ram = source.memory.block(0).unwrap().descriptor_to_pass().unwrap();
        let null = source.memory.block(1).unwrap().descriptor_to_pass().unwrap();
        let passed: Vec<_> = [ram.as_fd(), null.as_fd()].into_iter().cycle().take(descriptors).collect();
        near.write_all_with_descriptors(&bytes, &passed).unwrap();
        if pages_of == 1 {
            near.shutdown(Shutdown::Write).unwrap();
        }
        match arriving.join().unwrap() {
            IncomingOutcome::Failed(error) => Err(error.in_one_line()),
            IncomingOutcome::Undecided(_) => Ok(()),
            other => panic!("{other:?}"),
        }
    });
    (arrived, before, source.contents(0))
}

#[test]
fn a_source_that_sends_pages_of_shared_memory_is_refused_before_one_is_written() {
    let (arrived, before, after) = hostile(2, 0, 0);
    let error = arrived.unwrap_err();
    assert!(error.contains("sends pages of RAM block ram, which it shares"), "{error}");
    assert!(before == after);
    hostile(2, 1, 0).0.expect("the other block is sent as ever");
}

#[test]
fn a_wrong_number_of_descriptors_and_another_address_are_refused() {
    for count in [0, 1, 3, 253] {
        let error = hostile(count, 1, 0).0.unwrap_err();
        assert!(error.contains(&format!("{count} descriptors came with a stream of 2 RAM blocks")), "{error}");
    }
    let error = hostile(2, 1, 1 << 32).0.unwrap_err();
    assert!(error.contains("region address 0x100000000 at the source and 0x0 here"), "{error}");
}

/// A guest that calls these ranges free, at once, whenever it is asked.
struct Calls(Vec<Range<u64>>);

impl FreePageHinting for Calls {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        self.0.iter().for_each(|range| to.add_range(range.clone()));
        to.complete();
        Ok(())
    }

    fn stop_list(&self) {}

    fn return_pages(&self) {}
}

#[test]
fn free_pages_are_left_out_of_what_is_sent_and_what_is_shared_is_as_it_was() {
    const ABOVE: u64 = 4 << 30;
    for (ends, channels) in
        [(SharedMemoryMode::Passed, 0), (SharedMemoryMode::Passed, 2), (SharedMemoryMode::Mapped, 0)]
    {
        let blocks = [BlockOptions::memfd("ram", RAM * PAGE_SIZE), video()].map(|options| options.map().unwrap());
        let region = |block: usize, guest_address| GuestRegion { guest_address, block, pages: blocks[block].pages() };
        let regions = vec![region(0, 0), region(1, ABOVE)];
        let memory = Arc::new(GuestMemory::with_regions(blocks.into(), regions).unwrap());
        let source = TestVm { memory, ..TestVm::new(&[1]) };
        (0..2).for_each(|block| source.fill(block, |_| true));
        let before = source.contents(0);
        let heir = if ends == SharedMemoryMode::Passed { Heir::new() } else { Heir::with_memory_of(&source) };
        // All that is shared, and ten pages of what is not.
        let free = Calls(vec![0..RAM * PAGE_SIZE, ABOVE + 10 * PAGE_SIZE..ABOVE + 20 * PAGE_SIZE]);
        let guest = Guest { writes: false, free: Some(Arc::new(free)) };
        let (sent, arrived) = migrate(&source, &heir, Move { channels, guest, ..Move::from([ends; 2]) });
        arrived.unwrap();
        let stats = sent.unwrap();
        assert_eq!((stats.sum(|round| round.hinted), stats.sum(|round| round.normal)), (10, VIDEO - 10));
        assert!(source.contents(0) == before);
        let there = |name| {
            let block = heir.memory().block(heir.memory().index_of(name).unwrap()).unwrap();
            let mut bytes = vec![0; usize::try_from(block.len()).unwrap()];
            block.read(0, &mut bytes).unwrap();
            bytes
        };
        assert!(there("ram") == before);
        let (here, there) = (source.contents(1), there("vga"));
        for (page, (here, there)) in here.chunks(PAGE_LEN).zip(there.chunks(PAGE_LEN)).enumerate() {
            assert!(if (10..20).contains(&page) { there == [0; PAGE_LEN] } else { here == there }, "page {page}");
        }
    }
}
