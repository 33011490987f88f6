//! Errors in one line.

use std::error::Error;

/// Returns an error with its causes in one line, for a message that is not an error itself.
///
/// A cause whose text is already there is left out: a transparent error shows its cause as its own.
#[must_use]
pub fn error_with_causes(error: &(dyn Error + 'static)) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
        cause = error.source();
    }
    line
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[derive(Debug)]
    struct Outer(&'static str, io::Error);

    impl std::fmt::Display for Outer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Outer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn causes_follow_once() {
        assert_eq!(error_with_causes(&Outer("cannot open x", io::Error::other("no file"))), "cannot open x: no file");
        assert_eq!(error_with_causes(&Outer("no file", io::Error::other("no file"))), "no file");
    }
}
