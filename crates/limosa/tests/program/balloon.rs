//! `limosa balloon` serves a guest (the model of Linux's driver behind its own front end), and `limosa balloon ctl`
//! asks it.

use crate::needs_qemu;
use crate::stage;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::stage::{Ended, Program, SOON, limosa, start, wait_for};
use limosa_balloon::Features;
use limosa_balloon_driver::{Blocks, Driver, FrontEnd, Machine, Mutex, Shrinker};
use limosa_memory::rust_vmm::{DirtyMarks, export};
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_testkit::{LinuxGuest, Machine as Vm, Qmp, UmlGuest, on_uml, pattern, scratch};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use serde_json::{Value, json};
use tempfile::TempDir;
use vm_memory::GuestMemoryMmap;

const MIB: u64 = 1 << 20;
/// The guest's memory.
const RAM: u64 = 512 * MIB;
/// Memory that it uses itself, with the rings.
const USED: u64 = 16 * MIB;

/// A server, and where it is.
struct Balloon {
    limosa: Program,
    folder: TempDir,
}

impl Balloon {
    fn start(more: &[&str]) -> Self {
        let folder = scratch().unwrap();
        let path = |name: &str| folder.path().join(name).into_os_string().into_string().unwrap();
        let (device, control) = (path("balloon.sock"), path("control.sock"));
        let arguments = ["balloon", "--vhost-user", &device, "--control", &control];
        let limosa = start([&arguments[..], more].concat());
        let balloon = Self { limosa, folder };
        wait_for("a server", || balloon.limosa.stderr().contains("serving a balloon at").then_some(()));
        balloon
    }

    /// Starts another one in the place of one that has gone.
    fn again(&mut self) {
        let path = |path: PathBuf| path.into_os_string().into_string().unwrap();
        let (device, control) = (path(self.device()), path(self.control()));
        self.limosa = start(["balloon", "--vhost-user", &device, "--control", &control]);
        wait_for("a server", || self.limosa.stderr().contains("serving a balloon at").then_some(()));
    }

    fn device(&self) -> PathBuf {
        self.folder.path().join("balloon.sock")
    }

    fn control(&self) -> PathBuf {
        self.folder.path().join("control.sock")
    }

    fn arguments(&self, what: &[&str]) -> Vec<String> {
        let control = self.control().into_os_string().into_string().unwrap();
        ["balloon", "ctl", &control].iter().chain(what).map(|word| (*word).to_owned()).collect()
    }

    fn ctl(&self, what: &[&str]) -> Ended {
        limosa(self.arguments(what))
    }

    fn json(&self, what: &[&str]) -> Value {
        self.ctl(&[what, &["--json"]].concat()).json()
    }

    /// Ends it by a signal, and returns what it said.
    fn end(self) -> (Ended, TempDir) {
        self.limosa.signal(Signal::TERM);
        (self.limosa.wait().success(), self.folder)
    }
}

type Paused = Arc<Mutex<Option<Box<dyn Fn() -> bool + Send>>>>;

