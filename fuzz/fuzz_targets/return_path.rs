//! The return path: any bytes, in two different cuts; what was decoded encodes to the same bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::{ReturnDecoder, ReturnMessage, StreamError};

fn decode(wire: &[u8], piece: usize) -> (Vec<ReturnMessage>, u64, Option<StreamError>) {
    let mut decoder = ReturnDecoder::new(1 << 16);
    let mut messages = Vec::new();
    for bytes in wire.chunks(piece) {
        decoder.push(bytes);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, decoder.offset(), Some(error)),
            }
        }
    }
    (messages, decoder.offset(), None)
}

fuzz_target!(|data: &[u8]| {
    let whole = decode(data, data.len().max(1));
    assert_eq!(whole, decode(data, 3));
    let (messages, length, _) = whole;
    let mut encoded = Vec::new();
    for message in &messages {
        message.encode(&mut encoded).expect("what was decoded can be encoded");
    }
    assert_eq!(encoded, data[..length as usize]);
});
