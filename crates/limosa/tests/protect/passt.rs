//! passt as the network of a gate: what is framed for QEMU's stream back end is framed for it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use limosa_testkit::{LinuxGuest, Machine, Program, Series, kill9, listens};

use crate::gate::networked;
use crate::needs_newest_qemu;
use crate::scene::{Scene, text};
use crate::stage::{SOON, start_command, wait_for};

/// A shell in the guest, through passt.
struct Shell(BufReader<TcpStream>);

impl Shell {
    /// Connects once the guest listens: passt takes connections before.
    fn connect(port: u16) -> Self {
        wait_for("an answer through passt", || {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok()?;
            stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            let mut shell = Self(BufReader::new(stream));
            shell.ask("n=0; echo ready").filter(|answer| answer == "ready")?;
            shell.0.get_ref().set_read_timeout(Some(SOON)).unwrap();
            Some(shell)
        })
    }

    fn ask(&mut self, line: &str) -> Option<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).ok()?;
        let mut answer = String::new();
        self.0.read_line(&mut answer).ok()?;
        Some(answer.trim_end().to_owned())
    }

    /// Has the guest count one up, which knows all that were asked before.
    #[track_caller]
    fn count(&mut self, number: u32) {
        assert_eq!(self.ask("n=$((n+1)); echo $n"), Some(number.to_string()));
    }
}

/// passt, which forwards this port of the host to port 8 of the guest.
fn passt(socket: &Path, port: u16) -> Program {
    let program = ["/usr/bin/passt", "/bin/passt"].iter().find(|path| Path::new(path).is_file());
    let mut command = Command::new(program.expect("no passt: run `cargo xtask setup`, or `apt-get install passt`"));
    command.args(["--foreground", "--quiet", "--runas", "0", "--ipv4-only", "--socket", text(socket)]);
    command.args(["--address", "10.9.0.2", "--netmask", "24", "--gateway", "10.9.0.1"]);
    command.args(["--tcp-ports", &format!("127.0.0.1/{port}:8")]);
    let passt = start_command(command);
    wait_for("passt to listen", || {
        assert!(passt.is_running(), "passt ended: {}", passt.stderr());
        listens(passt.pid(), socket).then_some(())
    });
    passt
}

#[test]
fn a_connection_through_passt_is_held_for_checkpoints_and_survives_a_failover() {
    needs_newest_qemu!();
    let scene = Scene::of(|folder| {
        networked(Machine::linux(LinuxGuest::default()).series(Series::Newest), folder).memory(160 << 20)
    });
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let _passt = passt(&scene.path("world.net"), port);
    let _gate = scene.gate(&[]);
    let vm = scene.machine.start().unwrap();
    vm.wait_counts(1).unwrap();
    for line in [
        "ip link set eth0 up",
        "ip addr add 10.9.0.2/24 dev eth0",
        "ip route add default via 10.9.0.1",
        "(while :; do nc -l -p 8 -e sh; done) </dev/null >/dev/null 2>&1 &",
    ] {
        vm.shell(line).unwrap();
    }
    let mut shell = Shell::connect(port);
    shell.count(1);
    let gate = scene.path("gate").display().to_string();
    let keeper = scene.protected(&vm, &["--gate", &gate, "--every", "event"], &[]);
    for number in 2..20 {
        shell.count(number);
    }
    kill9(vm.pid()).unwrap();
    let ended = keeper.wait();
    assert!(ended.stderr.contains("QEMU has ended"), "{}", ended.stderr);
    let failover = scene.failover(&["--gate", &gate]);
    for number in 20..30 {
        shell.count(number);
    }
    failover.end();
}
