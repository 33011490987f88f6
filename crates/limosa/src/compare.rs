//! `limosa inspect --diff` and `limosa inspect --against-qmp`.

use limosa_console::quantity;
use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use limosa_qemu::qmp::MonitorAddress;
use limosa_qemu::{VmstateDump, examine_destination};
use limosa_snapshot::{
    Comparison, Confidence, Finding, MemoryComparison, Severity, Snapshot, Summary, compare_memory, compare_snapshots,
    find_damage, summarize_file,
};
use limosa_stream::configuration::MAPPED_RAM;
use serde_json::json;

use crate::args::InspectArgs;
use crate::job;
use crate::packed;
use crate::remedy;
use limosa_console::{check_stdout, print_out, say};

/// Status of "no verdict", as of diff(1) and of bad usage.
const NO_VERDICT: u8 = 2;
/// Most subjects that share a line.
const SUBJECTS: usize = 4;

pub(crate) fn run(args: &InspectArgs) -> ExitCode {
    let compared = match (&args.against_qmp, &args.other) {
        (Some(monitor), _) => with_qemu(args, monitor),
        (None, Some(other)) => with_file(args, other),
        // The command line asks for one of the two.
        (None, None) => Err(anyhow::anyhow!("nothing to compare with: give a second file, or --against-qmp SOCK")),
    };
    let printed = compared.and_then(|(comparison, memory)| {
        print(args, &comparison, memory)?;
        check_stdout()?;
        Ok(comparison.would_load())
    });
    match printed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            say!("limosa: {}{}", limosa_console::anyhow_error_line(&error), remedy::of_cause(&error));
            ExitCode::from(NO_VERDICT)
        }
    }
}

type Compared = (Comparison, Option<MemoryComparison>);

/// Opens a file: its summary, and the snapshot itself if its pages can be read one by one.
pub(crate) fn open(path: &Path) -> anyhow::Result<(Summary, Option<Snapshot>)> {
    if packed::is_one(path) {
        let snapshot = packed::open(path)?;
        return Ok((snapshot.summary(), Some(snapshot)));
    }
    let summary = summarize_file(path)?;
    // A mapped-ram stream inside a save image is no snapshot of its own.
    let mapped = !summary.importable && summary.capabilities.iter().any(|capability| capability == MAPPED_RAM);
    let snapshot = mapped.then(|| Snapshot::open(path)).transpose()?;
    Ok((summary, snapshot))
}

fn with_damage(comparison: Comparison, saved: Option<&Snapshot>) -> Comparison {
    let damaged = saved.and_then(find_damage);
    Comparison::new(comparison.findings.into_iter().chain(damaged).collect())
}

fn with_file(args: &InspectArgs, other: &Path) -> anyhow::Result<Compared> {
    let (saved, snapshot) = open(&args.file)?;
    let (other, other_snapshot) = open(other)?;
    let memory = match (&snapshot, &other_snapshot) {
        (Some(first), Some(second)) => Some(compare_memory(first, second, args.memory)?),
        _ if args.memory => {
            anyhow::bail!("--memory needs two snapshots: pages of a recorded stream cannot be looked up")
        }
        _ => None,
    };
    Ok((with_damage(compare_snapshots(&saved, &other), snapshot.as_ref()), memory))
}

fn with_qemu(args: &InspectArgs, monitor: &MonitorAddress) -> anyhow::Result<Compared> {
    let (saved, snapshot) = open(&args.file)?;
    let monitor = job::connect(monitor)?;
    let dump = args.qemu.as_deref().map(|program| VmstateDump::of(program, monitor.version()));
    let dump = dump.transpose().context("--qemu")?;
    let comparison = examine_destination(&monitor, &saved, dump)?;
    Ok((with_damage(comparison, snapshot.as_ref()), None))
}

