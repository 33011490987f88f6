//! The precopy source with multifd channels, against a destination that keeps QEMU's rules.

use std::fs::File;
use std::io::Write;
use std::num::NonZeroU64;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::thread;
use std::time::Duration;

use crate::model::InOneLine;
use crate::model::multifd::{MultifdModel, Outcome, Trouble};
use crate::model::{Memory, pair};
use limosa_channel::{Channel, Options, ZeroCopy};
use limosa_memory::{BlockOptions, MemoryBlock};
use limosa_migrate::control::{Phase, Stop};
use limosa_migrate::multifd::MultifdSourceOptions;
use limosa_migrate::stats::PrecopyStats;
use limosa_migrate::stored::{PageError, PageSource, PrecopyOptions, PrecopySource, PresentBlock, StreamSetup};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_stream::Configuration;
use limosa_stream::multifd::Compression;
use proptest::prelude::*;

/// Machine types on both sides of each change of the rules.
const MACHINES: [&str; 4] = ["pc-i440fx-7.2", "pc-q35-8.1", "pc-i440fx-9.0", "pc-q35-10.0"];

fn every_third(_: usize, page: u64) -> bool {
    page % 3 != 1
}

fn memory(machine: &str, blocks: &[u64], contents: impl Fn(usize, u64) -> bool) -> Memory {
    let mut memory = Memory::new(blocks, contents);
    memory.start.configuration = Configuration::new(machine);
    memory
}

/// A way of sending.
struct Way {
    channels: usize,
    multifd: MultifdSourceOptions,
    fresh: Vec<String>,
    in_place: Vec<String>,
    return_path: bool,
    answer_timeout: Duration,
    trouble: Option<Trouble>,
}

impl Way {
    fn new(channels: usize) -> Self {
        Self {
            channels,
            multifd: MultifdSourceOptions::default(),
            fresh: vec!["block0".into()],
            in_place: Vec::new(),
            return_path: true,
            answer_timeout: Duration::from_secs(20),
            trouble: None,
        }
    }

    fn compression(mut self, compression: Compression) -> Self {
        self.multifd.compression = compression;
        self
    }

    fn trouble(trouble: Trouble) -> Self {
        Self { trouble: Some(trouble), ..Self::new(3) }
    }

    /// Sends `source`, whose memory is `memory`, and returns what both sides say.
    fn send<S: PageSource>(
        &self,
        memory: &Memory,
        source: &S,
        handle: &Handle,
    ) -> (Result<PrecopyStats, MigrateError>, Outcome) {
        let model = MultifdModel::new(memory, (&self.fresh, &self.in_place), self.multifd.compression, self.trouble);
        let (near, far) = pair();
        let (page_channels, far_page_channels): (Vec<Channel>, Vec<Channel>) =
            (0..self.channels).map(|_| pair()).unzip();
        let options = PrecopyOptions {
            return_path: self.return_path,
            // On top of one another: the channels begin while the first answer is waited for.
            ping_timeout: Some(self.answer_timeout),
            answer_timeout: self.answer_timeout,
            zeroed_blocks: self.fresh.clone(),
            in_place: self.in_place.iter().map(PresentBlock::unchanged).collect(),
        };
        let (sent, outcome) = thread::scope(|scope| {
            let destination = scope.spawn(|| model.run(far, far_page_channels));
            let role = PrecopySource::new(source, near, handle).options(options);
            let sent = role.channels(page_channels, self.multifd.clone()).and_then(PrecopySource::run);
            (sent, destination.join().unwrap())
        });
        if sent.is_ok() {
            model.assert_memory();
        }
        (sent, outcome)
    }

    /// As `send`, without interference.
    fn send_plainly(&self, memory: &Memory) -> (Result<PrecopyStats, MigrateError>, Outcome) {
        self.send(memory, memory, &Handle::new())
    }
}

