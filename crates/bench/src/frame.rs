//! Contestants and rounds: every contestant runs once per round, in the same order, so that a drift of the
//! machine affects all of them.
//!
//! Where a virtual machine gives free memory back to its host, the first touch of memory that has been free for seconds
//! costs several times more than the second. [`Frame::touch`] therefore takes and frees as much as a run will need; a
//! contestant calls it right before its clock starts.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::measure::Measured;
use crate::raw::Mapping;

/// The services of the frame for a contestant.
#[derive(Debug, Clone, Copy)]
pub struct Frame {
    /// Bytes that [`touch`](Self::touch) takes and frees.
    pub touch: u64,
}

impl Frame {
    /// Takes and frees memory, so that the run which follows meets memory that the host has already provided.
    pub fn touch(&self) -> Result<()> {
        let len = usize::try_from(self.touch).context("memory to touch")?;
        if len == 0 {
            return Ok(());
        }
        let mut memory = Mapping::anonymous(len).with_context(|| format!("mapping {len} bytes to touch"))?;
        memory.populate().with_context(|| format!("touching {len} bytes: not enough memory for this --size"))
    }
}

/// The work of one run: prepares, calls [`Frame::touch`], measures, cleans up.
pub type Run<'a> = Box<dyn FnMut(&Frame) -> Result<Measured> + 'a>;

/// One way of doing one thing.
pub struct Contestant<'a> {
    /// The work; contestants of the same case can be compared.
    pub case: String,
    /// The way it is done.
    pub variant: String,
    /// Does it once.
    pub run: Run<'a>,
}

/// The runs of one contestant, one per round.
#[derive(Debug, Clone)]
pub struct Series {
    /// As in [`Contestant::case`].
    pub case: String,
    /// As in [`Contestant::variant`].
    pub variant: String,
    /// In order of rounds.
    pub runs: Vec<Measured>,
}

/// Makes of every series one for each part of its runs: a name, and the counter of the microseconds until the part is
/// done. The part without a counter is the whole run, which keeps CPU seconds and counters. A series whose runs have no
/// such counter has no such part.
pub(crate) fn in_parts(all: &[Series], parts: &[(&str, Option<&str>)]) -> Vec<Series> {
    let mut found = Vec::new();
    for &(name, counter) in parts {
        for series in all {
            let of = |run: &Measured| match counter {
                Some(counter) => {
                    let wall = Duration::from_micros(*run.counters.get(counter)?);
                    Some(Measured { wall, ..Measured::default() })
                }
                None => Some(run.clone()),
            };
            let runs: Vec<Measured> = series.runs.iter().filter_map(of).collect();
            if !runs.is_empty() {
                found.push(Series { case: part(&series.case, name), variant: series.variant.clone(), runs });
            }
        }
    }
    found
}

/// The case of a part.
pub(crate) fn part(case: &str, part: &str) -> String {
    format!("{case}: {part}")
}

/// Runs all contestants `rounds` times, interleaved. `progress` is called with each run, for people who wait.
pub fn interleave(
    contestants: &mut [Contestant<'_>],
    rounds: u32,
    frame: &Frame,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<Series>> {
    let mut all: Vec<Series> = contestants
        .iter()
        .map(|one| Series { case: one.case.clone(), variant: one.variant.clone(), runs: Vec::new() })
        .collect();
    for round in 1..=rounds {
        for (contestant, series) in contestants.iter_mut().zip(&mut all) {
            let measured = (contestant.run)(frame)
                .with_context(|| format!("{}, {}, round {round}", contestant.case, contestant.variant))?;
            let mut line = String::new();
            let _ = write!(
                line,
                "round {round}/{rounds}  {}  {}  wall {:.3} s  cpu {:.3} s",
                series.case,
                series.variant,
                measured.wall.as_secs_f64(),
                measured.cpu.as_secs_f64()
            );
            progress(&line);
            series.runs.push(measured);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn contestants_take_turns() {
        let order = RefCell::new(String::new());
        let contestant = |name: &'static str| Contestant {
            case: "case".into(),
            variant: name.into(),
            run: Box::new(|_| {
                order.borrow_mut().push_str(name);
                Ok(Measured::default())
            }),
        };
        let mut both = [contestant("A"), contestant("B")];
        let series = interleave(&mut both, 3, &Frame { touch: 1 << 20 }, &mut |_| {}).expect("runs");
        assert_eq!(*order.borrow(), "ABABAB");
        assert!(series.iter().all(|series| series.runs.len() == 3));
    }

    #[test]
    fn a_failure_names_the_contestant_and_the_round() {
        let mut one = [Contestant {
            case: "ext4".into(),
            variant: "splice".into(),
            run: Box::new(|frame| frame.touch().and_then(|()| anyhow::bail!("disk full"))),
        }];
        let error = interleave(&mut one, 1, &Frame { touch: 4096 }, &mut |_| {}).expect_err("fails");
        assert_eq!(format!("{error:#}"), "ext4, splice, round 1: disk full");
    }
}
