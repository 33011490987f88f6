//! Page deltas of capability `xbzrle`: changes of a page since it was last sent.
//!
//! A delta is a list of runs: a number of unchanged bytes, a number of changed bytes, and their new contents. An
//! unchanged run at the end is omitted. Both counts are ULEB128 of one or two bytes; only the very first unchanged run
//! may be empty. The law: a delta is applied completely or the page is as before, and **what [`encode`] writes,
//! [`decode`] reads back on the same page**.

use crate::cursor::{Cursor, Stop};
use crate::error::{ErrorKind, StreamError};
use crate::ram::PAGE_LEN;

const PLACE: &str = "xbzrle page delta";
const UNCHANGED: &str = "a count of unchanged bytes";
const CHANGED: &str = "a count of changed bytes";

/// Applies `delta`, which is at `offset` in its stream, to `page`. On an error the page is as before.
///
/// # Errors
/// A count that is empty, too long, or leads out of the page or of the delta.
pub fn decode(page: &mut [u8; PAGE_LEN], delta: &[u8], offset: u64) -> Result<(), StreamError> {
    let mut changed = *page;
    apply(&mut changed, &mut Cursor::new(delta)).map_err(|stop| stop.into_error(offset, PLACE, delta.len()))?;
    *page = changed;
    Ok(())
}

fn apply(page: &mut [u8; PAGE_LEN], cursor: &mut Cursor<'_>) -> Result<(), Stop> {
    let mut at = 0;
    while !cursor.is_at_end() {
        let begin = cursor.at();
        let unchanged = count(cursor, UNCHANGED)?;
        if unchanged == 0 && begin > 0 {
            return Err(Stop::Fail { at: begin, error_kind: ErrorKind::expected(UNCHANGED, 0) });
        }
        let begin = cursor.at();
        let length = count(cursor, CHANGED)?;
        if length == 0 {
            return Err(Stop::Fail { at: begin, error_kind: ErrorKind::expected(CHANGED, 0) });
        }
        let start = at + unchanged;
        at = start + length;
        let Some(run) = page.get_mut(start..at) else {
            let error_kind =
                ErrorKind::expected("changes inside the page of 4096 bytes", format_args!("bytes {start} to {at}"));
            return Err(Stop::Fail { at: begin, error_kind });
        };
        run.copy_from_slice(cursor.take(length)?);
    }
    Ok(())
}

/// ULEB128 of at most two bytes.
fn count(cursor: &mut Cursor<'_>, what: &'static str) -> Result<usize, Stop> {
    let begin = cursor.at();
    let low = cursor.u8()?;
    if low < 0x80 {
        return Ok(low.into());
    }
    let high = cursor.u8()?;
    if high >= 0x80 {
        let found = format_args!("{low:#04x} {high:#04x}: more than two bytes").to_string();
        return Err(Stop::Fail { at: begin, error_kind: ErrorKind::expected(what, found) });
    }
    Ok(usize::from(low & 0x7f) | usize::from(high) << 7)
}

/// Appends the delta from `old` to `new`; nothing for equal pages. It may be longer than the page: who sends it
/// compares.
pub fn encode(old: &[u8; PAGE_LEN], new: &[u8; PAGE_LEN], out: &mut Vec<u8>) {
    let differs = |at: usize| old.get(at) != new.get(at);
    let mut at = 0;
    while at < PAGE_LEN {
        let start = (at..PAGE_LEN).find(|&at| differs(at)).unwrap_or(PAGE_LEN);
        let end = (start..PAGE_LEN).find(|&at| !differs(at)).unwrap_or(PAGE_LEN);
        if start < end {
            put_count(start - at, out);
            put_count(end - start, out);
            out.extend_from_slice(&new[start..end]);
        }
        at = end;
    }
}

fn put_count(count: usize, out: &mut Vec<u8>) {
    debug_assert!(count < 1 << 14, "a run of {count} bytes in a page of 4096");
    let [high, low] = [count >> 7, count & 0x7f].map(|bits| bits.to_le_bytes()[0]);
    if high == 0 {
        out.push(low);
    } else {
        out.extend_from_slice(&[low | 0x80, high]);
    }
}
