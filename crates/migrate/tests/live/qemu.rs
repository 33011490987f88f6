//! Stock QEMU as the destination of a VM that runs here and writes all the time: its memory there is what it was here.

use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use crate::model::live::{Bare, TestVm};
use limosa_channel::{Channel, Options, Tls, Uri, ZeroCopy};
use limosa_memory::{BlockOptions, FreePageHinting, FreePageSink, FreePagesError, GuestMemory, GuestRegion};
use limosa_migrate::control::{Phase, Stop};
use limosa_migrate::live::{OpenPreempt, PostcopyMode, RecordWriteMode};
use limosa_migrate::multifd::MultifdSourceOptions;
use limosa_migrate::stats::{LiveStats, RoundReport};
use limosa_migrate::{Handle, LiveOutcome, LiveSource, MigrateError, MigrationParams};
use limosa_stream::multifd::{Compression, PACKET_LEN};
use limosa_testkit::{Authority, Machine, MemoryBackend, Vm, qemu_skipped, scratch};
use serde_json::json;

const BYTES: u64 = 64 << 20;

/// For what should take moments on any machine: a limit for the stuck, not a measure.
const SOON: Duration = Duration::from_secs(120);

/// The settings of a migration.
#[derive(Debug, Clone, Copy)]
struct How {
    channels: u8,
    compression: Compression,
    packet_pages: usize,
    record_write: RecordWriteMode,
    fresh: bool,
    /// In postcopy: at once, or after this number of rounds.
    postcopy: Option<Option<u32>>,
    preempt: bool,
    /// Whether it is broken off when the VM runs there, and recovered.
    cut: bool,
    tls: bool,
    /// Whether the guest tells its free pages.
    hints: bool,
}

const PRECOPY: How = How {
    channels: 0,
    compression: Compression::None,
    packet_pages: 128,
    record_write: RecordWriteMode::Vectored,
    fresh: true,
    postcopy: None,
    preempt: false,
    cut: false,
    tls: false,
    hints: false,
};

/// The pages that the guest calls free, written or not.
const FREE: Range<u64> = 48 << 20..BYTES;

/// A guest that answers at once.
struct Free;

impl FreePageHinting for Free {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        to.add_range(FREE);
        to.complete();
        Ok(())
    }

    fn stop_list(&self) {}

    fn return_pages(&self) {}
}

fn connect(uri: &Uri) -> Channel {
    Channel::connect(uri, &Options::default()).unwrap()
}

fn wait_status(vm: &Vm, wanted: &str) {
    let begun = Instant::now();
    while begun.elapsed() < SOON {
        if vm.execute("query-migrate", json!({})).unwrap()["status"] == wanted {
            return;
        }
        thread::sleep(Duration::from_millis(2));
    }
    panic!("the migration is never {wanted}\n{}", vm.log());
}

fn destination(how: How, credentials: &Path) -> (Vm, Uri) {
    let mut machine = Machine::paused(BYTES).backend(MemoryBackend::File);
    if how.tls {
        let object = format!("tls-creds-x509,id=tls0,dir={},endpoint=server", credentials.display());
        machine = machine.argument("-object").argument(&object);
    }
    let vm = machine.start_incoming_stopped().unwrap();
    if how.tls {
        vm.execute("migrate-set-parameters", json!({ "tls-creds": "tls0" })).unwrap();
    }
    let multifd = how.channels > 0;
    let capabilities = [
        ("multifd", multifd),
        ("postcopy-ram", how.postcopy.is_some()),
        ("postcopy-preempt", how.preempt),
        ("return-path", true),
    ];
    vm.set_capabilities(&capabilities).unwrap();
    if multifd {
        let parameters = json!({ "multifd-channels": how.channels, "multifd-compression": how.compression.name() });
        vm.execute("migrate-set-parameters", parameters).unwrap();
    }
    let uri: Uri = format!("unix:{}", vm.folder().join("incoming").display()).parse().unwrap();
    vm.execute("migrate-incoming", json!({ "uri": uri.to_string(), "exit-on-error": false })).unwrap();
    (vm, uri)
}