#[test]
fn memory_arrives_whole_for_every_machine_number_of_channels_and_compression() {
    for machine in MACHINES {
        let memory = memory(machine, &[3000, 50, 700], every_third);
        for channels in [1, 2, 5, 16] {
            for compression in [Compression::None, Compression::Zlib, Compression::Zstd] {
                let (sent, outcome) = Way::new(channels).compression(compression).send_plainly(&memory);
                let stats = sent.unwrap();
                assert_eq!(outcome.wrong, Vec::<String>::new(), "{machine} {channels} {compression:?}");
                assert_eq!(stats.normal_pages, outcome.normal);
                assert_eq!(stats.zero_pages, outcome.zero_listed + outcome.zero_records);
                // The holes of the fresh block are left out, all others are told of.
                assert_eq!(stats.normal_pages, 2000 + 33 + 467);
                assert_eq!(stats.zero_pages, 17 + 233);
                assert_eq!(compression == Compression::None, outcome.payload == 4096 * outcome.normal);
            }
        }
    }
}

/// Memory in which some stored pages are zero.
struct WithZeros<'a>(&'a Memory, Vec<PageBitmap>);

impl<'a> WithZeros<'a> {
    /// `memory` as if every page were stored.
    fn new(memory: &'a Memory) -> Self {
        Self(memory, memory.start.blocks.iter().map(|block| PageBitmap::full(block.pages())).collect())
    }
}

impl PageSource for WithZeros<'_> {
    fn setup(&self) -> &StreamSetup {
        self.0.setup()
    }
    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        &self.1[block]
    }
    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        self.0.read(block, pages, into)
    }
    fn device_sections(&self) -> &[u8] {
        self.0.device_sections()
    }
    fn description(&self) -> &[u8] {
        self.0.description()
    }
}

#[test]
fn of_a_block_that_is_in_place_no_page_goes_out_on_any_channel() {
    for machine in MACHINES {
        let memory = memory(machine, &[3000, 50, 700], every_third);
        let way = Way { in_place: vec!["block0".into()], ..Way::new(3) };
        let (sent, outcome) = way.send_plainly(&memory);
        let stats = sent.unwrap();
        assert_eq!(outcome.wrong, Vec::<String>::new(), "{machine}");
        assert_eq!((stats.normal_pages, stats.zero_pages), (33 + 467, 17 + 233), "{machine}");
    }
}

#[test]
fn stored_zero_pages_go_into_packets_only_where_a_destination_may_believe_it() {
    for machine in MACHINES {
        let memory = memory(machine, &[900, 600], |_, page| page % 5 != 0);
        for compression in [Compression::None, Compression::Zstd] {
            let way = Way::new(3).compression(compression);
            let (sent, outcome) = way.send(&memory, &WithZeros::new(&memory), &Handle::new());
            assert_eq!(outcome.wrong, Vec::<String>::new());
            assert_eq!(sent.unwrap().zero_pages, 180 + 120);
            let in_packets = if machine.ends_with("9.0") || machine.ends_with("10.0") { 180 } else { 0 };
            assert_eq!((outcome.zero_listed, outcome.zero_records), (in_packets, 300 - in_packets), "{machine}");
        }
        let mut way = Way::new(2);
        way.multifd.detect_zero = false;
        let (sent, outcome) = way.send(&memory, &WithZeros::new(&memory), &Handle::new());
        assert_eq!((sent.unwrap().normal_pages, outcome.normal), (1500, 1500));
    }
}

#[test]
fn memory_that_is_all_zero_or_empty_arrives() {
    for machine in MACHINES {
        let nothing = memory(machine, &[500, 0, 300], |_, _| false);
        let (sent, outcome) = Way::new(2).send_plainly(&nothing);
        assert_eq!(sent.unwrap().zero_pages, 300);
        assert!(outcome.wrong.is_empty() && outcome.devices && outcome.packets == [0, 0]);
        let (sent, outcome) = Way::new(2).send(&nothing, &WithZeros::new(&nothing), &Handle::new());
        assert_eq!(sent.unwrap().zero_pages, 800);
        assert!(outcome.wrong.is_empty() && outcome.devices && outcome.normal == 0);
    }
}

