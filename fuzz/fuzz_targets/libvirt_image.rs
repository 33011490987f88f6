//! The header and the XML of a libvirt save image: what is accepted is inside the data and names a domain in
//! text.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_snapshot::{SAVE_IMAGE_HEADER_LENGTH, SaveHeader, SaveImage, SAVE_IMAGE_XML_LIMIT};

fuzz_target!(|data: &[u8]| {
    let Ok(header) = SaveHeader::decode(data) else { return };
    assert!((1..=SAVE_IMAGE_XML_LIMIT).contains(&header.data_length));
    let Ok(image) = SaveImage::decode(header, &data[SAVE_IMAGE_HEADER_LENGTH..]) else { return };
    assert!(!image.xml.contains('\0') && image.xml.len() < header.data_length as usize);
    assert!(image.name.iter().all(|name| !name.chars().any(char::is_control)));
    assert!(image.payload_offset() <= data.len() as u64);
});
