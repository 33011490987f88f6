//! The end that the guest leaves.

use parking_lot::Mutex;

use limosa_channel::{Channel, ChannelError, Options, Tls, Uri, ZeroCopy};
use limosa_console::error_line;
use limosa_migrate::control::Control;
use limosa_migrate::live::{OpenPreempt, PostcopyPausedSource, Undecided};
use limosa_migrate::multifd::MultifdSourceOptions;
use limosa_migrate::stats::{LiveStats, RoundKind, RoundReport};
use limosa_migrate::{LiveOutcome, LiveSource, MigrateError};
use limosa_page::to_millis;
use serde_json::{Value, json};

use super::orders::{Coordinator, Order};
use super::vm::Vm;
use super::{End, Migration, REACH, tell};
use crate::report::{Calls, Hints, PostcopySent, Round, SourceReport, millis};
use crate::settings::Postcopy;
use crate::state::State;

impl End {
    /// Sends the guest there. Returns whether this end continues.
    pub(super) fn send(&self, uri: &Uri, fresh: bool) -> bool {
        let migration = self.begin();
        let (coordinator, seen) = (&*self.coordinator, Mutex::new(0_u32));
        let rounds = match self.settings.postcopy {
            Postcopy::AfterRounds(rounds) => Some((rounds, &migration.handle.control)),
            _ => None,
        };
        let source = match self.prepare(uri, &migration) {
            Ok(prepared) => prepared,
            Err(why) => {
                self.resumed(&migration, &LiveStats::default(), &why);
                return true;
            }
        };
        let outcome =
            source.destination_zeroed(fresh).on_round(move |round| tell_round(coordinator, round, rounds, &seen)).run();
        self.left(&migration, outcome)
    }

    /// Acts on the outcome of the migration. Returns whether this end continues.
    fn left(&self, migration: &Migration, outcome: LiveOutcome<'_, Vm>) -> bool {
        match outcome {
            LiveOutcome::Completed(stats) => {
                self.report_source(migration, "completed", &stats, None);
                self.coordinator.turn(State::Gone, None);
                true
            }
            LiveOutcome::Resumed { error, stats, .. } => {
                self.resumed(migration, &stats, &with_remedy(&error));
                true
            }
            LiveOutcome::ResumeFailed { error, resume, stats } => {
                let why = format!("{}; and the guest cannot continue: {}", error_line(&error), error_line(&*resume));
                self.report_source(migration, "failed", &stats, Some(why.clone()));
                self.coordinator.turn(State::Failed, Some(why));
                true
            }
            LiveOutcome::Undecided(undecided) => self.undecided(migration, undecided),
            LiveOutcome::PostcopyPaused(broken) => {
                let why = error_line(broken.why());
                self.recover_source(migration, broken, why)
            }
        }
    }

    /// The last byte was sent, and no answer has arrived since. Returns whether this end continues.
    fn undecided(&self, migration: &Migration, undecided: Undecided<'_, Vm>) -> bool {
        let why = error_line(undecided.why());
        self.report_source(migration, "undecided", undecided.stats(), Some(why.clone()));
        self.coordinator.recoverable(undecided.is_postcopy_paused());
        match self.ask(State::Undecided, &why) {
            Order::Go => {
                match undecided.resume() {
                    Ok(_) => self.coordinator.turn(State::Running, None),
                    Err(error) => self.coordinator.turn(State::Failed, Some(error_line(&*error))),
                }
                true
            }
            Order::Recover(uri) => match undecided.into_postcopy_paused() {
                Some(broken) => self.go_on(migration, Box::new(broken), &uri),
                // The coordinator has taken the order because it was.
                None => false,
            },
            _ => {
                undecided.discard();
                false
            }
        }
    }

    /// The guest runs at the destination and waits for pages that are here. Returns whether this end continues.
    fn recover_source(&self, migration: &Migration, broken: Box<PostcopyPausedSource<'_, Vm>>, why: String) -> bool {
        self.report_source(migration, "postcopy-paused", broken.stats(), Some(why.clone()));
        match self.ask(State::PostcopyPaused, &why) {
            Order::Recover(uri) => self.go_on(migration, broken, &uri),
            Order::Go => {
                // By hand: the operator who ordered this knows that the destination has ended.
                match broken.vm().run() {
                    Ok(()) => self.coordinator.turn(State::Running, None),
                    Err(error) => self.coordinator.turn(State::Failed, Some(error_line(&*error))),
                }
                true
            }
            _ => false,
        }
    }

    /// Continues a postcopy over another connection. Returns whether this end continues.
    fn go_on(&self, before: &Migration, broken: Box<PostcopyPausedSource<'_, Vm>>, uri: &Uri) -> bool {
        let again = self.begin_again(before);
        match self.connect(uri) {
            Ok(channel) => {
                let preempt = self.settings.preempt.then(|| self.preempt_to(uri));
                let outcome = broken.recover(channel, preempt, &again.handle);
                self.left(&again, outcome)
            }
            Err(error) => self.recover_source(&again, broken, error_line(&error)),
        }
    }

