//! A command line from which each clone's is made.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::Path;

/// QEMU's command line with placeholders: `{n}` is the clone's number, `{name}` its name, `{dir}` its directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandTemplate {
    args: Vec<OsString>,
}

impl CommandTemplate {
    /// From a command line, the program first.
    #[must_use]
    pub fn new(args: Vec<OsString>) -> Self {
        Self { args }
    }

    /// The arguments as they were given.
    #[must_use]
    pub fn args(&self) -> &[OsString] {
        &self.args
    }

    /// Returns the arguments for one clone.
    #[must_use]
    pub fn fill(&self, number: u64, name: &str, folder: &Path) -> Vec<OsString> {
        let number = number.to_string();
        let values: [(&[u8], &[u8]); 3] =
            [(b"{n}", number.as_bytes()), (b"{name}", name.as_bytes()), (b"{dir}", folder.as_os_str().as_bytes())];
        self.args.iter().map(|arg| filled(arg, &values)).collect()
    }
}

/// Puts values in the place of placeholders, in one pass: a value that holds a placeholder stays as it is.
fn filled(arg: &OsStr, values: &[(&[u8], &[u8])]) -> OsString {
    let mut rest = arg.as_bytes();
    let mut bytes = Vec::with_capacity(rest.len());
    while let Some((first, behind)) = rest.split_first() {
        match values.iter().find(|(placeholder, _)| rest.starts_with(placeholder)) {
            Some((placeholder, value)) => {
                bytes.extend_from_slice(value);
                rest = rest.get(placeholder.len()..).unwrap_or_default();
            }
            None => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_are_filled_once_and_other_braces_stay() {
        let args = [
            "qemu",
            "-name",
            "{name}",
            "-netdev",
            "tap,ifname=tap{n}",
            "-x",
            "{dir}/s{n}",
            r#"{"driver":"file"}"#,
            "{x}{",
        ];
        let template = CommandTemplate::new(args.map(OsString::from).to_vec());
        let filled = template.fill(7, "{n}", Path::new("/d/a b"));
        let wanted =
            ["qemu", "-name", "{n}", "-netdev", "tap,ifname=tap7", "-x", "/d/a b/s7", r#"{"driver":"file"}"#, "{x}{"];
        assert_eq!(filled, wanted.map(OsString::from));
        assert_eq!(template.args().len(), 9);
    }
}