fn print(args: &InspectArgs, comparison: &Comparison, memory: Option<MemoryComparison>) -> anyhow::Result<()> {
    if args.json {
        let verdict = if comparison.would_load() { "would-load" } else { "would-not-load" };
        let mut report = json!({
            "verdict": verdict,
            "unknown": comparison.uncertain_refusals(),
            "findings": comparison.findings,
        });
        if let (Some(memory), Some(report)) = (memory, report.as_object_mut()) {
            report.insert("memory".to_owned(), serde_json::to_value(memory)?);
        }
        print_out!("{report}");
        return Ok(());
    }
    for line in lines(&comparison.findings) {
        print_out!("{line}");
    }
    if let Some(memory) = memory {
        print_out!("{}", memory_line(memory));
    }
    print_out!("{}", verdict(args, comparison));
    Ok(())
}

/// Returns a line for each finding; findings of the same text about different subjects share one.
fn lines(findings: &[Finding]) -> Vec<String> {
    let mut groups: Vec<Vec<&Finding>> = Vec::new();
    let mut known = HashMap::new();
    for finding in findings {
        let says = (finding.severity, finding.confidence, &finding.what, &finding.advice);
        let at = *known.entry(says).or_insert(groups.len());
        match groups.get_mut(at) {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    let line = |group: Vec<&Finding>| {
        let first = group.first()?;
        let mut subjects: Vec<&str> = group.iter().take(SUBJECTS).map(|finding| finding.subject.as_str()).collect();
        let more = group.len().saturating_sub(SUBJECTS);
        let and_more = format!("{more} more");
        if more > 0 {
            subjects.push(&and_more);
        }
        let advice = first.advice.as_ref().map(|advice| format!("; {advice}")).unwrap_or_default();
        Some(format!("{:<16}{}: {}{advice}", class(first), subjects.join(", "), first.what))
    };
    groups.into_iter().filter_map(line).collect()
}

fn class(finding: &Finding) -> &'static str {
    match (finding.severity, finding.confidence) {
        (Severity::Refuses, Confidence::Certain) => "refuses",
        (Severity::Refuses, Confidence::Likely) => "likely refuses",
        (Severity::Refuses, Confidence::Unknown) => "may refuse",
        (Severity::ChangesVm, Confidence::Certain) => "loses",
        (Severity::ChangesVm, Confidence::Likely) => "likely loses",
        (Severity::ChangesVm, Confidence::Unknown) => "may lose",
        (Severity::Harmless, _) => "harmless",
    }
}

fn memory_line(memory: MemoryComparison) -> String {
    let differing = match memory.differing {
        Some(pages) => format!("{} differ in contents", quantity::count(pages)),
        None => "contents were not compared (use --memory)".to_owned(),
    };
    format!(
        "{:<16}{} pages: {} stored in both, {} in the first only, {} in the second only; {differing}",
        "memory",
        quantity::count(memory.pages),
        quantity::count(memory.both),
        quantity::count(memory.only_first),
        quantity::count(memory.only_second)
    )
}

fn verdict(args: &InspectArgs, comparison: &Comparison) -> String {
    let (file, unknown) = (args.file.display(), comparison.uncertain_refusals());
    let refusing = comparison.findings.iter().filter(|finding| finding.refuses()).count();
    let place = if args.diff { "where the other was saved" } else { "on this QEMU" };
    if refusing > 0 {
        let prevent = if refusing == 1 { "finding prevents" } else { "findings prevent" };
        return format!("{file} would not load {place}: {refusing} {prevent} it");
    }
    let unknown = match unknown {
        0 => String::new(),
        some if args.qemu.is_none() && !args.diff => {
            format!("; only loading, or the sections that --qemu lists, can decide {some} of the findings")
        }
        some => format!("; only loading can decide {some} of the findings"),
    };
    format!("{file} would load {place}, by what is known (options inside a device are not compared){unknown}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_that_say_the_same_share_a_line() {
        let finding = |subject: &str| Finding::new(Severity::Refuses, Confidence::Unknown, subject, "is unknown");
        let mut findings: Vec<_> = ["a", "b", "c", "d", "e", "f"].map(finding).into();
        findings.push(Finding::new(Severity::Harmless, Confidence::Certain, "x", "is so").advise("leave it"));
        let lines = lines(&findings);
        assert_eq!(lines[0], "may refuse      a, b, c, d, 2 more: is unknown");
        assert_eq!(lines[1], "harmless        x: is so; leave it");
        assert_eq!(lines.len(), 2);
    }
}