/// A guest whose driver runs on a thread.
struct Guest {
    memory: Arc<GuestMemory>,
    free: Arc<Mutex<Blocks>>,
    shrinker: Shrinker,
    /// The driver does nothing while this is there and says so.
    paused: Paused,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Guest {
    fn boot(balloon: &Balloon, features: Features) -> Self {
        Self::boot_at(&balloon.device(), features)
    }

    fn boot_at(device: &Path, features: Features) -> Self {
        let block = BlockOptions::memfd("pc.ram", RAM).map().unwrap();
        for at in (0..RAM).step_by(1 << 20) {
            block.write(at, &[7; 4096]).unwrap();
        }
        let memory = Arc::new(GuestMemory::new(vec![block]).unwrap());
        let guest: GuestMemoryMmap<DirtyMarks> = export(&memory).unwrap();
        let front_end = Arc::new(FrontEnd::connect(device, Arc::clone(&memory)).unwrap());
        let machine = Machine::over(front_end, Arc::new(guest), MIB);
        let free = Arc::new(Mutex::new(Blocks::new(USED..RAM)));
        let mut driver = Driver::probe(machine, Arc::clone(&free), features).unwrap();
        let (paused, over) = (Paused::default(), Arc::<AtomicBool>::default());
        let shrinker = driver.shrinker();
        let (pause, end) = (Arc::clone(&paused), Arc::clone(&over));
        let thread = std::thread::spawn(move || {
            while !end.load(Ordering::Acquire) {
                let stands = pause.lock().as_ref().is_some_and(|so| so());
                // A server that has gone has taken the device along.
                if !stands && driver.poll().is_err() {
                    return;
                }
                driver.wait(Duration::from_millis(2));
            }
        });
        Self { memory, free, shrinker, paused, over, thread: Some(thread) }
    }

    /// The driver does nothing from the moment on when this is so.
    fn pause_when(&self, so: impl Fn() -> bool + Send + 'static) {
        *self.paused.lock() = Some(Box::new(so));
    }

    fn go_on(&self) {
        *self.paused.lock() = None;
    }

    fn free_bytes(&self) -> u64 {
        self.free.lock().free_bytes()
    }

    fn byte(&self, at: u64) -> u8 {
        let mut byte = [1];
        self.memory.block(0).unwrap().read(at, &mut byte).unwrap();
        byte[0]
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        let ended = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

#[test]
fn a_guest_gives_memory_back_and_gets_it_again() {
    let balloon = Balloon::start(&[]);
    let none = balloon.ctl(&["query"]).success().stdout;
    assert!(none.contains("no guest has shared its memory"), "{none}");
    let guest = Guest::boot(&balloon, Features::ALL);
    let mut events = Qmp::connect(&balloon.control(), SOON).unwrap();

    let report = balloon.json(&["target", "256M", "--wait", "60s"]);
    assert_eq!(report["actual"], 256 * MIB);
    assert_eq!(guest.byte(RAM - MIB), 0, "the host has the page again");
    assert_eq!(guest.byte(100 * MIB), 7);
    let event = events.wait_event("BALLOON_CHANGE", SOON).unwrap();
    assert!(event["data"]["actual"].as_u64().unwrap() < RAM, "{event}");
    assert_eq!(events.execute("query-balloon", json!({})).unwrap()["actual"], 256 * MIB);

    let device = balloon.json(&["query"]);
    assert_eq!((&device["ram"], &device["target"], &device["driver"]), (&json!(RAM), &json!(256 * MIB), &json!(true)));
    assert_eq!(device["counters"]["inflated-pages"], 256 * MIB / 4096);
    assert_eq!(device["counters"]["discarded-bytes"], 256 * MIB);
    let words = balloon.ctl(&["query"]).success().stdout;
    assert!(words.contains("the guest has 256 MiB of 512 MiB") && words.contains("FREE_PAGE_HINT"), "{words}");

    balloon.ctl(&["target", "1T"]).success();
    wait_for("all of the memory", || (balloon.json(&["query"])["actual"] == RAM).then_some(()));
    assert_eq!(guest.free_bytes(), RAM - USED);
}

#[test]
fn a_guest_says_how_much_memory_it_has() {
    let balloon = Balloon::start(&[]);
    let _guest = Guest::boot(&balloon, Features::ALL);
    let first = balloon.json(&["stats"]);
    assert_eq!(first["stats"]["available-memory"], RAM - USED);
    let second = balloon.json(&["stats"]);
    assert!(second["sequence"].as_u64() > first["sequence"].as_u64(), "{first} {second}");
    let words = balloon.ctl(&["stats"]).success().stdout;
    assert!(words.lines().any(|line| line == "free-memory 496 MiB"), "{words}");

    // Watching continues until it is ended, and that is no failure.
    let watching = start(balloon.arguments(&["stats", "--watch", "10ms", "--json"]));
    wait_for("three reports", || (watching.stdout().lines().count() >= 3).then_some(()));
    watching.signal(Signal::INT);
    let lines = watching.wait().success().stdout;
    assert!(lines.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()), "{lines}");
}

#[test]
fn a_guest_lists_its_free_pages_and_has_them_afterwards() {
    let balloon = Balloon::start(&[]);
    let guest = Guest::boot(&balloon, Features::ALL);
    let list = balloon.json(&["hint"]);
    assert_eq!((&list["blocks"], &list["bytes"]), (&json!((RAM - USED) / (4 * MIB)), &json!(RAM - USED)), "{list}");
    wait_for("the pages to be the guest's again", || (guest.shrinker.held() == 0).then_some(()));
    assert_eq!(guest.byte(RAM - MIB), 7, "a hint gives nothing back");
    let words = balloon.ctl(&["hint"]).success().stdout;
    assert!(words.starts_with("496 MiB free in 124 blocks, listed in "), "{words}");
}

#[test]
fn squeezing_takes_what_is_available_and_gives_it_back_before_the_list() {
    let balloon = Balloon::start(&["--target", "500M"]);
    let guest = Guest::boot(&balloon, Features::ALL);
    wait_for("the first target", || (balloon.json(&["query"])["actual"] == 500 * MIB).then_some(()));
    let list = balloon.json(&["hint", "--squeeze", "--reserve", "100M"]);
    assert_eq!(list["squeezed"], (500 - 16 - 100) * MIB, "{list}");
    assert_eq!(list["bytes"], (500 - 16) * MIB, "{list}");
    assert_eq!(balloon.json(&["query"])["actual"], 500 * MIB, "the target is what it was");
    assert_eq!(guest.byte(300 * MIB), 0, "what was squeezed out was given back");
}

#[test]
fn a_real_guests_page_cache_is_squeezed_out_before_the_list() {
    on_uml(|| {
        let balloon = Balloon::start(&["--reporting", "off"]);
        let disk = balloon.folder.path().join("disk");
        File::create(&disk).unwrap().set_len(128 * MIB).unwrap();
        let guest = UmlGuest {
            memory: 256,
            devices: vec![(balloon.device(), 5)],
            modules: vec!["virtio_balloon".into()],
            kernel_words: format!("init_on_alloc=0 ubd0r={}", disk.display()),
            programs: Vec::new(),
        };
        let guest = guest.start().unwrap();
        wait_for("the driver", || (balloon.json(&["query"])["driver"] == true).then_some(()));
        let ram = balloon.json(&["query"])["ram"].clone();
        let free = || balloon.json(&["hint"])["bytes"].as_u64().unwrap();
        let before = free();
        // The cache of a disk goes with the last who has it open.
        guest.shell("mknod /dev/disk b 98 0; sleep 9999 </dev/disk & dd if=/dev/disk of=/dev/null bs=1M").unwrap();
        let cached = free();
        assert!(cached + 100 * MIB < before, "{cached} of {before} bytes are free with 128 MiB in the cache");
        let list = balloon.json(&["hint", "--squeeze", "--reserve", "32M"]);
        let squeezed = list["bytes"].as_u64().unwrap();
        assert!(squeezed > cached + 48 * MIB, "{squeezed} after {cached} of {before}: {list}");
        assert!(list["squeezed"].as_u64().unwrap() > 80 * MIB, "{list}");
        let device = balloon.json(&["query"]);
        assert_eq!((&device["actual"], &device["target"]), (&ram, &ram), "the guest has all of its memory");
        assert!(guest.meminfo("Buffers").unwrap() < 48 << 10, "the cache is gone");
        assert!(guest.meminfo("MemFree").unwrap() * 1024 > cached + 80 * MIB, "the guest holds nothing");
        guest.check_alive().unwrap();
    });
}

#[test]
fn an_interrupted_squeeze_leaves_the_guest_as_it_was() {
    let balloon = Balloon::start(&[]);
    let guest = Guest::boot(&balloon, Features::ALL);
    balloon.json(&["stats"]);
    for signal in [Signal::INT, Signal::TERM] {
        // The guest does not answer, so the job makes no progress.
        guest.pause_when(|| true);
        let squeezing = start(balloon.arguments(&["hint", "--squeeze"]));
        let mut qmp = Qmp::connect(&balloon.control(), SOON).unwrap();
        let mut phase = || qmp.execute("query-balloon-hint", json!({})).unwrap()["phase"].clone();
        wait_for("a job", || (phase() == "asking").then_some(()));
        balloon.ctl(&["hint"]).one_line(&["already in progress"]);
        squeezing.signal(signal);
        squeezing.wait().one_line(&["interrupted by a signal"]);
        assert_eq!(phase(), "failed");
        guest.go_on();
        let device = balloon.json(&["query"]);
        assert_eq!((&device["target"], &device["actual"]), (&json!(RAM), &json!(RAM)));
    }
    assert_eq!(balloon.json(&["hint"])["bytes"], RAM - USED, "the next one is whole");
}

#[test]
fn a_server_that_is_ended_takes_its_sockets_along_and_tells_the_guest() {
    let balloon = Balloon::start(&["--json"]);
    for socket in [balloon.device(), balloon.control()] {
        let found = std::fs::symlink_metadata(socket).unwrap();
        assert!(found.file_type().is_socket() && found.permissions().mode() & 0o777 == 0o600);
    }
    let guest = Guest::boot(&balloon, Features::ALL);
    balloon.json(&["target", "400M", "--wait", "60s"]);
    let (ended, folder) = balloon.end();
    let object: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&object["front-ends"], &object["counters"]["inflated-pages"]), (&json!(1), &json!(112 * MIB / 4096)));
    assert!(ended.stderr.contains("112 MiB returned to the host in"), "{}", ended.stderr);
    assert!(stage::names(folder.path()).is_empty(), "{:?}", stage::names(folder.path()));
    assert_eq!(guest.shrinker.held(), 0);
}

