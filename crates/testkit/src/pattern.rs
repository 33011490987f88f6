//! Pages that a program in a guest holds: each differs from any other, wherever it is found.
//!
//! The program is the test's own executable, started again in the guest ([`crate::UmlGuest::programs`]) with the name
//! of a test that calls [`hold_when_asked`].

use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

/// Bytes of a page.
const LENGTH: usize = 4096;
/// The first bytes of each page.
const MAGIC: &[u8; 8] = b"godwits!";
/// Variable with the number of MiB to hold.
const VARIABLE: &str = "LIMOSA_HOLD_MIB";
/// The file that says that they are held; its removal asks for a check of them.
const HELD: &str = "/tmp/held";
/// The file that says what was found.
const VERDICT: &str = "/tmp/verdict";

/// The page of that number.
pub fn page(number: u64) -> [u8; LENGTH] {
    let mut page = [0; LENGTH];
    let mut word = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for place in page.chunks_exact_mut(8) {
        // xorshift64
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        place.copy_from_slice(&word.to_le_bytes());
    }
    page[..8].copy_from_slice(MAGIC);
    page[8..16].copy_from_slice(&number.to_le_bytes());
    page
}

/// Returns the number of the page, if the bytes are a whole page of this pattern.
pub fn number_of(bytes: &[u8]) -> Option<u64> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let number = u64::from_le_bytes(*rest.first_chunk()?);
    (bytes == page(number)).then_some(number)
}

/// In a guest whose environment says so: holds pages, and looks whether they are still the same when it is asked. Does
/// not return then. Elsewhere it does nothing.
pub fn hold_when_asked() {
    let Some(mib) = std::env::var(VARIABLE).ok().and_then(|text| text.parse::<u64>().ok()) else { return };
    let length = usize::try_from(mib << 20).expect("less than the address space");
    let mut memory = vec![0_u8; length + LENGTH];
    // A page of ours is a page of the guest's.
    let start = memory.as_ptr().align_offset(LENGTH);
    let held = &mut memory[start..start + length];
    for (number, place) in (0..).zip(held.chunks_exact_mut(LENGTH)) {
        place.copy_from_slice(&page(number));
    }
    loop {
        std::fs::write(HELD, "held").expect("the guest's /tmp");
        while Path::new(HELD).exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        // They are looked at, and not remembered.
        let pages = black_box(&*held).chunks_exact(LENGTH);
        let count = pages.len();
        let lost = (0..).zip(pages).filter(|(number, found)| **found != page(*number)).count();
        std::fs::write(VERDICT, format!("{lost} of {count} pages lost\n")).expect("the guest's /tmp");
    }
}

/// The shell lines that have a guest's program hold this number of MiB, and wait until it does. `test` is the name of
/// the test that calls [`hold_when_asked`].
pub fn hold_line(program: &str, test: &str, mib: u64) -> String {
    format!(
        "{VARIABLE}={mib}; export {VARIABLE}; rm -f {HELD}; host {program} --exact {test} --nocapture >/dev/null 2>&1 & \
         while [ ! -e {HELD} ]; do sleep 0.05; done"
    )
}

/// The shell lines that ask it, and say what it found: `0 of N pages lost` is good.
pub fn verify_line() -> String {
    format!("rm -f {VERDICT} {HELD}; while [ ! -s {VERDICT} ]; do sleep 0.05; done; cat {VERDICT}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_known_by_all_of_its_bytes() {
        let mut bytes = page(77);
        assert_eq!(number_of(&bytes), Some(77));
        assert_ne!(page(78)[16..], bytes[16..]);
        bytes[4095] ^= 1;
        assert_eq!(number_of(&bytes), None);
        assert_eq!(number_of(&[0; 4096]), None);
    }
}
