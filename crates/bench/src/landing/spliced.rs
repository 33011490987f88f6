//! Pages that user space never sees: from the socket into a pipe, from the pipe into the file.
//!
//! The headers have to be read, so every page costs a read and a splice of its own; a run of pages leaves the pipe in one.

use std::os::fd::OwnedFd;

use anyhow::{Context, Result, ensure};
use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

use super::Intake;
use super::batch::{Outlet, PAGE};
use super::records::{HEADER, Record};

/// Pages that the pipe is asked to hold. A page takes two of its slots when it comes in two pieces.
const HELD: usize = 64;

/// Reads `socket` to its end.
pub(super) fn receive(socket: &OwnedFd, outlet: &Outlet<'_>, pages: u64) -> Result<Intake> {
    let (from, into) = pipe_with(PipeFlags::CLOEXEC).context("pipe")?;
    fcntl_setpipe_size(&into, 4 * HELD * PAGE).context("pipe size")?;
    let mut intake = Intake::default();
    let (mut start, mut held) = (0u64, 0usize);
    while let Some(header) = read_header(socket, &mut intake)? {
        let record = Record::decode(header, pages)?;
        let follows = matches!(record, Record::Page(number) if number == start + held as u64);
        if held == HELD || !follows {
            drain(&from, outlet, start, held)?;
            held = 0;
        }
        match record {
            Record::Page(number) => {
                if held == 0 {
                    start = number;
                }
                let mut rest = PAGE;
                while rest > 0 {
                    let count = splice(socket, None, &into, None, rest, SpliceFlags::MOVE).context("socket to pipe")?;
                    ensure!(count > 0, "the stream ended inside a page");
                    intake.reads += 1;
                    rest -= count;
                }
                held += 1;
                intake.pages += 1;
            }
            Record::Zero(_) => {
                intake.reads += 1;
                ensure!(rustix::io::read(socket, &mut [0u8][..])? == 1, "the stream ended inside a record");
                intake.zeros += 1;
            }
            Record::End => {}
        }
    }
    drain(&from, outlet, start, held)?;
    Ok(intake)
}

/// The next header, or none at the end of the stream.
fn read_header(socket: &OwnedFd, intake: &mut Intake) -> Result<Option<[u8; HEADER]>> {
    let mut header = [0; HEADER];
    let mut have = 0;
    while have < HEADER {
        intake.reads += 1;
        let count = rustix::io::read(socket, &mut header[have..]).context("receiving a header")?;
        if count == 0 {
            ensure!(have == 0, "the stream ended inside a header");
            return Ok(None);
        }
        have += count;
    }
    Ok(Some(header))
}

/// Moves the pages held in the pipe to their place in the file.
fn drain(from: &OwnedFd, outlet: &Outlet<'_>, start: u64, held: usize) -> Result<()> {
    let mut offset = start * PAGE as u64;
    let mut rest = held * PAGE;
    while rest > 0 {
        let before = offset;
        let count = splice(from, None, outlet.file(), Some(&mut offset), rest, SpliceFlags::MOVE)
            .with_context(|| format!("pipe to file at offset {before}"))?;
        ensure!(count > 0, "pipe to file at offset {before}: nothing was written");
        rest -= count;
        outlet.wrote(before, offset, 1)?;
    }
    Ok(())
}
