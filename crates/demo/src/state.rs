//! The status of an end: for people in words, for programs as the answer of `query-status`.

use serde::{Deserialize, Serialize};

/// The end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// The guest begins here.
    Source,
    /// The guest should continue here.
    Destination,
}

impl Role {
    /// How it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }
}

/// The state of an end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The guest runs, nothing moves.
    Running,
    /// The guest is being sent: it runs, or is paused for its last pages.
    Sending,
    /// A guest is waited for.
    Waiting,
    /// A guest is being received.
    Receiving,
    /// All has been sent (or has come), and the last message did not get through: the operator has to decide.
    Undecided,
    /// The guest runs at the destination and waits for pages: the connection is gone.
    PostcopyPaused,
    /// The guest runs at the other end.
    Gone,
    /// The guest did not come. What did is of no use.
    Failed,
}

impl State {
    /// QEMU's word for it (`RunState`), as `query-status` has it.
    pub fn run_state(self, running: bool) -> &'static str {
        match self {
            Self::Receiving if running => "running",
            Self::Waiting | Self::Receiving => "inmigrate",
            Self::Gone => "postmigrate",
            Self::Failed => "internal-error",
            Self::PostcopyPaused if running => "running",
            Self::Undecided | Self::PostcopyPaused => "paused",
            Self::Running | Self::Sending if running => "running",
            Self::Running | Self::Sending => "finish-migrate",
        }
    }
}

/// The answer of `query-status`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// QEMU's word.
    pub status: String,
    /// Whether the guest runs here.
    pub running: bool,
    /// This end.
    pub role: Role,
    /// Its state.
    pub state: State,
    /// Why, if something went wrong.
    pub why: Option<String>,
    /// The guest's own count of its writes: it grows while the guest runs.
    pub beats: u64,
    /// For how long it was paused on its way here, from its last write there to its first one here: milliseconds.
    pub stood_ms: Option<f64>,
    /// The commands that would decide, if there is something to decide.
    pub decide: Vec<String>,
}

/// The commands for an end that has to be decided, with what to look at before.
pub fn decisions(role: Role, state: State, control: &str) -> Vec<String> {
    let command = |verb: &str| format!("limosa-demo {verb} --control {}", quoted(control));
    match (role, state) {
        (Role::Source, State::Undecided | State::PostcopyPaused) => vec![command("resume"), command("discard")],
        (Role::Destination, State::Undecided) => vec![command("start"), command("discard")],
        (Role::Destination, State::PostcopyPaused) => vec![command("discard")],
        _ => Vec::new(),
    }
}

/// The advice of an undecided end.
pub fn advice(role: Role, state: State, control: &str, why: &str) -> String {
    let control = quoted(control);
    match (role, state) {
        (Role::Source, State::Undecided) => format!(
            "source: undecided: {why}\n  \
             The guest is paused here, with all of its memory. Whether it runs at the destination is not known.\n  \
             Look at the destination first: limosa-demo status --control <its socket>, or whether its process still runs.\n  \
             If it runs there, or all of it is there and you start it:  limosa-demo discard --control {control}\n  \
             If it waits there for pages (postcopy-paused):             limosa-demo recover --control {control} --destination <its socket>\n  \
             If it does not run there and never will:                   limosa-demo resume --control {control}"
        ),
        (Role::Destination, State::Undecided) => format!(
            "destination: undecided: {why}\n  \
             All of the guest is here, and the source's last message is missing: it has not been started.\n  \
             Look at the source first: limosa-demo status --control <its socket>, or whether its process still runs.\n  \
             If it runs there, or you resume it there:  limosa-demo discard --control {control}\n  \
             If it does not run there and never will:   limosa-demo start --control {control}"
        ),
        (Role::Source, State::PostcopyPaused) => format!(
            "source: the connection is gone while pages were missing: {why}\n  \
             The guest runs at the destination and waits there for the pages it touches; they are here, and none is lost.\n  \
             To go on:  limosa-demo recover --control {control} --destination <its socket>\n  \
             If the destination's process has ended, what the guest did there is lost; here it is as it left:\n    \
             to run it again from there:  limosa-demo resume --control {control}\n    \
             to give it up:               limosa-demo discard --control {control}"
        ),
        (Role::Destination, State::PostcopyPaused) => format!(
            "destination: the connection is gone while pages were missing: {why}\n  \
             The guest runs here and waits for the pages it touches; the source has them, and none is lost.\n  \
             To go on:  limosa-demo recover --control <the source's socket> --destination {control}\n  \
             If the source's process has ended, the guest cannot continue:  limosa-demo discard --control {control}"
        ),
        (role, _) => format!("{}: {why}", role.name()),
    }
}

/// For a shell.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:=@%,".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_undecided_end_names_the_commands_that_decide_it() {
        for (role, verbs) in [(Role::Source, ["resume", "discard"]), (Role::Destination, ["start", "discard"])] {
            let words = advice(role, State::Undecided, "/tmp/a b/source", "the network is gone");
            for (verb, command) in verbs.iter().zip(decisions(role, State::Undecided, "/tmp/a b/source")) {
                assert_eq!(command, format!("limosa-demo {verb} --control '/tmp/a b/source'"));
                assert!(words.contains(&command), "{words}");
            }
        }
        assert!(decisions(Role::Source, State::Running, "x").is_empty());
    }
}