#[test]
fn every_channel_states_the_uuid() {
    let mut memory = memory("pc-q35-10.0", &[10], every_third);
    let mut way = Way::new(4);
    assert_eq!(way.send_plainly(&memory).1.uuids, [[0; 16]; 4]);
    memory.start.configuration.uuid = Some([7; 16]);
    assert_eq!(way.send_plainly(&memory).1.uuids, [[7; 16]; 4]);
    way.multifd.uuid = Some([9; 16]);
    assert_eq!(way.send_plainly(&memory).1.uuids, [[9; 16]; 4]);
}

#[test]
fn no_more_than_16_channels_are_taken() {
    let memory = memory("pc-q35-10.0", &[10], every_third);
    let handle = Handle::new();
    let role = PrecopySource::new(&memory, pair().0, &handle);
    let page_channels = (0..17).map(|_| pair().0).collect();
    let error = role.channels(page_channels, MultifdSourceOptions::default()).map(drop).unwrap_err();
    assert!(error.to_string().contains("17 channels"), "{error}");
}

#[test]
fn without_a_return_path_memory_arrives_as_well() {
    for machine in MACHINES {
        let memory = memory(machine, &[1000], every_third);
        let (sent, outcome) = Way { return_path: false, ..Way::new(2) }.send_plainly(&memory);
        sent.unwrap();
        assert!(outcome.wrong.is_empty() && outcome.devices, "{outcome:?}");
    }
}

/// Memory that gives nothing away before a number of threads ask for some: so that every channel has a share. One that
/// fails before it asks is not waited for for ever.
struct Shared<'a>(&'a Memory, Mutex<u64>, Condvar);

impl<'a> Shared<'a> {
    fn among(threads: u64, memory: &'a Memory) -> Self {
        Self(memory, Mutex::new(threads), Condvar::new())
    }
}

impl PageSource for Shared<'_> {
    fn setup(&self) -> &StreamSetup {
        self.0.setup()
    }
    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        self.0.stored_bitmap(block)
    }
    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        let mut left = self.1.lock().unwrap();
        *left = left.saturating_sub(1);
        self.2.notify_all();
        drop(self.2.wait_timeout_while(left, Duration::from_secs(5), |left| *left > 0).unwrap());
        self.0.read(block, pages, into)
    }
    fn device_sections(&self) -> &[u8] {
        self.0.device_sections()
    }
    fn description(&self) -> &[u8] {
        self.0.description()
    }
}

#[test]
fn a_rate_limit_is_charged_with_what_is_sent_and_not_with_zero_pages_nor_what_compression_saves() {
    // A window, which goes out at once however low the limit is; what it has cost is paid afterwards.
    let charged = |source: &dyn Fn(&Way, &Handle) -> PrecopyStats, way: Way| {
        let handle = Handle::new();
        handle.control.set_max_bandwidth(NonZeroU64::new(1000));
        let stats = source(&way, &handle);
        assert_eq!(stats.normal_pages + stats.zero_pages, 256);
        handle.control.rate_limit().delay()
    };
    for machine in MACHINES {
        let one = memory(machine, &[256], |_, page| page == 7);
        let read = WithZeros::new(&one);
        let mapped = Mixed(&read, mapped(&one, 0));
        let send_read = |way: &Way, handle: &Handle| way.send(&one, &read, handle).0.unwrap();
        let send_mapped = |way: &Way, handle: &Handle| way.send(&one, &mapped, handle).0.unwrap();
        // A page, headers, and at most 9 bytes for each of the others, less what the time since has paid: 10 s. All
        // pages: 1000 s.
        for delay in [charged(&send_read, Way::new(1)), charged(&send_mapped, Way::new(1))] {
            assert!(delay < Duration::from_secs(60), "{machine} {delay:?}");
        }
        let all = memory(machine, &[256], |_, _| true);
        let send = |way: &Way, handle: &Handle| way.send(&all, &all, handle).0.unwrap();
        let delay = charged(&send, Way::new(1).compression(Compression::Zstd));
        assert!(delay < Duration::from_secs(60), "{machine} {delay:?}");
        let delay = charged(&send, Way::new(1));
        assert!(delay > Duration::from_secs(900), "{machine} {delay:?}");
    }
}

