//! The answers to the commands of a job.

use std::num::NonZeroU64;
use std::time::Duration;

use limosa_migrate::control::{Phase, Stop};
use limosa_page::{error_with_causes, to_millis};
use serde_json::{Value, json};

use super::state::{CommandError, Current, JobKind, Server};

/// QEMU's own limit, in milliseconds.
const DOWNTIME_LIMIT_MAX: u64 = 2_000_000;

/// Executes a command, and returns the answer to it.
pub(crate) fn answer(server: &Server, command: &Value) -> Value {
    let Some(name) = command.get("execute").and_then(Value::as_str) else {
        return error("GenericError", "expected {\"execute\": COMMAND}");
    };
    let done = json!({ "return": {} });
    if name == "qmp_capabilities" {
        return done;
    }
    let nothing = Value::Object(serde_json::Map::new());
    let own = server.commands.as_ref();
    match own.and_then(|own| own.execute(name, command.get("arguments").unwrap_or(&nothing))) {
        Some(Ok(value)) => return json!({ "return": value }),
        Some(Err(refused)) => return error("GenericError", &error_with_causes(&refused)),
        None => {}
    }
    let Some(current) = server.current() else {
        return match name {
            "query-migrate" => json!({ "return": amended(server, serde_json::Map::new()) }),
            "migrate_cancel" => done,
            "query-migrate-parameters" | "migrate-set-parameters" | "migrate-pause" => {
                error("GenericError", "no migration has begun here")
            }
            other => not_found(other),
        };
    };
    let phase = current.handle.progress.read().phase;
    match name {
        "query-migrate" => json!({ "return": query_migrate(server, &current) }),
        "query-migrate-parameters" => {
            let mut parameters =
                json!({ "max-bandwidth": current.handle.control.max_bandwidth().map_or(0, NonZeroU64::get) });
            if let (Some(limit), Some(parameters)) =
                (current.handle.control.downtime_limit(), parameters.as_object_mut())
            {
                parameters.insert("downtime-limit".into(), to_millis(limit).into());
            }
            json!({ "return": parameters })
        }
        "migrate-set-parameters" => match set_parameters(&current, command.get("arguments")) {
            Ok(()) => done,
            Err(refused) => error("GenericError", &error_with_causes(&refused)),
        },
        "migrate_cancel" => {
            if current.job != JobKind::Save && phase >= Phase::PostcopyActive {
                let why = "the guest runs already and cannot be taken back; migrate-pause breaks the transfer off \
                           recoverably";
                return error("GenericError", why);
            }
            current.handle.control.stop(Stop::Cancel);
            done
        }
        "migrate-pause" => {
            if phase != Phase::PostcopyActive {
                return error("GenericError", "only a postcopy whose guest runs can be paused");
            }
            current.handle.control.stop(Stop::Pause);
            done
        }
        other => not_found(other),
    }
}

fn set_parameters(current: &Current, arguments: Option<&Value>) -> Result<(), CommandError> {
    let control = &current.handle.control;
    let arguments = arguments.and_then(Value::as_object).ok_or("arguments are missing")?;
    let (mut bandwidth, mut downtime) = (None, None);
    for (key, value) in arguments {
        match key.as_str() {
            "max-bandwidth" => {
                bandwidth =
                    Some(value.as_u64().ok_or("max-bandwidth is a number of bytes per second, 0 for no limit")?);
            }
            "downtime-limit" if current.job == JobKind::Live => {
                let limit = value.as_u64().filter(|limit| *limit <= DOWNTIME_LIMIT_MAX);
                downtime = Some(limit.ok_or("downtime-limit is a number of milliseconds, at most 2000000")?);
            }
            other => return Err(format!("the parameter {other} cannot be changed in this job").into()),
        }
    }
    if let Some(limit) = downtime {
        control.set_downtime_limit(Duration::from_millis(limit));
    }
    if let Some(bandwidth) = bandwidth {
        control.set_max_bandwidth(NonZeroU64::new(bandwidth));
    }
    Ok(())
}

fn query_migrate(server: &Server, current: &Current) -> Value {
    let reading = current.handle.progress.read();
    let total = reading.total_pages.saturating_mul(limosa_page::PAGE_SIZE);
    let unique =
        (reading.normal_pages + reading.zero_pages + reading.hinted_pages).saturating_sub(reading.resent_pages);
    let remaining = reading.total_pages.saturating_sub(unique).saturating_mul(limosa_page::PAGE_SIZE);
    let answer = json!({
        "status": if current.handle.control.stop_requested().is_some() { "cancelling" } else { status(reading.phase) },
        "total-time": to_millis(current.begun.elapsed()),
        "ram": {
            "transferred": reading.bytes,
            "remaining": remaining,
            "total": total,
            "duplicate": reading.zero_pages,
            "normal": reading.normal_pages,
            "hinted": reading.hinted_pages,
            "normal-bytes": reading.bytes,
            "postcopy-requests": reading.requests,
            "page-size": limosa_page::PAGE_SIZE,
        },
    });
    let Value::Object(mut answer) = answer else { return answer };
    let addresses = server.addresses.lock().clone();
    if !addresses.is_empty() {
        answer.insert("socket-address".into(), addresses.into());
    }
    amended(server, answer)
}

fn amended(server: &Server, mut answer: serde_json::Map<String, Value>) -> Value {
    if let Some(own) = &server.commands {
        own.amend_query_migrate(&mut answer);
    }
    Value::Object(answer)
}

/// QEMU's name of a phase.
pub(crate) fn status(phase: Phase) -> &'static str {
    match phase {
        Phase::Setup => "setup",
        Phase::Active => "active",
        Phase::Device | Phase::Completing => "device",
        Phase::PostcopyActive => "postcopy-active",
        Phase::Colo => "colo",
        Phase::Completed => "completed",
    }
}

fn not_found(command: &str) -> Value {
    error("CommandNotFound", &format!("the command {command} has not been found"))
}

/// The answer to a command that failed.
pub(crate) fn error(class: &str, why: &str) -> Value {
    json!({ "error": { "class": class, "desc": why } })
}
