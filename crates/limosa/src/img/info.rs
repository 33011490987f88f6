//! `limosa img info`.
//!
//! Law: asking what an image is opens no other file; only `--backing-chain` does.

use std::fmt::Write as _;
use std::process::ExitCode;

use limosa_image::chain::{ImageFile, NamedImage};
use limosa_image::info::{FormatSpecific, ImageInfo, SnapshotInfo};
use limosa_storage::block_on;
use serde_json::Value;

use super::looking::look;
use super::options::InfoOptions;
use super::pretty::pretty;
use super::size::for_people;
use crate::report;
use limosa_console::{check_stdout, print_out};

pub(crate) fn run(options: &InfoOptions) -> anyhow::Result<ExitCode> {
    let all = options.backing_chain;
    let chain = look(&options.source, |NamedImage { reference, options, .. }| {
        let infos = async {
            if all {
                return ImageInfo::of_chain(reference, options).await;
            }
            Ok(vec![ImageInfo::of(&ImageFile::open(reference, options).await?).await?])
        };
        Ok(block_on(infos)?)
    })?;
    let chain = chain.found;
    if options.json {
        let text = match chain.as_slice() {
            [one] if !options.backing_chain => pretty(one)?,
            all => pretty(&all)?,
        };
        print_out!("{text}");
    } else {
        let texts = chain.iter().map(text).collect::<anyhow::Result<Vec<_>>>()?;
        print_out!("{}", texts.join("\n\n"));
    }
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// Describes an image for people.
fn text(info: &ImageInfo) -> anyhow::Result<String> {
    let mut lines = vec![
        format!("image: {}", info.filename),
        format!("file format: {}", info.format),
        format!("virtual size: {} ({} bytes)", for_people(info.virtual_size), info.virtual_size),
        format!("disk size: {}", disk_size(info.actual_size)),
    ];
    if info.encrypted == Some(true) {
        lines.push("encrypted: yes".to_owned());
    }
    if let Some(size) = info.cluster_size {
        lines.push(format!("cluster_size: {size}"));
    }
    if info.dirty_flag == Some(true) {
        lines.push("cleanly shut down: no".to_owned());
    }
    if let Some(backing) = &info.backing_filename {
        let place = match &info.full_backing_filename {
            Some(full) if full == backing => String::new(),
            Some(full) => format!(" (actual path: {full})"),
            None => " (cannot determine actual path)".to_owned(),
        };
        lines.push(format!("backing file: {backing}{place}"));
    }
    if let Some(format) = &info.backing_filename_format {
        lines.push(format!("backing file format: {format}"));
    }
    lines.extend(snapshots(&info.snapshots));
    let specific = match &info.format_specific {
        Some(FormatSpecific::Qcow2(specific)) => Some(serde_json::to_value(specific)?),
        Some(FormatSpecific::Luks(specific)) => Some(serde_json::to_value(specific)?),
        None => None,
    };
    if let Some(specific) = specific {
        lines.push("Format specific information:".to_owned());
        tell(&specific, 1, &mut lines);
    }
    for child in &info.children {
        let (of, length) = (&child.info, child.info.virtual_size);
        lines.push(format!("Child node '/{}':", child.name));
        lines.push(format!("    filename: {}", of.filename));
        lines.push(format!("    protocol type: {}", of.format));
        lines.push(format!("    file length: {} ({length} bytes)", for_people(length)));
        lines.push(format!("    disk size: {}", disk_size(of.actual_size)));
    }
    Ok(lines.join("\n"))
}

fn disk_size(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unavailable".to_owned(), for_people)
}

/// The list of an image's snapshots for people; nothing without any.
pub(super) fn snapshots(all: &[SnapshotInfo]) -> Vec<String> {
    if all.is_empty() {
        return Vec::new();
    }
    let head = ["Snapshot list:".to_owned(), row(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"])];
    head.into_iter().chain(all.iter().map(snapshot)).collect()
}

/// A row of the list of snapshots.
fn row([id, tag, size, date, clock, icount]: [&str; 6]) -> String {
    format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}")
}

fn snapshot(snapshot: &SnapshotInfo) -> String {
    let (seconds, millis) = (snapshot.vm_clock_sec, snapshot.vm_clock_nsec / 1_000_000);
    let date = report::date(snapshot.date_sec.into());
    row([
        &snapshot.id,
        &snapshot.name,
        &for_people(snapshot.vm_state_size),
        date.strip_suffix(" UTC").unwrap_or(&date),
        &format!("{:04}:{:02}:{:02}.{millis:03}", seconds / 3600, seconds / 60 % 60, seconds % 60),
        &snapshot.icount.map_or_else(|| "--".to_owned(), |count| count.to_string()),
    ])
}

/// Describes the format's own fields, a line each: names with spaces, their parts indented.
fn tell(value: &Value, depth: usize, lines: &mut Vec<String>) {
    let mut entry = |name: String, value: &Value| {
        let mut line = format!("{:width$}{name}:", "", width = 4 * depth);
        let inner = match value {
            Value::Object(_) | Value::Array(_) => true,
            Value::String(text) => {
                let _ = write!(line, " {text}");
                false
            }
            plain => {
                let _ = write!(line, " {plain}");
                false
            }
        };
        lines.push(line);
        if inner {
            tell(value, depth + 1, lines);
        }
    };
    match value {
        Value::Object(object) => object.iter().for_each(|(name, value)| entry(name.replace('-', " "), value)),
        Value::Array(values) => values.iter().enumerate().for_each(|(at, value)| entry(format!("[{at}]"), value)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_belongs_to_something_is_indented_below_it() {
        let mut lines = Vec::new();
        let value = json!({
            "compat": "1.1", "lazy-refcounts": false, "bitmaps": [{ "flags": ["auto"], "name": "b0", "granularity": 65536 }]
        });
        tell(&value, 1, &mut lines);
        assert_eq!(
            lines,
            [
                "    compat: 1.1",
                "    lazy refcounts: false",
                "    bitmaps:",
                "        [0]:",
                "            flags:",
                "                [0]: auto",
                "            name: b0",
                "            granularity: 65536"
            ]
        );
    }

    #[test]
    fn snapshots_are_rows_of_a_table() {
        let mut taken = SnapshotInfo::default();
        (taken.id, taken.name, taken.icount) = ("1".into(), "one".into(), Some(7));
        (taken.vm_clock_sec, taken.vm_clock_nsec) = (3723, 45_000_000);
        (taken.date_sec, taken.vm_state_size) = (1_795_191_889, 1 << 20);
        assert_eq!(
            snapshot(&taken),
            "1       one                 1 MiB 2026-11-20 16:24:49  0001:02:03.045          7"
        );
    }
}
