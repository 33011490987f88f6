//! Sizes as qemu-img reads them: facts found by asking it.

/// The factor of a suffix, as a power of two.
fn shift(suffix: char) -> Option<u32> {
    Some(match suffix.to_ascii_lowercase() {
        'b' => 0,
        'k' => 10,
        'm' => 20,
        'g' => 30,
        't' => 40,
        'p' => 50,
        'e' => 60,
        _ => return None,
    })
}

/// `512`, `64k`, `1.5G`, `0x10000`: 0 to 2^63 - 1 bytes.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    parse(text, "size")
}

/// A rate in bytes a second, written as a size.
pub(crate) fn parse_rate(text: &str) -> Result<u64, String> {
    parse(text, "rate in bytes per second")
}

fn parse(text: &str, kind: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is not a {kind}: write 512, 64k, 1.5G or 0x10000 (b k M G T P E)");
    let beyond = || format!("{text} is too large: at most {} bytes (8E - 1)", i64::MAX);
    let size = if let Some(digits) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        // A sign would be read as part of the number.
        if digits.is_empty() || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        u64::from_str_radix(digits, 16).map_err(|_| beyond())?
    } else {
        let (number, shift) = match text.chars().last() {
            Some(last) if !last.is_ascii_digit() && last != '.' => {
                let number = text.strip_suffix(last).unwrap_or_default();
                (number, shift(last).ok_or_else(wrong)?)
            }
            _ => (text, 0),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        let digits = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit());
        // There are no parts of a byte.
        let parts = shift == 0 && fraction.bytes().any(|digit| digit != b'0');
        if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) || parts {
            return Err(wrong());
        }
        let whole: u64 = if whole.is_empty() { 0 } else { whole.parse().map_err(|_| beyond())? };
        let whole = whole.checked_mul(1 << shift).ok_or_else(beyond)?;
        whole.checked_add(part(fraction, shift)).ok_or_else(beyond)?
    };
    if i64::try_from(size).is_ok() { Ok(size) } else { Err(beyond()) }
}

/// `0.fraction` of 2^shift, to the nearest byte.
fn part(fraction: &str, shift: u32) -> u64 {
    // 20 digits are more than 2^60 can tell apart, and with 60 bits behind them they fit.
    let (number, scale) = fraction.bytes().take(20).fold((0_u128, 1_u128), |(number, scale), digit| {
        (number * 10 + u128::from(digit.saturating_sub(b'0')), scale * 10)
    });
    u64::try_from(((number << shift) + scale / 2) / scale).unwrap_or(u64::MAX)
}

/// A limit of memory: less than 1 MiB is not enough for the program itself.
pub(crate) fn parse_memory(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size if size >= 1 << 20 => Ok(size),
        _ => Err(format!("{text}: must be at least 1M, which the program itself needs")),
    }
}

/// A size of at least 1 that a request can have.
pub(crate) fn parse_request(text: &str) -> Result<u64, String> {
    match parse_size(text)? {
        size @ 1..=0x7fff_ffff => Ok(size),
        _ => Err(format!("{text:?}: must be 1 to {} bytes", i32::MAX)),
    }
}

/// A size for people as qemu-img writes it: `1.5 GiB`, three digits that count.
pub(crate) fn for_people(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    // Told with three digits: what the conversion loses is not seen.
    #[expect(clippy::cast_precision_loss, reason = "a size for people")]
    let (mut size, mut unit) = (bytes as f64, 0);
    while size >= 1000.0 && unit + 1 < UNITS.len() {
        (size, unit) = (size / 1024.0, unit + 1);
    }
    let decimals = if size >= 100.0 {
        0
    } else if size >= 10.0 {
        1
    } else if size >= 1.0 {
        2
    } else {
        3
    };
    let text = format!("{size:.decimals$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", UNITS.get(unit).unwrap_or(&""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes_and_fractions_or_are_hexadecimal() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("7b", 7),
            ("64k", 65536),
            ("64K", 65536),
            ("1.5G", 3 << 29),
            ("0.1k", 102),
            ("0.0005k", 1),
            ("1.M", 1 << 20),
            (".5k", 512),
            ("1.", 1),
            ("1.0", 1),
            ("1.9999999999999999999999E", 1 << 61),
            ("0x10000", 65536),
            ("0x1b", 27),
            ("7E", 7 << 60),
            ("9223372036854775807", i64::MAX as u64),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        let wrong = ["", "k", ".", "-1", "1.3", "1.5b", "1e3", "1Q", "1kk", "1 k", "0x", "0x10k", "0x-1", "é", "nan"];
        for wrong in wrong.into_iter().chain(["8E", "99999999999P", "9223372036854775808", "0xffffffffffffffff"]) {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_for_people_have_three_digits_that_count() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (197_120, "192 KiB"),
            (1_638_400, "1.56 MiB"),
            (10 << 20, "10 MiB"),
            (1 << 30, "1 GiB"),
            (3 << 29, "1.5 GiB"),
            (1_000_000_000, "954 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(for_people(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn a_rate_that_is_none_is_not_called_a_size() {
        assert_eq!(parse_rate("64k"), Ok(65536));
        assert!(parse_rate("fast").unwrap_err().contains("\"fast\" is not a rate"));
        assert!(parse_size("big").unwrap_err().contains("\"big\" is not a size"));
    }

    #[test]
    fn a_limit_of_memory_has_room_for_the_program() {
        assert_eq!(parse_memory("1M"), Ok(1 << 20));
        assert!(parse_memory("0").is_err() && parse_memory("1023k").unwrap_err().contains("at least 1M"));
        assert!(parse_size("8E").unwrap_err().contains("8E is too large: at most 9223372036854775807 bytes"));
    }

    #[test]
    fn requests_are_neither_empty_nor_endless() {
        assert_eq!(parse_request("4k"), Ok(4096));
        assert!(parse_request("0").is_err() && parse_request("2G").is_err());
    }
}
