//! Pages of a packet out of what they were compressed to.
//!
//! The law: **a packet gives exactly the pages that its header says**, with any bytes. The output is bounded by
//! the pages' own room, the window of a decompressor by its method (zlib: 32 KiB; zstd: [`WINDOW_LOG`]).

use flate2::{Decompress, FlushDecompress, Status};
use limosa_page::{broken_invariant, to_usize};
use limosa_stream::multifd::Compression;
use zstd::stream::raw::{DParameter, Decoder, Operation};

/// log2 of the largest window that a zstd frame may ask for, in bytes: that of QEMU's highest level (20).
const WINDOW_LOG: u32 = 25;

/// The decompressor of one channel; its state lives as long as the channel.
pub(super) enum Unpacker {
    Plain,
    Zlib(Box<Decompress>),
    Zstd(Box<Decoder<'static>>),
}

/// The result of a step of a decompressor.
struct Stepped {
    /// Bytes taken from the input.
    taken: usize,
    /// Bytes made.
    made: usize,
    /// Whether the stream has ended.
    ended: bool,
}

impl Unpacker {
    pub(super) fn new(compression: Compression) -> Result<Self, String> {
        Ok(match compression {
            Compression::None => Self::Plain,
            Compression::Zlib => Self::Zlib(Box::new(Decompress::new(true))),
            Compression::Zstd => {
                let mut decoder = Decoder::new().map_err(|error| format!("zstd does not start: {error}"))?;
                let limit = decoder.set_parameter(DParameter::WindowLogMax(WINDOW_LOG));
                limit.map_err(|error| format!("zstd takes no limit of its window: {error}"))?;
                Self::Zstd(Box::new(decoder))
            }
        })
    }

    /// Fills `pages` from `packed`; the error says what is wrong with `packed`.
    pub(super) fn unpack(&mut self, packed: &[u8], pages: &mut [u8]) -> Result<(), String> {
        let (mut taken, mut made) = (0, 0);
        loop {
            let input = packed
                .get(taken..)
                .ok_or_else(|| broken_invariant("a decompressor takes what it is given").to_string())?;
            // Behind the last page there may be an empty block still, but not a byte.
            let mut beyond = [0];
            let full = made == pages.len();
            let room = pages
                .get_mut(made..)
                .ok_or_else(|| broken_invariant("a decompressor fills the room that it has").to_string())?;
            let room = if full { &mut beyond[..] } else { room };
            let Stepped { taken: took, made: gave, ended } = self.step(input, room)?;
            if full && gave > 0 {
                return Err(format!("more than the {} bytes of its pages come out of it", pages.len()));
            }
            taken += took;
            made += gave;
            if (took == 0 && gave == 0) || ended {
                break;
            }
        }
        if made < pages.len() {
            return Err(format!("only {made} of the {} bytes of its pages come out of it", pages.len()));
        }
        match packed.len().saturating_sub(taken) {
            0 => Ok(()),
            rest => Err(format!("{rest} bytes are left behind its last page")),
        }
    }

    /// Unpacks some bytes of `input` into `room`.
    fn step(&mut self, input: &[u8], room: &mut [u8]) -> Result<Stepped, String> {
        match self {
            Self::Plain => Err("it is not compressed".into()),
            Self::Zlib(zlib) => {
                let before = (zlib.total_in(), zlib.total_out());
                let status = zlib.decompress(input, room, FlushDecompress::Sync);
                let status = status.map_err(|error| format!("it is not a zlib stream: {error}"))?;
                let moved = |after: u64, before: u64| to_usize(after - before);
                let (taken, made) = (moved(zlib.total_in(), before.0), moved(zlib.total_out(), before.1));
                Ok(Stepped { taken, made, ended: status == Status::StreamEnd })
            }
            Self::Zstd(zstd) => {
                let status = zstd.run_on_buffers(input, room);
                let status = status.map_err(|error| format!("it is not a zstd frame: {error}"))?;
                Ok(Stepped { taken: status.bytes_read, made: status.bytes_written, ended: false })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::write::ZlibEncoder;

    use super::*;

    /// Packets of one channel, each with this number of bytes of `data`.
    fn packets(compression: Compression, data: &[u8], length: usize) -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        match compression {
            Compression::Zlib => {
                let mut encoder = ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
                for piece in data.chunks(length) {
                    encoder.write_all(piece).unwrap();
                    encoder.flush().unwrap();
                    packets.push(std::mem::take(encoder.get_mut()));
                }
            }
            _ => {
                let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 1).unwrap();
                for piece in data.chunks(length) {
                    encoder.write_all(piece).unwrap();
                    encoder.flush().unwrap();
                    packets.push(std::mem::take(encoder.get_mut()));
                }
            }
        }
        packets
    }

    fn data() -> Vec<u8> {
        (0..40 * 4096u64).map(|at| u8::try_from((at * at / 977 + at % 7) % 251).unwrap()).collect()
    }

    #[test]
    fn the_state_goes_on_from_packet_to_packet() {
        let data = data();
        for compression in [Compression::Zlib, Compression::Zstd] {
            let mut unpacker = Unpacker::new(compression).unwrap();
            let mut pages = vec![0; 8 * 4096];
            for (packet, wanted) in packets(compression, &data, pages.len()).iter().zip(data.chunks(pages.len())) {
                unpacker.unpack(packet, &mut pages).unwrap();
                assert!(pages == wanted, "{compression:?}");
            }
        }
    }

    #[test]
    fn a_packet_gives_exactly_its_pages_or_is_refused() {
        let data = data();
        for compression in [Compression::Zlib, Compression::Zstd] {
            let packet = packets(compression, &data, data.len()).remove(0);
            let refused = |packet: &[u8], length: usize| {
                let mut pages = vec![0; length];
                Unpacker::new(compression).unwrap().unpack(packet, &mut pages).expect_err("it is wrong")
            };
            assert!(refused(&packet, data.len() - 4096).contains("more than"), "{compression:?}");
            assert!(refused(&packet, data.len() + 4096).contains("only"), "{compression:?}");
            assert!(refused(&packet[..packet.len() / 2], data.len()).contains("only"), "{compression:?}");
            assert!(refused(b"these are not pages", 4096).contains("it is no"), "{compression:?}");
        }
    }

    #[test]
    fn a_bomb_is_not_unpacked_further_than_its_pages() {
        let zeros = vec![0; 64 << 20];
        for compression in [Compression::Zlib, Compression::Zstd] {
            let bomb = packets(compression, &zeros, zeros.len()).remove(0);
            assert!(bomb.len() < 1 << 20);
            let error = Unpacker::new(compression).unwrap().unpack(&bomb, &mut [0; 4096]).unwrap_err();
            assert!(error.contains("more than the 4096 bytes"), "{compression:?}: {error}");
        }
    }
}