/// A block as it is mapped in memory.
fn mapped(memory: &Memory, block: usize) -> MemoryBlock {
    let mapping = BlockOptions::anonymous("mapped", memory.setup().blocks[block].used_length).map().unwrap();
    for page in memory.stored_bitmap(block).runs().flat_map(|run| run.iter().collect::<Vec<_>>()) {
        mapping.write(page.offset(), &memory.page(block, page.0)).unwrap();
    }
    mapping
}

/// Memory whose first block is mapped, so that its pages leave from where they lie; those of the others are read.
struct Mixed<'a, S>(&'a S, MemoryBlock);

impl<'a> Mixed<'a, Memory> {
    fn new(memory: &'a Memory) -> Self {
        Self(memory, mapped(memory, 0))
    }
}

impl<S: PageSource> PageSource for Mixed<'_, S> {
    fn setup(&self) -> &StreamSetup {
        self.0.setup()
    }
    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        self.0.stored_bitmap(block)
    }
    fn memory(&self, block: usize) -> Option<&MemoryBlock> {
        (block == 0).then_some(&self.1)
    }
    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        self.0.read(block, pages, into)
    }
    fn device_sections(&self) -> &[u8] {
        self.0.device_sections()
    }
    fn description(&self) -> &[u8] {
        self.0.description()
    }
}

#[test]
fn a_packet_of_mapped_memory_that_is_not_full_goes_out_before_pages_that_are_read() {
    for machine in MACHINES {
        let memory = memory(machine, &[1000, 1000], every_third);
        let (sent, outcome) = Way::new(1).send(&memory, &Mixed::new(&memory), &Handle::new());
        sent.unwrap();
        assert!(outcome.wrong.is_empty() && outcome.devices, "{outcome:?}");
    }
}

#[test]
fn memory_is_not_spliced_where_its_arrival_is_not_confirmed() {
    let memory = memory("pc-q35-10.0", &[10], every_third);
    let mixed = Mixed::new(&memory);
    let handle = Handle::new();
    let mut refused = Vec::new();
    for (zero_copy, return_path) in [(ZeroCopy::Splice, false), (ZeroCopy::Auto, false), (ZeroCopy::Splice, true)] {
        let (_far, near) = std::os::unix::net::UnixStream::pair().unwrap();
        let page_channel = Channel::from_fd_with(near.into(), &Options { zero_copy, ..Options::default() }).unwrap();
        let options = PrecopyOptions { return_path, ..PrecopyOptions::default() };
        let role = PrecopySource::new(&mixed, pair().0, &handle).options(options);
        let role = role.channels(vec![page_channel], MultifdSourceOptions::default()).unwrap();
        refused.push(role.run().unwrap_err().to_string().contains("a destination that answers"));
    }
    // The last one finds only that its peer is gone.
    assert_eq!(refused, [true, true, false]);
}

#[test]
fn a_channel_that_is_closed_ends_everything_and_is_named() {
    // More than the rest of the first window does not fit into the channel's buffer.
    for packets in [0, 1] {
        let memory = memory("pc-q35-10.0", &[30_000], |_, _| true);
        let way = Way::trouble(Trouble::Close { id: 1, packets });
        let (sent, outcome) = way.send(&memory, &Shared::among(3, &memory), &Handle::new());
        let error = sent.unwrap_err();
        assert!(matches!(error, MigrateError::Multifd { id: 1, .. }), "{error}");
        assert!(error.in_one_line().starts_with("multifd channel 1: cannot write to "), "{error}");
        assert!(!outcome.devices);
    }
}

