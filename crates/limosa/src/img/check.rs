//! `limosa img check`.
//!
//! Law: the exit status says how bad it is, as qemu-img's does: scripts look at nothing else.

use std::process::ExitCode;
use std::thread;

use limosa_image::chain::ImageFile;
use limosa_image::qcow2::{CheckReport, Finding};
use limosa_storage::block_on;
use serde_json::{Map, Value, json};

use super::looking::{ATTEMPTS, Look, PAUSE, look};
use super::options::CheckOptions;
use super::pretty::pretty;
use super::{object, open};
use crate::program::say_named;
use limosa_console::{check_stdout, print_out, say};

/// The image has wrong references, or uses space that it has not allocated.
const CORRUPT: u8 = 2;
/// Only space is lost.
const LEAKS: u8 = 3;
/// Images of this format have nothing to check.
const NOT_CHECKED: u8 = 63;
/// Of what is found in an image that is in use.
const NOT_CERTAIN: &str = "it is in use, and its writer may not have completed a change; check it when it is not.";

/// Prints the findings that were kept to stderr.
fn say_findings(findings: &[Finding], left_out: u64) {
    for finding in findings {
        say!("{finding}");
    }
    if left_out > 0 {
        say!("and {left_out} more");
    }
}

/// Parts of a whole in percent.
fn percent(part: u64, whole: u64) -> f64 {
    // Told with two digits behind the point: what the conversion loses is not seen.
    #[expect(clippy::cast_precision_loss, reason = "a percentage for people")]
    let (part, whole) = (part as f64, whole.max(1) as f64);
    part * 100.0 / whole
}

/// `1 corruption`, `2 corruptions`.
fn count(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Describes the state of an image for people. `in_use`: a writer has it, and no damage is certain.
fn lines(report: &CheckReport, in_use: bool) -> Vec<String> {
    let mut lines = Vec::new();
    if report.leaks_fixed > 0 || report.corruptions_fixed > 0 {
        lines.push(format!(
            "Repaired: {}, {}. The image as it is now:",
            count(report.leaks_fixed, "leaked cluster"),
            count(report.corruptions_fixed, "corruption")
        ));
    }
    if report.is_clean() {
        lines.push("No errors were found on the image.".to_owned());
    }
    if report.corruptions > 0 {
        let found = if report.corruptions == 1 { "error was" } else { "errors were" };
        let what = if in_use { NOT_CERTAIN } else { "data may be lost, and writing to it can lose more." };
        lines.push(format!("{} {found} found in the image: {what}", report.corruptions));
    }
    if report.leaks > 0 {
        lines.push(match report.leaks {
            leaks if in_use => format!("{leaks} leaked clusters were found in the image: {NOT_CERTAIN}"),
            1 => "1 leaked cluster was found in the image: it costs space, no data.".to_owned(),
            leaks => format!("{leaks} leaked clusters were found in the image: they cost space, no data."),
        });
    }
    if report.check_errors > 0 {
        let places = if report.check_errors == 1 { "place" } else { "places" };
        lines.push(format!("{} {places} could not be checked.", report.check_errors));
    }
    if report.total_clusters > 0 && report.allocated_clusters > 0 {
        let (total, allocated) = (report.total_clusters, report.allocated_clusters);
        lines.push(format!(
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(allocated, total),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated)
        ));
    }
    if report.image_end_offset > 0 {
        lines.push(format!("Image end offset: {}", report.image_end_offset));
    }
    lines
}

/// Builds the report for programs. Figures that are 0 are left out, as in qemu-img.
fn object(report: &CheckReport, name: &str, format: &str) -> Value {
    let mut object = Map::new();
    for (key, figure) in [
        ("image-end-offset", report.image_end_offset),
        ("total-clusters", report.total_clusters),
        ("allocated-clusters", report.allocated_clusters),
        ("fragmented-clusters", report.fragmented_clusters),
        ("compressed-clusters", report.compressed_clusters),
        ("corruptions", report.corruptions),
        ("leaks", report.leaks),
        ("corruptions-fixed", report.corruptions_fixed),
        ("leaks-fixed", report.leaks_fixed),
    ] {
        if figure > 0 {
            object.insert(key.to_owned(), json!(figure));
        }
    }
    object.insert("check-errors".to_owned(), json!(report.check_errors));
    object.insert("filename".to_owned(), json!(name));
    object.insert("format".to_owned(), json!(format));
    Value::Object(object)
}

