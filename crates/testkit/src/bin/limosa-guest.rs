//! A guest to try limosa on by hand: `limosa-guest beat|linux [--incoming]` starts it, prints its pid and a free QMP
//! socket, then its serial port, and ends it on Ctrl-C or end of input.

use std::io::{BufRead as _, Write as _};
use std::process::ExitCode;

use anyhow::{Result, bail};
use limosa_testkit::{BeatGuest, LinuxGuest, Machine};

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
    let (name, incoming) = match words.as_slice() {
        [name] => (*name, false),
        [name, "--incoming"] => (*name, true),
        _ => bail!("usage: limosa-guest beat|linux [--incoming]"),
    };
    let machine = match name {
        "beat" => Machine::beat(BeatGuest { rest: 20, ..BeatGuest::default() }),
        "linux" => Machine::linux(LinuxGuest::default()),
        other => bail!("no guest `{other}`: there are beat and linux"),
    };
    let vm = if incoming { machine.start_incoming()? } else { machine.start()? };
    println!("pid={} qmp={}", vm.pid(), vm.qmp_socket().display());
    // What is typed goes to the guest; a closed input ends all.
    let (typed, lines) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if typed.send(line).is_err() {
                break;
            }
        }
    });
    let mut shown = 0;
    loop {
        match lines.recv_timeout(std::time::Duration::from_millis(20)) {
            Ok(line) => vm.serial().send(&line)?,
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return Ok(()),
        }
        let mut out = std::io::stdout().lock();
        for line in vm.serial().lines().iter().skip(shown) {
            writeln!(out, "{}", line.text)?;
            shown += 1;
        }
        out.flush()?;
        if vm.process().try_wait()?.is_some() {
            bail!("QEMU has ended: {}", vm.log().trim());
        }
    }
}
