//! `limosa restore --detach`: a pager that stays behind, and a command that returns when the guest runs.
//!
//! The command starts itself again as the pager, in its own session, and waits for one line on the pager's stdout. The
//! pager writes it when the guest runs or when it failed, and is silent afterwards.

use limosa_console::quantity;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::RestoreArgs;
use limosa_console::{print_out, say};

/// The command's side: starts the pager and waits for its line.
pub(crate) fn run(args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let executable = std::env::current_exe().context("cannot find the limosa program to start the pager")?;
    // The same arguments again, but for the first that asks to detach, in whose place another asks to be the pager.
    let mut asked = false;
    let arguments = std::env::args_os().skip(1).map(|word| {
        let replace = !asked && word == "--detach";
        asked |= replace;
        if replace { OsString::from("--pager") } else { word }
    });
    // Until the guest runs, what is said to this process is meant for the pager, which has left its session.
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot handle signals")?;
    let mut pager = Command::new(executable)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the pager")?;
    let stdout = pager.stdout.take().context("the pager has no stdout")?;
    let handle = signals.handle();
    let number = i32::try_from(pager.id()).ok().and_then(rustix::process::Pid::from_raw);
    let passing_on = std::thread::spawn(move || {
        for _ in signals.forever() {
            if let Some(number) = number {
                let _ = rustix::process::kill_process(number, rustix::process::Signal::TERM);
            }
        }
    });
    let mut line = String::new();
    let heard = BufReader::new(stdout).read_line(&mut line);
    handle.close();
    let _ = passing_on.join();
    heard.context("cannot read from the pager")?;
    let Ok(said) = serde_json::from_str::<Value>(&line) else {
        bail!("the pager ended before the guest ran; the snapshot is unchanged: end this QEMU and start a new one");
    };
    if let Some(why) = said.get("failed").and_then(Value::as_str) {
        bail!("{why}");
    }
    let after = said.get("to_guest_ms").and_then(Value::as_f64).unwrap_or_default();
    let mode = said.get("mode").and_then(Value::as_str).unwrap_or("lazy");
    let after_words = quantity::time(Duration::from_secs_f64(after / 1e3));
    let process = pager.id();
    let pager = (mode == "lazy").then_some(process);
    let recorder = args.how.working_set.record_working_set.map(|_| process);
    match mode {
        "lazy" => say!("the guest runs after {after_words}; process {process} restores its memory"),
        "mapped" => say!("restored after {after_words}; the snapshot file is its memory"),
        _ => say!("restored eagerly after {after_words}; all memory is restored"),
    }
    if recorder.is_some() {
        say!("process {process} records the working set");
    }
    if args.job.json {
        let report = json!({
            "mode": mode,
            "detached": true,
            "pager": pager,
            "recorder": recorder,
            "to_guest_ms": after,
        });
        print_out!("{report}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The pager's side: leaves the terminal's session, so that neither its end nor its keys reach the pager.
pub(crate) fn leave_session() {
    // Fails only for a session leader, which a child of the command is not.
    let _ = rustix::process::setsid();
}

/// Prints the one line, if the command's stdout is still open.
pub(crate) struct Reporter {
    open: AtomicBool,
}

impl Reporter {
    pub(crate) fn new(pager: bool) -> Self {
        Self { open: AtomicBool::new(pager) }
    }

    /// The guest runs.
    pub(crate) fn guest_ready(&self, after: Duration, mode: &str) {
        self.say(&json!({ "mode": mode, "to_guest_ms": quantity::millis(after) }));
    }

    /// It does not; `true` if that was written.
    pub(crate) fn failed(&self, why: &str) -> bool {
        self.say(&json!({ "failed": why }))
    }

    fn say(&self, what: &Value) -> bool {
        if !self.open.swap(false, Ordering::AcqRel) {
            return false;
        }
        let mut stdout = std::io::stdout().lock();
        let heard = writeln!(stdout, "{what}").and_then(|()| stdout.flush()).is_ok();
        // The command's caller may wait for the end of what it reads from the terminal: close both streams.
        if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&null);
            let _ = rustix::stdio::dup2_stderr(&null);
        }
        heard
    }
}
