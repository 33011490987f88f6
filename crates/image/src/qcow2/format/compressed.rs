//! Compressed clusters.
//!
//! Law: decompression yields one cluster, no more, for any input. Bytes between the end of the stream and the end of
//! its last sector are ignored.

use std::cell::RefCell;

use flate2::{Decompress, FlushDecompress, Status};
use limosa_page::{BrokenInvariant, broken_invariant, to_usize};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use crate::compression::Compression;

/// The logarithm of the most that a zstd stream may have kept behind it: four of the largest clusters.
const ZSTD_WINDOW: u32 = 23;

/// Why compressed contents are not a cluster.
#[derive(Debug, thiserror::Error)]
pub(in crate::qcow2) enum UnpackFault {
    #[error("its compressed contents cannot be unpacked: {0}")]
    Zlib(flate2::DecompressError),
    #[error("its compressed contents cannot be unpacked: {0}")]
    Zstd(std::io::Error),
    #[error("its compressed contents end after {got} of {cluster} bytes")]
    Short { got: usize, cluster: usize },
    #[error(transparent)]
    Internal(#[from] BrokenInvariant),
}

thread_local! {
    static UNPACKER: RefCell<Unpacker> = RefCell::default();
}

/// Memory that each cluster needs, which a thread keeps: a few times the size of the largest cluster.
#[derive(Default)]
struct Unpacker {
    cluster: Vec<u8>,
    zstd: Option<Decoder<'static>>,
}

/// Decompresses `packed` to exactly `cluster` bytes. Returns what `take` makes of them, and how many bytes of `packed`
/// they were.
pub(in crate::qcow2) fn unpack<T>(
    compression: Compression,
    packed: &[u8],
    cluster: usize,
    take: impl FnOnce(&[u8]) -> T,
) -> Result<(T, usize), UnpackFault> {
    UNPACKER.with_borrow_mut(|Unpacker { cluster: bytes, zstd: decoder }| {
        // What it has of the cluster before is written over, or there are fewer bytes than a cluster has.
        bytes.resize(cluster, 0);
        let (got, taken) = match compression {
            Compression::Zlib => inflate(packed, bytes),
            Compression::Zstd => zstd(decoder, packed, bytes),
        }?;
        if got == cluster { Ok((take(bytes), taken)) } else { Err(UnpackFault::Short { got, cluster }) }
    })
}

/// Returns how many bytes it made, and of how many.
fn inflate(packed: &[u8], into: &mut [u8]) -> Result<(usize, usize), UnpackFault> {
    let mut stream = Decompress::new(false);
    loop {
        let (taken, made) = (stream.total_in(), stream.total_out());
        let rest =
            packed.get(to_usize(taken)..).ok_or_else(|| broken_invariant("zlib takes no more than it is given"))?;
        let room = into
            .get_mut(to_usize(made)..)
            .ok_or_else(|| broken_invariant("zlib makes no more than there is room for"))?;
        let full = room.is_empty();
        let status = stream.decompress(rest, room, FlushDecompress::Finish).map_err(UnpackFault::Zlib)?;
        let stuck = (stream.total_in(), stream.total_out()) == (taken, made);
        if status == Status::StreamEnd || full || stuck {
            return Ok((to_usize(stream.total_out()), to_usize(stream.total_in())));
        }
    }
}

/// Returns how many bytes it made, and of how many.
fn zstd(decoder: &mut Option<Decoder<'static>>, packed: &[u8], into: &mut [u8]) -> Result<(usize, usize), UnpackFault> {
    let stream = if let Some(known) = decoder {
        // The one before may have ended amid a frame.
        known.reinit().map_err(UnpackFault::Zstd)?;
        known
    } else {
        let mut new = Decoder::new().map_err(UnpackFault::Zstd)?;
        new.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW)).map_err(UnpackFault::Zstd)?;
        decoder.insert(new)
    };
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(into);
    loop {
        let before = (input.pos(), output.pos());
        let more = stream.run(&mut input, &mut output).map_err(UnpackFault::Zstd)?;
        // A cluster may be several frames, one after the other, so its end is where it is full.
        if output.pos() == output.capacity() || (input.pos(), output.pos()) == before {
            return Ok((output.pos(), input.pos()));
        }
        if more == 0 {
            stream.reinit().map_err(UnpackFault::Zstd)?;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    fn deflated(bytes: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn a_cluster_comes_out_whatever_stands_behind_it() {
        let cluster: Vec<u8> = (0..65536_u32).map(|n| (n / 7).to_le_bytes()[0]).collect();
        for (compression, mut packed) in
            [(Compression::Zlib, deflated(&cluster)), (Compression::Zstd, zstd::encode_all(&cluster[..], 3).unwrap())]
        {
            assert!(unpack(compression, &packed[..packed.len() / 2], cluster.len(), |_| ()).is_err());
            packed.extend([0xa5; 400]);
            let (bytes, taken) = unpack(compression, &packed, cluster.len(), <[u8]>::to_vec).unwrap();
            assert!(bytes == cluster && taken <= packed.len());
            // What is behind the end is not taken.
            let longer = [&packed[..], &[0x55; 1000]].concat();
            assert_eq!(unpack(compression, &longer, cluster.len(), |_| ()).unwrap().1, taken);
        }
    }

    #[test]
    fn what_expands_without_end_fills_one_cluster() {
        let bomb = vec![0; 64 << 20];
        for (compression, packed) in
            [(Compression::Zlib, deflated(&bomb)), (Compression::Zstd, zstd::encode_all(&bomb[..], 3).unwrap())]
        {
            assert_eq!(unpack(compression, &packed, 512, <[u8]>::to_vec).unwrap().0, [0; 512]);
        }
    }

    proptest! {
        #[test]
        fn garbage_is_a_cluster_or_an_error(packed: Vec<u8>, zlib: bool) {
            let compression = if zlib { Compression::Zlib } else { Compression::Zstd };
            if let Ok((bytes, _)) = unpack(compression, &packed, 4096, <[u8]>::to_vec) {
                prop_assert_eq!(bytes.len(), 4096);
            }
        }
    }
}
