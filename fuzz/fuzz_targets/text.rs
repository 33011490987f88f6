//! Texts of people and of QEMU's human monitor: addresses, and the table of RAM blocks; the description of device
//! sections with all its names.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_channel::Uri;
use limosa_qemu::monitor::parse_ram_blocks;
use limosa_qemu::qmp::MonitorAddress;

fuzz_target!(|text: &str| {
    if let Ok(uri) = text.parse::<Uri>() {
        assert_eq!(uri.to_string().parse::<Uri>().as_ref(), Ok(&uri));
    }
    if let Ok(address) = text.parse::<MonitorAddress>() {
        assert_eq!(address.to_string().parse::<MonitorAddress>().ok(), Some(address));
    }
    if let Ok(devices) = limosa_stream::vmdesc::decode(text.as_bytes()) {
        assert!(devices.len() <= limosa_stream::DEVICES_LIMIT);
    }
    for block in parse_ram_blocks(text) {
        assert!(block.page_size.is_power_of_two());
    }
});
