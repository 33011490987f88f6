//! Frames that a VM or a network sends to a gate, in pieces of any size: the frames are the bytes that came, in their
//! order, and do not depend on the pieces; a length that is not possible ends the stream at the same place.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_protect::gate::{FRAME_MAX, FrameReader};

/// Reads a stream in pieces of `piece` bytes. Returns the bytes of the frames, and whether the stream is broken.
fn read(stream: &[u8], piece: usize) -> (Vec<u8>, bool) {
    let (mut reader, mut frames, mut rest) = (FrameReader::new(), Vec::new(), stream);
    while !rest.is_empty() {
        let room = reader.room();
        let count = room.len().min(piece).min(rest.len());
        assert!(count > 0, "there is always room once all frames were taken");
        let (now, later) = rest.split_at(count);
        room[..count].copy_from_slice(now);
        reader.arrived(count);
        rest = later;
        loop {
            match reader.next_frame() {
                Ok(Some(frame)) => {
                    assert!((5..=FRAME_MAX + 4).contains(&frame.len()));
                    frames.extend_from_slice(frame);
                }
                Ok(None) => break,
                Err(_) => return (frames, true),
            }
        }
    }
    (frames, false)
}

fuzz_target!(|data: &[u8]| {
    let Some((&piece, stream)) = data.split_first() else { return };
    let (frames, broken) = read(stream, usize::from(piece) * 16 + 1);
    assert!(stream.starts_with(&frames));
    assert_eq!(read(stream, usize::MAX), (frames, broken));
});
