//! Settings and credentials of stores, under the names that the clouds' own tools give them.

use std::collections::BTreeMap;
use std::fmt;

/// The beginnings of names that are taken from a process's environment.
const PREFIXES: [&str; 3] = ["AWS_", "AZURE_", "GOOGLE_"];

/// Further names.
const NAMES: [&str; 4] = ["HOME", "STORAGE_EMULATOR_HOST", "MSI_ENDPOINT", "IDENTITY_ENDPOINT"];

/// Settings and credentials of stores: the variables of the clouds' own tools. Its `Debug` shows no values.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Environment(BTreeMap<String, String>);

impl Environment {
    /// No settings.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// The environment of this process: `AWS_*`, `AZURE_*`, `GOOGLE_*` and a few others.
    #[must_use]
    pub fn of_process() -> Self {
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        let is_wanted = |name: &str| NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix));
        Self(std::env::vars_os().filter_map(text).filter(|(name, _)| is_wanted(name)).collect())
    }

    /// Sets a variable.
    #[must_use]
    pub fn with(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.0.insert(name.into(), value.into());
        self
    }

    /// Returns the value of a variable that is not empty.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Whether a variable is set to something that means yes.
    pub(super) fn is_true(&self, name: &str) -> bool {
        self.get(name).is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes"))
    }

    /// The variables whose names begin so, with values.
    pub(super) fn with_prefix<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let pairs = self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        pairs.filter(move |(name, value)| name.starts_with(prefix) && !value.is_empty())
    }
}

impl fmt::Debug for Environment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_is_shown() {
        let environment = Environment::empty().with("AWS_SECRET_ACCESS_KEY", "hunter2").with("AWS_EMPTY", "");
        assert_eq!(format!("{environment:?}"), r#"{"AWS_EMPTY", "AWS_SECRET_ACCESS_KEY"}"#);
        assert_eq!((environment.get("AWS_EMPTY"), environment.with_prefix("AWS_").count()), (None, 1));
    }
}
