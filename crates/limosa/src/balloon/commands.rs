//! Commands of the control socket.
//!
//! `balloon` and `query-balloon` are QEMU's; the others are limosa's own. None of them waits for the guest: a request
//! that takes time is begun, and its result is queried later.

use std::sync::Arc;

use limosa_balloon::{Balloon, Statistics, StatisticsError};
use limosa_control::{CommandError, Commands};
use limosa_page::to_millis;
use serde_json::{Map, Value, json};

use super::Ending;
use super::job::{Jobs, Wanted};
use crate::remedy;

/// The commands of a balloon.
pub(super) struct BalloonCommands {
    balloon: Arc<Balloon>,
    jobs: Arc<Jobs>,
    ending: Arc<Ending>,
}

impl BalloonCommands {
    pub(super) fn new(balloon: Arc<Balloon>, jobs: Arc<Jobs>, ending: Arc<Ending>) -> Self {
        Self { balloon, jobs, ending }
    }

    fn query_device(&self) -> Value {
        let size = self.balloon.size();
        json!({
            "ram": size.ram,
            "target": size.target,
            "actual": size.actual,
            "driver": self.balloon.has_driver(),
            "features": format!("{:?}", self.balloon.acked_features()),
            "reporting": self.balloon.reporting(),
            "counters": counters(&self.balloon),
        })
    }

    fn query_statistics(&self, arguments: &Value) -> Result<Value, CommandError> {
        // First what there is: the answer to the request has another sequence then, however fast it comes.
        let last = self.balloon.statistics();
        if flag(arguments, "refresh")?.unwrap_or(false) {
            self.balloon.request_statistics().map_err(remedy::with_statistics)?;
        }
        Ok(last.map_or_else(|| json!({ "sequence": 0 }), |statistics| statistics_object(&statistics)))
    }

    fn begin_list(&self, arguments: &Value) -> Result<Value, CommandError> {
        let reserve = match arguments.get("reserve") {
            None => None,
            Some(reserve) => Some(reserve.as_u64().ok_or("reserve must be a number of bytes")?),
        };
        let squeeze = flag(arguments, "squeeze")?.unwrap_or(false);
        self.jobs.begin(&self.balloon, Wanted { squeeze, reserve })?;
        Ok(json!({}))
    }
}

impl Commands for BalloonCommands {
    fn execute(&self, name: &str, arguments: &Value) -> Option<Result<Value, CommandError>> {
        Some(match name {
            "balloon" => {
                let value = arguments.get("value").and_then(Value::as_u64);
                let set = value
                    .ok_or_else(|| CommandError::from("value is missing: the guest's memory in bytes"))
                    .and_then(|value| self.jobs.set_target(&self.balloon, value).map_err(CommandError::new));
                set.map(|()| json!({}))
            }
            // As in QEMU: a balloon without a driver is an error.
            "query-balloon" if !self.balloon.has_driver() => {
                Err(remedy::with_statistics(StatisticsError::NoDriver).into())
            }
            "query-balloon" => Ok(json!({ "actual": self.balloon.size().actual })),
            "query-balloon-device" => Ok(self.query_device()),
            "query-balloon-stats" => self.query_statistics(arguments),
            "balloon-hint-start" => self.begin_list(arguments),
            "balloon-hint-stop" => {
                self.jobs.give_up(&self.balloon);
                Ok(json!({}))
            }
            "query-balloon-hint" => Ok(self.jobs.read(&self.balloon)),
            "balloon-reporting" => match flag(arguments, "enable") {
                Ok(Some(on)) => {
                    self.balloon.set_reporting(on);
                    Ok(json!({}))
                }
                Ok(None) => Err("enable is missing: must be true or false".into()),
                Err(why) => Err(why.into()),
            },
            "quit" => {
                self.ending.end();
                Ok(json!({}))
            }
            _ => return None,
        })
    }
}

fn flag(arguments: &Value, name: &str) -> Result<Option<bool>, String> {
    match arguments.get(name) {
        None => Ok(None),
        Some(Value::Bool(on)) => Ok(Some(*on)),
        Some(other) => Err(format!("{name} must be true or false, not {other}")),
    }
}

/// Returns the counters of what was done and refused, for programs.
pub(super) fn counters(balloon: &Balloon) -> Value {
    let counters = balloon.counters();
    Value::Object(counters.iter().map(|(name, number)| (name.replace('_', "-"), number.into())).collect())
}

fn statistics_object(statistics: &Statistics) -> Value {
    let values: Map<_, _> = statistics.iter().map(|(name, value, _)| (name.to_owned(), value.into())).collect();
    json!({
        "sequence": statistics.sequence,
        "age-ms": to_millis(statistics.received_at.elapsed()),
        "stats": values,
    })
}
