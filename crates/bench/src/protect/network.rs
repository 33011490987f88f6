//! The time that an answer of the guest takes, with its output held back until a checkpoint counts.

use std::io::{ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use limosa_testkit::{LinuxGuest, Machine, Series};

use super::door::{Door, read_frame};
use super::pauses::quantile_us;
use super::watched::{Protection, wait_until};
use crate::limosa::Prepared;
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::scratch::Scratch;

/// The name of the case.
pub(super) const CASE: &str = "network";
/// The way in which nothing is held back.
pub(super) const UNPROTECTED: &str = "a gate alone";
/// The way in which a checkpoint is made as soon as something is held back.
pub(super) const BY_EVENT: &str = "limosa protect --every event";

/// The ways, each with the value of `--every`.
pub(super) const WAYS: [(&str, Option<&str>); 4] = [
    (UNPROTECTED, None),
    (BY_EVENT, Some("event")),
    ("limosa protect --every 20ms", Some("20ms")),
    ("limosa protect --every 100ms", Some("100ms")),
];

/// Questions to the guest.
const QUESTIONS: usize = 150;
/// Time from an answer to the next question, which is in no step with the periods.
const BETWEEN: Duration = Duration::from_micros(13_700);
/// How long an answer may take before the question is asked once more: QEMU drops frames which it has not given to the
/// guest when it stops that.
const ANSWER: Duration = Duration::from_secs(1);
/// How many questions may be lost.
const LOST: usize = QUESTIONS / 5;

/// The guest's address in the network 10.9.0.0/24, its card's, and those of the other end.
const GUEST: [u8; 4] = [10, 9, 0, 2];
const GUEST_MAC: &str = "02:00:00:00:00:02";
const WORLD: [u8; 4] = [10, 9, 0, 1];
const WORLD_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// Asks a Linux guest behind a gate again and again.
pub(super) fn run(options: &Options, every: Option<&str>) -> Result<Measured> {
    let folder = Scratch::new_in(&std::env::temp_dir())?;
    let at = |name: &str| folder.path().join(name);
    let door = Door::open(&at("world"))?;
    let (gate, listen) = (at("gate"), at("vm"));
    let mut gate_process = Prepared::without_report(options, "protect")?
        .arguments(&["gate", "--net", &format!("unix:{}", at("world").display())])
        .path(Some("--listen"), &listen)
        .path(None, &gate)
        .start()?;
    wait_until("the gate", || {
        gate_process.check()?;
        Ok(gate.exists().then_some(()))
    })?;
    let vm = machine(&listen).start()?;
    vm.wait_counts(1)?;
    for line in ["ip link set eth0 up", "ip addr add 10.9.0.2/24 dev eth0", "arp -s 10.9.0.1 02:00:00:00:00:01"] {
        vm.shell(line)?;
    }
    let mut world = door.enter()?;
    let gate = gate.to_str().context("a path that is not UTF-8")?;
    let protection =
        every.map(|every| Protection::here(options, &vm.qmp_socket(), &["--every", every, "--gate", gate]));
    let protection = protection.transpose()?;
    ask(&mut world, 10, &mut 0)?;
    let mut pids = vec![vm.pid(), gate_process.pid()];
    pids.extend(protection.iter().flat_map(Protection::pids));
    let watch = Stopwatch::start(&pids)?;
    let mut lost = 0;
    let answers = ask(&mut world, QUESTIONS, &mut lost)?;
    let measured = watch.stop()?;
    protection.map(Protection::finish).transpose()?;
    let lost = u64::try_from(lost)?;
    Ok([("answer_median_us", 0.5), ("answer_p95_us", 0.95), ("answer_max_us", 1.0)]
        .into_iter()
        .fold(measured, |measured, (name, part)| measured.with(name, quantile_us(&answers, part)))
        .with("lost", lost))
}

/// A Linux guest whose network card connects to this socket.
fn machine(socket: &Path) -> Machine {
    Machine::linux(LinuxGuest::default())
        .series(Series::Newest)
        .argument("-netdev")
        .argument(&format!("stream,id=n0,server=off,addr.type=unix,addr.path={},reconnect-ms=50", socket.display()))
        .argument("-device")
        .argument(&format!("virtio-net-pci,netdev=n0,mac={GUEST_MAC},romfile="))
}

/// Asks this many times; the times of the answers, the shortest first.
fn ask(world: &mut UnixStream, count: usize, lost: &mut usize) -> Result<Vec<Duration>> {
    world.set_read_timeout(Some(ANSWER))?;
    let mut times = Vec::new();
    while times.len() < count {
        thread::sleep(BETWEEN);
        let asked = Instant::now();
        world.write_all(&question()?).context("sending a frame")?;
        match answer(world, asked)? {
            true => times.push(asked.elapsed()),
            false => *lost += 1,
        }
        ensure!(*lost <= LOST, "{lost} questions had no answer");
    }
    times.sort_unstable();
    Ok(times)
}

/// Waits for the guest's answer; false if none comes.
fn answer(world: &mut UnixStream, asked: Instant) -> Result<bool> {
    while asked.elapsed() < ANSWER {
        match read_frame(&mut *world) {
            Ok(frame) if is_answer(&frame) => return Ok(true),
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error).context("the guest's network"),
        }
    }
    Ok(false)
}

/// An ARP request for the guest, which its kernel answers, with the length that QEMU's stream back end puts before it.
fn question() -> Result<Vec<u8>> {
    let header = [0, 1, 8, 0, 6, 4, 0, 1];
    let frame = [&[0xff; 6][..], &WORLD_MAC, &[8, 6], &header, &WORLD_MAC, &WORLD, &[0; 6], &GUEST, &[0; 18]].concat();
    Ok([&u32::try_from(frame.len())?.to_be_bytes()[..], &frame].concat())
}

fn is_answer(frame: &[u8]) -> bool {
    frame.get(12..22) == Some(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 2])
}
