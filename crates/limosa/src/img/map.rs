//! `limosa img map`.
//!
//! Law: neighbours that are alike are one line, however many requests it took to find them.

use std::any::Any;
use std::process::ExitCode;
use std::sync::Arc;

use limosa_image::chain;
use limosa_image::{BlockStatus, Disk, GuestOffset, HostOffset, MapEntry};
use limosa_nbd::protocol::allocation;
use limosa_nbd::{ContextExtent, NbdStorage};
use limosa_storage::{Storage, block_on};

use super::looking::{Look, look, uncertain};
use super::open;
use super::options::MapOptions;
use limosa_console::{check_stdout, print_out};

/// A run of bytes of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    start: u64,
    what: MapEntry,
    /// A metadata context marks it: qemu-img has it as what no file has.
    is_marked: bool,
}

impl Run {
    /// Extends the run by the next one, if that is of the same kind and follows it in the file.
    fn join(&mut self, next: &Self) -> bool {
        let (ours, theirs) = (&self.what, &next.what);
        let follows = match (&ours.host, &theirs.host) {
            (None, None) => true,
            (Some((file, at)), Some((next_file, next_at))) => file == next_file && at.0 + ours.length == next_at.0,
            _ => false,
        };
        let alike =
            follows && ours.kind == theirs.kind && ours.depth == theirs.depth && self.is_marked == next.is_marked;
        if alike {
            self.what.length += theirs.length;
        }
        alike
    }

    /// Describes the range for programs, in qemu-img's form.
    fn json(&self) -> String {
        let MapEntry { length, kind, depth, ref host, .. } = self.what;
        let (zero, compressed) = (kind.is_zero(), kind == BlockStatus::Compressed);
        let data = !self.is_marked && (!zero || kind == BlockStatus::Preallocated);
        let present = if self.is_marked { zero } else { kind != BlockStatus::Unallocated };
        let offset = host.as_ref().map(|(_, HostOffset(at))| format!(", \"offset\": {at}")).unwrap_or_default();
        format!(
            "{{ \"start\": {}, \"length\": {length}, \"depth\": {depth}, \"present\": {present}, \"zero\": {zero}, \
             \"data\": {data}, \"compressed\": {compressed}{offset}}}",
            self.start
        )
    }

    /// Describes the range for people; nothing if it has no contents.
    ///
    /// # Errors
    /// The contents are compressed or encrypted, so they have no plain location.
    fn line(&self) -> anyhow::Result<Option<String>> {
        match (self.what.kind, &self.what.host) {
            (kind, _) if kind.is_zero() || self.is_marked => Ok(None),
            (BlockStatus::Data, Some((file, HostOffset(at)))) => {
                let [start, length, at] = [self.start, self.what.length, *at].map(number);
                Ok(Some(format!("{start:<16}{length:<16}{at:<16}{file}")))
            }
            (kind, _) => {
                let how = if kind == BlockStatus::Compressed { "compressed" } else { "encrypted" };
                anyhow::bail!(
                    "the contents at {} are {how}, so they have no plain location; use --output json",
                    GuestOffset(self.start)
                )
            }
        }
    }
}

/// `0x10000`, and `0` without a prefix, as C prints it.
fn number(value: u64) -> String {
    if value == 0 { "0".to_owned() } else { format!("{value:#x}") }
}

/// Passes every run between `start` and `end` to `tell`.
async fn each(
    disk: &dyn Disk,
    start: u64,
    end: u64,
    mut tell: impl FnMut(&Run) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    if let Some(storage) = disk.storage(0)
        && let Some(export) = in_other_context(&*storage)
    {
        return each_in_context(export, start, end, tell);
    }
    let mut pending: Option<Run> = None;
    let mut at = start;
    while at < end {
        let what = disk.map(GuestOffset(at), end - at).await?;
        let run = Run { start: at, what, is_marked: false };
        at += run.what.length.max(1);
        if !pending.as_mut().is_some_and(|before| before.join(&run))
            && let Some(before) = pending.replace(run)
        {
            tell(&before)?;
        }
    }
    pending.iter().try_for_each(tell)
}

/// Returns the export that was asked for another metadata context than the usual one.
fn in_other_context(storage: &dyn Storage) -> Option<&NbdStorage> {
    let export = (storage as &dyn Any).downcast_ref::<NbdStorage>();
    export.filter(|export| export.context() != allocation::NAME)
}

/// Passes every run that a metadata context knows between `start` and `end` to `tell`, as qemu-img understands its
/// flags: as those of `base:allocation`.
fn each_in_context(
    export: &NbdStorage,
    start: u64,
    end: u64,
    mut tell: impl FnMut(&Run) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for ContextExtent { range, flags, .. } in export.context_extents(start..end)? {
        let has = |flag: u32| flags & u64::from(flag) != 0;
        let is_marked = has(allocation::HOLE);
        let kind = if has(allocation::ZERO) { BlockStatus::Preallocated } else { BlockStatus::Data };
        let host = (!is_marked).then(|| (Arc::clone(export.name()), HostOffset(range.start)));
        let what = MapEntry::new(range.end - range.start, kind).host(host);
        tell(&Run { start: range.start, what, is_marked })?;
    }
    Ok(())
}

