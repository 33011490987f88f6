//! apt's package sources, old one-line form and deb822 form (sources.list(5)), and how to name a sibling suite of one.
//!
//! Law: a mirror, its components and its keyring come from the machine; nothing here knows the name of any mirror.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// One enabled `deb` entry.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    text: EntryText,
}

/// How the entry was written, so that a sibling can be written the same way.
#[derive(Debug, Clone, PartialEq, Eq)]
enum EntryText {
    /// The `[...]` options, without the brackets.
    Line { options: String },
    /// Every field but `Types`, `Suites` and `Enabled`, continuation lines included.
    Stanza { other_fields: Vec<String> },
}

/// One file of apt sources.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    entries: Vec<Entry>,
}

impl SourceFile {
    /// All the files that apt reads below `/etc/apt`, sorted by name. A missing file or folder is no error.
    pub(crate) fn read_all(apt: &Path) -> Result<Vec<Self>> {
        let mut paths = vec![apt.join("sources.list")];
        if let Ok(folder) = std::fs::read_dir(apt.join("sources.list.d")) {
            let mut more: Vec<PathBuf> = folder.flatten().map(|entry| entry.path()).collect();
            more.sort();
            paths.extend(more);
        }
        let mut files = Vec::new();
        for path in paths {
            let extension = path.extension().and_then(|text| text.to_str());
            if !matches!(extension, Some("list" | "sources")) || !path.is_file() {
                continue;
            }
            let text = std::fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
            files.push(Self::parse(&path.to_string_lossy(), &text));
        }
        Ok(files)
    }

    /// The entries of one file; the form follows from the name, as with apt.
    pub(crate) fn parse(name: &str, text: &str) -> Self {
        let entries = if name.ends_with(".sources") {
            stanzas(text).iter().filter_map(|stanza| parse_stanza(stanza)).collect()
        } else {
            text.lines().filter_map(parse_line).collect()
        };
        Self { entries }
    }
}

/// Whether some entry names `suite`.
pub(crate) fn offer(files: &[SourceFile], suite: &str) -> bool {
    entries(files).any(|entry| entry.suites.iter().any(|name| name == suite))
}

/// The file to write so that apt knows `suite` of the mirror that serves `release`: its path and content.
pub(crate) fn with_suite(files: &[SourceFile], release: &str, suite: &str) -> Result<(PathBuf, String)> {
    let updates = format!("{release}-updates");
    let has = |entry: &Entry, name: &str| entry.suites.iter().any(|suite| suite == name);
    let mut candidates: Vec<&Entry> = entries(files)
        .filter(|entry| has(entry, release) && entry.components.iter().any(|component| component == "main"))
        .collect();
    // A vendor's repository may name its suite like the release, but only the distribution's own also has updates.
    candidates.sort_by_key(|entry| {
        !entries(files).any(|other| has(other, &updates) && other.uris.iter().any(|uri| entry.uris.contains(uri)))
    });
    let Some(entry) = candidates.first() else {
        bail!("no apt source for `{release} main` found in /etc/apt, so the mirror of {suite} is unknown");
    };
    let folder = Path::new("/etc/apt/sources.list.d");
    Ok(match &entry.text {
        EntryText::Line { options } => {
            let options = if options.is_empty() { String::new() } else { format!("[{options}] ") };
            let uris = entry.uris.join(" ");
            let content = format!("deb {options}{uris} {suite} {}\n", entry.components.join(" "));
            (folder.join("limosa-backports.list"), content)
        }
        EntryText::Stanza { other_fields } => {
            let content = format!("Types: deb\nSuites: {suite}\n{}\n", other_fields.join("\n"));
            (folder.join("limosa-backports.sources"), content)
        }
    })
}

fn entries(files: &[SourceFile]) -> impl Iterator<Item = &Entry> {
    files.iter().flat_map(|file| &file.entries)
}

/// `deb [options] uri suite component...`
fn parse_line(line: &str) -> Option<Entry> {
    let line = line.split('#').next().unwrap_or_default().trim();
    let rest = line.strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(inside) => inside.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().map(str::to_owned);
    Some(Entry {
        uris: vec![words.next()?],
        suites: vec![words.next()?],
        components: words.collect(),
        text: EntryText::Line { options: options.trim().to_owned() },
    })
}

