//! Check and repair, compared with the stock tool.

mod breaking;
mod cuts;
mod encrypted;
mod hostile;
mod resized_more;
mod resizing;
mod verdict;
mod zoo;

use breaking::Tables;
use limosa_image::qcow2::{CheckOptions, Repair, check, repair};
use limosa_storage::testing::SeededRandom;
use limosa_storage::{MemoryStorage, block_on};
use verdict::{figures, ours, stock, stock_repair};

/// Memory that suffices for everything, and memory for a window of 4096 clusters.
const MEMORY: [usize; 2] = [64 << 20, 0];

#[test]
fn images_of_the_stock_tools_are_told_the_same_of() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    for animal in zoo::all(folder.path()) {
        let bytes = std::fs::read(&animal.path).unwrap();
        for memory in MEMORY {
            let report = ours(&bytes, memory).unwrap();
            assert_eq!((Some(figures(&report)), String::new()), stock(&animal.path), "{}: {report:?}", animal.name);
            assert!(report.is_clean());
        }
    }
}

#[test]
fn broken_images_are_told_the_same_of() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let mut chance = SeededRandom::new(seed());
    let mut compared = 0;
    let mut wrong = Vec::new();
    for animal in zoo::all(folder.path()).into_iter().filter(|animal| animal.name != "large") {
        let whole = std::fs::read(&animal.path).unwrap();
        let broken = folder.path().join("broken.qcow2");
        for _ in 0..times(30) {
            let mut bytes = whole.clone();
            let tables = Tables::of(&bytes);
            let what: Vec<_> = (0..=chance.below(3)).map(|_| tables.break_one(&mut bytes, &mut chance)).collect();
            std::fs::write(&broken, &bytes).unwrap();
            let (stock, said) = stock(&broken);
            let report = ours(&bytes, *chance.choose(&MEMORY));
            let found = report.as_ref().ok().map(figures);
            if stock.is_some() {
                compared += 1;
                if stock != found {
                    let said: Vec<_> = said.lines().take(6).collect();
                    let findings: Vec<_> = report.iter().flat_map(|report| &report.findings).take(6).collect();
                    let name = &animal.name;
                    wrong.push(format!(
                        "{name} {what:#?}\n{said:#?}\nstock {stock:?}\nlimosa {found:?}\n{findings:#?}\n{:?}",
                        report.as_ref().err()
                    ));
                }
            }
        }
    }
    println!("{compared} compared, {} differ", wrong.len());
    assert!(wrong.is_empty(), "{}\n{} of {compared} differ", wrong.join("\n\n"), wrong.len());
}

#[test]
fn what_was_repaired_is_clean_for_the_stock_tool() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let mut chance = SeededRandom::new(seed());
    let (mut repaired, mut wrong) = (0, Vec::new());
    for animal in zoo::all(folder.path()).into_iter().filter(|animal| animal.name != "large") {
        let whole = std::fs::read(&animal.path).unwrap();
        let broken = folder.path().join("broken.qcow2");
        for _ in 0..times(20) {
            let mut bytes = whole.clone();
            let tables = Tables::of(&bytes);
            let what: Vec<_> = (0..=chance.below(3)).map(|_| tables.break_one(&mut bytes, &mut chance)).collect();
            let storage = MemoryStorage::with_contents(bytes.clone(), u64::MAX);
            let options = CheckOptions::default().memory(*chance.choose(&MEMORY));
            // What cannot be gone through at all is left alone.
            let Ok(report) = block_on(repair(&storage, Repair::All, options)) else {
                assert!(storage.contents() == bytes || what.len() > 1, "{}: {what:#?}", animal.name);
                continue;
            };
            repaired += 1;
            std::fs::write(&broken, storage.contents()).unwrap();
            let (stock, said) = stock(&broken);
            let clean = stock.is_some_and(|found| (found.leaks, found.corruptions, found.errors) == (0, 0, 0));
            if !clean || !report.is_clean() {
                let said: Vec<_> = said.lines().take(6).collect();
                let before =
                    ours(&bytes, MEMORY[0]).map(|report| report.findings.into_iter().take(6).collect::<Vec<_>>());
                let left = report.findings.iter().take(6).collect::<Vec<_>>();
                wrong.push(format!("{} {what:#?}\nbefore {before:#?}\n{said:#?}\nleft {left:#?}", animal.name));
            }
        }
    }
    println!("{repaired} repaired, {} not clean", wrong.len());
    assert!(wrong.is_empty(), "{}\n{} of {repaired} are not clean", wrong.join("\n\n"), wrong.len());
}

#[test]
fn leaks_are_given_back_as_by_the_stock_tool() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let mut chance = SeededRandom::new(seed());
    let mut compared = 0;
    for name in ["usual", "tiny", "width2", "width64", "subclusters", "bitmaps", "zlib", "old"] {
        let whole = std::fs::read(zoo::one(folder.path(), name).path).unwrap();
        let broken = folder.path().join("broken.qcow2");
        for _ in 0..times(12) {
            let mut bytes = whole.clone();
            let mut tables = Tables::of(&bytes);
            tables.kinds.retain(|(kind, _)| *kind == "refcount block" || *kind == "l2");
            let what: Vec<_> = (0..2).map(|_| tables.break_one(&mut bytes, &mut chance)).collect();
            std::fs::write(&broken, &bytes).unwrap();
            let (stock, said) = stock_repair(&broken, "leaks");
            // It does nothing if other things are broken, too; limosa gives back what it can.
            if said.contains("rebuild") || said.contains("Repairing refcount block") {
                continue;
            }
            let Some((stock, fixed)) = stock else { continue };
            let storage = MemoryStorage::with_contents(bytes, u64::MAX);
            let report = block_on(repair(&storage, Repair::Leaks, CheckOptions::default())).unwrap();
            assert_eq!((figures(&report), report.leaks_fixed), (stock, fixed), "{name} {what:#?}\n{said}");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared}");
}

#[test]
fn an_image_that_was_not_closed_is_closed_when_it_is_repaired() {
    if limosa_testkit::qemu_skipped() {
        return;
    }
    let folder = limosa_testkit::scratch().unwrap();
    let mut bytes = std::fs::read(zoo::one(folder.path(), "lazy").path).unwrap();
    // Bit 0 of the incompatible features says dirty, bit 1 corrupt; the last refcounts have not been written.
    let block =
        *Tables::of(&bytes).kinds.iter().find(|(kind, _)| *kind == "refcount block").unwrap().1.first().unwrap();
    let block = usize::try_from(block).unwrap();
    bytes[block + 16..block + 64].fill(0);
    for flags in [1, 2, 3] {
        let mut bytes = bytes.clone();
        bytes[79] |= flags;
        let storage = MemoryStorage::with_contents(bytes.clone(), u64::MAX);
        let found = block_on(check(&storage, CheckOptions::default())).unwrap();
        assert!(found.corruptions > 0 && storage.contents() == bytes);
        let report = block_on(repair(&storage, Repair::All, CheckOptions::default())).unwrap();
        assert_eq!((report.corruptions_fixed, report.is_clean()), (found.corruptions, true));
        assert_eq!(storage.contents()[79], 0);
    }
}

/// `LIMOSA_SEED`, or always the same.
fn seed() -> u64 {
    std::env::var("LIMOSA_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1)
}

/// `LIMOSA_TIMES` times as often as usual.
fn times(usual: u64) -> u64 {
    usual * std::env::var("LIMOSA_TIMES").ok().and_then(|times| times.parse().ok()).unwrap_or(1)
}