    /// Reaches the destination, on as many channels as it expects.
    fn prepare<'a>(&'a self, uri: &Uri, migration: &'a Migration) -> Result<LiveSource<'a, 'a, Vm>, String> {
        let logs = self.vm.logs().map_err(|error| error_line(&error))?;
        // The main one first: an end that cannot distinguish them otherwise uses their order.
        let main = self.connect(uri).map_err(|error| error_line(&error))?;
        let zero_copy = self.settings.zero_copy;
        // Over TLS it has shaken hands then; the others do so on their own threads.
        let tls = self.tls.clone().map(Tls::with_deferred_handshake);
        let multifd_channels = (0..self.settings.channels).map(|_| connect(uri, zero_copy, tls.clone()));
        let multifd_channels = multifd_channels.collect::<Result<Vec<_>, _>>();
        let multifd_channels = multifd_channels.map_err(|error| error_line(&error))?;
        let multifd =
            MultifdSourceOptions { compression: self.settings.compression, ..MultifdSourceOptions::default() };
        let source = LiveSource::new(&self.vm, logs, main, &migration.handle)
            .options(self.settings.params())
            .shared_memory(self.settings.shared_memory());
        let source = source.channels(multifd_channels, multifd).map_err(|error| error_line(&error))?;
        let source = source.postcopy(match self.settings.postcopy {
            Postcopy::Off => limosa_migrate::live::PostcopyMode::Off,
            Postcopy::AfterRounds(_) => limosa_migrate::live::PostcopyMode::Allowed,
            Postcopy::AtOnce => limosa_migrate::live::PostcopyMode::AtOnce,
        });
        let source = match self.vm.free_pages() {
            Some(from) => source.hint_free_pages(from),
            None => source,
        };
        Ok(if self.settings.preempt { source.preempt(self.preempt_to(uri)) } else { source })
    }

    /// The main channel.
    fn connect(&self, uri: &Uri) -> Result<Channel, ChannelError> {
        connect(uri, ZeroCopy::Off, self.tls.clone())
    }

    /// The channel of requested pages: the destination takes it when it has the package, which comes behind this.
    fn preempt_to(&self, uri: &Uri) -> OpenPreempt<'static> {
        let (uri, tls) = (uri.clone(), self.tls.clone().map(Tls::with_deferred_handshake));
        Box::new(move || connect(&uri, ZeroCopy::Off, tls))
    }

    /// The guest never left.
    fn resumed(&self, migration: &Migration, stats: &LiveStats, why: &str) {
        self.report_source(migration, "resumed", stats, Some(why.to_owned()));
        tell(&format!("source: the migration failed, and the guest continues here: {why}"));
        self.coordinator.turn(State::Running, Some(why.to_owned()));
    }

    /// Makes the report of a migration that is over.
    fn report_source(&self, migration: &Migration, outcome: &str, stats: &LiveStats, error: Option<String>) {
        let mut channels = Calls::default();
        stats.channels.iter().chain([&stats.main]).for_each(|counters| channels.add(counters));
        let report = SourceReport {
            outcome: outcome.to_owned(),
            error,
            rounds: stats.rounds.iter().map(round).collect(),
            total_ms: millis(stats.total_time),
            downtime_ms: millis(stats.downtime),
            expected_downtime_ms: stats.expected_downtime.map(millis),
            channels,
            cpu_ms: migration.cpu.since_ms(),
            postcopy: stats.postcopy.as_ref().map(|sent| PostcopySent {
                pages: sent.normal_pages.saturating_add(sent.zero_pages),
                requested: sent.requests,
                took_ms: millis(sent.elapsed),
                begin_ms: millis(stats.total_time.saturating_sub(sent.elapsed)),
            }),
            hints: stats.hints.as_ref().map(|hints| Hints {
                lists: hints.lists,
                complete: hints.complete,
                list_ms: hints.list_took.map(millis),
                ranges: hints.ranges,
                late: hints.late,
                refused: hints.refused.clone(),
            }),
        };
        self.coordinator
            .tell("status", if outcome == "completed" { "completed".into() } else { Value::from("failed") });
        self.coordinator.report(serde_json::to_value(report).unwrap_or(Value::Null));
    }
}

/// The words of an error, and what can be done about it.
fn with_remedy(error: &MigrateError) -> String {
    match error {
        MigrateError::NoConvergence(_) => format!(
            "{error}; allow more downtime or bandwidth, slow the vCPUs down (auto-converge), or switch to postcopy"
        ),
        _ => error_line(error),
    }
}

/// Adds a round to the answer of `query-migrate`, and starts postcopy after the number of rounds that was set.
fn tell_round(coordinator: &Coordinator, round: &RoundReport, switch: Option<(u32, &Control)>, rounds: &Mutex<u32>) {
    let mut seen = rounds.lock();
    *seen = seen.saturating_add(1);
    coordinator.tell("dirty-sync-count", json!(*seen));
    if let Some((_, control)) = switch.filter(|(wanted, _)| *seen >= *wanted) {
        control.start_postcopy();
    }
    drop(seen);
    coordinator.tell("dirty-pages-rate", json!(round.dirty_rate() / limosa_page::PAGE_SIZE));
    if let Some(expected) = round.expected_downtime {
        coordinator.tell("expected-downtime", json!(to_millis(expected)));
    }
}

fn connect(uri: &Uri, zero_copy: ZeroCopy, tls: Option<Tls>) -> Result<Channel, ChannelError> {
    Channel::connect(uri, &Options { connect_timeout: Some(REACH), zero_copy, tls, ..Options::default() })
}

fn round(round: &RoundReport) -> Round {
    Round {
        number: round.number.saturating_add(1),
        begin_ms: millis(round.start_time),
        took_ms: millis(round.duration),
        pages: round.pages,
        normal: round.normal,
        zero: round.zero,
        left_out: round.left_out,
        hinted: round.hinted,
        holes: round.holes,
        bytes: round.bytes,
        dirty_rate: round.dirty_rate().saturating_mul(limosa_page::PAGE_SIZE),
        rest: round.rest,
        bandwidth: round.bandwidth,
        expected_downtime_ms: round.expected_downtime.map(millis),
        last: round.kind == RoundKind::Last,
    }
}