/// The fields of each stanza: a field is its first line and its continuation lines.
fn stanzas(text: &str) -> Vec<Vec<String>> {
    let mut all = vec![Vec::<String>::new()];
    for line in text.lines() {
        if line.trim().is_empty() {
            all.push(Vec::new());
        } else if line.starts_with('#') {
            continue;
        } else if let Some(fields) = all.last_mut() {
            match fields.last_mut() {
                Some(field) if line.starts_with([' ', '\t']) => {
                    field.push('\n');
                    field.push_str(line);
                }
                _ => fields.push(line.to_owned()),
            }
        }
    }
    all.retain(|fields| !fields.is_empty());
    all
}

fn parse_stanza(fields: &[String]) -> Option<Entry> {
    let named = |field: &String, name: &str| {
        let (key, value) = field.split_once(':')?;
        key.eq_ignore_ascii_case(name).then(|| value.trim().to_owned())
    };
    let value = |name: &str| fields.iter().find_map(|field| named(field, name));
    let words =
        |name: &str| -> Vec<String> { value(name).unwrap_or_default().split_whitespace().map(str::to_owned).collect() };
    let enabled = value("Enabled").is_none_or(|text| !matches!(text.as_str(), "no" | "false" | "0" | "off"));
    if !enabled || !words("Types").iter().any(|kind| kind == "deb") {
        return None;
    }
    let ours = ["Types", "Suites", "Enabled"];
    let other_fields =
        fields.iter().filter(|field| !ours.iter().any(|name| named(field, name).is_some())).cloned().collect();
    Some(Entry {
        uris: words("URIs"),
        suites: words("Suites"),
        components: words("Components"),
        text: EntryText::Stanza { other_fields },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEB822: &str = "\
Types: deb deb-src
# a comment
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 abc

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/a.gpg
";

    #[test]
    fn a_deb822_source_is_copied_with_its_keyring_and_another_suite() {
        let files = [SourceFile::parse("debian.sources", DEB822)];
        let (path, content) = with_suite(&files, "bookworm", "bookworm-backports").unwrap();
        assert!(path.ends_with("limosa-backports.sources"));
        assert_eq!(
            content,
            "Types: deb\nSuites: bookworm-backports\nURIs: http://mirror.example/debian\nComponents: main contrib\n\
             Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n"
        );
        let again = SourceFile::parse("x.sources", &content);
        assert!(offer(&[again], "bookworm-backports") && !offer(&files, "bookworm-backports"));
    }

    #[test]
    fn a_one_line_source_is_copied_with_its_options() {
        let text = "# deb http://no bookworm main\ndeb-src http://no bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm main non-free # x\n";
        let files = [SourceFile::parse("/etc/apt/sources.list", text)];
        let (path, content) = with_suite(&files, "bookworm", "bookworm-backports").unwrap();
        assert!(path.ends_with("limosa-backports.list"));
        let wanted =
            "deb [arch=amd64 signed-by=/k.gpg] http://mirror.example/debian bookworm-backports main non-free\n";
        assert_eq!(content, wanted);
    }

    #[test]
    fn the_distribution_goes_before_a_vendor_whose_suite_has_the_same_name() {
        let vendor = SourceFile::parse("a.list", "deb http://vendor.example bookworm main\n");
        let debian = SourceFile::parse("debian.sources", DEB822);
        let (_, content) = with_suite(&[vendor, debian], "bookworm", "bookworm-backports").unwrap();
        assert!(content.contains("mirror.example"), "{content}");
    }

    #[test]
    fn disabled_and_foreign_entries_are_no_source() {
        let disabled = DEB822.replace("Types: deb deb-src", "Enabled: no\nTypes: deb");
        assert!(with_suite(&[SourceFile::parse("d.sources", &disabled)], "bookworm", "x").is_err());
        assert!(with_suite(&[SourceFile::parse("d.list", "nonsense\ndeb\n\n")], "bookworm", "x").is_err());
    }
}
