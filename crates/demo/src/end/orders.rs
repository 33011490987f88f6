//! The control socket of an end: what it answers by itself, and what it passes on to the thread that has the guest.
//!
//! Law: an order is taken only in a state in which it means something, and then exactly once: the state is changed
//! together with taking it. The client gets an answer at once whether it was taken; `query-status` returns the result.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

use limosa_channel::Uri;
use limosa_control::{CommandError, Commands};
use limosa_migrate::control::{Control, Stop};
use serde_json::{Map, Value, json};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::guest::Guest;
use crate::state::{Role, State, Status, decisions};

/// An order for the thread that has the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Order {
    /// Send the guest there.
    Send {
        /// Where.
        uri: Uri,
        /// Whether the memory there is known to be fresh.
        fresh: bool,
    },
    /// Listen there, and receive the guest.
    Receive(Uri),
    /// Go on with a postcopy: connect there (source), listen there (destination).
    Recover(Uri),
    /// Have the guest run here.
    Go,
    /// Look at all of the guest's memory.
    Verify,
    /// Give the guest up, and end.
    Discard,
}

/// The known state of an end.
#[derive(Debug)]
struct Known {
    state: State,
    running: bool,
    why: Option<String>,
    recoverable: bool,
    /// Nanoseconds that the guest was paused on its way here.
    stood: Option<u64>,
    /// The result of the last look at all of the memory.
    verified: Value,
    /// The engine's figures of the last migration.
    migration: Map<String, Value>,
    /// The answer of `query-report`.
    report: Value,
    /// Of the migration that is under way.
    control: Control,
}

/// Shared between the socket's threads and the one that has the guest.
pub(super) struct Coordinator {
    role: Role,
    socket: String,
    known: Mutex<Known>,
    orders: Mutex<Sender<Order>>,
    /// Counts for itself.
    guest: OnceLock<Arc<dyn Guest>>,
}

impl Coordinator {
    pub(super) fn new(role: Role, socket: String) -> (Arc<Self>, Receiver<Order>) {
        let state = if role == Role::Source { State::Running } else { State::Waiting };
        let (orders, taken) = channel();
        let known = Known {
            state,
            running: false,
            why: None,
            recoverable: false,
            stood: None,
            verified: Value::Null,
            migration: Map::new(),
            report: Value::Null,
            control: Control::new(),
        };
        let (known, orders, guest) = (Mutex::new(known), Mutex::new(orders), OnceLock::new());
        (Arc::new(Self { role, socket, known, orders, guest }), taken)
    }

    /// The guest of this end.
    pub(super) fn has(&self, guest: Arc<dyn Guest>) {
        // There is one.
        let _ = self.guest.set(guest);
    }

    pub(super) fn role(&self) -> Role {
        self.role
    }

    /// Where programs reach this end.
    pub(super) fn socket(&self) -> &str {
        &self.socket
    }

    /// The guest runs, or is paused.
    pub(super) fn runs(&self, running: bool) {
        self.lock().running = running;
    }

    /// For how long the guest was paused on its way here, in nanoseconds.
    pub(super) fn stood_still(&self, nanoseconds: u64) {
        self.lock().stood = Some(nanoseconds);
    }

    /// Sets the result of a look at all of the memory.
    pub(super) fn verified(&self, found: Value) {
        self.lock().verified = found;
    }

    /// Whether the guest runs here.
    pub(super) fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Whether a source that is undecided may turn out to be in postcopy.
    pub(super) fn recoverable(&self, recoverable: bool) {
        self.lock().recoverable = recoverable;
    }

    /// Sets the state of the end, and its reason.
    pub(super) fn turn(&self, state: State, why: Option<String>) {
        let mut known = self.lock();
        (known.state, known.why) = (state, why);
    }

    /// A migration begins.
    pub(super) fn begin(&self, control: &Control) {
        let mut known = self.lock();
        known.control = control.clone();
        known.migration.clear();
    }

    /// Adds to what `query-migrate` answers.
    pub(super) fn tell(&self, key: &str, value: Value) {
        self.lock().migration.insert(key.to_owned(), value);
    }

