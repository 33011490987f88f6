//! Numbers with units, for people.

use std::time::Duration;

/// `1.2 GiB`, `340 KiB`.
#[must_use]
pub fn bytes(count: u64) -> String {
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
#[must_use]
pub fn time(time: Duration) -> String {
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

/// Pages with thousands set apart.
#[must_use]
pub fn count(number: u64) -> String {
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

/// GiB per second, to three decimals.
#[must_use]
pub fn rate(moved: u64, within: Duration) -> f64 {
    // A rate is printed with two digits: what the conversion loses beyond 2^53 bytes is not seen.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    let gib = moved as f64 / f64::from(1u32 << 30);
    rounded(gib / within.as_secs_f64().max(1e-9))
}

/// Milliseconds to three decimals, for programs.
#[must_use]
pub fn millis(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e3)
}

/// A number to three decimals: more digits of a measurement mean nothing.
#[must_use]
pub fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
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
    fn measurements_for_programs_have_three_decimals() {
        assert_eq!(millis(Duration::from_nanos(26_971_605)).to_string(), "26.972");
        assert_eq!(rate(499_712, Duration::from_millis(51)).to_string(), "0.009");
        assert_eq!(rounded(1_846.803_921_134).to_string(), "1846.804");
    }

    #[test]
    fn thousands_are_set_apart() {
        assert_eq!(count(0), "0");
        assert_eq!(count(999), "999");
        assert_eq!(count(1_048_576), "1,048,576");
    }
}
