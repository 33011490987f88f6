//! Sizes, rates and times as they are written on the command line.

use std::num::NonZeroU64;
use std::time::Duration;

/// `4K`, `64M`, `8G`, `1T` or plain bytes.
///
/// # Errors
/// What was expected instead.
pub fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a size: write 4K, 64M, 8G, 1T or a number of bytes");
    let (digits, shift) = match text.char_indices().last().ok_or_else(wrong)? {
        (at, 'K' | 'k') => (text.get(..at).ok_or_else(wrong)?, 10),
        (at, 'M' | 'm') => (text.get(..at).ok_or_else(wrong)?, 20),
        (at, 'G' | 'g') => (text.get(..at).ok_or_else(wrong)?, 30),
        (at, 'T' | 't') => (text.get(..at).ok_or_else(wrong)?, 40),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|size| *size > 0).ok_or_else(wrong)
}

/// `off`, `auto`, or the size from which on something is done.
///
/// # Errors
/// What was expected instead.
pub fn threshold<T>(text: &str, off: T, auto: T, from: impl FnOnce(u64) -> T) -> Result<T, String> {
    match text {
        "off" => Ok(off),
        "auto" => Ok(auto),
        _ => size(text).map(from).map_err(|why| format!("{why}; or off or auto")),
    }
}

/// `100M`: bytes a second.
///
/// # Errors
/// What was expected instead.
pub fn rate(text: &str) -> Result<NonZeroU64, String> {
    let rate = size(text).map_err(|_| format!("{text:?} is not a rate: write 100M for 100 MiB per second"))?;
    NonZeroU64::new(rate).ok_or_else(|| "a rate must be more than 0".into())
}

/// `300ms`, `30s`, `5m` or plain seconds.
///
/// # Errors
/// What was expected instead.
pub fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a time: write 300ms, 30s or 5m");
    let (digits, millis) = if let Some(digits) = text.strip_suffix("ms") {
        (digits, 1)
    } else if let Some(digits) = text.strip_suffix('m') {
        (digits, 60_000)
    } else {
        (text.strip_suffix('s').unwrap_or(text), 1000)
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(millis).filter(|millis| *millis > 0).map(Duration::from_millis).ok_or_else(wrong)
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
        assert!(read("on").unwrap_err().contains("or off or auto"));
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
    }
}