/// Ends a server whose guest is paused, and has the guest go on when the server is about to end.
fn end_while_squeezed(balloon: Balloon, guest: &Guest) {
    let control = balloon.control();
    balloon.limosa.signal(Signal::TERM);
    wait_for("no more programs", || (!control.exists()).then_some(()));
    guest.go_on();
    balloon.end();
}

#[test]
fn a_guest_amid_a_list_has_its_pages_when_the_server_ends() {
    let balloon = Balloon::start(&[]);
    let guest = Guest::boot(&balloon, Features::ALL);
    let shrinker = guest.shrinker.clone();
    guest.pause_when(move || shrinker.held() > 0);
    let asking = start(balloon.arguments(&["hint"]));
    wait_for("a part of a list", || (guest.shrinker.held() > 0).then_some(()));
    end_while_squeezed(balloon, &guest);
    asking.wait().one_line(&[]);
    wait_for("its pages", || (guest.shrinker.held() == 0).then_some(()));
    assert_eq!(guest.free_bytes(), RAM - USED);
}

#[test]
fn a_guest_amid_a_squeeze_has_its_memory_when_the_server_ends() {
    let balloon = Balloon::start(&[]);
    let guest = Guest::boot(&balloon, Features::ALL);
    let free = Arc::clone(&guest.free);
    let half = RAM / 2;
    guest.pause_when(move || free.lock().free_bytes() < half);
    let asking = start(balloon.arguments(&["hint", "--squeeze"]));
    wait_for("a part of a squeeze", || (guest.free_bytes() < half).then_some(()));
    end_while_squeezed(balloon, &guest);
    asking.wait().one_line(&[]);
    assert_eq!(guest.free_bytes(), RAM - USED);
}

