//! Requests for metrics: any bytes are answered, or wait for more of the head, which has a limit.

#![no_main]

use libfuzzer_sys::fuzz_target;

// The server of metrics is part of the program, which is no library.
#[path = "../../crates/limosa/src/metrics/http.rs"]
mod http;

use http::{Decision, HEAD_MAX, decide, metrics, refusal};

fuzz_target!(|data: &[u8]| {
    let decided = (0..=data.len()).map(|end| decide(&data[..end])).find(|decision| *decision != Decision::Incomplete);
    match decided {
        None => assert!(data.len() < HEAD_MAX),
        Some(Decision::Metrics { body }) => assert_eq!(metrics("a 1\n", body).ends_with(b"\r\n\r\na 1\n"), body),
        Some(Decision::Refused(status)) => assert!(refusal(status).starts_with(b"HTTP/1.1 ")),
        Some(Decision::Incomplete) => unreachable!("it was looked for"),
    }
});
