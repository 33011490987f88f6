//! `limosa img compare`.
//!
//! Exit statuses are qemu-img's: 0 alike, 1 not; 2 an image cannot be opened, 3 its map, 4 its contents cannot be read.

use std::process::ExitCode;

use limosa_image::compare::{self, CompareError, Comparison, Verdict};
use limosa_image::{DiskOperation, OperationError};
use limosa_storage::block_on;
use serde_json::json;

use super::meter::Meter;
use super::open;
use super::options::CompareOptions;
use crate::program::say_named;
use crate::remedy;
use limosa_console::{check_stdout, error_line, print_out};

/// An image cannot be opened.
const OPEN: u8 = 2;
/// The allocation cannot be determined.
const MAP: u8 = 3;
/// Contents cannot be read.
pub(super) const READ: u8 = 4;

pub(crate) fn run(options: &CompareOptions) -> anyhow::Result<ExitCode> {
    let images = open::to_read(&options.first).and_then(|first| Ok((first, open::to_read(&options.second)?)));
    let (first, second) = match images {
        Ok(images) => images,
        Err(error) => return Ok(refuse(&error)),
    };
    let meter = Meter::new("compare", options.progress && !options.json, options.quiet, None);
    let how = compare::CompareOptions::default().strict(options.strict);
    let compared = block_on(compare::compare(&*first, &*second, &how, &|progress| meter.note(progress)));
    meter.hide();
    let code = match compared {
        Ok(comparison) => {
            if options.json {
                print_out!("{}", object(&comparison));
            } else if !options.quiet {
                if warns_of_lengths(&comparison, first.len().min(second.len())) {
                    print_out!("Warning: Image size mismatch!");
                }
                print_out!("{}", sentence(comparison.verdict));
            }
            ExitCode::from(u8::from(comparison.verdict != Verdict::Same))
        }
        Err(CompareError { image, source, .. }) => {
            failed(&format!("{image}: {}", error_line(&source)), status(&source))
        }
    };
    check_stdout()?;
    Ok(code)
}

/// Reports an error that prevented the comparison.
pub(crate) fn refuse(error: &anyhow::Error) -> ExitCode {
    failed(&format!("{}{}", limosa_console::anyhow_error_line(error), remedy::of_cause(error)), OPEN)
}

fn failed(line: &str, status: u8) -> ExitCode {
    say_named!("{}", line.replace('\n', " "));
    ExitCode::from(status)
}

fn status(error: &OperationError) -> u8 {
    match error {
        OperationError::Failed { operation: DiskOperation::Mapping, .. } => MAP,
        _ => READ,
    }
}

/// Whether to warn that the lengths differ: not if the difference was found before the end of the `shorter` image.
fn warns_of_lengths(comparison: &Comparison, shorter: u64) -> bool {
    !comparison.same_length
        && match comparison.verdict {
            Verdict::ContentsDiffer(at) => at.0 >= shorter,
            Verdict::Same | Verdict::AllocationDiffers(_) => true,
            Verdict::LengthDiffers => false,
        }
}

fn sentence(verdict: Verdict) -> String {
    match verdict {
        Verdict::Same => "Images are identical.".to_owned(),
        Verdict::ContentsDiffer(at) => format!("Content mismatch at offset {}!", at.0),
        Verdict::AllocationDiffers(at) => format!("Strict mode: Offset {} block status mismatch!", at.0),
        Verdict::LengthDiffers => "Strict mode: Image size mismatch!".to_owned(),
    }
}

fn object(comparison: &Comparison) -> serde_json::Value {
    let (differs, offset) = match comparison.verdict {
        Verdict::Same => (None, None),
        Verdict::ContentsDiffer(at) => (Some("contents"), Some(at.0)),
        Verdict::AllocationDiffers(at) => (Some("allocation"), Some(at.0)),
        Verdict::LengthDiffers => (Some("length"), None),
    };
    json!({
        "identical": comparison.verdict == Verdict::Same,
        "differs": differs,
        "offset": offset,
        "same-length": comparison.same_length,
        "bytes-read": comparison.bytes_read,
    })
}
