//! Compressed clusters.
//!
//! Law: what comes out is one cluster, no more, whatever went in. Behind the stream may be anything, up to the end of its last
//! sector.

use flate2::{Decompress, FlushDecompress, Status};
use zstd::stream::raw::{DParameter, Decoder, InBuffer, Operation, OutBuffer};

use super::header::Compression;

/// The logarithm of the most that a zstd stream may have kept behind it: four of the largest clusters.
const ZSTD_WINDOW: u32 = 23;

/// What `packed` holds, of exactly `cluster` bytes.
///
/// # Errors
/// Why it holds no cluster, for people.
pub(super) fn unpack(compression: Compression, packed: &[u8], cluster: usize) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; cluster];
    let got = match compression {
        Compression::Zlib => inflate(packed, &mut bytes),
        Compression::Zstd => zstd(packed, &mut bytes),
    }?;
    if got == cluster { Ok(bytes) } else { Err(format!("its compressed contents end after {got} of {cluster} bytes")) }
}

fn inflate(packed: &[u8], into: &mut [u8]) -> Result<usize, String> {
    let mut stream = Decompress::new(false);
    loop {
        let (taken, made) = (stream.total_in(), stream.total_out());
        let index = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        let rest = packed.get(index(taken)..).unwrap_or_default();
        let room = into.get_mut(index(made)..).unwrap_or_default();
        let full = room.is_empty();
        let status = stream
            .decompress(rest, room, FlushDecompress::Finish)
            .map_err(|error| format!("its compressed contents cannot be unpacked: {error}"))?;
        let stuck = (stream.total_in(), stream.total_out()) == (taken, made);
        if status == Status::StreamEnd || full || stuck {
            return Ok(index(stream.total_out()));
        }
    }
}

fn zstd(packed: &[u8], into: &mut [u8]) -> Result<usize, String> {
    let failed = |error: std::io::Error| format!("its compressed contents cannot be unpacked: {error}");
    let mut stream = Decoder::new().map_err(failed)?;
    stream.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW)).map_err(failed)?;
    let mut input = InBuffer::around(packed);
    let mut output = OutBuffer::around(into);
    loop {
        let before = (input.pos(), output.pos());
        let more = stream.run(&mut input, &mut output).map_err(failed)?;
        // A cluster may be several frames, one after the other, so its end is where it is full.
        if output.pos() == output.capacity() || (input.pos(), output.pos()) == before {
            return Ok(output.pos());
        }
        if more == 0 {
            stream.reinit().map_err(failed)?;
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
            assert!(unpack(compression, &packed[..packed.len() / 2], cluster.len()).is_err());
            packed.extend([0xa5; 400]);
            assert!(unpack(compression, &packed, cluster.len()).unwrap() == cluster);
        }
    }

    #[test]
    fn what_expands_without_end_fills_one_cluster() {
        let bomb = vec![0; 64 << 20];
        for (compression, packed) in
            [(Compression::Zlib, deflated(&bomb)), (Compression::Zstd, zstd::encode_all(&bomb[..], 3).unwrap())]
        {
            assert_eq!(unpack(compression, &packed, 512).unwrap(), [0; 512]);
        }
    }

    proptest! {
        #[test]
        fn garbage_is_a_cluster_or_an_error(packed: Vec<u8>, zlib: bool) {
            let compression = if zlib { Compression::Zlib } else { Compression::Zstd };
            if let Ok(bytes) = unpack(compression, &packed, 4096) {
                prop_assert_eq!(bytes.len(), 4096);
            }
        }
    }
}
