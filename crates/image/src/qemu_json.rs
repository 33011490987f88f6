//! QEMU's form of JSON, in which strings may be in single quotes (QEMU docs: interop/qmp-spec).

use std::borrow::Cow;

/// Rewrites text in this form as JSON. What is wrong stays wrong.
pub(crate) fn to_json(text: &[u8]) -> Cow<'_, [u8]> {
    if !text.contains(&b'\'') {
        return Cow::Borrowed(text);
    }
    let mut json = Vec::with_capacity(text.len() + 8);
    let mut quote = None;
    let mut bytes = text.iter().copied();
    while let Some(byte) = bytes.next() {
        match (quote, byte) {
            (None, b'"' | b'\'') => {
                quote = Some(byte);
                json.push(b'"');
            }
            (Some(open), byte) if byte == open => {
                quote = None;
                json.push(b'"');
            }
            (Some(_), b'"') => json.extend(b"\\\""),
            (Some(_), b'\\') => match bytes.next() {
                Some(b'\'') => json.push(b'\''),
                escaped => json.extend([b'\\'].into_iter().chain(escaped)),
            },
            (_, byte) => json.push(byte),
        }
    }
    Cow::Owned(json)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn read(text: &str) -> Result<Value, serde_json::Error> {
        serde_json::from_slice(&to_json(text.as_bytes()))
    }

    #[test]
    fn strings_in_either_quotes_are_the_same() {
        for text in [
            r#"{"a": "it's", "b": ["x\"y", 1, null]}"#,
            r#"{'a': 'it\'s', 'b': ['x"y', 1, null]}"#,
            r#"{'a': "it\'s", "b": ['x\"y', 1, null]}"#,
        ] {
            assert_eq!(read(text).unwrap(), json!({ "a": "it's", "b": ["x\"y", 1, null] }), "{text}");
        }
        for text in ["{'a\": 1}", "{'a': 'b}", "'", "{'a\\", "{'a' 'b'}"] {
            read(text).unwrap_err();
        }
    }

    proptest! {
        #[test]
        fn what_is_json_means_the_same_with_single_quotes(text in any::<String>()) {
            let quoted = serde_json::to_string(&text).unwrap();
            prop_assert_eq!(read(&quoted).unwrap(), json!(text));
            let inner = quoted[1..quoted.len() - 1].replace("\\\"", "\"").replace('\'', "\\'");
            prop_assert_eq!(read(&format!("'{inner}'")).unwrap(), json!(text));
        }
    }
}
