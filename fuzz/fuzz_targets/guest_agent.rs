//! The answers of a guest agent: lines do not depend on the pieces in which they come, and no more than the limit is
//! held.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_qemu::AgentAnswers;

const LIMIT: usize = 4096;

fuzz_target!(|bytes: &[u8]| {
    let (mut whole, mut pieces) = (AgentAnswers::new(LIMIT), AgentAnswers::new(LIMIT));
    let lines = |answers: &mut AgentAnswers| std::iter::from_fn(|| answers.next_line()).collect::<Vec<_>>();
    if whole.push(bytes).is_err() {
        assert!(bytes.len() > LIMIT);
        return;
    }
    for piece in bytes.chunks(3) {
        pieces.push(piece).expect("the pieces are as long as the whole");
    }
    let found = lines(&mut whole);
    assert_eq!(found, lines(&mut pieces));
    assert!(found.iter().map(Vec::len).sum::<usize>() <= bytes.len());
    assert!(found.iter().flatten().all(|byte| *byte != b'\n' && *byte != 0xff));
});
