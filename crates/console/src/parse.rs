//! Sizes, rates and times as they are written on the command line.

use std::num::NonZeroU64;
use std::time::Duration;

/// A value on the command line that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a {kind}: write {expected}")]
pub struct ParseError {
    /// The text.
    text: String,
    /// The kind of value that was expected.
    kind: &'static str,
    /// How such a value is written.
    expected: &'static str,
}

impl ParseError {
    /// `text` is not a `kind`, which is written as `expected`.
    #[must_use]
    pub fn new(text: &str, kind: &'static str, expected: &'static str) -> Self {
        Self { text: text.to_owned(), kind, expected }
    }
}

/// Reads a size: `4K`, `64M`, `8G`, `1T` or plain bytes.
///
/// # Errors
/// The text is not a size, or is 0.
pub fn size(text: &str) -> Result<u64, ParseError> {
    bytes(text).ok_or_else(|| ParseError::new(text, "size", "4K, 64M, 8G, 1T or a number of bytes"))
}

fn bytes(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().last()? {
        (at, 'K' | 'k') => (text.get(..at)?, 10),
        (at, 'M' | 'm') => (text.get(..at)?, 20),
        (at, 'G' | 'g') => (text.get(..at)?, 30),
        (at, 'T' | 't') => (text.get(..at)?, 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().ok()?;
    number.checked_mul(1 << shift).filter(|size| *size > 0)
}

/// Reads `off`, `auto`, or the smallest size from which something is done.
///
/// # Errors
/// The text has none of these forms.
pub fn threshold<T>(text: &str, off: T, auto: T, from: impl FnOnce(u64) -> T) -> Result<T, ParseError> {
    match text {
        "off" => Ok(off),
        "auto" => Ok(auto),
        _ => bytes(text)
            .map(from)
            .ok_or_else(|| ParseError::new(text, "size", "4K, 64M, 8G, 1T or a number of bytes; or off or auto")),
    }
}

/// Reads a rate in bytes per second, written as a size.
///
/// # Errors
/// The text is not a rate, or is 0.
pub fn rate(text: &str) -> Result<NonZeroU64, ParseError> {
    let rate = bytes(text).and_then(NonZeroU64::new);
    rate.ok_or_else(|| ParseError::new(text, "rate", "100M for 100 MiB per second"))
}

/// Reads a time: `300ms`, `30s`, `5m` or plain seconds.
///
/// # Errors
/// The text is not a time, or is 0.
pub fn time(text: &str) -> Result<Duration, ParseError> {
    let (digits, millis) = if let Some(digits) = text.strip_suffix("ms") {
        (digits, 1)
    } else if let Some(digits) = text.strip_suffix('m') {
        (digits, 60_000)
    } else {
        (text.strip_suffix('s').unwrap_or(text), 1000)
    };
    let time = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(millis)).filter(|millis| *millis > 0);
    time.map(Duration::from_millis).ok_or_else(|| ParseError::new(text, "time", "300ms, 30s or 5m"))
}

/// Reads a time as [`time`] does, but for plain seconds: where times of milliseconds are usual, a number alone may mean
/// either.
///
/// # Errors
/// The text is not a time, has no unit, or is 0.
pub fn time_with_unit(text: &str) -> Result<Duration, ParseError> {
    match text.parse::<u64>() {
        Ok(_) => Err(ParseError::new(text, "time with its unit", "100ms, 2s or 5m")),
        Err(_) => time(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threshold_is_off_automatic_or_a_size() {
        let read = |text| threshold(text, None, Some(128), Some);
        assert_eq!(read("off"), Ok(None));
        assert_eq!(read("auto"), Ok(Some(128)));
        assert_eq!(read("1M"), Ok(Some(1 << 20)));
        assert!(read("on").unwrap_err().to_string().contains("or off or auto"));
    }

    #[test]
    fn sizes_have_binary_suffixes_and_never_overflow() {
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("1T"), Ok(1 << 40));
        assert_eq!(size("17"), Ok(17));
        for wrong in ["", "K", "0", "-1", "4KB", "99999999999T", "1.5G", "é"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_seconds_unless_they_say_otherwise() {
        assert_eq!(time("300ms"), Ok(Duration::from_millis(300)));
        assert_eq!(time("5m"), Ok(Duration::from_secs(300)));
        assert_eq!(time("30s"), time("30"));
        assert!(time("0").is_err() && time("m").is_err());
        assert!(time_with_unit("30").is_err() && time_with_unit("0ms").is_err());
        assert_eq!(time_with_unit("30s"), time("30"));
    }
}
