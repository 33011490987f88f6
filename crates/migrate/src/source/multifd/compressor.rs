//! Page contents, compressed for one channel.
//!
//! Law: a channel has one compressed stream for its whole life, and each packet ends with a flush, so that the reader
//! has every page of a packet when it has the packet.

use std::io;

use flate2::{Compress, FlushCompress};
use limosa_page::{broken_invariant, to_usize};
use limosa_stream::multifd::Compression;
use zstd::stream::raw::{InBuffer, Operation, OutBuffer};

/// The least room to offer a compressor at a time, in bytes.
const ROOM: usize = 64 << 10;

/// The compressor of one channel.
pub(super) enum Compressor {
    None,
    Zlib(Box<Compress>),
    Zstd(Box<zstd::stream::raw::Encoder<'static>>),
}

impl Compressor {
    pub(super) fn new(compression: Compression, level: u8) -> io::Result<Self> {
        Ok(match compression {
            Compression::None => Self::None,
            Compression::Zlib => {
                Self::Zlib(Box::new(Compress::new(flate2::Compression::new(u32::from(level.min(9))), true)))
            }
            Compression::Zstd => Self::Zstd(Box::new(zstd::stream::raw::Encoder::new(i32::from(level))?)),
        })
    }

    /// Whether contents go out as they are.
    pub(super) fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Appends the compressed form of `parts`, of all of it, to `out`.
    pub(super) fn append<'b>(&mut self, parts: impl Iterator<Item = &'b [u8]>, out: &mut Vec<u8>) -> io::Result<()> {
        match self {
            Self::None => parts.for_each(|part| out.extend_from_slice(part)),
            Self::Zlib(stream) => {
                for part in parts {
                    let mut rest = part;
                    while !rest.is_empty() {
                        out.reserve(ROOM);
                        let before = stream.total_in();
                        stream.compress_vec(rest, out, FlushCompress::None)?;
                        let taken = to_usize(stream.total_in() - before);
                        rest = rest.get(taken..).ok_or_else(too_much)?;
                    }
                }
                loop {
                    out.reserve(ROOM);
                    stream.compress_vec(&[], out, FlushCompress::Sync)?;
                    // Room that was left is the sign that nothing is.
                    if out.len() < out.capacity() {
                        break;
                    }
                }
            }
            Self::Zstd(stream) => {
                for part in parts {
                    let mut rest = InBuffer::around(part);
                    while rest.pos() < part.len() {
                        out.reserve(ROOM);
                        let filled = out.len();
                        stream.run(&mut rest, &mut OutBuffer::around_pos(out, filled))?;
                    }
                }
                loop {
                    out.reserve(ROOM);
                    let filled = out.len();
                    if stream.flush(&mut OutBuffer::around_pos(out, filled))? == 0 {
                        break;
                    }
                }
            }
        }
        Ok(())
    }
}

#[track_caller]
fn too_much() -> io::Error {
    io::Error::other(broken_invariant("a compressor takes no more than it is given"))
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::Zlib(_) => "Zlib",
            Self::Zstd(_) => "Zstd",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Packets from easy to hard to compress.
    fn packets() -> Vec<Vec<u8>> {
        let noise =
            |length: usize| (0_u64..).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7]).take(length);
        let mut random = 1_u64;
        let mut next = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random.to_le_bytes()[3]
        };
        vec![
            vec![0; 128 << 12],
            noise(4096).collect(),
            (0..128 << 12).map(|_| next()).collect(),
            vec![7; 4096],
            (0..4096).map(|_| next()).collect(),
        ]
    }

    #[test]
    fn every_packet_of_the_one_stream_can_be_read_when_it_has_arrived() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut compressor = Compressor::new(compression, 1).unwrap();
            let mut zlib = flate2::write::ZlibDecoder::new(Vec::new());
            let mut zstd = zstd::stream::write::Decoder::new(Vec::new()).unwrap();
            let mut expected = Vec::new();
            for packet in packets() {
                let mut out = b"header".to_vec();
                compressor.append(packet.chunks(4096), &mut out).unwrap();
                assert!(out.len() < 1 << 20);
                expected.extend_from_slice(&packet);
                let payload = out.strip_prefix(b"header").unwrap();
                let found = if compression == Compression::Zlib {
                    zlib.write_all(payload).unwrap();
                    zlib.flush().unwrap();
                    zlib.get_ref()
                } else {
                    zstd.write_all(payload).unwrap();
                    zstd.flush().unwrap();
                    zstd.get_ref()
                };
                assert!(*found == expected, "{compression:?}: {} of {} bytes", found.len(), expected.len());
            }
        }
    }

    #[test]
    fn pages_that_repeat_take_little_room() {
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut out = Vec::new();
            Compressor::new(compression, 1)
                .unwrap()
                .append([[5; 4096]; 128].iter().map(|page| &page[..]), &mut out)
                .unwrap();
            assert!(out.len() < 20_000, "{compression:?}: {}", out.len());
        }
    }
}
