//! Texts from outside, in messages.

/// A text from outside as one line of at most `most` characters.
pub(crate) fn printable(text: &str, most: usize) -> String {
    text.chars().map(|it| if it.is_control() { ' ' } else { it }).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_from_outside_is_one_short_line() {
        assert_eq!(printable("a\nb\u{1b}[31m", 5), "a b [");
    }
}
