//! Options whose values are names.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};

/// A parser of the values of a library's enumeration, each with its name and its line in `--help` (or none). Libraries
/// do not depend on clap, so the values of an option are listed where the option is.
pub fn named_values<T, const N: usize>(values: [(T, &'static str, &'static str); N]) -> impl TypedValueParser<Value = T>
where
    T: Copy + Send + Sync + 'static,
{
    let names = values.map(|(_, name, help)| {
        let value = PossibleValue::new(name);
        if help.is_empty() { value } else { value.help(help) }
    });
    PossibleValuesParser::new(names).try_map(move |name| {
        let found = values.iter().find(|(_, known, _)| *known == name).map(|(value, _, _)| *value);
        // The parser before has refused every other name.
        found.ok_or_else(|| format!("{name:?} is not a known value"))
    })
}

/// `on` and `off`.
pub fn on_off_parser() -> impl TypedValueParser<Value = bool> {
    named_values([(true, "on", ""), (false, "off", "")])
}

#[cfg(test)]
mod tests {
    use clap::{Arg, Command};

    use super::*;

    #[test]
    fn a_value_is_found_by_its_name_and_any_other_name_is_refused() {
        let command =
            || Command::new("x").arg(Arg::new("way").value_parser(named_values([(1, "one", "First"), (2, "two", "")])));
        let found =
            |name: &str| command().try_get_matches_from(["x", name]).map(|found| *found.get_one::<i32>("way").unwrap());
        assert_eq!(found("two").unwrap(), 2);
        let error = found("three").unwrap_err().to_string();
        assert!(error.contains("[possible values: one, two]"), "{error}");
    }
}
