//! A file of bytes that do not compress, uploaded by `limosa img convert` and downloaded by `limosa img dd`, as a share
//! of what the line carries.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use limosa_page::to_micros;

use super::store::{Far, LINE, Store, cost, url, with_cost};
use crate::content::fill_random;
use crate::frame::Frame;
use crate::limosa::Prepared;
use crate::measure::{Measured, Stopwatch};
use crate::options::Options;
use crate::page_cache;
use crate::raw::children_cpu;

/// Bytes of the file per second, of 1000 that the line carries.
pub(super) const SHARE: &str = "line_permille";

/// Share of the line of an upload, as [`SHARE`], without the time of [`COMPLETION`].
pub(super) const SHARE_OF_PARTS: &str = "line_permille_of_parts";

/// How long the store takes for the slowest answer to an upload, which is that it has put the parts together, in
/// microseconds. No part of it is the line's or the client's.
const COMPLETION: &str = "completion_us";

/// The object of an upload.
const UPLOADED: &str = "uploaded.raw";

/// The way that the bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Up,
    Down,
}

impl Direction {
    pub(super) const ALL: [Self; 2] = [Self::Up, Self::Down];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Up => "upload (img convert)",
            Self::Down => "download (img dd)",
        }
    }
}

/// The file, and the same as an object.
pub(super) struct Rates {
    file: PathBuf,
    url: String,
    bytes: u64,
}

impl Rates {
    /// Makes both.
    pub(super) fn new(store: &Store, bytes: u64) -> Result<Self> {
        let file = store.folder().join("random.raw");
        let mut contents = vec![0; usize::try_from(bytes).context("--size")?];
        fill_random(&mut contents);
        fs::write(&file, contents).with_context(|| file.display().to_string())?;
        let url = store.put(&file, "random.raw")?;
        Ok(Self { file, url, bytes })
    }

    /// Moves it once, over a line.
    pub(super) fn run(&self, far: Far<'_>, direction: Direction, frame: &Frame) -> Result<Measured> {
        let Far { options, store, latency } = far;
        let (limosa, target) = match direction {
            Direction::Up => (self.upload(options, store)?, store.object(UPLOADED)),
            Direction::Down => {
                let target = store.folder().join("downloaded.raw");
                (store.download(options, &self.url, &target, None)?, target)
            }
        };
        page_cache::warm(&self.file)?;
        frame.touch()?;
        store.begin_run(Duration::from_millis(latency.into()))?;
        let cpu_before = children_cpu().context("getrusage of children")?;
        let watch = Stopwatch::start(&[])?;
        let said = limosa.start()?.finish()?;
        let measured = watch.stop()?;
        let cpu = children_cpu().context("getrusage of children")?.saturating_sub(cpu_before);
        let length = fs::metadata(&target).with_context(|| target.display().to_string())?.len();
        ensure!(length == self.bytes, "{}: {length} bytes instead of {}", target.display(), self.bytes);
        // The next upload does not replace an object.
        fs::remove_file(&target).with_context(|| target.display().to_string())?;
        let mut done = Measured { cpu, ..measured }.with(SHARE, permille_of_line(self.bytes, measured.wall));
        if direction == Direction::Up {
            let completion = store.slowest_answer();
            let sent = measured.wall.saturating_sub(completion);
            done =
                done.with(SHARE_OF_PARTS, permille_of_line(self.bytes, sent)).with(COMPLETION, to_micros(completion));
        }
        Ok(with_cost(done, &said)?.with("bytes_sent", cost(&said, "bytes-sent")?))
    }

    /// A limosa that uploads the file.
    fn upload(&self, options: &Options, store: &Store) -> Result<Prepared> {
        let limosa = Prepared::without_report(options, "img")?
            .arguments(&["convert", "--json", "-f", "raw", "-O", "raw"])
            .path(None, &self.file)
            .path(None, Path::new(&url(UPLOADED)));
        Ok(store.at_line(limosa, None))
    }
}

/// The rate of this many bytes in a time, of 1000 that the line carries.
fn permille_of_line(bytes: u64, time: Duration) -> u64 {
    let carried = u128::from(LINE) * time.as_micros().max(1) / 1_000_000;
    u64::try_from(u128::from(bytes) * 1000 / carried.max(1)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_of_the_line_is_that_of_its_rate() {
        assert_eq!(permille_of_line(LINE, Duration::from_secs(1)), 1000);
        assert_eq!(permille_of_line(LINE, Duration::from_millis(1250)), 800);
    }
}