    /// Sets the answer of `query-report`.
    pub(super) fn report(&self, report: Value) {
        self.lock().report = report;
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }

    fn status(&self) -> Status {
        let known = self.lock();
        Status {
            status: known.state.run_state(known.running).to_owned(),
            running: known.running,
            role: self.role,
            state: known.state,
            why: known.why.clone(),
            beats: self.guest.get().map_or(0, |guest| guest.writes()),
            stood_ms: known.stood.map(|stood| Duration::from_nanos(stood).as_secs_f64() * 1e3),
            decide: decisions(self.role, known.state, &self.socket),
        }
    }

    /// Takes an order if the end is in one of these states, and turns it to the next.
    fn order(&self, order: Order, from: &[State], next: State) -> Result<Value, CommandError> {
        let mut known = self.lock();
        if !from.contains(&known.state) {
            let why = known.why.as_ref().map_or(String::new(), |why| format!(" ({why})"));
            return Err(format!("not possible now: this end is {}{why}", word(known.state)).into());
        }
        (known.state, known.why) = (next, None);
        let sent = self.orders.lock().send(order);
        sent.map(|()| json!({})).map_err(|_| "this end is about to end".into())
    }

    fn migrate(&self, arguments: &Value) -> Result<Value, CommandError> {
        let uri = uri(arguments)?;
        let flag = |key: &str, usual| arguments.get(key).map_or(Some(usual), Value::as_bool);
        let not_bools = || "resume and fresh must be true or false";
        if flag("resume", false).ok_or_else(not_bools)? {
            // An undecided one too: the package may have come, and its answer not.
            let from = [State::PostcopyPaused, State::Undecided];
            let from = if self.lock().recoverable { &from[..] } else { &from[..1] };
            return self.order(Order::Recover(uri), from, State::Sending);
        }
        let fresh = flag("fresh", true).ok_or_else(not_bools)?;
        self.order(Order::Send { uri, fresh }, &[State::Running], State::Sending)
    }

    fn go(&self) -> Result<Value, CommandError> {
        if self.lock().state == State::Running {
            return Ok(json!({}));
        }
        match self.role {
            Role::Source => self.order(Order::Go, &[State::Undecided, State::PostcopyPaused], State::Running),
            Role::Destination => self.order(Order::Go, &[State::Undecided], State::Receiving),
        }
    }

    fn verify(&self) -> Result<Value, CommandError> {
        self.lock().verified = Value::Null;
        let (running, gone) = (State::Running, State::Gone);
        let now = self.lock().state;
        self.order(Order::Verify, &[running, gone], now)
    }

    fn start_postcopy(&self) -> Result<Value, CommandError> {
        let known = self.lock();
        if self.role != Role::Source || known.state != State::Sending {
            return Err("no migration is running from here".into());
        }
        known.control.start_postcopy();
        Ok(json!({}))
    }
}

impl Commands for Coordinator {
    fn execute(&self, name: &str, arguments: &Value) -> Option<Result<Value, CommandError>> {
        match name {
            "query-status" => Some(
                serde_json::to_value(self.status())
                    .map_err(|error| format!("cannot be written as JSON: {error}").into()),
            ),
            "query-report" => Some(Ok(self.lock().report.clone())),
            "verify-memory" => Some(self.verify()),
            "query-verify-memory" => Some(Ok(self.lock().verified.clone())),
            "migrate" => Some(self.migrate(arguments)),
            "migrate-incoming" => {
                Some(uri(arguments).and_then(|uri| {
                    self.order(Order::Receive(uri), &[State::Waiting, State::Failed], State::Receiving)
                }))
            }
            "migrate-recover" => Some(uri(arguments).and_then(|uri| {
                if self.role == Role::Source {
                    return Err("this end is the source: use migrate with resume".into());
                }
                self.order(Order::Recover(uri), &[State::PostcopyPaused], State::Receiving)
            })),
            "migrate-start-postcopy" => Some(self.start_postcopy()),
            "cont" => Some(self.go()),
            "quit" => Some({
                // A running migration would not notice it.
                self.lock().control.stop(Stop::Cancel);
                let orders = self.orders.lock();
                orders.send(Order::Discard).map(|()| json!({})).map_err(|_| "this end is about to end".into())
            }),
            _ => None,
        }
    }

