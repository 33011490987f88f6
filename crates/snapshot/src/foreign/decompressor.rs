//! Decompression by the programs that packed: gzip, bzip2, xz, lzop and zstd, run as libvirt runs them (`PROGRAM -dc`).
//!
//! Law of this module: a program that fails is noticed, also after output that is a whole stream; it does
//! not outlive its owner, and its messages are kept within bounds.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::ForeignError;

/// Bytes of a program's complaints that are kept.
const SAID_LIMIT: u64 = 4096;
/// How long a program may take to end by itself, once its output is not read any more.
const END_WITHIN: Duration = Duration::from_secs(2);

/// A program that packs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "lowercase")]
pub enum Decompressor {
    /// `gzip`.
    Gzip,
    /// `bzip2`.
    Bzip2,
    /// `xz`.
    Xz,
    /// `lzop`.
    Lzop,
    /// `zstd`.
    Zstd,
}

impl Decompressor {
    /// All of them.
    pub const ALL: &'static [Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The program's name.
    #[must_use]
    pub fn program(self) -> &'static str {
        self.into()
    }

    /// The package that has the program, on Debian and Ubuntu.
    fn package(self) -> &'static str {
        match self {
            Self::Xz => "xz-utils",
            other => other.program(),
        }
    }

    /// The first bytes of a file of the program.
    fn magic(self) -> &'static [u8] {
        match self {
            Self::Gzip => b"\x1f\x8b",
            Self::Bzip2 => b"BZh",
            Self::Xz => b"\xfd7zXZ\0",
            Self::Lzop => b"\x89LZO\0",
            Self::Zstd => b"\x28\xb5\x2f\xfd",
        }
    }

    /// Returns the program whose files begin like this one.
    pub(super) fn of_magic(head: &[u8]) -> Option<Self> {
        Self::ALL.iter().copied().find(|decompressor| head.starts_with(decompressor.magic()))
    }
}

/// A program that unpacks; ended when dropped.
#[derive(Debug)]
pub(crate) struct Decompression {
    decompressor: Decompressor,
    child: Child,
    said: Option<JoinHandle<Vec<u8>>>,
}

impl Decompression {
    /// Starts the program on `input` from its present position on; returns also its output.
    pub(crate) fn start(
        decompressor: Decompressor,
        input: OwnedFd,
        path: &Path,
    ) -> Result<(Self, ChildStdout), ForeignError> {
        let program = decompressor.program();
        let mut command = Command::new(program);
        command.arg("-dc").env("LC_ALL", "C");
        command.stdin(Stdio::from(input)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let failed = |what: String| ForeignError::DecompressorFailed { path: path.to_path_buf(), what };
        let mut child = command.spawn().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => failed(format!(
                "it is packed by {program}, which is not installed here: install the package {}",
                decompressor.package()
            )),
            _ => failed(format!("cannot run {program} to unpack it: {error}")),
        })?;
        let said = child.stderr.take().map(|mut stderr| {
            std::thread::spawn(move || {
                let mut said = Vec::new();
                let _ = stderr.by_ref().take(SAID_LIMIT).read_to_end(&mut said);
                // What is not kept is still taken, or the program would wait for ever.
                let _ = std::io::copy(&mut stderr, &mut std::io::sink());
                said
            })
        });
        match child.stdout.take() {
            Some(stdout) => Ok((Self { decompressor, child, said }, stdout)),
            None => Err(failed(format!("{program} has no output"))),
        }
    }

    /// Waits for the end of the program, whose output was read to its end.
    ///
    /// # Errors
    /// It failed: the file was not, or not only, of its format.
    pub(crate) fn finish(mut self, path: &Path) -> Result<(), ForeignError> {
        match self.child.wait() {
            Ok(status) => {
                let said = self.said();
                // A warning counts as an exit status of its own here; what it is about may not matter.
                let warned =
                    matches!(self.decompressor, Decompressor::Gzip | Decompressor::Lzop) && status.code() == Some(2);
                // Some programs pass over what stands behind, with a word about it.
                if (status.success() || warned) && !said.contains("trailing garbage") {
                    return Ok(());
                }
                Err(self.failed(path, status, &said))
            }
            Err(error) => Err(ForeignError::DecompressorFailed {
                path: path.to_path_buf(),
                what: format!("{}: {error}", self.decompressor.program()),
            }),
        }
    }

    /// Why the program failed, if it did and that is why its output was not a whole stream. The reading end is closed.
    pub(crate) fn reason(mut self, path: &Path) -> Option<ForeignError> {
        let limit = Instant::now() + END_WITHIN;
        while Instant::now() < limit {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                // A program that was killed was so because its output is not read any more.
                Ok(Some(status)) if status.code().is_some_and(|code| code != 0) => {
                    let said = self.said();
                    return Some(self.failed(path, status, &said));
                }
                _ => return None,
            }
        }
        None
    }

    /// Returns the messages of the program, which has ended.
    fn said(&mut self) -> String {
        let said = self.said.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        String::from_utf8_lossy(&said).into_owned()
    }

    fn failed(&self, path: &Path, status: ExitStatus, said: &str) -> ForeignError {
        let line = said.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it gives no reason");
        let line: String = line.chars().filter(|character| !character.is_control()).collect();
        let program = self.decompressor.program();
        ForeignError::DecompressorFailed {
            path: path.to_path_buf(),
            what: format!("{program} cannot unpack it ({status}): {line}"),
        }
    }
}

impl Drop for Decompression {
    fn drop(&mut self) {
        // Both fail only if it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads a program's output at ascending offsets.
#[derive(Debug)]
pub(crate) struct Forward {
    output: File,
    position: u64,
}

impl Forward {
    pub(crate) fn new(output: ChildStdout) -> Self {
        Self { output: File::from(OwnedFd::from(output)), position: 0 }
    }

    /// Reads at an offset that is not before the end of the last read; bytes between are passed over.
    pub(crate) fn read_at(&mut self, offset: u64, into: &mut [u8]) -> std::io::Result<usize> {
        let Some(skip) = offset.checked_sub(self.position) else {
            return Err(std::io::Error::other("a stream that is packed can only be read forwards"));
        };
        if skip > 0 {
            let passed = std::io::copy(&mut self.output.by_ref().take(skip), &mut std::io::sink())?;
            self.position += passed;
            if passed < skip {
                return Ok(0);
            }
        }
        let got = self.output.read(into)?;
        self.position += got as u64;
        Ok(got)
    }
}
