//! Any bytes as a file with a LUKS header: it is refused, or its key material is inside the file, a passphrase does not
//! open it, and it is written back as it was understood.

#![no_main]

use std::ops::Range;

use libfuzzer_sys::fuzz_target;
use limosa_image::luks::{Header, Layout, Limits, LuksError};

/// Small, so that an input takes milliseconds.
const LIMITS: Limits = Limits::new(20, 16);

fuzz_target!(|data: &[u8]| {
    let length = data.len() as u64;
    for layout in [Layout::File(length), Layout::Detached(length)] {
        let Ok(header) = Header::parse(data, layout, LIMITS) else { continue };
        let again = Header::parse(&header.to_bytes(), layout, LIMITS);
        assert_eq!(again.as_ref(), Ok(&header), "what was written is read");
        let material = header.slots.iter().map(|slot| {
            let Range { start, end } = header.key_material(slot);
            let place = usize::try_from(start).expect("inside the file")..usize::try_from(end).expect("inside it");
            data.get(place).expect("key material is inside the file").to_vec()
        });
        match header.unlock(&material.collect::<Vec<_>>(), b"passphrase") {
            Ok(found) => assert!(!found.slots.is_empty()),
            Err(LuksError::Passphrase | LuksError::Unsupported(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
});
