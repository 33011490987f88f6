//! JSON as qemu-img prints it: people read it too.

use serde::Serialize;
use serde_json::ser::{PrettyFormatter, Serializer};

/// Indented by four spaces.
pub(crate) fn pretty(value: &impl Serialize) -> anyhow::Result<String> {
    let mut text = Vec::new();
    value.serialize(&mut Serializer::with_formatter(&mut text, PrettyFormatter::with_indent(b"    ")))?;
    Ok(String::from_utf8(text)?)
}
