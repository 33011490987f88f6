//! The end that the guest comes to.

use std::time::Duration;

use limosa_channel::{Acceptor, Channel, Listener, Options, Uri};
use limosa_console::error_line;
use limosa_migrate::control::Control;
use limosa_migrate::live::{AcceptPreempt, LiveDestinationOptions, PostcopyPaused, TimeoutStrategy};
use limosa_migrate::multifd::{MultifdAccept, MultifdAcceptOptions, MultifdChannels, MultifdOptions};
use limosa_migrate::stats::{IncomingStats, PostcopyIncomingStats};
use limosa_migrate::{IncomingOutcome, LiveDestination};
use serde_json::Value;

use super::orders::Order;
use super::vm::Vm;
use super::{End, Migration, REACH, tell};
use crate::report::{Calls, DestinationReport, FaultLatency};
use crate::settings::Postcopy;
use crate::state::State;

/// Time limit of one wait for a connection: the end may have been discarded.
const TICK: Duration = Duration::from_millis(10);

impl End {
    /// Listens there, and receives the guest. Returns whether this end continues.
    pub(super) fn receive(&self, uri: &Uri) -> bool {
        let migration = self.begin();
        let (listener, set) = match self.accept(uri, self.settings.channels, &migration.handle.control) {
            Ok(accepted) => accepted,
            Err(why) => {
                self.failed(&migration, &why);
                return true;
            }
        };
        let options = LiveDestinationOptions {
            answer_timeout: Some(Duration::from_millis(self.settings.answer_timeout_ms)),
            postcopy: self.may_postcopy(),
            shared_memory: self.settings.shared_memory(),
            populate: self.settings.populate,
            ..LiveDestinationOptions::default()
        };
        let multifd = MultifdOptions { compression: self.settings.compression };
        let mut destination =
            LiveDestination::new(&self.vm, set.main, &migration.handle).options(options).channels(set.multifd, multifd);
        if self.settings.preempt {
            destination = destination.preempt(preempt(&listener));
        }
        self.came_to(&migration, destination.run())
    }

    /// Whether the guest may run here before its memory is here.
    fn may_postcopy(&self) -> bool {
        self.settings.postcopy != Postcopy::Off || self.settings.give_up == TimeoutStrategy::Postcopy
    }

    /// Acts on the outcome of the migration. Returns whether this end continues.
    fn came_to(&self, migration: &Migration, outcome: IncomingOutcome<'_, Vm>) -> bool {
        match outcome {
            IncomingOutcome::Running(stats) => {
                self.arrived(migration, &stats);
                true
            }
            IncomingOutcome::Failed(error) => {
                self.failed(migration, &error_line(&error));
                true
            }
            IncomingOutcome::Undecided(arrival) => {
                let why = error_line(arrival.why());
                self.report_destination(migration, "undecided", None, Some(why.clone()));
                if self.ask(State::Undecided, &why) != Order::Go {
                    arrival.discard();
                    return false;
                }
                match arrival.start() {
                    Ok(()) => self.coordinator.turn(State::Running, None),
                    Err(error) => self.coordinator.turn(State::Failed, Some(error_line(&*error))),
                }
                true
            }
            IncomingOutcome::PostcopyPaused(paused) => self.recover(migration, paused),
        }
    }

    /// The guest runs here and waits for its pages, until the source comes back. Returns whether this end continues.
    fn recover(&self, migration: &Migration, paused: PostcopyPaused<'_, Vm>) -> bool {
        let mut why = format!("{}; {} pages are missing", error_line(paused.why()), paused.missing_pages());
        self.report_destination(migration, "postcopy-paused", None, Some(why.clone()));
        loop {
            let Order::Recover(uri) = self.ask(State::PostcopyPaused, &why) else {
                paused.discard();
                return false;
            };
            let again = self.begin_again(migration);
            match self.accept(&uri, 0, &again.handle.control) {
                Ok((listener, set)) => {
                    let accept = self.settings.preempt.then(|| preempt(&listener));
                    return self.came_to(&again, paused.recover(set.main, accept, &again.handle));
                }
                Err(error) => why = error,
            }
        }
    }

    /// Waits for the source, with this number of multifd channels.
    fn accept(&self, uri: &Uri, channels: u8, control: &Control) -> Result<(Listener, MultifdChannels), String> {
        let accepted = self.listen(uri, channels, control);
        // Before the next one is asked for: an old address would be taken for the new one.
        self.socket.clear_listen_address();
        accepted
    }

