//! A guest to try limosa on by hand: `limosa-guest heartbeat|linux [--incoming]` starts it, prints its pid and a free
//! QMP socket, then its serial port, and ends it on Ctrl-C or end of input. `limosa-guest uml [--memory MIB] [--balloon
//! SOCKET]` is user-mode Linux, whose lines are shell lines; the benches use it.

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Result, bail};
use limosa_testkit::{HeartbeatGuest, LinuxGuest, Machine, UmlGuest};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("limosa-guest: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["uml", rest @ ..] = words.as_slice() {
        return uml(rest);
    }
    let (name, incoming) = match words.as_slice() {
        [name] => (*name, false),
        [name, "--incoming"] => (*name, true),
        _ => bail!(
            "usage: limosa-guest heartbeat|linux [--incoming], limosa-guest uml [--memory MIB] [--balloon SOCKET]"
        ),
    };
    let machine = match name {
        "heartbeat" => Machine::heartbeat(HeartbeatGuest { rest: 20, ..HeartbeatGuest::default() }),
        "linux" => Machine::linux(LinuxGuest::default()),
        other => bail!("no guest `{other}`: there are heartbeat, linux and uml"),
    };
    let vm = if incoming { machine.start_incoming()? } else { machine.start()? };
    println!("pid={} qmp={}", vm.pid(), vm.qmp_socket().display());
    // What is typed goes to the guest; a closed input ends all.
    let lines = typed_lines();
    let mut shown = 0;
    loop {
        match lines.recv_timeout(Duration::from_millis(20)) {
            Ok(line) => vm.serial().send(&line)?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        let said: Vec<String> = vm.serial().lines().into_iter().map(|line| line.text).collect();
        show(&said, &mut shown)?;
        if vm.process().try_wait()?.is_some() {
            bail!("QEMU has ended: {}", vm.log().trim());
        }
    }
}

fn uml(mut words: &[&str]) -> Result<()> {
    let mut guest = UmlGuest { kernel_words: "init_on_alloc=0".into(), ..UmlGuest::default() };
    while let [option, value, rest @ ..] = words {
        match *option {
            "--memory" => guest.memory = value.parse()?,
            "--balloon" => {
                guest.devices.push((value.into(), 5));
                guest.modules.push("virtio_balloon".into());
            }
            other => bail!("no option `{other}`"),
        }
        words = rest;
    }
    if let [left, ..] = words {
        bail!("no option `{left}`, or no value for it");
    }
    let guest = guest.start()?;
    let lines = typed_lines();
    let mut shown = 0;
    loop {
        match lines.recv_timeout(Duration::from_millis(5)) {
            Ok(line) => guest.send(&line)?,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        show(&guest.lines(), &mut shown)?;
        guest.check_alive()?;
    }
}

/// Copies the typed lines; ends with the input.
fn typed_lines() -> Receiver<String> {
    let (typed, lines) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if typed.send(line).is_err() {
                break;
            }
        }
    });
    lines
}

/// Prints the lines that have not been shown yet.
fn show(lines: &[String], shown: &mut usize) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for line in lines.iter().skip(*shown) {
        writeln!(out, "{line}")?;
        *shown += 1;
    }
    Ok(out.flush()?)
}
