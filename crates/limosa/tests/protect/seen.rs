//! A protection as people and programs see it while it runs.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use limosa_testkit::{Process, Qmp};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use serde_json::{Value, json};

use crate::needs_newest_qemu;
use crate::scene::{Scene, machine, text};
use crate::stage::{SOON, limosa, save_arguments, wait_for};

/// The bytes that a program shows on a terminal of its own, which is its standard error.
struct Screen {
    process: Process,
    shown: Arc<Mutex<Vec<u8>>>,
}

impl Screen {
    fn of(mut command: Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let size = Winsize { ws_row: 24, ws_col: 200, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&master, size).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        command.stderr(rustix::fs::open(name, flags, Mode::empty()).unwrap());
        let process = Process::spawn("limosa at a terminal", command).unwrap();
        let (mut screen, shown) = (File::from(master), Arc::new(Mutex::new(Vec::new())));
        let kept = Arc::clone(&shown);
        // It ends with the terminal's last user.
        thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(length @ 1..) = screen.read(&mut piece) {
                kept.lock().unwrap().extend(&piece[..length]);
            }
        });
        Self { process, shown }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().unwrap()).into_owned()
    }
}

/// GET /metrics.
fn metrics(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut page = String::new();
    stream.read_to_string(&mut page).unwrap();
    assert!(page.starts_with("HTTP/1.1 200 OK"), "{page}");
    page
}

/// The value of a metric.
fn value(page: &str, name: &str) -> f64 {
    let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in {page}")).parse().unwrap()
}

#[test]
fn a_terminal_has_a_line_with_the_newest_checkpoint_until_the_protection_ends() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.args(["protect", "--qmp"]).arg(vm.qmp_socket()).args(["--every", "50ms"]).arg(scene.kept());
    command.env("TMPDIR", scene.path("tmp")).env("TERM", "xterm").env_remove("XDG_RUNTIME_DIR");
    let screen = Screen::of(command);
    let line = wait_for("the line of a checkpoint", || {
        let shown = screen.text();
        let at = shown.rfind("checkpoint ")?;
        let line = shown[at..].split(['\r', '\n', '\u{1b}']).next()?;
        (line.contains("lag ") && scene.newest() >= Some(5)).then(|| line.to_owned())
    });
    let [every, pause, longest, pages, lag] = [": every ", ", pause ", " at most)", " pages, ", ", lag "];
    for part in [every, pause, longest, pages, lag] {
        assert!(line.contains(part), "{part:?} in {line:?}");
    }
    let number: u64 = line.split([' ', ':']).nth(1).unwrap().parse().unwrap();
    assert!(number >= 1, "{line:?}");
    // It is drawn over, not below itself.
    let shown = screen.text();
    assert!(shown.contains("the VM is protected: "), "{shown:?}");
    assert!(shown.matches('\n').count() < 12, "{shown:?}");
    kill_process(Pid::from_raw(i32::try_from(screen.process.pid()).unwrap()).unwrap(), Signal::INT).unwrap();
    assert!(screen.process.wait(SOON).unwrap().success());
    wait_for("the summary", || screen.text().contains("output: free").then_some(()));
}

#[test]
fn programs_and_prometheus_read_the_figures_while_checkpoints_are_made() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let (control, socket) = (scene.path("control"), scene.path("metrics"));
    let uri = format!("unix:{}", socket.display());
    let options = ["--every", "50ms", "--events", "--control", text(&control), "--metrics", &uri];
    let keeper = scene.protect(&vm, &options);
    scene.wait_checkpoint(10, &keeper);
    let mut qmp = Qmp::connect(&control, SOON).unwrap();
    // The file has its name before they are told.
    let figures = wait_for("the figures of the tenth checkpoint", || {
        let figures = qmp.execute("query-protect", json!({})).unwrap();
        (figures["checkpoint"].as_u64() >= Some(10)).then_some(figures)
    });
    assert_eq!(figures["state"], "protected", "{figures}");
    let number = u32::try_from(figures["checkpoint"].as_u64().unwrap()).unwrap();
    assert!(figures["checkpoints"] == number, "{figures}");
    assert!(figures["age_ms"].as_f64() < Some(5000.0), "{figures}");
    assert!(figures["last"]["lag_ms"].as_f64() >= figures["last"]["pause_ms"].as_f64(), "{figures}");
    assert!(figures["pause"]["median_ms"].as_f64() > Some(0.0), "{figures}");
    assert_eq!(qmp.execute("query-migrate", json!({})).unwrap()["status"], "colo");
    let page = metrics(&socket);
    assert!(value(&page, "limosa_protect_newest_checkpoint") >= f64::from(number));
    assert!(value(&page, "limosa_protect_pause_seconds_count") >= f64::from(number));
    assert_eq!(value(&page, "limosa_protect_protected"), 1.0);
    for name in ["lag_seconds_sum", "period_seconds", "newest_timestamp_seconds", "received_bytes_total"] {
        assert!(value(&page, &format!("limosa_protect_{name}")) > 0.0, "{name}");
    }
    keeper.signal(Signal::INT);
    let ended = keeper.wait().success();
    assert!(ended.stderr.contains("the VM is protected: "), "{}", ended.stderr);
    let events: Vec<Value> = ended.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (last, kept) = events.split_last().unwrap();
    assert_eq!(kept[0]["event"], "base");
    for (number, event) in kept.iter().enumerate() {
        assert_eq!(event["checkpoint"], number, "{event}");
        assert!(number == 0 || event["event"] == "checkpoint", "{event}");
    }
    assert_eq!((&last["event"], &last["end"]), (&json!("ended"), &json!("asked")), "{last}");
    assert_eq!(last["checkpoints"].as_u64().unwrap() + 1, kept.len() as u64);
}

