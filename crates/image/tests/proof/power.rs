//! The power is cut at any moment: the image is sound, what was flushed is there, and nothing else than what was ever
//! written.

use std::sync::Arc;

use limosa_image::Disk;
use limosa_storage::testing::{Loss, PowerCut, RequestHolder, SeededRandom};

use crate::Verdict;
use crate::bed::Make;
use crate::linear::Watched;
use crate::model::Plan;

/// Runs requests, and then cuts the power `cuts` times: at every moment in turn, or at some of them by chance, with all
/// three kinds of loss.
///
/// `look` is given the contents of the storages after a cut, and says what the guest sees then.
pub(crate) fn run(
    first: Vec<u8>,
    plan: Plan,
    cuts: u64,
    open: &dyn Fn(&Make<'_>) -> Verdict<Arc<dyn Disk>>,
    look: &dyn Fn(Vec<Vec<u8>>) -> Verdict<Vec<u8>>,
) -> Verdict {
    let (held, power) = (RequestHolder::new().lazily(), PowerCut::new());
    held.release_all();
    let disk = open(&|name, bytes| held.wrap(power.add_storage(name, bytes, 256 << 20)))?;
    held.hold_again();
    let mut watched = Watched::new(disk, first, plan, &held, power.clone());
    watched.run()?;
    watched.driver.close().map_err(|error| format!("close: {error}"))?;
    let moments = power.moments();
    let mut chance = SeededRandom::new(plan.seed ^ 0xc07);
    for cut in 0..cuts {
        let moment = usize::try_from(if cut <= moments as u64 && cuts > moments as u64 {
            cut
        } else {
            chance.below(moments as u64 + 1)
        });
        let moment = moment.unwrap();
        let loss = match cut % 6 {
            0 => Loss::None,
            1 => Loss::All,
            _ => Loss::Some(chance.bits()),
        };
        let found = look(power.cut(moment, loss)).and_then(|found| watched.history.survived(&found, moment));
        found.map_err(|error| format!("seed {}: power cut at {moment} of {moments}, {loss:?}: {error}", plan.seed))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plain::{Defect, Plain};

    fn found(defect: Option<Defect>, seed: u64) -> Verdict {
        let first = vec![3; 100 << 10];
        let len = first.len() as u64;
        let plan = Plan {
            seed,
            cluster: 512,
            steps: 200,
            depth: 4,
            drops: false,
            discards_may_stay: false,
            compresses: false,
        };
        let open = |make: &Make<'_>| Ok(Plain::disk(make("disk", vec![3; 100 << 10]), len, defect));
        run(first, plan, 600, &open, &|mut contents| Ok(contents.remove(0)))
    }

    #[test]
    fn a_disk_without_a_defect_survives() {
        for seed in 0..3 {
            found(None, seed).unwrap();
        }
    }

    #[test]
    fn a_disk_that_does_not_flush_or_answers_too_early_is_found_out() {
        for defect in [Defect::KeepsNothing, Defect::SpeaksTooEarly] {
            found(Some(defect), 1).expect_err(&format!("{defect:?}"));
        }
    }
}
