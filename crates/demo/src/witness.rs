//! The witness: proof that at most one end runs the guest.
//!
//! **Law: who runs the guest holds the witness.** Both ends have the same file; an end takes its lock before its guest
//! runs and releases it when the guest is paused. The lock is the kernel's and belongs to an open file, so it ends with
//! its process however that ends, and no two can hold it. Every change is a line in the file, written under the lock:
//! their order is the order in which it happened. An end that finds the lock taken writes that down too, and does not
//! run.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

/// One end's hand on the witness.
#[derive(Debug)]
pub struct Witness {
    file: File,
    who: String,
}

/// One line of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WitnessLine {
    /// This end let its guest run.
    Ran(String),
    /// This end's guest was paused.
    Paused(String),
    /// This end's guest would run while another's did: the law was about to be broken.
    Refused(String),
}

impl Witness {
    /// Opens the file, and makes it if it is not there. `who` is the end's name, without spaces.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn open(path: &Path, who: &str) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file, who: who.to_owned() })
    }

    /// Takes the witness: the guest runs from now on.
    ///
    /// # Errors
    /// Another end holds it: the guest must not run here.
    pub fn run(&self) -> io::Result<()> {
        if flock(&self.file, FlockOperation::NonBlockingLockExclusive).is_err() {
            self.write("refused")?;
            return Err(io::Error::other("the guest runs at the other end; it is not started here"));
        }
        self.write("ran")
    }

    /// Gives it back: the guest is paused.
    ///
    /// # Errors
    /// The line cannot be written.
    pub fn pause(&self) -> io::Result<()> {
        let written = self.write("paused");
        flock(&self.file, FlockOperation::NonBlockingUnlock)?;
        written
    }

    fn write(&self, what: &str) -> io::Result<()> {
        // One call, appended: a line is there or it is not.
        (&self.file).write_all(format!("{what} {}\n", self.who).as_bytes())
    }

    /// Returns the lines of the file so far.
    ///
    /// # Errors
    /// It cannot be read, or holds what no end writes.
    pub fn read(path: &Path) -> io::Result<Vec<WitnessLine>> {
        let line = |line: &str| match line.split_once(' ') {
            Some(("ran", who)) => Ok(WitnessLine::Ran(who.to_owned())),
            Some(("paused", who)) => Ok(WitnessLine::Paused(who.to_owned())),
            Some(("refused", who)) => Ok(WitnessLine::Refused(who.to_owned())),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}: {line:?}", path.display()))),
        };
        std::fs::read_to_string(path)?.lines().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_runner_is_refused_and_written_down() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("witness");
        let (source, destination) = (Witness::open(&path, "source").unwrap(), Witness::open(&path, "dest").unwrap());
        source.run().unwrap();
        source.run().unwrap();
        assert!(destination.run().is_err());
        source.pause().unwrap();
        destination.run().unwrap();
        drop(destination);
        source.run().unwrap();
        use WitnessLine::{Paused, Ran, Refused};
        let (source, dest) = (|| "source".to_owned(), || "dest".to_owned());
        let all = [Ran(source()), Ran(source()), Refused(dest()), Paused(source()), Ran(dest()), Ran(source())];
        assert_eq!(Witness::read(&path).unwrap(), all);
    }
}
