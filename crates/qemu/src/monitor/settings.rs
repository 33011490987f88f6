//! Migration capabilities and parameters, changed in a way that can be undone.
//!
//! Law: **the settings to put back are known before anything is changed.** [`Monitor::plan_settings`] only reads; what
//! it returns goes into the job's record, and only then [`Monitor::apply_settings`] changes QEMU.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{Answer, Monitor, Question, need_list, need_text};
use crate::qmp::QmpError;

/// Migration capabilities and parameters by QEMU's names.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Capabilities, for example `return-path`.
    pub capabilities: BTreeMap<String, bool>,
    /// Parameters, for example `max-bandwidth`.
    pub parameters: Map<String, Value>,
}

/// `events=on, max-bandwidth=0`; `none` if there is nothing in it.
impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on_off = |on: &bool| if *on { "on" } else { "off" };
        let capabilities = self.capabilities.iter().map(|(name, on)| format!("{name}={}", on_off(on)));
        let parameters = self.parameters.iter().map(|(name, value)| match value {
            Value::String(text) => format!("{name}={text}"),
            other => format!("{name}={other}"),
        });
        let all: Vec<_> = capabilities.chain(parameters).collect();
        if all.is_empty() { f.write_str("none") } else { f.write_str(&all.join(", ")) }
    }
}

impl Settings {
    /// Nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// With a capability on or off.
    #[must_use]
    pub fn capability(mut self, name: &str, on: bool) -> Self {
        self.capabilities.insert(name.to_owned(), on);
        self
    }

    /// With a parameter.
    #[must_use]
    pub fn parameter(mut self, name: &str, value: impl Into<Value>) -> Self {
        self.parameters.insert(name.to_owned(), value.into());
        self
    }

    /// Whether there is nothing in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.capabilities.is_empty() && self.parameters.is_empty()
    }

    /// The part of `self` that differs from `current`, among the names that `current` has; and the names that it lacks.
    fn against(&self, current: &Settings) -> (Settings, Vec<String>) {
        let mut differing = Settings::new();
        let mut unknown = Vec::new();
        for (name, on) in &self.capabilities {
            match current.capabilities.get(name) {
                None => unknown.push(name.clone()),
                Some(now) if now == on => {}
                Some(_) => drop(differing.capabilities.insert(name.clone(), *on)),
            }
        }
        for (name, value) in &self.parameters {
            match current.parameters.get(name) {
                None => unknown.push(name.clone()),
                Some(now) if now == value => {}
                Some(_) => drop(differing.parameters.insert(name.clone(), value.clone())),
            }
        }
        (differing, unknown)
    }
}

impl Settings {
    /// Returns the settings that turn these into `wish`, and those that restore them afterwards.
    #[must_use]
    pub fn change_to(&self, wish: &Settings) -> SettingChange {
        let (set, unknown) = wish.against(self);
        SettingChange { set, undo: self.of_the_names_in(wish), unknown }
    }

    /// The part of `self` whose names are in `names` too.
    fn of_the_names_in(&self, names: &Settings) -> Settings {
        let mut part = self.clone();
        part.capabilities.retain(|name, _| names.capabilities.contains_key(name));
        part.parameters.retain(|name, _| names.parameters.contains_key(name));
        part
    }
}

/// The result of [`Monitor::plan_settings`].
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SettingChange {
    /// Settings to change: the part of the wish that does not hold already.
    pub set: Settings,
    /// The present values of all that was wished for: also of what is so already, because a job may change it later on
    /// (`max-bandwidth`).
    pub undo: Settings,
    /// Wished for, but this QEMU does not know them.
    pub unknown: Vec<String>,
}

impl Monitor {
    /// All capabilities and parameters as they are.
    ///
    /// # Errors
    /// The connection's.
    pub fn settings(&self) -> Result<Settings, QmpError> {
        let [capabilities, parameters] = self.qmp().execute_all(questions())?;
        answers(capabilities, parameters)
    }

    /// Compares a wish with what is: what has to be set, and what to put back afterwards. Changes nothing.
    ///
    /// # Errors
    /// The connection's.
    pub fn plan_settings(&self, wish: &Settings) -> Result<SettingChange, QmpError> {
        Ok(self.settings()?.change_to(wish))
    }