fn migrate(how: How) -> Option<LiveStats> {
    if qemu_skipped() {
        return None;
    }
    let folder = scratch().unwrap();
    Authority::new().unwrap().equip(folder.path()).unwrap();
    let (vm, uri) = destination(how, folder.path());
    let tls = how.tls.then(|| Tls::client(folder.path(), Some("localhost")).unwrap());
    let encrypted = Options { tls: tls.clone(), ..Options::default() };
    // QEMU shakes hands with one after the other, each when its first bytes have come.
    let deferred =
        Options { tls: tls.map(Tls::with_deferred_handshake), zero_copy: ZeroCopy::Auto, ..Options::default() };
    let block = BlockOptions::memfd("mem", BYTES).map().unwrap();
    let region = GuestRegion { guest_address: 0, block: 0, pages: block.pages() };
    let memory = GuestMemory::with_regions(vec![block], vec![region]).unwrap();
    let source = Bare(TestVm { machine: "pc", memory: memory.into(), ..TestVm::new(&[1]) });
    source.0.fill(0, |page| page % 7 < 3);
    let (logs, marker) = source.0.restless_logs(2);
    let handle = Handle::new();
    let downtime_limit = Duration::from_millis(30);
    let mut params = MigrationParams::default().downtime_limit(downtime_limit).record_write(how.record_write);
    if how.postcopy.is_some() {
        // Never reached: what is restless has always written something.
        params.downtime_limit = Duration::ZERO;
    }
    if how.cut || how.hints {
        params.max_postcopy_bandwidth = NonZeroU64::new(4 << 20);
    }
    let main = Channel::connect(&uri, &encrypted).unwrap();
    let pages = (0..how.channels).map(|_| Channel::connect(&uri, &deferred).unwrap()).collect();
    let outcome = thread::scope(|scope| {
        if how.cut {
            scope.spawn(|| {
                // As soon as the VM runs there, or would if it had been let: QEMU answers the PING in the package just
                // before that, and one that loses its source in between ends.
                while handle.progress.read().phase != Phase::PostcopyActive {
                    thread::sleep(Duration::from_millis(2));
                }
                vm.wait_run_state("paused", SOON).unwrap();
                handle.control.stop(Stop::Pause);
            });
        }
        let asked = (how.hints && how.postcopy.is_some()).then(|| {
            scope.spawn(|| {
                while handle.progress.read().phase != Phase::PostcopyActive {
                    thread::sleep(Duration::from_millis(2));
                }
                vm.wait_run_state("paused", SOON).unwrap();
                free_pages_there(&source.0, &vm);
            })
        });
        source.0.write_on(scope, marker.clone(), 3, Duration::from_micros(40));
        source.0.write_on(scope, marker, 5 << 40, Duration::from_micros(90));
        let How { compression, packet_pages, .. } = how;
        let options = MultifdSourceOptions { compression, packet_pages, ..MultifdSourceOptions::default() };
        let mut role = LiveSource::new(&source, logs, main, &handle)
            .options(params)
            .destination_zeroed(how.fresh)
            .channels(pages, options)
            .unwrap()
            .on_round(|round: &RoundReport| {
                if how.postcopy == Some(Some(round.number)) {
                    handle.control.start_postcopy();
                }
            });
        if let Some(after) = how.postcopy {
            role = role.postcopy(if after.is_some() { PostcopyMode::Allowed } else { PostcopyMode::AtOnce });
        }
        if how.preempt {
            let (uri, deferred) = (uri.clone(), deferred.clone());
            role = role.preempt(Box::new(move || Channel::connect(&uri, &deferred)));
        }
        if how.hints {
            role = role.hint_free_pages(Arc::new(Free));
        }
        let outcome = role.run();
        source.0.over.store(true, Ordering::Relaxed);
        if let Some(asked) = asked {
            asked.join().unwrap();
        }
        outcome
    });
    let outcome = match outcome {
        LiveOutcome::PostcopyPaused(broken) if how.cut => {
            assert!(matches!(broken.why(), MigrateError::Paused), "{broken:?}");
            wait_status(&vm, "postcopy-paused");
            let again: Uri = format!("unix:{}", vm.folder().join("again").display()).parse().unwrap();
            vm.execute("migrate-recover", json!({ "uri": again.to_string() })).unwrap();
            let open: Option<OpenPreempt<'_>> = match how.preempt {
                true => Some(Box::new(|| Channel::connect(&again, &Options::default()))),
                false => None,
            };
            broken.recover(connect(&again), open, &Handle::new())
        }
        outcome => {
            assert!(!how.cut, "{how:?}: {outcome:?}");
            outcome
        }
    };
    let LiveOutcome::Completed(stats) = outcome else { panic!("{how:?}: {outcome:?}\n{}", vm.log()) };
    vm.wait_migrated().unwrap();
    assert!(!source.0.runs());
    let mut there = vec![0; usize::try_from(BYTES).unwrap()];
    vm.memory_file().unwrap().read_exact_at(&mut there, 0).unwrap();
    let here = source.0.contents(0);
    let differs = here.chunks(4096).zip(there.chunks(4096)).enumerate().position(|(page, (here, there))| {
        let may_be_lost = how.hints && FREE.contains(&(page as u64 * 4096)) && there.iter().all(|byte| *byte == 0);
        here != there && !may_be_lost
    });
    assert_eq!(differs, None, "{how:?}");
    Some(stats)
}