#[test]
fn a_directory_shows_its_newest_checkpoint_and_whether_a_keeper_lives() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let kept = scene.kept();
    std::fs::create_dir(&kept).unwrap();
    limosa(["inspect", text(&kept)]).one_line(&["no checkpoint is in this directory"]);
    let keeper = scene.protect(&vm, &["--every", "20ms"]);
    scene.wait_checkpoint(5, &keeper);
    let mut before = 5;
    for _ in 0..5 {
        let shown = limosa(["inspect", "--json", text(&kept)]).json();
        let number = shown["checkpoint"].as_u64().unwrap();
        assert!(number >= before && shown["kept"] == true, "{number} after {before}: {shown}");
        assert!(shown["age_ms"].as_f64() < Some(5000.0), "{shown}");
        assert_eq!(shown["snapshot"]["run_state"], "running");
        before = number;
    }
    let shown = limosa(["inspect", text(&kept)]).success().stdout;
    for words in [": checkpoint ", " old\n", "keeper        alive", "run state     running", "disks         none in it"]
    {
        assert!(shown.contains(words), "{words:?} is not in {shown}");
    }
    keeper.signal(Signal::INT);
    keeper.wait().success();
    let shown = limosa(["inspect", "--json", text(&kept)]).json();
    assert!(shown["kept"] == false && shown["checkpoint"].as_u64() >= Some(before), "{shown}");
}

#[test]
fn a_save_beside_a_protection_says_at_once_who_protects_the_vm() {
    needs_newest_qemu!();
    let scene = Scene::new();
    let vm = scene.guest();
    let keeper = scene.protect(&vm, &[]);
    scene.wait_checkpoint(1, &keeper);
    let begun = Instant::now();
    let save = limosa(save_arguments(&vm, &scene.path("saved"), &[]));
    let who = format!("protected by limosa protect (process {})", keeper.pid());
    save.one_line(&[&who, "end that first"]);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    keeper.signal(Signal::INT);
    keeper.wait().success();
}

#[test]
fn a_vm_whose_networks_have_no_gate_is_named_at_the_start() {
    needs_newest_qemu!();
    let scene = Scene::of(|_| machine().argument("-nic").argument("user,id=net7"));
    let vm = scene.guest();
    for (options, named) in [(&[][..], true), (&["--output", "free"], false)] {
        let keeper = scene.protect(&vm, options);
        wait_for("the base", || keeper.stderr().contains("the VM is protected").then_some(()));
        let said = keeper.stderr();
        let warning = said.find("output of the VM's networks (net7) is not held back");
        assert_eq!(warning.is_some_and(|at| Some(at) < said.find("is protected:")), named, "{said}");
        keeper.signal(Signal::INT);
        keeper.wait().success();
    }
}

#[test]
fn a_vm_whose_monitor_is_reached_over_tcp_is_protected_where_both_meet() {
    needs_newest_qemu!();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let monitor = format!("tcp:127.0.0.1:{port}");
    let scene = Scene::of(|_| machine().argument("-qmp").argument(&format!("{monitor},server=on,wait=off")));
    let _vm = scene.guest();
    let kept = scene.kept();
    let arguments = ["protect", "--qmp", &monitor, text(&kept)];
    limosa(arguments).one_line(&["reached over tcp", "--listen tcp:HOST:PORT"]);
    let place = format!("unix:{}", scene.path("meet").display());
    let keeper = crate::stage::start(arguments.iter().chain(&["--listen", &place]));
    scene.wait_checkpoint(3, &keeper);
    keeper.signal(Signal::INT);
    keeper.wait().success();
}

#[test]
fn a_time_without_a_unit_and_a_gate_with_one_socket_are_refused() {
    let scene = Scene::new();
    let kept = scene.kept();
    limosa(["protect", "--qmp", "/nowhere", text(&kept), "--every", "100"]).misused(&["100ms"]);
    let gate = ["protect", "gate", "/run/a", "--listen", "/run/a", "--net", "tap:tap0"];
    limosa(gate).misused(&["--listen /run/a: must be another socket"]);
}
