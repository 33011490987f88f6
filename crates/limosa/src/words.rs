//! Numbers and errors in words that people read.

use std::time::Duration;

use limosa_channel::Counters;
use limosa_page::PAGE_SIZE;
use limosa_snapshot::PageStatistics;
use serde_json::{Value, json};

/// An error and its causes in one line, none of them said twice.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let said = cause.to_string();
        if !line.contains(&said) {
            if !line.is_empty() {
                line.push_str(": ");
            }
            line.push_str(&said);
        }
    }
    line.replace('\n', " ")
}

/// `1.2 GiB`, `340 KiB`.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if count >> shift > 0 {
            let tenths = (u128::from(count) * 10) >> shift;
            return if tenths >= 1000 || tenths % 10 == 0 {
                format!("{} {unit}", tenths / 10)
            } else {
                format!("{}.{} {unit}", tenths / 10, tenths % 10)
            };
        }
    }
    format!("{count} bytes")
}

/// `3.2 ms`, `1.42 s`.
pub(crate) fn time(time: Duration) -> String {
    let millis = time.as_secs_f64() * 1e3;
    if millis < 0.1 {
        format!("{:.0} µs", millis * 1e3)
    } else if millis < 100.0 {
        format!("{millis:.1} ms")
    } else if millis < 1000.0 {
        format!("{millis:.0} ms")
    } else {
        format!("{:.2} s", millis / 1e3)
    }
}

/// A moment in seconds since 1970, as UTC.
pub(crate) fn date(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400, seconds % 86_400);
    // The calendar repeats every 400 years of 146,097 days; counted from 1 March 0000, leap days end years.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year_of_era + era * 400 + next;
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", time / 3600, time / 60 % 60, time % 60)
}

/// Pages with thousands set apart.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// GiB per second.
pub(crate) fn rate(moved: u64, within: Duration) -> f64 {
    // A rate is told with two digits: what the conversion loses beyond 2^53 bytes is not seen.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let gib = moved as f64 / f64::from(1u32 << 30);
    gib / within.as_secs_f64().max(1e-9)
}

/// Milliseconds with their fraction, for programs.
pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What kinds of pages a new snapshot was made of, and how much memory each is; `unsent` and `again` say what became of those
/// that never came, and of those that came more than once.
pub(crate) fn pages(pages: &PageStatistics, unsent: &str, again: &str) -> String {
    let kind = |pages: u64, what: &str| match pages {
        0 => format!("0 {what}"),
        pages => format!("{} {what} ({})", count(pages), bytes(pages.saturating_mul(PAGE_SIZE))),
    };
    let mut kinds = vec![kind(pages.normal, "with contents"), kind(pages.zero, "zero")];
    kinds.extend(pages.hinted.filter(|hinted| *hinted > 0).map(|hinted| kind(hinted, unsent)));
    kinds.push(kind(pages.resent, again));
    kinds.join(", ")
}

/// The same in bytes of memory, for programs.
pub(crate) fn page_bytes(pages: &PageStatistics) -> Value {
    let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE);
    json!({
        "normal": bytes(pages.normal),
        "zero": bytes(pages.zero),
        "hinted": pages.hinted.map(bytes),
        "resent": bytes(pages.resent),
    })
}

/// A channel's counters, for programs.
pub(crate) fn counters(counters: &Counters) -> Value {
    json!({
        "calls_out": counters.calls_out,
        "calls_in": counters.calls_in,
        "bytes_out": counters.bytes_out,
        "bytes_in": counters.bytes_in,
        "partial": counters.partial,
        "interrupted": counters.interrupted,
        "waits": counters.waits,
        "waited_ms": counters.waited_ns / 1_000_000,
        "throttled_ms": counters.throttled_ns / 1_000_000,
        "spliced": counters.spliced,
        "lent": counters.lent,
        "lent_copied": counters.lent_copied,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_at_most_one_decimal_and_three_digits_or_more() {
        assert_eq!(bytes(17), "17 bytes");
        assert_eq!(bytes(4096), "4 KiB");
        assert_eq!(bytes((3 << 30) / 2), "1.5 GiB");
        assert_eq!(bytes(u64::MAX), "16777215 TiB");
    }

    #[test]
    fn dates_follow_the_calendar_over_leap_days() {
        assert_eq!(date(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(date(1_795_161_946), "2026-11-20 08:05:46 UTC");
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_048_576), "1,048,576");
    }

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let inner = anyhow::anyhow!("no space left");
        let error = inner.context("cannot write x: no space left");
        assert_eq!(one_line(&error), "cannot write x: no space left");
        let inner = anyhow::anyhow!("no space left");
        assert_eq!(one_line(&inner.context("x: no space left; free some")), "x: no space left; free some");
    }
}