    fn listen(&self, uri: &Uri, channels: u8, control: &Control) -> Result<(Listener, MultifdChannels), String> {
        let listener = Listener::bind(uri, &Options { tls: self.tls.clone(), ..Options::default() })
            .map_err(|error| error_line(&error))?;
        self.socket.set_listen_address(listener.local_uri());
        if channels == 0 {
            let main = wait(&listener, control)?;
            return Ok((listener, MultifdChannels { main, multifd: Vec::new() }));
        }
        let options = MultifdAcceptOptions { channels, timeout: REACH, main_first: false };
        let mut gathering = MultifdAccept::new(&listener, options).on_refusal(|why| turned_away(&error_line(why)));
        let set = loop {
            control.check().map_err(|error| error_line(&error))?;
            if let Some(set) = gathering.poll(TICK).map_err(|error| error_line(&error))? {
                break set;
            }
        };
        drop(gathering);
        Ok((listener, set))
    }

    fn arrived(&self, migration: &Migration, stats: &IncomingStats) {
        let unheard = stats.acknowledge_error.as_ref().map(|error| {
            let why = format!("the guest runs here, but the source may not have been notified: {}", error_line(error));
            tell(&format!("destination: {why}\n  At the source: limosa-demo discard --control <its socket>"));
            why
        });
        self.report_destination(migration, "running", Some(stats), unheard.clone());
        self.coordinator.turn(State::Running, unheard);
    }

    fn failed(&self, migration: &Migration, why: &str) {
        self.report_destination(migration, "failed", None, Some(why.to_owned()));
        tell(&format!("destination: the guest was not received, and stays at the source: {why}"));
        self.coordinator.turn(State::Failed, Some(why.to_owned()));
    }

    /// Makes the report of a migration that is over.
    fn report_destination(
        &self,
        migration: &Migration,
        outcome: &str,
        stats: Option<&IncomingStats>,
        error: Option<String>,
    ) {
        let received = stats.map(|stats| &stats.received);
        let postcopy = stats.and_then(|stats| stats.postcopy.as_deref());
        let mut channels = Calls::default();
        received.iter().for_each(|received| channels.add(&received.channel));
        let report = DestinationReport {
            outcome: outcome.to_owned(),
            error,
            normal: received.map_or(0, |received| received.normal_pages) + postcopy.map_or(0, |post| post.normal_pages),
            zero: received.map_or(0, |received| received.zero_pages) + postcopy.map_or(0, |post| post.zero_pages),
            channels,
            cpu_ms: migration.cpu.since_ms(),
            faults: postcopy.map(latency),
        };
        self.coordinator.tell("status", if outcome == "running" { "completed".into() } else { Value::from("failed") });
        self.coordinator.report(serde_json::to_value(report).unwrap_or(Value::Null));
    }
}

/// Waits for the main channel. Over TLS who does not come through the handshake is not taken for it.
fn wait(listener: &Listener, control: &Control) -> Result<Channel, String> {
    let mut acceptor = Acceptor::new(listener).on_refusal(turned_away);
    loop {
        control.check().map_err(|error| error_line(&error))?;
        if let Some(channel) = acceptor.poll(TICK).map_err(|error| error_line(&error))? {
            return Ok(channel);
        }
    }
}

/// Waits for the channel of requested pages, likewise: it says nothing until a page is asked for.
fn preempt(listener: &Listener) -> AcceptPreempt<'_> {
    let mut acceptor = Acceptor::new(listener).on_refusal(turned_away);
    Box::new(move |wait| acceptor.poll(wait))
}

fn turned_away(why: &str) {
    tell(&format!("destination: a connection was refused: {why}"));
}

fn latency(stats: &PostcopyIncomingStats) -> FaultLatency {
    let micros = |nanos: u64| Duration::from_nanos(nanos).as_secs_f64() * 1e6;
    let histogram = &stats.fault_latency;
    FaultLatency {
        faults: stats.faults,
        requests: stats.requests,
        median_us: micros(histogram.value_at_quantile(0.5)),
        p99_us: micros(histogram.value_at_quantile(0.99)),
        longest_us: micros(histogram.max()),
    }
}
