//! Invariants that are checked where two parts of limosa meet.
//!
//! A broken invariant is a bug of limosa, never something that outside data can cause. Debug builds panic at it, where
//! tests and fuzzers see it. Release builds return [`BrokenInvariant`] before anything is committed: a VM that is still
//! whole is worth more than a program that ends.

use std::panic::Location;

/// An invariant that did not hold: a bug of limosa.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BrokenInvariant {
    what: &'static str,
    location: &'static Location<'static>,
}

impl std::fmt::Display for BrokenInvariant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "internal error at {}: {} does not hold; please report it", self.location, self.what)
    }
}

impl std::error::Error for BrokenInvariant {}

/// Checks that an invariant holds; `what` states it as a sentence, for example "each page is claimed once".
///
/// # Errors
/// [`BrokenInvariant`] in release builds, if it does not hold.
///
/// # Panics
/// In debug builds, if it does not hold.
#[track_caller]
#[inline]
pub const fn invariant(holds: bool, what: &'static str) -> Result<(), BrokenInvariant> {
    if holds { Ok(()) } else { Err(broken_invariant(what)) }
}

/// The error of an invariant that is known to be broken, where the value that must be there is not.
///
/// # Panics
/// In debug builds.
#[track_caller]
#[cold]
#[must_use]
pub const fn broken_invariant(what: &'static str) -> BrokenInvariant {
    if cfg!(debug_assertions) {
        panic!("{}", what);
    }
    BrokenInvariant { what, location: Location::caller() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invariant_that_holds_is_no_error() {
        assert_eq!(invariant(true, "one is one"), Ok(()));
    }

    #[test]
    fn a_broken_invariant_panics_in_debug_builds_and_is_an_error_in_release_builds() {
        let checked = std::panic::catch_unwind(|| invariant(false, "each page is claimed once"));
        if cfg!(debug_assertions) {
            assert!(checked.is_err());
        } else {
            let text = checked.unwrap().unwrap_err().to_string();
            assert!(text.contains("each page is claimed once") && text.contains("invariant.rs"), "{text}");
        }
    }
}