pub(crate) fn run(options: &MapOptions) -> anyhow::Result<ExitCode> {
    let Look { found: disk, in_use } =
        look(&options.source, |image| Ok(block_on(chain::open(&image.reference, &open::one_by_one(&image.options)))?))?;
    let start = options.start;
    let end = options.length.map_or(disk.len(), |length| start.saturating_add(length).min(disk.len()));
    let printed = if options.json { print_json(&*disk, start, end) } else { print_lines(&*disk, start, end) };
    printed.map_err(|error| if in_use { uncertain(error) } else { error })?;
    check_stdout()?;
    Ok(ExitCode::SUCCESS)
}

/// A table, a row for each run that has an offset.
fn print_lines(disk: &dyn Disk, start: u64, end: u64) -> anyhow::Result<()> {
    print_out!("{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to");
    block_on(each(disk, start, end, |run| {
        if let Some(line) = run.line()? {
            print_out!("{line}");
        }
        Ok(())
    }))
}

/// One array, an element a line.
fn print_json(disk: &dyn Disk, start: u64, end: u64) -> anyhow::Result<()> {
    let mut last: Option<String> = None;
    let mut opening = "[";
    block_on(each(disk, start, end, |run| {
        if let Some(before) = last.replace(run.json()) {
            print_out!("{opening}{before},");
            opening = "";
        }
        Ok(())
    }))?;
    // qemu-img's line for an empty range.
    let nothing = || {
        format!(
            "{{ \"start\": {start}, \"length\": 0, \"depth\": 0, \"present\": false, \"zero\": false, \"data\": false, \
             \"compressed\": false}}"
        )
    };
    print_out!("{opening}{}]", last.unwrap_or_else(nothing));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, length: u64, kind: BlockStatus, depth: u32, host: Option<(&str, u64)>) -> Run {
        let host = host.map(|(file, at)| (Arc::from(file), HostOffset(at)));
        Run { start, what: MapEntry::new(length, kind).depth(depth).host(host), is_marked: false }
    }

    #[test]
    fn what_follows_is_the_same_run_if_it_lies_behind_it() {
        let first = || run(0, 4096, BlockStatus::Data, 0, Some(("a", 65536)));
        let mut joined = first();
        assert!(joined.join(&run(4096, 512, BlockStatus::Data, 0, Some(("a", 69632)))));
        assert_eq!(joined.what.length, 4608);
        for other in [
            run(4096, 512, BlockStatus::Data, 0, Some(("a", 70000))),
            run(4096, 512, BlockStatus::Data, 0, Some(("b", 69632))),
            run(4096, 512, BlockStatus::Data, 1, Some(("a", 69632))),
            run(4096, 512, BlockStatus::Data, 0, None),
            run(4096, 512, BlockStatus::Zero, 0, Some(("a", 69632))),
        ] {
            assert!(!first().join(&other), "{other:?}");
        }
        assert!(run(0, 1, BlockStatus::Zero, 0, None).join(&run(1, 1, BlockStatus::Zero, 0, None)));
    }

    #[test]
    fn people_see_only_data_that_has_an_offset() {
        let line = |run: Run| run.line();
        let shown = line(run(0, 65536, BlockStatus::Data, 1, Some(("a.qcow2", 327_680)))).unwrap();
        assert_eq!(shown.as_deref(), Some("0               0x10000         0x50000         a.qcow2"));
        assert_eq!(line(run(0, 1, BlockStatus::Zero, 0, Some(("a", 0)))).unwrap(), None);
        assert_eq!(line(run(0, 1, BlockStatus::Preallocated, 0, Some(("a", 0)))).unwrap(), None);
        assert_eq!(line(run(0, 1, BlockStatus::Unallocated, 0, None)).unwrap(), None);
        for (kind, how) in [(BlockStatus::Compressed, "are compressed"), (BlockStatus::Data, "are encrypted")] {
            assert!(line(run(0, 1, kind, 0, None)).unwrap_err().to_string().contains(how));
        }
    }

    #[test]
    fn programs_see_everything() {
        assert_eq!(
            run(1, 2, BlockStatus::Compressed, 3, None).json(),
            r#"{ "start": 1, "length": 2, "depth": 3, "present": true, "zero": false, "data": true, "compressed": true}"#
        );
        assert_eq!(
            run(0, 2, BlockStatus::Zero, 0, Some(("a", 0))).json(),
            r#"{ "start": 0, "length": 2, "depth": 0, "present": true, "zero": true, "data": false, "compressed": false, "offset": 0}"#
        );
    }
}
