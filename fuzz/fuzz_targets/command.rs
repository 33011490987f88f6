//! Commands, and the two other small standalone decoders: what was decoded encodes to the same bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::{Command, Configuration, GlobalState, replace_run_state};

fuzz_target!(|data: &[u8]| {
    if let Ok(Some((command, length))) = Command::decode(data) {
        let mut encoded = Vec::new();
        command.encode(&mut encoded).expect("what was decoded can be encoded");
        assert_eq!(encoded, data[..length]);
    }
    if let Ok(Some((configuration, length))) = Configuration::decode(data) {
        // The order of the subsections is free to read and fixed to write.
        let mut encoded = Vec::new();
        configuration.encode(&mut encoded).expect("what was decoded can be encoded");
        assert_eq!(encoded.len(), length);
        encoded.push(0);
        assert_eq!(Configuration::decode(&encoded), Ok(Some((configuration, length))));
    }
    if let Ok(state) = GlobalState::decode(data) {
        let mut body = data.to_vec();
        replace_run_state(&mut body, &state.run_state).expect("what was decoded can be encoded");
        assert_eq!(GlobalState::decode(&body), Ok(state));
    }
});
