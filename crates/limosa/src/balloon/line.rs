//! The live status line, on a terminal only.

use limosa_console::quantity;
use std::io::IsTerminal as _;

use indicatif::{ProgressBar, ProgressStyle};
use limosa_balloon::{Balloon, HintState};

/// A line that is drawn until it is dropped.
pub(super) struct StatusLine(Option<ProgressBar>);

impl StatusLine {
    /// Draws on stderr if that is a terminal.
    pub(super) fn show() -> Self {
        let style = ProgressStyle::with_template("{msg}").unwrap_or_else(|_| ProgressStyle::default_spinner());
        Self(std::io::stderr().is_terminal().then(|| ProgressBar::new_spinner().with_style(style)))
    }

    /// Shows the status.
    pub(super) fn update(&self, balloon: &Balloon, front_ends: u64) {
        let Some(bar) = &self.0 else { return };
        bar.set_message(status_of(balloon, front_ends));
    }

    /// Shows this message instead.
    pub(super) fn set_message(&self, message: String) {
        if let Some(bar) = &self.0 {
            bar.set_message(message);
        }
    }
}

impl Drop for StatusLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.0 {
            bar.finish_and_clear();
        }
    }
}

fn status_of(balloon: &Balloon, front_ends: u64) -> String {
    if !balloon.has_driver() {
        return match front_ends {
            0 => "waiting for a front end".into(),
            _ => "no balloon driver in the guest".into(),
        };
    }
    let (size, counters) = (balloon.size(), balloon.counters());
    let mut line = format!("guest has {} of {}", quantity::bytes(size.actual), quantity::bytes(size.ram));
    if size.target != size.actual {
        line.push_str(&format!(", target {}", quantity::bytes(size.target)));
    }
    line.push_str(&format!("; {} given back", quantity::bytes(counters.discarded_bytes)));
    let list = balloon.hint_list();
    match list.state {
        HintState::Requested => line.push_str("; free pages requested"),
        HintState::Started => line.push_str(&format!("; {} free so far", quantity::bytes(list.bytes))),
        HintState::Stopped => line.push_str(&format!("; {} free, held by the guest", quantity::bytes(list.bytes))),
        HintState::Done => {}
    }
    line
}
