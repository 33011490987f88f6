//! Results in lines for people and in JSON for programs.

use limosa_channel::Counters;
use limosa_console::quantity::{bytes, count};
use limosa_page::PAGE_SIZE;
use limosa_snapshot::PageStatistics;
use serde_json::{Value, json};

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

/// The kinds of pages in a new snapshot, and how much memory each is; `unsent` and `again` say what became of those
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
        "lent": counters.zero_copy_calls,
        "lent_copied": counters.zero_copy_copied,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_follow_the_calendar_over_leap_days() {
        assert_eq!(date(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(date(951_782_399), "2000-02-28 23:59:59 UTC");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(date(1_795_161_946), "2026-11-20 08:05:46 UTC");
    }
}
