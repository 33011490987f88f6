//! A command line from which each clone's is made.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Component, Path, PathBuf};

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

    /// Returns the names, relative to a clone's directory, that the command line gives to QEMU below `{dir}`: serial
    /// files, sockets, pid files. They belong to the clone.
    ///
    /// A name ends where an option's value ends: at a comma (two stand for one in the name) or a quote.
    #[must_use]
    pub fn file_names(&self, number: u64, name: &str) -> Vec<PathBuf> {
        const BEGIN: &str = "{dir}/";
        let number = number.to_string();
        let values: [(&[u8], &[u8]); 2] = [(b"{n}", number.as_bytes()), (b"{name}", name.as_bytes())];
        let texts = self.args.iter().filter_map(|arg| arg.to_str());
        let names = texts.flat_map(|text| text.match_indices(BEGIN).map(|(at, _)| text.split_at(at + BEGIN.len()).1));
        let names = names.map(|rest| filled(OsStr::new(&value(rest)), &values)).map(PathBuf::from);
        let is_inside = |name: &PathBuf| name.components().all(|part| matches!(part, Component::Normal(_)));
        names.filter(|name| !name.as_os_str().is_empty() && is_inside(name)).collect()
    }
}

/// The value of an option that begins here.
fn value(text: &str) -> String {
    let mut value = String::new();
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            ',' if letters.next_if_eq(&',').is_none() => break,
            '"' | '\'' => break,
            _ => value.push(letter),
        }
    }
    value
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

    #[test]
    fn what_qemu_is_given_below_the_directory_belongs_to_the_clone() {
        let args = [
            "qemu",
            "-serial",
            "file:{dir}/serial-{n}",
            "-chardev",
            "socket,id=a,path={dir}/a,,b,server=on",
            "-blockdev",
            r#"{"driver":"file","filename":"{dir}/sub/{name}.raw"}"#,
            "-pidfile",
            "{dir}/../pid",
            "-virtfs",
            "local,path={dir}/,mount_tag=x",
            "-D",
            "{dir}",
        ];
        let template = CommandTemplate::new(args.map(OsString::from).to_vec());
        assert_eq!(template.file_names(7, "007"), ["serial-7", "a,b", "sub/007.raw"].map(PathBuf::from));
    }
}
