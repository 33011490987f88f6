//! The two programs, and one run of one of them.
//!
//! Law: both get the same words. The clock begins before the exec and ends when the program has ended.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::process::{OneCore, Process};

pub(super) use crate::serve::servers::LIMOSA;

pub(super) const STOCK: &str = "qemu-img";

/// The most memory that a process had at a time, in KiB.
pub(super) const PEAK: &str = "peak_rss_kib";

/// A program with the commands of qemu-img.
#[derive(Debug, Clone)]
pub(super) enum Program {
    Limosa(PathBuf),
    Stock,
}

impl Program {
    /// Returns both, stock first, because what runs first meets caches that are no warmer; stock only if it is
    /// installed.
    pub(super) fn all(options: &Options, has_stock: bool) -> Result<Vec<Self>> {
        let limosa = Self::Limosa(options.limosa()?);
        Ok(has_stock.then_some(Self::Stock).into_iter().chain([limosa]).collect())
    }

    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Limosa(_) => LIMOSA,
            Self::Stock => STOCK,
        }
    }

    fn command(&self) -> Command {
        match self {
            Self::Limosa(program) => {
                let mut command = Command::new(program);
                command.arg("img");
                command
            }
            Self::Stock => Command::new(STOCK),
        }
    }

    /// Runs it to its end with these words; what it prints goes to a file of `folder`.
    pub(super) fn measure(&self, words: &[String], folder: &Path, one_core: bool) -> Result<Measured> {
        let [printed, said] = ["stdout", "stderr"].map(|name| folder.join(name));
        let mut command = self.command();
        command.args(words).stdin(Stdio::null());
        command.stdout(File::create(&printed)?).stderr(File::create(&said)?);
        let watch = Stopwatch::start(&[])?;
        let mut process = {
            let _pinned = one_core.then(OneCore::begin).transpose()?;
            Process::start(command, None)?
        };
        let peak = process.wait_for_peak_kib()?;
        let status = process.wait()?;
        let measured = watch.stop()?;
        let said = fs::read_to_string(&said).unwrap_or_default();
        ensure!(status.success(), "{} {}: {status}: {}", self.name(), words.join(" "), said.trim());
        Ok(measured.with(PEAK, peak))
    }

    /// Runs it without a measurement.
    pub(super) fn run(&self, words: &[String]) -> Result<()> {
        let output = self.command().args(words).stdin(Stdio::null()).output().context(self.name())?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{} {}: {}: {said}", self.name(), words.join(" "), output.status);
        Ok(())
    }
}

/// The words of a command line, as both programs take them: blanks part them, and each `{}` is the next path.
pub(super) fn words(line: &str, paths: &[&Path]) -> Result<Vec<String>> {
    let mut paths = paths.iter();
    let word = |word: &str| {
        if !word.contains("{}") {
            return Ok(word.to_owned());
        }
        let path = paths.next().context("fewer paths than places for them")?;
        Ok(word.replace("{}", path.to_str().context("a folder whose path is UTF-8")?))
    };
    line.split_ascii_whitespace().map(word).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_take_their_places_in_order_even_with_blanks() {
        let found = words("compare {} file.filename={}", &[Path::new("/a b"), Path::new("/c")]).expect("two paths");
        assert_eq!(found, ["compare", "/a b", "file.filename=/c"]);
        assert!(words("{} {}", &[Path::new("/a")]).is_err());
    }
}
