//! `limosa restore --detach`: a pager that stays behind, and a command that returns when the guest runs.
//!
//! The command starts itself again as the pager, in a session of its own, and waits for one line on the pager's stdout. The
//! pager says it when the guest runs or when it failed, and is silent afterwards.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::{Value, json};

use crate::args::RestoreArgs;
use crate::words;

/// The command's side: starts the pager and waits for its word.
pub(crate) fn run(args: &RestoreArgs) -> anyhow::Result<ExitCode> {
    let executable = std::env::current_exe().context("cannot find this program to start the pager")?;
    // The same words again, but for the one that asks to detach; it takes no value, so nothing else can look like it
    // but a file of that name, which the user would have had to write behind `--`.
    let words = std::env::args_os().skip(1).filter(|word| word != "--detach");
    let mut pager = Command::new(executable)
        .args(words)
        .arg("--pager")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the pager")?;
    let stdout = pager.stdout.take().context("the pager has no stdout")?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).context("cannot hear the pager")?;
    let Ok(said) = serde_json::from_str::<Value>(&line) else {
        bail!("the pager died before the guest ran; the snapshot is as it was: start a fresh QEMU and try again");
    };
    if let Some(why) = said.get("failed").and_then(Value::as_str) {
        bail!("{why}");
    }
    let after = said.get("to_guest_ms").and_then(Value::as_f64).unwrap_or_default();
    eprintln!(
        "the guest is back after {}; process {} brings its memory",
        words::time(Duration::from_secs_f64(after / 1e3)),
        pager.id()
    );
    if args.job.json {
        println!("{}", json!({ "mode": "lazy", "detached": true, "pager": pager.id(), "to_guest_ms": after }));
    }
    Ok(ExitCode::SUCCESS)
}

/// The pager's side: leaves the terminal's session, so that neither its end nor its keys reach the pager.
pub(crate) fn leave_session() {
    // Fails only for a session leader, which a child of the command is not.
    let _ = rustix::process::setsid();
}

/// Says the one line, if there is somebody to hear it.
pub(crate) struct Reporter {
    open: AtomicBool,
}

impl Reporter {
    pub(crate) fn new(pager: bool) -> Self {
        Self { open: AtomicBool::new(pager) }
    }

    /// The guest runs.
    pub(crate) fn guest_ready(&self, after: Duration) {
        self.say(&json!({ "to_guest_ms": words::millis(after) }));
    }

    /// It does not; `true` if that was heard.
    pub(crate) fn failed(&self, why: &str) -> bool {
        self.say(&json!({ "failed": why }))
    }

    fn say(&self, what: &Value) -> bool {
        if !self.open.swap(false, Ordering::AcqRel) {
            return false;
        }
        let mut stdout = std::io::stdout().lock();
        let heard = writeln!(stdout, "{what}").and_then(|()| stdout.flush()).is_ok();
        // The command's caller may wait for the end of what it reads from the terminal: let go of both streams.
        if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
            let _ = rustix::stdio::dup2_stdout(&null);
            let _ = rustix::stdio::dup2_stderr(&null);
        }
        heard
    }
}