#[test]
fn a_guest_that_does_nothing_keeps_no_server_from_ending() {
    let balloon = Balloon::start(&[]);
    let guest = Guest::boot(&balloon, Features::ALL);
    guest.pause_when(|| true);
    balloon.ctl(&["target", "256M"]).success();
    let begun = std::time::Instant::now();
    balloon.end();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn one_guest_after_the_other_is_served_and_the_target_holds_for_all() {
    let mut balloon = Balloon::start(&["--target", "500M"]);
    for _ in 0..2 {
        let _guest = Guest::boot(&balloon, Features::ALL);
        wait_for("its size", || (balloon.json(&["query"])["actual"] == 500 * MIB).then_some(()));
    }
    wait_for("no driver", || (balloon.json(&["query"])["driver"] == false).then_some(()));
    // A server that was killed has left its sockets; the next one takes their places.
    balloon.limosa.signal(Signal::KILL);
    wait_for("its end", || (!balloon.limosa.is_running()).then_some(()));
    balloon.again();
    let _guest = Guest::boot(&balloon, Features::ALL);
    assert_eq!(balloon.json(&["hint"])["bytes"], RAM - USED);
    balloon.end();
}

#[test]
fn holds_a_pattern_when_asked() {
    pattern::hold_when_asked();
}

/// User-mode Linux 6.1 removes its device when the back end is gone, and never looks for another one: so the balloon
/// that follows the one that was killed serves another guest.
#[test]
fn a_real_guest_outlives_a_balloon_that_is_killed_and_the_next_one_serves_at_once() {
    on_uml(|| {
        let mut balloon = Balloon::start(&[]);
        for inflating in [false, true] {
            let guest = UmlGuest {
                memory: 256,
                devices: vec![(balloon.device(), 5)],
                modules: vec!["virtio_balloon".into()],
                kernel_words: "init_on_alloc=0".into(),
                programs: vec![std::env::current_exe().unwrap()],
            };
            let guest = guest.start().unwrap();
            wait_for("its driver", || (balloon.json(&["query"])["driver"] == true).then_some(()));
            let name = std::env::current_exe().unwrap().file_name().unwrap().to_string_lossy().into_owned();
            guest
                .shell(&pattern::hold_line(&name, limosa_testkit::own_test_name!(holds_a_pattern_when_asked), 60))
                .unwrap();
            let ram = balloon.json(&["query"])["ram"].as_u64().unwrap();
            // What the one before it served for is done for this guest, too.
            assert!(balloon.json(&["hint"])["bytes"].as_u64().unwrap() > 60 * MIB);
            let target = (ram - 60 * MIB).to_string();
            assert_eq!(balloon.json(&["target", &target, "--wait", "60s"])["actual"], ram - 60 * MIB);
            let device = balloon.json(&["query"]);
            assert!(device["counters"]["discarded-bytes"].as_u64() >= Some(30 * MIB), "{device}");
            assert!(device["features"].as_str().unwrap().contains("MUST_TELL_HOST"), "{device}");

            let all = ram.to_string();
            assert_eq!(balloon.json(&["target", &all, "--wait", "60s"])["actual"], ram);

            // It is killed while a list is being sent, or with an array that is handled in part.
            let free = guest.meminfo("MemFree").unwrap();
            if inflating {
                balloon.json(&["target", &(ram - 100 * MIB).to_string()]);
            } else {
                let mut qmp = Qmp::connect(&balloon.control(), SOON).unwrap();
                qmp.execute("balloon-hint-start", json!({})).unwrap();
            }
            balloon.limosa.signal(Signal::KILL);
            wait_for("its end", || (!balloon.limosa.is_running()).then_some(()));
            if !inflating {
                // What is in the balloon Linux keeps there: its driver asks the device for it, too.
                wait_for("its pages", || (guest.meminfo("MemFree").unwrap() > free - 16 * 1024).then_some(()));
            }
            let verdict = guest.shell(&pattern::verify_line()).unwrap();
            assert_eq!(verdict.iter().rfind(|line| line.ends_with("pages lost")).unwrap(), "0 of 15360 pages lost");
            guest.check_alive().unwrap();
            drop(guest);
            balloon.again();
        }
    });
}

#[test]
fn reports_can_be_left_alone_and_memory_be_kept() {
    let balloon = Balloon::start(&["--reporting", "off", "--discard", "none"]);
    let guest = Guest::boot(&balloon, Features::ALL);
    assert_eq!(balloon.json(&["query"])["reporting"], false);
    assert_eq!(balloon.json(&["reporting", "on"])["reporting"], true);
    let words = balloon.ctl(&["reporting", "off"]).success().stderr;
    assert!(words.contains("left alone"), "{words}");
    balloon.json(&["target", "256M", "--wait", "60s"]);
    assert_eq!(guest.byte(RAM - MIB), 7, "--discard none gives nothing back");
}

#[test]
fn what_cannot_be_done_is_said_in_one_line() {
    let folder = scratch().unwrap();
    let absent = folder.path().join("absent").into_os_string().into_string().unwrap();
    limosa(["balloon", "ctl", &absent, "query"]).one_line(&[&absent]);
    let away = folder.path().join("away/balloon.sock").into_os_string().into_string().unwrap();
    limosa(["balloon", "--vhost-user", &away]).one_line(&[&away]);
    for wrong in [&["balloon"][..], &["balloon", "--control", "x"], &["balloon", "ctl", "x", "target", "0"]] {
        assert_eq!(limosa(wrong).status.code(), Some(2), "{wrong:?}");
    }

    for method in ["dontneed", "free"] {
        limosa(["balloon", "--vhost-user", "x", "--discard", method]).misused(&[method, "use auto"]);
    }

    let balloon = Balloon::start(&[]);
    for what in [&["stats"][..], &["hint"], &["hint", "--squeeze"]] {
        balloon.ctl(what).one_line(&["load virtio_balloon"]);
    }
    balloon.ctl(&["target", "17"]).one_line(&["at least 4096 bytes"]);
    balloon.ctl(&["target", "256M", "--wait", "50ms"]).one_line(&["no balloon driver became active"]);
    let later = balloon.ctl(&["target", "1T"]).success();
    assert!(later.stderr.contains("no balloon driver is active in the guest yet"), "{}", later.stderr);
    limosa(["balloon", "ctl", "absent", "query"]).one_line(&["cannot connect", "--control socket"]);
    limosa(["balloon", "--vhost-user", "x", "--control", "x"]).misused(&["must be different paths"]);
    let taken = balloon.device().into_os_string().into_string().unwrap();
    limosa(["balloon", "--vhost-user", &taken]).one_line(&[
        "--vhost-user: cannot listen on ",
        &taken,
        "choose another",
    ]);
    let guest = Guest::boot(&balloon, Features::NONE);
    balloon.ctl(&["stats"]).one_line(&["no statistics"]);
    balloon.ctl(&["hint"]).one_line(&["free-page-hint"]);
    guest.pause_when(|| true);
    balloon.ctl(&["target", "256M", "--wait", "100ms"]).one_line(&["not 256 MiB", "set a larger one"]);
    let asking = start(balloon.arguments(&["target", "128M", "--wait", "60s"]));
    wait_for("the order", || (balloon.json(&["query"])["target"] == 128 * MIB).then_some(()));
    balloon.ctl(&["target", "200M"]);
    asking.wait().one_line(&["another client has changed the target to 200 MiB"]);
}

#[test]
fn a_target_below_what_the_guest_uses_is_refused_unless_it_is_forced() {
    let balloon = Balloon::start(&[]);
    let _guest = Guest::boot(&balloon, Features::ALL);
    balloon.ctl(&["target", "1M"]).one_line(&["the guest uses 16 MiB of its 512 MiB", "with 1 MiB", "--force"]);
    assert_eq!(balloon.json(&["query"])["target"], RAM);
    balloon.json(&["target", "32M", "--wait", "60s"]);
    balloon.ctl(&["target", "8M", "--force"]).success();
    assert_eq!(balloon.json(&["query"])["target"], 8 * MIB);
}

#[test]
fn a_guest_that_goes_amid_a_list_ends_it() {
    let balloon = Balloon::start(&[]);
    let guest = Guest::boot(&balloon, Features::ALL);
    let shrinker = guest.shrinker.clone();
    guest.pause_when(move || shrinker.held() > 0);
    let asking = start(balloon.arguments(&["hint"]));
    wait_for("a part of a list", || (guest.shrinker.held() > 0).then_some(()));
    drop(guest);
    asking.wait().one_line(&["has disconnected"]);
    let _guest = Guest::boot(&balloon, Features::ALL);
    assert_eq!(balloon.json(&["hint"])["bytes"], RAM - USED, "the next guest's is its own");
}

#[test]
fn a_stock_qemus_own_balloon_is_resized_and_waited_for() {
    needs_qemu!();
    let machine = Vm::linux(LinuxGuest::default()).balloon();
    // Of what is plugged its balloon knows DIMMs alone; an NVDIMM stands for what it does not know.
    let base = machine.memory_bytes();
    let memory = format!("{}M,slots=2,maxmem={}M", base / MIB, base / MIB + 1024);
    let plugged = ["-machine", "nvdimm=on", "-m", &memory]
        .into_iter()
        .chain("-object memory-backend-ram,id=ram0,size=128M -device pc-dimm,id=dimm0,memdev=ram0".split(' '))
        .chain("-object memory-backend-ram,id=ram1,size=128M -device nvdimm,id=nvdimm0,memdev=ram1".split(' '));
    let vm = plugged.fold(machine, |machine, word| machine.argument(word)).start().unwrap();
    vm.wait_counts(1).unwrap();
    let qmp = vm.qmp_socket().display().to_string();
    let ctl = |what: &[&str]| limosa([&["balloon", "ctl", &qmp][..], what].concat());
    let ram = ctl(&["query", "--json"]).json()["actual"].as_u64().unwrap();
    assert_eq!(ram, base + 128 * MIB);
    // Not whole pages: what a balloon of whole pages comes to.
    let asked = (ram - 32 * MIB - 1).to_string();
    let report = ctl(&["target", &asked, "--wait", "120s", "--json"]).json();
    assert_eq!((&report["actual"], &report["target"]), (&json!(ram - 32 * MIB), &json!(ram - 32 * MIB)));
    assert_eq!(vm.execute("query-balloon", json!({})).unwrap()["actual"], ram - 32 * MIB);
    assert_eq!(ctl(&["target", "1T", "--wait", "120s", "--json"]).json()["actual"], ram);
    ctl(&["stats"]).one_line(&["not a balloon of limosa"]);
}

/// A limosa whose stderr is a terminal.
struct OnTerminal {
    master: OwnedFd,
    child: Child,
    shown: String,
}

impl OnTerminal {
    fn start<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let terminal = File::options().read(true).write(true).open(name).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.args(arguments).stderr(terminal).stdout(Stdio::null()).stdin(Stdio::null());
        let child = command.spawn().unwrap();
        Self { master, child, shown: String::new() }
    }

    /// Reads on until these words have been shown, and forgets what came before them.
    fn wait_shown(&mut self, words: &str) {
        let mut buffer = [0; 4096];
        while !self.shown.contains(words) {
            let wanted = &mut [PollFd::new(&self.master, PollFlags::IN)];
            let ready = poll(wanted, Some(&SOON.try_into().unwrap())).unwrap();
            assert!(ready > 0, "{words:?} is not shown, but {:?}", self.shown);
            let count = rustix::io::read(&self.master, &mut buffer).unwrap_or(0);
            assert!(count > 0, "it has ended, and {words:?} was not shown, but {:?}", self.shown);
            self.shown.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
        self.shown.clear();
    }

    fn end(mut self) {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(Pid::from_child(&self.child), Signal::INT);
        assert!(self.child.wait().unwrap().success());
    }
}

#[test]
fn a_terminal_shows_one_line_of_how_things_are() {
    let folder = scratch().unwrap();
    let path = |name: &str| folder.path().join(name).into_os_string().into_string().unwrap();
    let (device, control) = (path("balloon.sock"), path("control.sock"));
    let mut server = OnTerminal::start(["balloon", "--vhost-user", &device, "--control", &control]);
    let ctl = |what: &[&str]| OnTerminal::start([&["balloon", "ctl", &control][..], what].concat());
    server.wait_shown("waiting for a front end");

    let guest = Guest::boot_at(device.as_ref(), Features::ALL);
    server.wait_shown("guest has 512 MiB of 512 MiB; 0");
    let shrinker = guest.shrinker.clone();
    guest.pause_when(move || shrinker.held() > 0);
    let mut asking = ctl(&["hint"]);
    asking.wait_shown("256 MiB free so far");
    server.wait_shown("; 256 MiB free so far");
    guest.go_on();
    assert!(asking.child.wait().unwrap().success());

    guest.pause_when(|| true);
    let mut asking = ctl(&["target", "256M", "--wait", "60s"]);
    asking.wait_shown("guest has 512 MiB, target 256 MiB");
    server.wait_shown("guest has 512 MiB of 512 MiB, target 256 MiB;");
    guest.go_on();
    asking.wait_shown("the guest has 256 MiB after");
    asking.end();
    server.wait_shown("guest has 256 MiB of 512 MiB; 256 MiB given back");
    drop(guest);
    server.wait_shown("no balloon driver in the guest");
    server.end();
    assert!(!Path::new(&device).exists());
}
