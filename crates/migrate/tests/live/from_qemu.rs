//! Stock QEMU as the source of a VM that links limosa: its memory has to arrive byte for byte, by every way QEMU has.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use limosa_channel::{Acceptor, Listener, Options, Tls, Uri};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::live::AcceptPreempt;
use limosa_migrate::multifd::{MultifdAccept, MultifdAcceptOptions, MultifdChannels, MultifdOptions};
use limosa_migrate::stats::IncomingStats;
use limosa_migrate::{Handle, IncomingOutcome, IncomingVm, LiveDestination, VmError};
use limosa_stream::OpaqueSection;
use limosa_testkit::{Authority, HeartbeatGuest, Machine, MemoryBackend, Vm, qemu_skipped, scratch};
use serde_json::json;
use tempfile::TempDir;

const WITHIN: Duration = Duration::from_secs(120);

/// A VM with QEMU's memory, that takes all devices that come.
struct Taker {
    memory: GuestMemory,
    sections: AtomicU32,
    packages: AtomicU32,
    started: AtomicBool,
    /// How many pages the guest has looked at here, and how many it may.
    looked: AtomicU64,
    may_look: AtomicU64,
}

impl IncomingVm for Taker {
    fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    fn load_device(&self, _section: OpaqueSection<'_>) -> Result<(), VmError> {
        self.sections.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn load_package(&self, sections: &[u8]) -> Result<(), VmError> {
        assert_eq!(sections.first(), Some(&4), "it begins with a section");
        self.packages.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn start(&self) -> Result<(), VmError> {
        assert!(!self.started.swap(true, Ordering::SeqCst), "started twice");
        Ok(())
    }
}

/// A QEMU whose guest writes all the time, what takes its memory, and where they meet.
struct Meeting {
    vm: Vm,
    taker: Taker,
    listener: Listener,
    uri: Uri,
    /// Where both ends have their credentials.
    _credentials: Option<TempDir>,
}

impl Meeting {
    fn new() -> Result<Self> {
        Self::encrypted(None)
    }

    /// Over TLS, with credentials of this folder.
    fn over_tls() -> Result<Self> {
        let folder = scratch()?;
        Authority::new()?.equip(folder.path())?;
        Self::encrypted(Some(folder))
    }

    fn encrypted(credentials: Option<TempDir>) -> Result<Self> {
        let mut machine = Machine::heartbeat(HeartbeatGuest::default()).backend(MemoryBackend::File);
        let mut options = Options::default();
        if let Some(folder) = &credentials {
            let object = format!("tls-creds-x509,id=tls0,dir={},endpoint=client", folder.path().display());
            machine = machine.argument("-object").argument(&object);
            options.tls = Some(Tls::server(folder.path(), true)?);
        }
        let vm = machine.start()?;
        if credentials.is_some() {
            vm.execute("migrate-set-parameters", json!({ "tls-creds": "tls0", "tls-hostname": "localhost" }))?;
        }
        vm.wait_heartbeats(2)?;
        let text = vm.execute("human-monitor-command", json!({ "command-line": "info ramblock" }))?;
        let mut blocks = Vec::new();
        for line in text.as_str().context("no text")?.lines().skip(1) {
            // Name, page size (two words), offset, used length, length, ...
            let words: Vec<_> = line.split_whitespace().collect();
            let [name, _, _, _, used, ..] = words[..] else { bail!("{line:?}") };
            blocks.push(BlockOptions::anonymous(name, u64::from_str_radix(used.trim_start_matches("0x"), 16)?).map()?);
        }
        // The order here is not QEMU's.
        blocks.reverse();
        let (sections, packages, started) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
        let (looked, may_look) = (AtomicU64::new(0), AtomicU64::new(u64::MAX));
        let taker = Taker { memory: GuestMemory::new(blocks)?, sections, packages, started, looked, may_look };
        let uri: Uri = format!("unix:{}", vm.folder().join("meeting").display()).parse()?;
        let listener = Listener::bind(&uri, &options)?;
        Ok(Self { vm, taker, listener, uri, _credentials: credentials })
    }

    fn migrate(&self, arguments: serde_json::Value) -> Result<()> {
        let mut all = json!({ "uri": self.uri.to_string() });
        for (name, value) in arguments.as_object().into_iter().flatten() {
            all[name] = value.clone();
        }
        self.vm.execute("migrate", all)?;
        Ok(())
    }

    fn bandwidth(&self, parameter: &str, bytes: u64) -> Result<()> {
        self.vm.execute("migrate-set-parameters", json!({ parameter: bytes }))?;
        Ok(())
    }

    fn destination<'a>(&'a self, handle: &'a Handle) -> Result<LiveDestination<'a, Taker>> {
        let channel = self.listener.accept(Some(WITHIN))?;
        Ok(LiveDestination::new(&self.taker, channel, handle))
    }

    /// Looks at pages all over the memory until `over`, as many as it may: a guest that runs.
    fn look_around(&self, over: &AtomicBool) {
        let (mem, taker) = (self.block(), &self.taker);
        let mut page = 1;
        while !over.load(Ordering::SeqCst) {
            let looked = taker.looked.load(Ordering::SeqCst);
            if taker.started.load(Ordering::SeqCst) && looked < taker.may_look.load(Ordering::SeqCst) {
                page = (page * 7919 + 13) % mem.pages().len();
                mem.read(page * 4096, &mut [0; 64]).unwrap();
                taker.looked.store(looked + 1, Ordering::SeqCst);
            } else {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Breaks the postcopy off when the guest has looked at this number of pages more. It may look at no others until
    /// then, so that most of the memory is still at the source.
    fn break_off_after(&self, pages: u64) -> Result<()> {
        let looked = |pages| self.taker.looked.load(Ordering::SeqCst) >= pages;
        let begun = Instant::now();
        let enough = self.taker.looked.load(Ordering::SeqCst) + pages;
        self.taker.may_look.store(enough, Ordering::SeqCst);
        while !looked(enough) {
            assert!(begun.elapsed() < WITHIN, "the guest does not run");
            thread::sleep(Duration::from_millis(1));
        }
        self.vm.execute("migrate-pause", json!({})).map(drop)
    }

    fn block(&self) -> &limosa_memory::MemoryBlock {
        self.taker.memory.block(self.taker.memory.index_of("mem").unwrap()).unwrap()
    }

    /// The source's VM is stopped for good, and what is here is what it has.
    fn assert_arrived(&self) -> Result<()> {
        self.vm.wait_run_state("postmigrate", WITHIN)?;
        self.vm.check_heartbeat()?;
        let mem = self.block();
        let mut here = vec![0; usize::try_from(mem.len())?];
        mem.read(0, &mut here)?;
        assert!(here == self.vm.read_memory(0..mem.len())?, "the memory is not the source's");
        assert!(self.taker.started.load(Ordering::SeqCst));
        Ok(())
    }
}

fn running(outcome: IncomingOutcome<'_, Taker>) -> IncomingStats {
    match outcome {
        IncomingOutcome::Running(stats) => stats,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_running_qemu_comes_over_one_channel_or_several() -> Result<()> {
    if qemu_skipped() {
        return Ok(());
    }
    for (channels, tls) in [(0u8, false), (2, false), (4, false), (0, true), (2, true)] {
        let meeting = if tls { Meeting::over_tls()? } else { Meeting::new()? };
        meeting.bandwidth("max-bandwidth", 0)?;
        meeting.vm.set_capabilities(&[("return-path", true), ("multifd", channels > 0)])?;
        if channels > 0 {
            meeting.bandwidth("multifd-channels", channels.into())?;
        }
        meeting.migrate(json!({}))?;
        let options = MultifdAcceptOptions { channels, timeout: WITHIN, main_first: false };
        let mut gathering = MultifdAccept::new(&meeting.listener, options);
        let MultifdChannels { main, multifd: pages } = gathering.poll(WITHIN)?.context("not all channels have come")?;
        let handle = Handle::new();
        let role = LiveDestination::new(&meeting.taker, main, &handle);
        let stats = running(role.channels(pages, MultifdOptions::default()).run());
        assert!(stats.acknowledge_error.is_none() && stats.received.normal_pages > 0);
        assert!(meeting.taker.sections.load(Ordering::SeqCst) > 10, "devices are handed over by name");
        meeting.assert_arrived()?;
    }
    Ok(())
}

/// Precopy for a moment, then postcopy with a guest that looks at its memory here.
fn postcopy(preempt: bool, cuts: u32) -> Result<()> {
    postcopy_of(&Meeting::new()?, preempt, cuts)
}

fn postcopy_of(meeting: &Meeting, preempt: bool, cuts: u32) -> Result<()> {
    meeting.vm.set_capabilities(&[("postcopy-ram", true), ("postcopy-preempt", preempt)])?;
    meeting.bandwidth("max-bandwidth", 8 << 20)?;
    // What is not requested does not come before the last cut.
    meeting.bandwidth("max-postcopy-bandwidth", if cuts > 0 { 64 << 10 } else { 0 })?;
    if cuts > 0 {
        meeting.taker.may_look.store(0, Ordering::SeqCst);
    }
    let (handle, over) = (&Handle::new(), &AtomicBool::new(false));
    let doorkeeper = || -> AcceptPreempt<'_> {
        let mut acceptor = Acceptor::new(&meeting.listener);
        Box::new(move |wait| acceptor.poll(wait))
    };
    let stats = thread::scope(|scope| -> Result<IncomingStats> {
        scope.spawn(|| meeting.look_around(over));
        let result = (|| {
            meeting.migrate(json!({}))?;
            let role = meeting.destination(handle)?;
            let role = if preempt { role.preempt(doorkeeper()) } else { role };
            let steering = scope.spawn(move || -> Result<()> {
                thread::sleep(Duration::from_millis(300));
                meeting.vm.execute("migrate-start-postcopy", json!({}))?;
                if cuts > 0 { meeting.break_off_after(50) } else { Ok(()) }
            });
            let mut outcome = role.run();
            steering.join().expect("no panic")?;
            for cut in 1..=cuts {
                let IncomingOutcome::PostcopyPaused(paused) = outcome else { bail!("{outcome:?}") };
                assert!(paused.missing_pages() > 0);
                if cut == cuts {
                    meeting.bandwidth("max-postcopy-bandwidth", 0)?;
                }
                wait_paused(&meeting.vm)?;
                meeting.migrate(json!({ "resume": true }))?;
                let channel = meeting.listener.accept(Some(WITHIN))?;
                let open = preempt.then(doorkeeper);
                if cut == cuts {
                    meeting.taker.may_look.store(u64::MAX, Ordering::SeqCst);
                }
                let pausing = (cut < cuts).then(|| scope.spawn(|| meeting.break_off_after(50)));
                outcome = paused.recover(channel, open, handle);
                pausing.map_or(Ok(()), |pausing| pausing.join().expect("no panic"))?;
            }
            Ok(running(outcome))
        })();
        over.store(true, Ordering::SeqCst);
        result
    })?;
    let came = stats.postcopy.as_ref().context("it came by precopy alone")?;
    assert!(came.normal_pages > 0 && came.requests > 0, "{came:?}");
    assert_eq!((came.repeated_pages, came.recoveries), (0, cuts), "{came:?}");
    assert_eq!(meeting.taker.packages.load(Ordering::SeqCst), 1);
    meeting.assert_arrived()
}

fn wait_paused(vm: &Vm) -> Result<()> {
    let begun = Instant::now();
    loop {
        let state = vm.execute("query-migrate", json!({}))?;
        match state["status"].as_str() {
            Some("postcopy-paused") => return Ok(()),
            _ if begun.elapsed() > WITHIN => bail!("{state}"),
            _ => thread::sleep(Duration::from_millis(10)),
        }
    }
}

#[test]
fn a_qemu_that_switches_to_postcopy_brings_the_rest_on_demand() -> Result<()> {
    if qemu_skipped() {
        return Ok(());
    }
    postcopy(false, 0)?;
    postcopy(true, 0)?;
    postcopy_of(&Meeting::over_tls()?, false, 0)?;
    postcopy_of(&Meeting::over_tls()?, true, 0)
}

#[test]
fn a_qemu_whose_postcopy_was_broken_off_twice_brings_the_rest_after_recovery() -> Result<()> {
    if qemu_skipped() {
        return Ok(());
    }
    postcopy(false, 2)?;
    postcopy(true, 2)?;
    postcopy_of(&Meeting::over_tls()?, true, 2)
}