#[test]
fn a_channel_that_takes_nothing_is_named_when_patience_is_over() {
    let memory = memory("pc-q35-10.0", &[30_000], |_, _| true);
    let way = Way { answer_timeout: Duration::from_secs(2), ..Way::trouble(Trouble::Stall { id: 2, packets: 1 }) };
    let (sent, outcome) = way.send(&memory, &Shared::among(3, &memory), &Handle::new());
    let error = sent.unwrap_err();
    assert!(matches!(error, MigrateError::Multifd { id: 2, .. }), "{error}");
    assert!(error.in_one_line().contains("nothing moved for 2s"), "{error}");
    // The others have taken over meanwhile.
    assert!(outcome.packets[0] + outcome.packets[1] > 10, "{outcome:?}");
    assert!(!outcome.devices);
}

#[test]
fn a_destination_that_gives_up_in_the_middle_or_at_the_end_is_a_failure() {
    let memory = memory("pc-q35-10.0", &[30_000], |_, _| true);
    let way = Way::trouble(Trouble::TimeoutStrategy { id: 0, packets: 1 });
    let (sent, outcome) = way.send(&memory, &Shared::among(3, &memory), &Handle::new());
    assert!(matches!(sent, Err(MigrateError::Refused { status: 1 })), "{sent:?}");
    assert!(!outcome.devices);
    let (sent, outcome) = Way::trouble(Trouble::RefuseAtTheEnd).send_plainly(&memory);
    assert!(matches!(sent, Err(MigrateError::Refused { status: 1 })), "{sent:?}");
    assert!(outcome.devices);
}

#[test]
fn a_store_that_fails_ends_everything_and_no_channel_is_blamed() {
    for left in [0, 5000] {
        let memory = memory("pc-q35-10.0", &[30_000], |_, _| true);
        memory.reads_left.store(left, Ordering::Relaxed);
        let (sent, outcome) = Way::new(4).send_plainly(&memory);
        let error = sent.unwrap_err();
        assert_eq!(error.in_one_line(), "cannot read pages: the medium has failed");
        assert!(!outcome.devices);
    }
}

#[test]
fn a_cancellation_ends_all_channels_also_while_they_are_held_back_or_blocked() {
    let memory = memory("pc-q35-10.0", &[30_000], |_, _| true);
    for (rate, trouble) in [(1 << 20, None), (0, Some(Trouble::Stall { id: 0, packets: 3 }))] {
        let handle = Handle::new();
        handle.control.set_max_bandwidth(NonZeroU64::new(rate));
        let way = Way { trouble, ..Way::new(3) };
        let (sent, outcome) = thread::scope(|scope| {
            let sending = scope.spawn(|| way.send(&memory, &memory, &handle));
            while handle.progress.read().normal_pages == 0 {
                thread::yield_now();
            }
            handle.control.stop(Stop::Cancel);
            sending.join().unwrap()
        });
        assert!(matches!(sent, Err(MigrateError::Cancelled)), "{sent:?}");
        assert!(!outcome.devices);
    }
}

#[test]
fn all_channels_together_keep_to_one_rate_and_are_counted_together() {
    let memory = memory("pc-q35-10.0", &[2048], |_, _| true);
    let handle = Handle::new();
    // All but the last windows have to be paid for: 8 MiB at 32 MiB a second take a fifth of a second at least.
    handle.control.set_max_bandwidth(NonZeroU64::new(32 << 20));
    let (sent, _) = Way::new(2).send(&memory, &memory, &handle);
    let stats = sent.unwrap();
    assert!(stats.elapsed > Duration::from_millis(100), "{stats:?}");
    assert!(stats.channel.bytes_out > 2048 * 4096, "{stats:?}");
    let read = handle.progress.read();
    assert_eq!((read.phase, read.normal_pages, read.total_pages), (Phase::Completed, 2048, 2048));
}

/// Memory that is stored in a file as well.
struct Filed<'a> {
    memory: &'a Memory,
    file: File,
    /// Calls of `check_unchanged` that find everything in order.
    whole: AtomicU64,
    reads: AtomicU64,
    /// The second block, if it is mapped as well.
    mapped: Option<MemoryBlock>,
}

impl<'a> Filed<'a> {
    fn new(memory: &'a Memory) -> Self {
        let mut file = tempfile::tempfile().unwrap();
        for (block, layout) in memory.start.blocks.iter().enumerate() {
            for page in 0..layout.pages() {
                file.write_all(&memory.page(block, page)).unwrap();
            }
        }
        Self { memory, file, whole: AtomicU64::new(u64::MAX), reads: AtomicU64::new(0), mapped: None }
    }
}

