//! Device sections with their description: whatever end is believed, the sections fill the tail without a gap.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::description::Description;
use limosa_stream::devices::{self, DeviceState, DeviceTail};

fn check(state: &DeviceState, tail: &[u8]) {
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
    Description::decode(&tail[state.json_range.clone()]).expect("the description that proved the sections");
    let _ = state.global_state(tail);
}

fuzz_target!(|data: &[u8]| {
    let _ = Description::decode(data);
    let located = devices::locate(data, 0, 1 << 20);
    if let Ok(state) = &located {
        check(state, data);
    }
    let mut arriving = DeviceTail::new(0, 1 << 20);
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