    fn amend_query_migrate(&self, answer: &mut Map<String, Value>) {
        let known = self.lock();
        answer.extend(known.migration.iter().map(|(key, value)| (key.clone(), value.clone())));
        if known.state == State::PostcopyPaused {
            answer.insert("status".into(), "postcopy-paused".into());
        }
        if let Some(why) = &known.why {
            answer.insert("error-desc".into(), why.clone().into());
        }
    }
}

fn uri(arguments: &Value) -> Result<Uri, CommandError> {
    let text = arguments.get("uri").and_then(Value::as_str).ok_or("uri is missing")?;
    text.parse().map_err(CommandError::new)
}

fn word(state: State) -> &'static str {
    match state {
        State::Running => "running its guest",
        State::Sending => "sending its guest",
        State::Waiting => "waiting for a guest",
        State::Receiving => "receiving a guest",
        State::Undecided => "undecided",
        State::PostcopyPaused => "paused in postcopy",
        State::Gone => "without its guest, which runs at the other end",
        State::Failed => "without a guest: it was not received",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(coordinator: &Coordinator, name: &str, arguments: Value) -> Result<Value, CommandError> {
        coordinator.execute(name, &arguments).expect("a command of the end's own")
    }

    #[test]
    fn an_order_is_taken_once_and_only_where_it_means_something() {
        let (coordinator, orders) = Coordinator::new(Role::Source, "s".into());
        assert!(ask(&coordinator, "migrate-incoming", json!({ "uri": "tcp:127.0.0.1:0" })).is_err());
        let there = json!({ "uri": "tcp:127.0.0.1:9", "fresh": false });
        ask(&coordinator, "migrate", there.clone()).unwrap();
        assert!(ask(&coordinator, "migrate", there).unwrap_err().to_string().contains("sending its guest"));
        assert!(ask(&coordinator, "cont", json!({})).is_err(), "it must not run while it is sent");
        assert!(matches!(orders.try_recv(), Ok(Order::Send { fresh: false, .. })));
        coordinator.turn(State::Undecided, Some("the network was cut".into()));
        let status: Status = serde_json::from_value(ask(&coordinator, "query-status", json!({})).unwrap()).unwrap();
        assert_eq!((status.status.as_str(), status.decide.len()), ("paused", 2));
        ask(&coordinator, "cont", json!({})).unwrap();
        assert_eq!(orders.try_recv(), Ok(Order::Go));
        assert!(orders.try_recv().is_err());
    }

    #[test]
    fn a_destination_is_started_by_hand_only_if_it_is_undecided() {
        let (coordinator, orders) = Coordinator::new(Role::Destination, "d".into());
        for state in [State::Waiting, State::Receiving, State::Failed, State::PostcopyPaused] {
            coordinator.turn(state, None);
            assert!(ask(&coordinator, "cont", json!({})).is_err(), "{state:?}");
        }
        coordinator.turn(State::Undecided, None);
        ask(&coordinator, "cont", json!({})).unwrap();
        assert!(ask(&coordinator, "cont", json!({})).is_err(), "once");
        assert_eq!(orders.try_recv(), Ok(Order::Go));
    }

    #[test]
    fn what_is_missing_or_wrong_in_an_order_is_reported() {
        let (coordinator, _orders) = Coordinator::new(Role::Source, "s".into());
        for wrong in
            [json!({}), json!({ "uri": 3 }), json!({ "uri": "nonsense" }), json!({ "uri": "tcp:a:1", "resume": 1 })]
        {
            assert!(ask(&coordinator, "migrate", wrong).is_err());
        }
        assert!(coordinator.execute("query-migrate", &json!({})).is_none(), "the socket's own");
    }
}