impl PageSource for Filed<'_> {
    fn setup(&self) -> &StreamSetup {
        self.memory.setup()
    }
    fn stored_bitmap(&self, block: usize) -> &PageBitmap {
        self.memory.stored_bitmap(block)
    }
    fn read(&self, block: usize, pages: PageRange, into: &mut [u8]) -> Result<(), PageError> {
        self.reads.fetch_add(pages.len(), Ordering::Relaxed);
        self.memory.read(block, pages, into)
    }
    fn memory(&self, block: usize) -> Option<&MemoryBlock> {
        self.mapped.as_ref().filter(|_| block == 1)
    }
    fn file_location(&self, block: usize, page: PageNumber) -> Option<(BorrowedFd<'_>, u64)> {
        let before: u64 = self.memory.start.blocks.iter().take(block).map(|block| block.used_length).sum();
        Some((self.file.as_fd(), before + page.offset()))
    }
    fn check_unchanged(&self) -> Result<(), PageError> {
        let left = self.whole.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| "the file was written to".into())
    }
    fn device_sections(&self) -> &[u8] {
        self.memory.device_sections()
    }
    fn description(&self) -> &[u8] {
        self.memory.description()
    }
}

fn in_place() -> Way {
    let mut way = Way::new(2);
    way.multifd.detect_zero = false;
    way
}

#[test]
fn contents_go_out_of_their_file_unread_but_for_short_runs() {
    for machine in MACHINES {
        // Runs of 1 to 20 pages and gaps between them, and a long run.
        let memory = memory(machine, &[4000, 500], |_, page| page > 3000 || (page * page / 20) % 3 != 1);
        let filed = Filed::new(&memory);
        let (sent, outcome) = in_place().send(&memory, &filed, &Handle::new());
        let stats = sent.unwrap();
        assert_eq!(outcome.wrong, Vec::<String>::new());
        let read = filed.reads.load(Ordering::Relaxed);
        assert!(read > 0 && read < stats.normal_pages / 2, "{read} of {stats:?}");
    }
}

#[test]
fn blocks_in_a_file_and_mapped_ones_go_out_in_packets_of_their_own() {
    for machine in MACHINES {
        let memory = memory(machine, &[1000, 1000, 100], |_, _| true);
        let filed = Filed { mapped: Some(mapped(&memory, 1)), ..Filed::new(&memory) };
        let way = Way { channels: 1, ..in_place() };
        let (sent, outcome) = way.send(&memory, &filed, &Handle::new());
        assert_eq!(sent.unwrap().normal_pages, 2100);
        assert!(outcome.wrong.is_empty() && outcome.devices, "{outcome:?}");
    }
}

#[test]
fn contents_are_read_where_they_must_be_looked_at_or_their_receipt_is_not_confirmed() {
    let memory = memory("pc-q35-10.0", &[1000], |_, _| true);
    let ways = [Way::new(2), in_place().compression(Compression::Zlib), Way { return_path: false, ..in_place() }];
    for way in ways {
        let filed = Filed::new(&memory);
        let (sent, _) = way.send(&memory, &filed, &Handle::new());
        sent.unwrap();
        assert_eq!(filed.reads.load(Ordering::Relaxed), 1000);
    }
}

