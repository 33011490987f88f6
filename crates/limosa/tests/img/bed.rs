//! A folder in which limosa and the stock qemu-img are asked the same.
#![allow(dead_code, reason = "what the commands that come next are tested with")]

use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use limosa_storage::{FileOptions, FileStorage};
use limosa_testkit::{qemu_img_output, scratch};
use serde_json::Value;
use tempfile::TempDir;

use crate::stage::{Ended, Program, wait_for};

/// The answer of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    /// Expects exit status 0.
    #[track_caller]
    pub(crate) fn success(self) -> Self {
        assert_eq!(self.status, Some(0), "{self:?}");
        self
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl From<Ended> for Answer {
    fn from(ended: Ended) -> Self {
        Self { status: ended.status.code(), stdout: ended.stdout, stderr: ended.stderr }
    }
}

/// The folder.
#[derive(Debug)]
pub(crate) struct Bed {
    folder: TempDir,
}

impl Bed {
    pub(crate) fn new() -> Self {
        // Asked once, so that a program that is missing is said with the line that installs it.
        qemu_img_output(["--version"]).unwrap();
        Self { folder: scratch().unwrap() }
    }

    /// A file in it.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits until nobody has a file open. The kernel first ends what a process that was killed had under way, and only
    /// then closes its files.
    pub(crate) fn wait_unlocked(&self, name: &str) {
        wait_for("the files of a killed process to be closed", || {
            FileStorage::open(self.path(name), &FileOptions::default()).ok()
        });
    }

    /// `limosa img WORDS`, run there.
    pub(crate) fn start(&self, words: &[&str]) -> Program {
        let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
        command.arg("img").args(words).current_dir(self.folder.path());
        crate::stage::start_command(command)
    }

    /// `limosa img WORDS`, run there to its end.
    pub(crate) fn limosa(&self, words: &[&str]) -> Ended {
        self.start(words).wait()
    }

    fn stock(&self, program: &str, words: &[&str]) -> Answer {
        let output = Command::new(program).args(words).current_dir(self.folder.path()).output().unwrap();
        let [stdout, stderr] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        Answer { status: output.status.code(), stdout, stderr }
    }

    /// `qemu-img WORDS`, run there.
    pub(crate) fn qemu_img(&self, words: &[&str]) -> Answer {
        self.stock("qemu-img", words)
    }

    /// `qemu-io -c COMMAND ... NAME`, run there.
    #[track_caller]
    pub(crate) fn qemu_io(&self, name: &str, commands: &[&str]) {
        let words: Vec<_> = commands.iter().flat_map(|command| ["-c", command]).chain([name]).collect();
        self.stock("qemu-io", &words).success();
    }

    /// `qemu-img create -q WORDS`, run there.
    #[track_caller]
    pub(crate) fn create(&self, words: &[&str]) {
        self.qemu_img(&[&["create", "-q"], words].concat()).success();
    }

    /// Asks both, and expects the same exit status and the same output.
    #[track_caller]
    pub(crate) fn both_say(&self, words: &[&str]) -> Answer {
        let (ours, stock) = (Answer::from(self.limosa(words)), self.qemu_img(words));
        assert_eq!((ours.status, &ours.stdout), (stock.status, &stock.stdout), "{words:?}: {}", ours.stderr);
        ours
    }

    /// Asks both, and expects the same exit status and the same JSON, in any order of its keys.
    #[track_caller]
    pub(crate) fn both_tell(&self, words: &[&str]) -> Value {
        let (ours, stock) = (Answer::from(self.limosa(words)), self.qemu_img(words));
        assert_eq!(ours.status, stock.status, "{words:?}: {}", ours.stderr);
        assert_eq!(sorted(ours.json()), sorted(stock.json()), "{words:?}");
        ours.json()
    }

    /// Expects that both refuse this with the same exit status, and that limosa says in one line why: with `says` in
    /// it.
    #[track_caller]
    pub(crate) fn both_refuse(&self, words: &[&str], says: &str) {
        let (ours, stock) = (Answer::from(self.limosa(words)), self.qemu_img(words));
        assert_ne!(stock.status, Some(0), "{words:?}");
        assert_eq!(ours.status, stock.status, "{words:?}: {}", ours.stderr);
        assert_one_line(&ours, words, says);
    }
}

/// Expects one line on stderr, with this in it.
#[track_caller]
pub(crate) fn assert_one_line(answer: &Answer, words: &[&str], says: &str) {
    let said = &answer.stderr;
    assert!(said.starts_with("limosa: ") && said.lines().count() == 1, "{words:?}: not one line: {said:?}");
    assert!(said.contains(says), "{words:?}: {says:?} is not in {said:?}");
}

/// The same with keys in order: how they are ordered means nothing.
fn sorted(value: Value) -> Value {
    match value {
        Value::Array(values) => values.into_iter().map(sorted).collect(),
        Value::Object(object) => {
            let mut pairs: Vec<_> = object.into_iter().map(|(key, value)| (key, sorted(value))).collect();
            pairs.sort_by(|(one, _), (other, _)| one.cmp(other));
            Value::Object(pairs.into_iter().collect())
        }
        other => other,
    }
}

/// A size of a file in bytes.
pub(crate) fn length(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

/// Writes bytes into a file directly, without its locks.
#[track_caller]
pub(crate) fn poke(path: &Path, at: u64, bytes: &[u8]) {
    std::fs::File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
}