/// Has QEMU look at pages that were called free, which have not come: they are zero, unless they were written since.
fn free_pages_there(source: &TestVm, vm: &Vm) {
    let mut lost = 0;
    // Every seventh page has contents here.
    for page in (FREE.start / 4096..FREE.end / 4096).filter(|page| page % 7 == 0).take(200) {
        let line = format!("xp /1gx {:#x}", page * 4096);
        let report = vm.execute("human-monitor-command", json!({ "command-line": line })).unwrap();
        let (_, word) = report.as_str().unwrap().trim().split_once(": 0x").unwrap();
        let mut here = [0; 8];
        source.memory.block(0).unwrap().read(page * 4096, &mut here).unwrap();
        match u64::from_str_radix(word, 16).unwrap() {
            0 => lost += 1,
            there => assert_eq!(there, u64::from_le_bytes(here), "page {page}"),
        }
    }
    assert!(lost > 0, "pages that were called free were sent");
}

#[test]
fn a_vm_arrives_over_one_channel() {
    for fresh in [true, false] {
        let Some(stats) = migrate(How { fresh, ..PRECOPY }) else { return };
        assert_eq!(stats.sum(|round| round.left_out) > 0, fresh);
    }
}

#[test]
fn a_vm_arrives_over_two_multifd_channels() {
    for (compression, fresh) in [(Compression::None, true), (Compression::None, false), (Compression::Zlib, true)] {
        let Some(stats) = migrate(How { channels: 2, compression, fresh, ..PRECOPY }) else { return };
        assert_eq!(stats.channels.len(), 2);
        assert!(stats.channels.iter().all(|channel| channel.bytes_out > 0));
    }
}

#[test]
fn a_vm_arrives_over_tls_each_channel_a_session_of_its_own() {
    let tls = How { tls: true, ..PRECOPY };
    for how in [
        tls,
        How { channels: 2, ..tls },
        How { postcopy: Some(Some(1)), ..tls },
        How { postcopy: Some(Some(1)), preempt: true, ..tls },
    ] {
        let Some(stats) = migrate(how) else { return };
        assert_eq!(stats.channels.len(), usize::from(how.channels));
        assert!(stats.channels.iter().all(|channel| channel.bytes_out > 0 && channel.spliced == 0));
    }
}

#[test]
fn a_vm_arrives_in_packets_of_fewer_pages_and_copied_through_a_buffer() {
    for (channels, packet_pages, put) in
        [(1, 1, RecordWriteMode::Vectored), (2, 64, RecordWriteMode::Vectored), (0, 128, RecordWriteMode::Buffered)]
    {
        let Some(stats) = migrate(How { channels, packet_pages, record_write: put, ..PRECOPY }) else { return };
        let contents = stats.sum(|round| round.normal);
        match channels {
            // A buffer of 16 KiB has no room for four pages with their headers.
            0 => assert!(stats.main.calls_out >= contents / 4, "{stats:?}"),
            _ => {
                // Each packet has a header of the same length, however many pages are behind it.
                let bytes: u64 = stats.channels.iter().map(|channel| channel.bytes_out).sum();
                let headers = bytes - contents * 4096;
                let least = contents / packet_pages as u64 * PACKET_LEN as u64;
                assert!(headers >= least, "{headers} bytes of headers for {contents} pages");
            }
        }
    }
}

#[test]
fn a_vm_runs_there_before_all_of_its_memory_has_come() {
    for (after, preempt) in [(Some(0), false), (Some(1), true), (None, true), (None, false)] {
        let how = How { postcopy: Some(after), preempt, ..PRECOPY };
        let Some(stats) = migrate(how) else { return };
        assert_eq!(stats.rounds.is_empty(), after.is_none());
        assert!(stats.postcopy.is_some_and(|postcopy| postcopy.normal_pages > 0), "{how:?}");
    }
}

#[test]
fn what_the_guest_calls_free_does_not_arrive_and_is_zero_there() {
    let hints = How { hints: true, ..PRECOPY };
    for how in [
        hints,
        How { channels: 2, ..hints },
        How { fresh: false, ..hints },
        How { postcopy: Some(Some(0)), ..hints },
        How { postcopy: Some(Some(1)), preempt: true, ..hints },
    ] {
        let Some(stats) = migrate(how) else { return };
        assert_eq!(stats.rounds[0].hinted, (FREE.end - FREE.start) / 4096, "{how:?}");
    }
}

#[test]
fn a_vm_that_runs_there_gets_the_rest_over_a_connection_that_took_the_place_of_a_broken_one() {
    for preempt in [false, true] {
        let how = How { postcopy: Some(Some(0)), preempt, cut: true, ..PRECOPY };
        if migrate(how).is_none() {
            return;
        }
    }
}
