//! The main channel: any bytes, in any pieces. Page payloads are not part of the input, as the decoder never sees them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::{Decoder, Event, Step, StreamError};

/// Decodes `stream`, showing at most `piece` bytes more than were asked for; all events and how it ended.
fn decode(stream: &[u8], piece: usize) -> (Vec<Event>, Option<StreamError>) {
    let mut decoder = Decoder::new();
    let (mut at, mut shown, mut events) = (0usize, 0usize, Vec::new());
    loop {
        let end = stream.len().min(at + shown);
        let input = &stream[at..end];
        match decoder.step(input) {
            Err(error) => {
                assert!(!error.to_string().is_empty());
                return (events, Some(error));
            }
            Ok(Step::Need(wanted)) => {
                assert!(wanted > input.len(), "asked for {wanted} bytes while {} were there", input.len());
                assert!(wanted <= Decoder::LARGEST_NEED);
                if end == stream.len() {
                    assert!(!decoder.truncated_error(input.len(), wanted).to_string().is_empty());
                    return (events, None);
                }
                shown = wanted.max(shown + piece);
            }
            Ok(Step::Event { consumed, event }) => {
                assert!(consumed <= input.len());
                at += consumed;
                shown -= consumed;
                match &event {
                    Event::Page { block, offset } | Event::Zero { block, offset } => {
                        let block = &decoder.blocks()[*block];
                        assert!(offset % 4096 == 0 && offset + 4096 <= block.used_length);
                    }
                    Event::DeviceTail | Event::EndOfStream => {
                        events.push(event);
                        return (events, None);
                    }
                    _ => {}
                }
                events.push(event);
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let whole = decode(data, usize::MAX / 2);
    let pieces = decode(data, 1);
    assert_eq!(whole, pieces, "what a stream means does not depend on how it arrives");
});
