//! The figures of a protection that runs: for its status line, for programs that ask, and for Prometheus.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hdrhistogram::Histogram;
use limosa_console::quantity;
use limosa_control::{CommandError, Commands};
use limosa_migrate::output::OutputCounters;
use limosa_page::{PAGE_SIZE, to_nanos};
use limosa_protect::{KeptBase, KeptCheckpoint};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::gate;

/// Longest time that is told apart in percentiles, in nanoseconds: an hour.
const LONGEST: u64 = 3_600_000_000_000;

/// Shared by the thread that keeps checkpoints and those that answer.
pub(super) struct Figures {
    place: PathBuf,
    begun: Instant,
    /// Filters hold output, and do not count it.
    filters: bool,
    now: Mutex<Now>,
}

/// The state of a protection.
pub(super) struct Now {
    /// The newest checkpoint that counts.
    pub(super) newest: Option<Newest>,
    /// The last one behind the base.
    pub(super) last: Option<KeptCheckpoint>,
    pub(super) sums: Sums,
    /// In nanoseconds.
    pub(super) pauses: Histogram<u64>,
    /// In nanoseconds.
    pub(super) lags: Histogram<u64>,
}

/// A checkpoint that counts.
#[derive(Clone, Copy)]
pub(super) struct Newest {
    pub(super) number: u64,
    /// The instant of the VM's state in it.
    pub(super) instant: Instant,
}

/// The sums over all checkpoints behind a base.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sums {
    pub(super) checkpoints: u64,
    /// Pages with contents.
    pub(super) pages: u64,
    /// Those of them that had not changed.
    pub(super) unchanged: u64,
    pub(super) zero: u64,
    /// Bytes that came.
    pub(super) received: u64,
}

impl Newest {
    /// The age of the VM's state in it.
    pub(super) fn age(self) -> Duration {
        self.instant.elapsed()
    }

    /// Its instant, in seconds since 1970.
    pub(super) fn timestamp(self) -> f64 {
        let at = SystemTime::now().checked_sub(self.age()).unwrap_or(UNIX_EPOCH);
        at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
    }
}

impl Sums {
    /// Bytes of pages that were written.
    pub(super) fn written(&self) -> u64 {
        written(self.pages, self.unchanged)
    }
}

/// Bytes of `pages` without those that were not written.
pub(super) fn written(pages: u64, unchanged: u64) -> u64 {
    pages.saturating_sub(unchanged).saturating_mul(PAGE_SIZE)
}

impl Figures {
    /// The figures of a protection into this directory, or to this keeper, that begins now. Output that
    /// `filters` hold is not counted.
    pub(super) fn new(place: PathBuf, filters: bool) -> anyhow::Result<Arc<Self>> {
        let times = || Histogram::new_with_bounds(1, LONGEST, 2);
        let (pauses, lags) = (times()?, times()?);
        let now = Now { newest: None, last: None, sums: Sums::default(), pauses, lags };
        Ok(Arc::new(Self { place, begun: Instant::now(), filters, now: Mutex::new(now) }))
    }

    /// Notes a base that counts.
    pub(super) fn began(&self) {
        self.now.lock().newest = Some(Newest { number: 0, instant: Instant::now() });
    }

    /// Notes a checkpoint that counts.
    pub(super) fn kept(&self, kept: &KeptCheckpoint) {
        let mut now = self.now.lock();
        let (now, pages) = (&mut *now, &kept.stored.pages);
        let counted = Instant::now();
        let instant = counted.checked_sub(kept.lag()).unwrap_or(counted);
        now.newest = Some(Newest { number: kept.number, instant });
        let sums = &mut now.sums;
        sums.checkpoints += 1;
        sums.pages = sums.pages.saturating_add(pages.contents);
        sums.unchanged = sums.unchanged.saturating_add(pages.equal);
        sums.zero = sums.zero.saturating_add(pages.zero);
        sums.received = sums.received.saturating_add(kept.bytes);
        now.pauses.saturating_record(to_nanos(kept.pause));
        now.lags.saturating_record(to_nanos(kept.lag()));
        now.last = Some(kept.clone());
    }

    /// Whether output that is held is counted.
    pub(super) fn counts_output(&self) -> bool {
        !self.filters
    }

    /// Reads all of them at one moment.
    pub(super) fn read<T>(&self, read: impl FnOnce(&Now) -> T) -> T {
        read(&self.now.lock())
    }

    /// All of them, for programs.
    fn object(&self) -> Value {
        self.read(|now| {
            let Now { newest, last, sums, pauses, lags } = now;
            json!({
                "state": if newest.is_some() { "protected" } else { "receiving" },
                "directory": self.place.to_string_lossy(),
                "elapsed_ms": quantity::millis(self.begun.elapsed()),
                "checkpoint": newest.map(|newest| newest.number),
                "age_ms": newest.map(|newest| quantity::millis(newest.age())),
                "last": last.as_ref().map(|last| self.checkpoint(last)),
                "checkpoints": sums.checkpoints,
                "pause": percentiles(pauses),
                "lag": percentiles(lags),
                "pages": { "contents": sums.pages, "unchanged": sums.unchanged, "zero": sums.zero },
                "received_bytes": sums.received,
                "written_bytes": sums.written(),
                "output": self.output(last.as_ref().and_then(|last| last.output).as_ref()),
            })
        })
    }

    /// A checkpoint that counts, for programs.
    pub(super) fn checkpoint(&self, kept: &KeptCheckpoint) -> Value {
        let pages = &kept.stored.pages;
        json!({
            "event": "checkpoint",
            "checkpoint": kept.number,
            "pause_ms": quantity::millis(kept.pause),
            "lag_ms": quantity::millis(kept.lag()),
            "period_ms": kept.period.map(quantity::millis),
            "catch_up_ms": quantity::millis(kept.catch_up),
            "pages": { "contents": pages.contents, "unchanged": pages.equal, "zero": pages.zero },
            "received_bytes": kept.bytes,
            "written_bytes": written(pages.contents, pages.equal),
            "output": self.output(kept.output.as_ref()),
        })
    }

    /// Output that was held, for programs; its treatment where it is not counted.
    pub(super) fn output(&self, output: Option<&OutputCounters>) -> Value {
        match output {
            _ if self.filters => json!("filter"),
            Some(output) => gate::held(output),
            None => json!("free"),
        }
    }
}

impl Commands for Figures {
    fn execute(&self, name: &str, _arguments: &Value) -> Option<Result<Value, CommandError>> {
        (name == "query-protect").then(|| Ok(self.object()))
    }
}

fn percentiles(times: &Histogram<u64>) -> Value {
    let millis = |nanos| quantity::millis(Duration::from_nanos(nanos));
    json!({
        "median_ms": millis(times.value_at_quantile(0.5)),
        "p95_ms": millis(times.value_at_quantile(0.95)),
        "max_ms": millis(times.max()),
    })
}

/// A base that counts, for programs.
pub(super) fn base(base: &KeptBase) -> Value {
    json!({
        "event": "base",
        "checkpoint": 0,
        "path": base.path.to_string_lossy(),
        "received_bytes": base.bytes,
        "elapsed_ms": quantity::millis(base.elapsed),
    })
}
