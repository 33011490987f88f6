//! Stock QEMU as the other end of a move on one host: both have mapped the same memory file, and no page of it travels.

use std::os::fd::AsFd as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use crate::model::live::{Bare, TestVm};
use anyhow::{Context as _, Result, bail};
use limosa_channel::{Channel, Listener, Options, Uri};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::live::{LiveDestinationOptions, SharedMemoryMode};
use limosa_migrate::{Handle, IncomingOutcome, IncomingVm, LiveDestination, LiveOutcome, LiveSource, VmError};
use limosa_page::PAGE_SIZE;
use limosa_stream::OpaqueSection;
use limosa_testkit::{HeartbeatGuest, Machine, MemoryBackend, Vm, qemu_skipped};
use serde_json::json;

/// The memory file of a QEMU, as the block of its name.
fn shared_block(vm: &Vm) -> Result<BlockOptions> {
    let file = vm.memory_file()?.as_fd().try_clone_to_owned()?;
    Ok(BlockOptions::file("mem", vm.machine().memory_bytes(), file, 0))
}

/// Names and used lengths of the RAM blocks of a QEMU.
fn blocks_of(vm: &Vm) -> Result<Vec<(String, u64)>> {
    let text = vm.execute("human-monitor-command", json!({ "command-line": "info ramblock" }))?;
    let text = text.as_str().context("no text")?;
    let mut blocks = Vec::new();
    for line in text.lines().skip(1) {
        // Name, page size (two words), offset, used length, length, ...
        let words: Vec<_> = line.split_whitespace().collect();
        let [name, _, _, _, used, ..] = words[..] else { bail!("{line:?}") };
        blocks.push((name.to_owned(), u64::from_str_radix(used.trim_start_matches("0x"), 16)?));
    }
    Ok(blocks)
}

/// A VM that takes all devices that QEMU has.
struct Taker {
    memory: GuestMemory,
    devices: AtomicU32,
    started: OnceLock<()>,
}

impl IncomingVm for Taker {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn load_device(&self, _section: OpaqueSection<'_>) -> Result<(), VmError> {
        self.devices.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        self.started.set(()).map_err(|()| "started twice".into())
    }
}

#[test]
fn a_qemu_with_a_memory_file_moves_to_a_vm_that_has_mapped_it() {
    if qemu_skipped() {
        return;
    }
    let vm = Machine::heartbeat(HeartbeatGuest::default()).backend(MemoryBackend::File).start().unwrap();
    vm.wait_heartbeats(2).unwrap();
    vm.set_capabilities(&[("x-ignore-shared", true)]).unwrap();
    let mut blocks = Vec::new();
    let mut others = 0;
    for (name, length) in blocks_of(&vm).unwrap() {
        let options = if name == "mem" {
            shared_block(&vm).unwrap()
        } else {
            others += length / PAGE_SIZE;
            BlockOptions::anonymous(name, length)
        };
        blocks.push(options.map().unwrap());
    }
    let taker =
        Taker { memory: GuestMemory::new(blocks).unwrap(), devices: AtomicU32::new(0), started: OnceLock::new() };

    let uri: Uri = format!("unix:{}", vm.folder().join("shared").display()).parse().unwrap();
    let listener = Listener::bind(&uri, &Options::default()).unwrap();
    let handle = Handle::new();
    thread::scope(|scope| {
        let arriving = scope.spawn(|| {
            let channel = listener.accept(Some(Duration::from_secs(30))).unwrap();
            let options =
                LiveDestinationOptions { shared_memory: SharedMemoryMode::Mapped, ..LiveDestinationOptions::default() };
            match LiveDestination::new(&taker, channel, &handle).options(options).run() {
                IncomingOutcome::Running(stats) => stats,
                other => panic!("{other:?}"),
            }
        });
        vm.execute("migrate", json!({ "uri": uri.to_string() })).unwrap();
        let stats = arriving.join().unwrap();
        let pages = stats.received.normal_pages + stats.received.zero_pages;
        assert!(pages <= 4 * others, "{pages} pages of {others} in the blocks that are not shared");
    });
    vm.wait_run_state("postmigrate", Duration::from_secs(30)).unwrap();
    assert!(taker.started.get().is_some());
    assert!(taker.devices.load(Ordering::SeqCst) > 10, "QEMU's devices were handed over by name");
    // QEMU finds its guest's memory consistent, and it is what the VM here has.
    vm.check_heartbeat().unwrap();
    let mem = taker.memory.block(taker.memory.index_of("mem").unwrap()).unwrap();
    let mut here = vec![0; usize::try_from(mem.len()).unwrap()];
    mem.read(0, &mut here).unwrap();
    assert!(here == vm.read_memory(0..mem.len()).unwrap());
    assert!(here.iter().any(|byte| *byte != 0));
}

#[test]
fn a_vm_moves_to_a_qemu_that_has_mapped_its_memory_file() {
    if qemu_skipped() {
        return;
    }
    let vm = Machine::paused(64 << 20).backend(MemoryBackend::File).start_incoming_stopped().unwrap();
    vm.set_capabilities(&[("x-ignore-shared", true)]).unwrap();
    let uri: Uri = format!("unix:{}", vm.folder().join("shared").display()).parse().unwrap();
    vm.execute("migrate-incoming", json!({ "uri": uri.to_string() })).unwrap();

    let source = Bare(TestVm { machine: "pc", ..TestVm::of(vec![shared_block(&vm).unwrap()]) });
    source.0.fill(0, |page| page >= 256 && page % 5 != 0);
    let (logs, marker) = source.0.logs();
    let handle = Handle::new();
    let channel = Channel::connect(&uri, &Options::default()).unwrap();
    let outcome = thread::scope(|scope| {
        source.0.write_on(scope, marker, 3, Duration::from_micros(50));
        let role = LiveSource::new(&source, logs, channel, &handle);
        let outcome = role.shared_memory(SharedMemoryMode::Mapped).run();
        source.0.over.store(true, Ordering::Relaxed);
        outcome
    });
    let LiveOutcome::Completed(stats) = outcome else { panic!("{outcome:?}\n{}", vm.log()) };
    assert_eq!(stats.sum(|round| round.normal + round.zero + round.left_out), 0, "{stats:#?}");
    vm.wait_migrated().unwrap();
    assert!(vm.read_memory(0..64 << 20).unwrap() == source.0.contents(0));
}