/// Returns the exit status.
fn status(report: &CheckReport) -> ExitCode {
    if report.check_errors > 0 {
        ExitCode::FAILURE
    } else if report.corruptions > 0 {
        ExitCode::from(CORRUPT)
    } else if report.leaks > 0 {
        ExitCode::from(LEAKS)
    } else {
        ExitCode::SUCCESS
    }
}

pub(crate) fn run(options: &CheckOptions) -> anyhow::Result<ExitCode> {
    let source = &options.source;
    let (file, report, in_use) = if options.repair.is_some() {
        let file = open::file(source, false)?;
        let report = block_on(file.check(options.repair, &object::secrets()))?;
        (file, report, false)
    } else {
        let Look { found: (file, mut report), in_use } = look(source, |image| {
            let file = block_on(ImageFile::open(&image.reference, &image.options))?;
            let report = block_on(file.check(None, &object::secrets()))?;
            Ok((file, report))
        })?;
        // A change that was under way is complete when it is looked at again.
        for _ in 1..ATTEMPTS {
            if !in_use || report.as_ref().is_none_or(CheckReport::is_clean) {
                break;
            }
            thread::sleep(PAUSE);
            report = block_on(file.check(None, &object::secrets()))?;
        }
        (file, report, in_use)
    };
    let Some(report) = report else {
        say_named!("{}: images of format {} have nothing to check", source.name, file.format);
        return Ok(ExitCode::from(NOT_CHECKED));
    };
    say_findings(&report.findings, report.findings_left_out);
    if options.json {
        print_out!("{}", pretty(&object(&report, &source.name.to_string(), file.format.name()))?);
    } else if !options.quiet {
        for line in lines(&report, in_use) {
            print_out!("{line}");
        }
    }
    check_stdout()?;
    Ok(status(&report))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(change: impl FnOnce(&mut CheckReport)) -> CheckReport {
        let mut report = CheckReport::default();
        change(&mut report);
        report
    }

    fn report() -> CheckReport {
        with(|report| {
            report.image_end_offset = 2_097_152;
            (report.total_clusters, report.allocated_clusters, report.fragmented_clusters) = (400, 19, 1);
        })
    }

    fn faulty(leaks: u64, corruptions: u64, check_errors: u64) -> CheckReport {
        let mut report = report();
        (report.leaks, report.corruptions, report.check_errors) = (leaks, corruptions, check_errors);
        report
    }

    #[test]
    fn figures_are_printed_in_qemu_imgs_lines() {
        assert_eq!(
            lines(&report(), false),
            [
                "No errors were found on the image.",
                "19/400 = 4.75% allocated, 5.26% fragmented, 0.00% compressed clusters",
                "Image end offset: 2097152"
            ]
        );
        assert_eq!(lines(&with(|report| report.image_end_offset = 7), false).len(), 2);
        let one = lines(&faulty(1, 1, 1), false);
        assert!(one[0].starts_with("1 error was") && one[1].starts_with("1 leaked cluster was"), "{one:?}");
        let repaired = lines(&with(|report| (report.leaks_fixed, report.corruptions_fixed) = (2, 1)), false);
        assert!(repaired[0].starts_with("Repaired: 2 leaked clusters, 1 corruption. "), "{repaired:?}");
        let bad = faulty(2, 3, 4);
        let uncertain = lines(&bad, true);
        assert!(uncertain[..2].iter().all(|line| line.ends_with(NOT_CERTAIN)), "{uncertain:?}");
        let lines = lines(&bad, false);
        assert!(
            lines[0].starts_with("3 errors") && lines[1].starts_with("2 leaked") && lines[2].starts_with("4 places")
        );
    }

    #[test]
    fn figures_that_are_0_are_left_out_for_programs_but_for_errors() {
        assert_eq!(
            object(&report(), "x", "qcow2"),
            json!({
                "image-end-offset": 2_097_152, "total-clusters": 400, "allocated-clusters": 19, "fragmented-clusters": 1,
                "check-errors": 0, "filename": "x", "format": "qcow2"
            })
        );
    }

    #[test]
    fn what_was_not_checked_is_worse_than_what_was_found() {
        let status =
            |check_errors, corruptions, leaks| format!("{:?}", status(&faulty(leaks, corruptions, check_errors)));
        let code = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(status(0, 0, 0), code(0));
        assert_eq!(status(0, 0, 1), code(3));
        assert_eq!(status(0, 1, 1), code(2));
        assert_eq!(status(1, 1, 1), code(1));
    }
}
