//! Pages through one receive buffer, as they come: read as much as there is, write runs of pages out of the middle of it.
//!
//! A page lies behind its 8-byte header, so it is never aligned, and a run of pages is one slice for each.

use std::os::fd::OwnedFd;

use anyhow::{Result, ensure};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use zerocopy::IntoBytes;

use super::Intake;
use super::batch::{Batch, Hand, PAGE};
use super::records::{HEADER, Record};

/// Reads `socket` to its end. With `fill` a batch is written only when nothing more is there to be read or the buffer is
/// full.
pub(super) fn receive(socket: &OwnedFd, mut hand: Hand<'_, '_>, len: usize, pages: u64, fill: bool) -> Result<Intake> {
    let mut intake = Intake::default();
    let mut batch = Batch::new(len);
    let mut have = 0;
    loop {
        let bytes = batch.memory.as_mut_slice().as_mut_bytes();
        let mut flags = RecvFlags::empty();
        let mut ended = false;
        while let Some(room @ [_, ..]) = bytes.get_mut(have..) {
            intake.reads += 1;
            match recv(socket, room, flags) {
                Ok((0, _)) => ended = true,
                Ok((count, _)) => {
                    have += count;
                    flags = RecvFlags::DONTWAIT;
                    if fill {
                        continue;
                    }
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => {}
                Err(error) => return Err(error.into()),
            }
            break;
        }
        let used = decode(bytes.get(..have).unwrap_or_default(), &mut batch.pages, pages, &mut intake)?;
        let mut tail = [0; HEADER + PAGE];
        let rest = have - used;
        tail[..rest].copy_from_slice(&bytes[used..have]);
        batch = hand.deliver(batch)?;
        batch.memory.as_mut_slice().as_mut_bytes()[..rest].copy_from_slice(&tail[..rest]);
        have = rest;
        if ended {
            ensure!(rest == 0, "the stream ended inside a record");
            break;
        }
    }
    intake.writer_cpu = hand.finish()?;
    Ok(intake)
}

/// Finds the whole records in `bytes`; the number of bytes they take, short of the end by at most one record.
fn decode(bytes: &[u8], found: &mut Vec<(usize, u64)>, pages: u64, intake: &mut Intake) -> Result<usize> {
    let mut at = 0;
    while let Some((header, rest)) = bytes.get(at..).and_then(|bytes| bytes.split_first_chunk::<HEADER>()) {
        let payload = match Record::decode(*header, pages)? {
            Record::Page(number) if rest.len() >= PAGE => {
                found.push((at + HEADER, number));
                intake.pages += 1;
                PAGE
            }
            Record::Zero(_) if !rest.is_empty() => {
                intake.zeros += 1;
                1
            }
            Record::End => 0,
            Record::Page(_) | Record::Zero(_) => break,
        };
        at += HEADER + payload;
    }
    Ok(at)
}