#[test]
fn a_way_out_of_the_file_that_is_named_is_taken_or_refused_before_anything_is_sent() {
    let memory = memory("pc-q35-10.0", &[1000], |_, _| true);
    let named = |zero_copy, mut way: Way| {
        way.multifd.zero_copy = zero_copy;
        way
    };
    for (zero_copy, read) in [(ZeroCopy::Off, 1000), (ZeroCopy::Auto, 0), (ZeroCopy::Splice, 0)] {
        let filed = Filed::new(&memory);
        let (sent, outcome) = named(zero_copy, in_place()).send(&memory, &filed, &Handle::new());
        sent.unwrap();
        assert_eq!((outcome.wrong, filed.reads.load(Ordering::Relaxed)), (Vec::new(), read), "{zero_copy}");
    }
    let filed = Filed::new(&memory);
    let refused =
        |way: &Way, source: &dyn PageSource| way.multifd.check_zero_copy(source, way.return_path).unwrap_err();
    for (way, why) in [
        (named(ZeroCopy::Splice, Way::new(2)), "looked at"),
        (named(ZeroCopy::Splice, in_place().compression(Compression::Zlib)), "compressed"),
        (named(ZeroCopy::Splice, Way { return_path: false, ..in_place() }), "no answer that would confirm"),
        (named(ZeroCopy::Msg, in_place()), "in a file"),
    ] {
        let error = refused(&way, &filed).in_one_line();
        assert!(error.starts_with("zero-copy is not available: ") && error.contains(why), "{error}");
    }
    // This memory has no place in a file.
    let error = refused(&named(ZeroCopy::Splice, in_place()), &memory).in_one_line();
    assert!(error.contains("checksums"), "{error}");
}

#[test]
fn a_destination_that_has_nothing_to_say_once_all_channels_have_begun_is_given_up() {
    let memory = memory("pc-q35-10.0", &[3000], |_, _| true);
    let (near, _far) = pair();
    let (page_channels, _far_page_channels): (Vec<Channel>, Vec<Channel>) = (0..3).map(|_| pair()).unzip();
    let options = PrecopyOptions { ping_timeout: Some(Duration::from_millis(50)), ..PrecopyOptions::default() };
    let handle = Handle::new();
    let role = PrecopySource::new(&memory, near, &handle).options(options);
    let error = role.channels(page_channels, MultifdSourceOptions::default()).and_then(PrecopySource::run).unwrap_err();
    assert!(matches!(error, MigrateError::AnswerTimedOut { .. }), "{error}");
}

#[test]
fn a_file_that_changes_while_it_is_sent_ends_it_before_the_devices() {
    let memory = memory("pc-q35-10.0", &[2048], |_, _| true);
    // Eight windows, each looked at, and the look when the destination has everything.
    for whole in [0, 3, 8] {
        let filed = Filed::new(&memory);
        filed.whole.store(whole, Ordering::Relaxed);
        let (sent, outcome) = in_place().send(&memory, &filed, &Handle::new());
        assert_eq!(sent.unwrap_err().in_one_line(), "cannot read pages: the file was written to", "{whole}");
        assert!(!outcome.devices);
    }
    let filed = Filed::new(&memory);
    filed.file.set_len(1000 * 4096).unwrap();
    let (sent, outcome) = in_place().send(&memory, &filed, &Handle::new());
    let error = sent.unwrap_err();
    assert!(matches!(error, MigrateError::Source(_)), "{error}");
    assert!(error.in_one_line().contains("the file that is sent ends at byte 4"), "{error}");
    assert!(!outcome.devices);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn any_layout_arrives_whole_by_any_number_of_channels(
        blocks in proptest::collection::vec(1u64..1500, 1..5),
        seed in any::<u64>(),
        density in 0u64..11,
        channels in 1usize..9,
        machine in 0..MACHINES.len(),
        direct in any::<bool>(),
        method in 0..3usize,
    ) {
        let mix = |value: u64| value.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        // Runs of eight pages or so, and single ones.
        let stored = |block: usize, page: u64| {
            mix(seed ^ mix(block as u64) ^ (page / 8)) % 10 < density && mix(seed ^ mix(page)) % 10 < 9
        };
        let memory = memory(MACHINES[machine], &blocks, stored);
        let compression = [Compression::None, Compression::Zlib, Compression::Zstd][method];
        let mut way = Way::new(channels).compression(compression);
        way.multifd.detect_zero = !direct;
        let (sent, outcome) = way.send(&memory, &Filed::new(&memory), &Handle::new());
        prop_assert!(sent.is_ok(), "{sent:?}");
        prop_assert!(outcome.wrong.is_empty(), "{outcome:?}");
    }
}