    /// Sets capabilities and parameters: first what goes off, then the parameters, then what comes on, because QEMU
    /// checks each list against what is set at that moment (facts found with QEMU 10.0.2: `mapped-ram` excludes
    /// `xbzrle`, and no parameter at all can be set while it stands beside a `multifd-compression`). QEMU takes each
    /// list as a whole or not at all.
    ///
    /// # Errors
    /// QEMU's, for example while a migration runs, or for a combination that it excludes.
    pub fn apply_settings(&self, settings: &Settings) -> Result<(), QmpError> {
        self.switch(settings, false)?;
        if !settings.parameters.is_empty() {
            self.order("migrate-set-parameters", Value::Object(settings.parameters.clone()))?;
        }
        self.switch(settings, true)
    }

    /// Switches those capabilities on or off.
    fn switch(&self, settings: &Settings, on: bool) -> Result<(), QmpError> {
        let wanted = settings.capabilities.iter().filter(|(_, state)| **state == on);
        let list: Vec<Value> = wanted.map(|(name, state)| json!({ "capability": name, "state": state })).collect();
        if list.is_empty() {
            return Ok(());
        }
        self.order("migrate-set-capabilities", json!({ "capabilities": list }))
    }

    /// Puts settings back: sets those that are not so already and that this QEMU knows. The rest is tried even if
    /// something is refused.
    ///
    /// # Errors
    /// QEMU's first.
    pub fn restore_settings(&self, undo: &Settings) -> Result<(), QmpError> {
        if undo.is_empty() {
            return Ok(());
        }
        let undo = undo.against(&self.settings()?).0;
        let off = self.switch(&undo, false);
        let parameters =
            self.apply_settings(&Settings { capabilities: BTreeMap::new(), parameters: undo.parameters.clone() });
        let on = self.switch(&undo, true);
        off.and(parameters).and(on)
    }
}

const CAPABILITIES: &str = "query-migrate-capabilities";
const PARAMETERS: &str = "query-migrate-parameters";

pub(super) fn questions() -> [Question; 2] {
    [(CAPABILITIES, Value::Null), (PARAMETERS, Value::Null)]
}

pub(super) fn answers(capabilities: Answer, parameters: Answer) -> Result<Settings, QmpError> {
    let mut settings = Settings::new();
    let answer = capabilities?;
    for entry in need_list(CAPABILITIES, &answer)? {
        let name = need_text(CAPABILITIES, entry, "capability")?;
        let on = entry.get("state").and_then(Value::as_bool);
        let on = on.ok_or_else(|| QmpError::unexpected(CAPABILITIES, "a 'state'", entry))?;
        settings.capabilities.insert(name.to_owned(), on);
    }
    settings.parameters = match parameters? {
        Value::Object(map) => map,
        other => return Err(QmpError::unexpected(PARAMETERS, "an object", &other)),
    };
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_shown_by_qemus_names() {
        let settings = Settings::new().capability("events", true).capability("multifd", false);
        let settings = settings.parameter("max-bandwidth", 5).parameter("mode", "normal");
        assert_eq!(settings.to_string(), "events=on, multifd=off, max-bandwidth=5, mode=normal");
        assert_eq!(Settings::new().to_string(), "none");
    }

    #[test]
    fn only_what_differs_is_set_and_unknown_names_are_reported() {
        let current =
            Settings::new().capability("events", true).capability("multifd", false).parameter("max-bandwidth", 5);
        let wish = Settings::new()
            .capability("events", true)
            .capability("multifd", true)
            .capability("mapped-ram", true)
            .parameter("max-bandwidth", 0)
            .parameter("direct-io", true);
        let (set, unknown) = wish.against(&current);
        assert_eq!(set, Settings::new().capability("multifd", true).parameter("max-bandwidth", 0));
        assert_eq!(unknown, ["mapped-ram", "direct-io"]);
        assert_eq!(current.of_the_names_in(&wish), current, "what is so already is put back too: it may change");
    }
}
