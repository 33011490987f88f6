//! Random dirty patterns over chains, with everything that is done to a directory in between: what is left is what was
//! saved. `LIMOSA_PACK_PATTERNS` is the number of patterns, `LIMOSA_SEED` the first seed.

use std::ffi::{OsStr, OsString};
use std::path::Path;

use limosa_migrate::Handle;
use limosa_pack::{Base, PackOptions, SnapshotDirectory, open_snapshot, pack};
use limosa_snapshot::{Snapshot, UnnamedFile};
use limosa_storage::testing::SeededRandom;

use crate::directory::{carry_out, plan};
use crate::{access, assert_same, encrypted, options, passphrase, snapshot};

const PAGES: u64 = 300;
/// Images in the deepest chain.
const DEPTH: usize = 8;

fn number(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(usual)
}

/// A directory, and what was done to it.
struct Run {
    folder: tempfile::TempDir,
    chance: SeededRandom,
    how: PackOptions,
    /// Pages of the last snapshot, with the seed of each one's contents.
    pages: Vec<(u64, u64)>,
    saved: u64,
    log: Vec<String>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("plain")).unwrap();
        let mut chance = SeededRandom::new(seed);
        let how = if chance.below(4) == 0 { encrypted() } else { options() };
        Self { folder, chance, how, pages: Vec::new(), saved: 0, log: vec![format!("seed {seed}")] }
    }

    fn plain(&self, name: &OsStr) -> std::path::PathBuf {
        self.folder.path().join("plain").join(name)
    }

    fn directory(&self) -> SnapshotDirectory {
        SnapshotDirectory::new(self.folder.path(), Some(passphrase()))
    }

    /// Makes some pages dirty, and saves: mostly on the newest snapshot.
    fn save(&mut self, there: &[OsString]) {
        for _ in 0..self.chance.below(40) {
            let page = self.chance.below(PAGES);
            self.pages.retain(|(other, _)| *other != page);
            match self.chance.below(5) {
                // It is zeros now.
                0 => {}
                seed => self.pages.push((page, seed)),
            }
        }
        self.pages.sort_unstable();
        let name = OsString::from(format!("{:05}", self.saved));
        snapshot(&self.plain(&name), PAGES, &self.pages);
        let base = match self.chance.below(8) {
            0 => None,
            1 => self.one_of(there),
            _ => there.last().cloned(),
        };
        let open = |base: &OsString| Base::open(&self.folder.path().join(base), &access(Some(&passphrase()))).unwrap();
        let base = base.as_ref().map(open).filter(|base| base.depth() < DEPTH);
        self.log.push(format!("save {name:?} on {:?}", base.as_ref().map(|base| base.snapshot().path().to_path_buf())));
        let pending = UnnamedFile::create(&self.folder.path().join(&name), false).unwrap();
        let plain = Snapshot::open(&self.plain(&name)).unwrap();
        pack(&plain, pending, base.as_ref(), &self.how, &Handle::new()).unwrap();
        self.saved += 1;
    }

    fn one_of(&mut self, there: &[OsString]) -> Option<OsString> {
        let count = u64::try_from(there.len()).unwrap();
        let index = if count == 0 { 0 } else { self.chance.below(count) };
        there.get(usize::try_from(index).unwrap()).cloned()
    }

    /// Does something. Returns whether it was more than a save.
    fn act(&mut self) -> bool {
        let directory = self.directory();
        let there = self.names();
        let Some(one) = self.one_of(&there) else {
            self.save(&there);
            return false;
        };
        match self.chance.below(12) {
            0 => {
                let removed = directory.remove(&one).is_ok();
                self.log.push(format!("remove {one:?}: {removed}"));
            }
            1 | 2 => {
                let base = if self.chance.below(3) == 0 { None } else { self.one_of(&there) };
                // A loop, or a chain that is too long, is refused.
                let done = directory.rebase(&one, base.as_deref(), &options(), &Handle::new()).is_ok();
                self.log.push(format!("rebase {one:?} on {base:?}: {done}"));
            }
            3 => {
                let done = directory.merge(&one, &options(), &Handle::new(), |_| ()).is_ok();
                self.log.push(format!("merge {one:?}: {done}"));
            }
            4 => {
                let last = usize::try_from(2 + self.chance.below(6)).unwrap();
                let plan = plan(&directory, last);
                self.log.push(format!("prune to {last}: {:?}", plan.steps));
                carry_out(&directory, &plan);
                assert!(self.names().len() <= last, "{:#?}", self.log);
            }
            _ => {
                self.save(&there);
                return false;
            }
        }
        true
    }

    fn names(&self) -> Vec<OsString> {
        let is_file = |entry: &std::fs::DirEntry| entry.file_type().unwrap().is_file();
        let read = std::fs::read_dir(self.folder.path()).unwrap().map(|entry| entry.unwrap());
        let mut names: Vec<_> = read.filter(is_file).map(|entry| entry.file_name()).collect();
        names.sort();
        names
    }

    fn check(&self) {
        for name in self.names() {
            let packed = open_snapshot(&self.folder.path().join(&name), &access(Some(&passphrase())));
            let packed = packed.unwrap_or_else(|error| panic!("{name:?}: {error}: {:#?}", self.log));
            assert_same(&Snapshot::open(&self.plain(&name)).unwrap(), &packed);
        }
    }
}

#[test]
fn what_is_done_to_a_directory_changes_nothing_of_what_its_snapshots_hold() {
    let (wanted, mut seed) = (number("LIMOSA_PACK_PATTERNS", 50), number("LIMOSA_SEED", 1));
    let (mut patterns, mut deepest, mut actions) = (0, 0, 0_u64);
    while patterns < wanted {
        let mut run = Run::new(seed);
        for _ in 0..40 {
            actions += 1;
            if run.act() {
                run.check();
            }
        }
        run.check();
        deepest = deepest.max(depth_of(run.folder.path(), &run.names()));
        patterns += run.saved;
        seed += 1;
        if patterns % 500 < run.saved {
            println!("{patterns} patterns, {actions} actions, seed {seed}");
        }
    }
    println!("{patterns} patterns, {actions} actions, chains of up to {deepest} images at the end of a run");
}

fn depth_of(folder: &Path, names: &[OsString]) -> usize {
    let depth =
        |name: &OsString| Base::open(&folder.join(name), &access(Some(&passphrase()))).map_or(0, |base| base.depth());
    names.iter().map(depth).max().unwrap_or(0)
}
