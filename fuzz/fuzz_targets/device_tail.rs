//! Device sections with their description: for any end that is believed, the sections fill the tail without a gap.
//! The tail of a live source is the same once its words have been taken out.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::{FramedSections, Vmdesc, CompleteTail, DeviceTailFinder, TailStep, devices};

fn check(state: &CompleteTail, tail: &[u8]) {
    let mut at = 0;
    for section in &state.sections {
        assert_eq!(section.range.start, at);
        assert!(section.range.start < section.body.start && section.body.end + 5 == section.range.end);
        assert_eq!(tail[at], 4);
        at = section.range.end;
    }
    assert_eq!(state.sections_range, 0..at);
    assert_eq!(state.json_range, at + 6..state.end);
    assert!(state.end <= tail.len());
    Vmdesc::decode(&tail[state.json_range.clone()]).expect("the description that proved the sections");
    let _ = state.global_state(tail);
}

/// A tail that says where it ends, in pieces.
fn check_delimited(data: &[u8]) {
    let (mut arriving, mut end, mut ready) = (FramedSections::new(0, 1 << 20), 0, false);
    while end <= data.len() {
        match arriving.parse(&data[..end]) {
            Ok(TailStep::Ready { sections }) => {
                assert!(!std::mem::replace(&mut ready, true) && sections < end);
                continue;
            }
            Ok(TailStep::Whole { state, pings, length }) => {
                assert!(ready && length <= end);
                let mut tail = data[..length].to_vec();
                tail.drain(pings);
                assert_eq!(state.end, tail.len());
                return check(&state, &tail);
            }
            Ok(TailStep::NotFramed) => return assert!(!ready),
            Ok(TailStep::More) => {}
            Err(_) => return,
        }
        end += 1 + data.len() / 8;
    }
}

fuzz_target!(|data: &[u8]| {
    check_delimited(data);
    let _ = Vmdesc::decode(data);
    let located = devices::find_tail_end(data, 0, 1 << 20);
    if let Ok(state) = &located {
        check(state, data);
    }
    let mut arriving = DeviceTailFinder::new(0, 1 << 20);
    let mut step = 1;
    let mut end = 0;
    let mut last = None;
    while end < data.len() {
        end = data.len().min(end + step);
        step = step * 2 % 61 + 1;
        match arriving.find(&data[..end]) {
            Ok(found) => last = found,
            Err(_) => return,
        }
        if let Some(state) = &last {
            assert_eq!(state.end, end);
            check(state, &data[..end]);
        }
    }
    if last.is_some() {
        assert!(located.is_ok(), "an end that was found while arriving is found in the whole");
    }
});
