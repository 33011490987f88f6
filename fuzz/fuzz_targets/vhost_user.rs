//! A vhost-user front end and its guest, both hostile: messages in any order, rings full of anything.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    limosa_vhost::fuzzing::play(data);
});
