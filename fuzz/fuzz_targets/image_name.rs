//! Any bytes as the name of an image: a path, a protocol, JSON, a list of options.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_image::reference::Reference;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let name = OsStr::from_bytes(data);
    let image = Path::new("folder/image").into();
    for reference in [Reference::from_name(name), Reference::from_image(name, &image)].into_iter().flatten() {
        assert!(reference.path().is_none_or(|path| !path.as_os_str().is_empty()));
    }
    if let Ok(list) = std::str::from_utf8(data) {
        let _ = Reference::from_options(list);
    }
});
