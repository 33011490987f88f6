//! The identity of a PCI device, read from the configuration space at the beginning of its section.
//!
//! QEMU compares the read-only parts of that space when it loads a device, and refuses one that differs: other
//! identifiers (`disable-legacy` changes them), another number of MSI-X vectors (queues change it, and the number of
//! vCPUs changes the queues of virtio-blk and virtio-scsi). Facts found with QEMU 10.0.2: the section of a PCI device
//! begins with a version of 32 bits, 2, and 256 bytes of configuration space (4096 with PCI Express). Layout of that
//! space: PCI Local Bus Specification 3.0, chapter 6.

use serde::Serialize;

/// Version of QEMU's state of a PCI device.
const VERSION: u32 = 2;
/// Bytes of the configuration space that every device has.
const SPACE: usize = 256;
/// Capability with the number of MSI-X vectors.
const MSI_X: u8 = 0x11;
/// Capabilities lie on 4 bytes behind the header's 64.
const MOST_CAPABILITIES: usize = (SPACE - 64) / 4;

/// The identity of a PCI device to a guest and to QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PciIdentity {
    /// Vendor identifier.
    pub vendor: u16,
    /// Device identifier.
    pub device: u16,
    /// MSI-X vectors; 0 if it has none, `None` if that is not known.
    pub vectors: Option<u32>,
}

impl PciIdentity {
    /// Of the section `name` with this body; `None` if it is not that of a PCI device.
    pub(crate) fn of(name: &str, body: &[u8]) -> Option<Self> {
        let (place, device) = name.split_once('/')?;
        if !place.contains(':') || device.contains('/') {
            return None;
        }
        let (version, rest) = body.split_first_chunk::<4>()?;
        let space = rest.get(..SPACE).filter(|_| u32::from_be_bytes(*version) == VERSION)?;
        let word = |at: usize| Some(u16::from_le_bytes([*space.get(at)?, *space.get(at.checked_add(1)?)?]));
        let (vendor, device) = (word(0)?, word(2)?);
        // All zeros and all ones identify nothing; header types are 0 and 1, with a bit for several functions.
        if matches!(vendor, 0 | 0xffff) || space.get(0x0e)? & 0x7f > 1 {
            return None;
        }
        Some(Self { vendor, device, vectors: vectors(space) })
    }
}

/// MSI-X vectors of a configuration space; `None` if its list of capabilities is broken.
fn vectors(space: &[u8]) -> Option<u32> {
    let has_list = space.get(6)? & 0x10 != 0;
    let mut at = if has_list { usize::from(space.get(0x34)? & 0xfc) } else { 0 };
    for _ in 0..=MOST_CAPABILITIES {
        if at == 0 {
            return Some(0);
        }
        if *space.get(at)? == MSI_X {
            let control = u16::from_le_bytes([*space.get(at + 2)?, *space.get(at + 3)?]);
            return Some(u32::from(control & 0x7ff) + 1);
        }
        at = usize::from(space.get(at + 1)? & 0xfc);
    }
    // It goes round in circles.
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn body() -> Vec<u8> {
        let mut body = vec![0; 4 + SPACE + 16];
        body[3] = 2;
        body[4..8].copy_from_slice(&[0xf4, 0x1a, 0x41, 0x10]);
        body[4 + 6] = 0x10;
        body[4 + 0x34] = 0x40;
        body[4 + 0x40..4 + 0x44].copy_from_slice(&[0x09, 0x98, 0, 0]);
        body[4 + 0x98..4 + 0x9c].copy_from_slice(&[0x11, 0, 2, 0x80]);
        body
    }

    #[test]
    fn identifiers_and_vectors_are_read_through_the_list_of_capabilities() {
        let identity = PciIdentity { vendor: 0x1af4, device: 0x1041, vectors: Some(3) };
        assert_eq!(PciIdentity::of("0000:00:01.0/virtio-net", &body()), Some(identity));
        let mut without = body();
        without[4 + 6] = 0;
        assert_eq!(PciIdentity::of("0000:00:01.0/virtio-net", &without).unwrap().vectors, Some(0));
        let mut circle = body();
        circle[4 + 0x41] = 0x40;
        assert_eq!(PciIdentity::of("0000:00:01.0/virtio-net", &circle).unwrap().vectors, None);
    }

    #[test]
    fn what_is_no_pci_device_has_no_identity() {
        assert_eq!(PciIdentity::of("timer", &body()), None);
        assert_eq!(PciIdentity::of("0000:00:01.0/1/usb-ptr", &body()), None);
        assert_eq!(PciIdentity::of("0000:00:01.0/virtio-net", &body()[..100]), None);
        let mut other = body();
        other[3] = 3;
        assert_eq!(PciIdentity::of("0000:00:01.0/virtio-net", &other), None);
    }

    proptest! {
        #[test]
        fn any_bytes_have_an_identity_or_none(mut bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            if let Some(version) = bytes.first_chunk_mut() {
                *version = VERSION.to_be_bytes();
            }
            let _ = PciIdentity::of("0000:00:01.0/x", &bytes);
        }
    }
}
