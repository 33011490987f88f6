//! Features and the configuration space (virtio 1.2, sections 5.2.3 and 5.2.4).

/// Bytes of a sector, the unit of offsets and lengths on this device.
pub(super) const SECTOR: u64 = 512;
/// Most segments of data of a request: a ring of 128 descriptors holds them with the header and the status, also
/// without indirect descriptors.
pub(super) const SEGMENTS_MAX: u32 = 126;
/// Most bytes of a segment.
const SEGMENT_MAX: u32 = 1 << 20;
/// Most bytes of a read or a write, so that the plan for one request is bounded.
pub(super) const BYTES_MAX: u64 = SEGMENTS_MAX as u64 * SEGMENT_MAX as u64;
/// Most ranges of one request to discard or to write zeroes.
pub(super) const RANGES_MAX: u32 = 64;
/// Most sectors of a range that is discarded: 2 GiB.
pub(super) const DISCARD_MAX: u32 = 1 << 22;
/// Most sectors of a range that is zeroed: 256 MiB. Zeros may have to be written, and other requests wait for that when
/// the ring stops.
pub(super) const ZEROES_MAX: u32 = 1 << 19;

/// Bits of features.
pub(super) mod feature {
    /// `VIRTIO_BLK_F_SIZE_MAX`: the longest segment is known.
    pub(crate) const SIZE_MAX: u64 = 1 << 1;
    /// `VIRTIO_BLK_F_SEG_MAX`: the most segments of a request are known.
    pub(crate) const SEG_MAX: u64 = 1 << 2;
    /// `VIRTIO_BLK_F_RO`: writes fail.
    pub(crate) const RO: u64 = 1 << 5;
    /// `VIRTIO_BLK_F_BLK_SIZE`: the block size is known.
    pub(crate) const BLK_SIZE: u64 = 1 << 6;
    /// `VIRTIO_BLK_F_FLUSH`: the driver flushes.
    pub(crate) const FLUSH: u64 = 1 << 9;
    /// `VIRTIO_BLK_F_TOPOLOGY`: preferred alignment is known.
    pub(crate) const TOPOLOGY: u64 = 1 << 10;
    /// `VIRTIO_BLK_F_CONFIG_WCE`: the driver chooses between write-back and write-through.
    pub(crate) const CONFIG_WCE: u64 = 1 << 11;
    /// `VIRTIO_BLK_F_MQ`: several queues.
    pub(crate) const MQ: u64 = 1 << 12;
    /// `VIRTIO_BLK_F_DISCARD`: ranges can be discarded.
    pub(crate) const DISCARD: u64 = 1 << 13;
    /// `VIRTIO_BLK_F_WRITE_ZEROES`: ranges can be zeroed.
    pub(crate) const WRITE_ZEROES: u64 = 1 << 14;
    /// `VIRTIO_F_INDIRECT_DESC`: tables of descriptors outside of the ring.
    pub(crate) const INDIRECT: u64 = 1 << 28;
}

/// Offset of the field `writeback` in the configuration.
pub(super) const WRITE_BACK_OFFSET: u32 = 32;
/// Bytes of the configuration.
const LENGTH: usize = 60;

/// The fields of the configuration that depend on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Configuration {
    /// Sectors of the disk.
    pub(super) sectors: u64,
    /// Bytes that the disk allocates together: a power of two.
    pub(super) allocation_unit: u64,
    /// Queues of the device.
    pub(super) queues: u16,
    /// Whether writes may be acknowledged before they are durable.
    pub(super) write_back: bool,
}

impl Configuration {
    /// Returns the features of a device with this configuration.
    pub(super) fn features(&self, read_only: bool) -> u64 {
        use feature::{
            BLK_SIZE, CONFIG_WCE, DISCARD, FLUSH, INDIRECT, MQ, RO, SEG_MAX, SIZE_MAX, TOPOLOGY, WRITE_ZEROES,
        };
        let always = SIZE_MAX | SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | CONFIG_WCE | MQ | INDIRECT;
        always | if read_only { RO } else { DISCARD | WRITE_ZEROES }
    }

    /// Returns its bytes.
    pub(super) fn encode(&self) -> [u8; LENGTH] {
        let mut bytes = [0; LENGTH];
        // More than a GiB is not a preference of any disk.
        let unit = u32::try_from(self.allocation_unit.clamp(SECTOR, 1 << 30) / SECTOR).unwrap_or(1);
        let optimal = if unit > 8 { unit } else { 0 };
        let mut rest = bytes.as_mut_slice();
        let mut put = |field: &[u8]| {
            if let Some((place, behind)) = std::mem::take(&mut rest).split_at_mut_checked(field.len()) {
                place.copy_from_slice(field);
                rest = behind;
            }
        };
        put(&self.sectors.to_le_bytes());
        put(&SEGMENT_MAX.to_le_bytes());
        put(&SEGMENTS_MAX.to_le_bytes());
        // The geometry in cylinders is not offered.
        put(&[0; 4]);
        put(&512_u32.to_le_bytes());
        // Physical blocks of 2^3 logical ones, the first of them at block 0; at least as many blocks should be used at
        // once, and best a whole allocation unit.
        put(&[3, 0]);
        put(&8_u16.to_le_bytes());
        put(&optimal.to_le_bytes());
        put(&[u8::from(self.write_back), 0]);
        put(&self.queues.to_le_bytes());
        put(&DISCARD_MAX.to_le_bytes());
        put(&RANGES_MAX.to_le_bytes());
        put(&unit.to_le_bytes());
        put(&ZEROES_MAX.to_le_bytes());
        put(&RANGES_MAX.to_le_bytes());
        // Zeroed ranges may be unmapped.
        put(&[1, 0, 0, 0]);
        bytes
    }

    /// Reads from `offset` on; bytes past the end are zero.
    pub(super) fn read(&self, offset: u32, into: &mut [u8]) {
        into.fill(0);
        let bytes = self.encode();
        let from = usize::try_from(offset).ok().and_then(|offset| bytes.get(offset..)).unwrap_or_default();
        into.iter_mut().zip(from).for_each(|(byte, from)| *byte = *from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIGURATION: Configuration =
        Configuration { sectors: 0x0102_0304_0506_0708, allocation_unit: 65536, queues: 4, write_back: true };

    #[test]
    fn fields_are_where_the_specification_has_them() {
        let bytes = CONFIGURATION.encode();
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!(bytes[..8], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!((u32_at(8), u32_at(12), u32_at(16), u32_at(20)), (1 << 20, 126, 0, 512));
        assert_eq!((bytes[24], bytes[25], bytes[26], bytes[27], u32_at(28)), (3, 0, 8, 0, 128));
        assert_eq!((bytes[32], bytes[33], bytes[34], bytes[35]), (1, 0, 4, 0));
        assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (1 << 22, 64, 128));
        assert_eq!((u32_at(48), u32_at(52), bytes[56]), (1 << 19, 64, 1));
        assert_eq!(CONFIGURATION.encode().get(WRITE_BACK_OFFSET as usize), Some(&1));
    }

    #[test]
    fn any_piece_can_be_read_and_past_the_end_are_zeros() {
        let whole = CONFIGURATION.encode();
        for offset in [0, 7, 32, 59, 60, 61, 4096, u32::MAX] {
            for length in [0, 1, 8, 60, 256] {
                let mut piece = vec![0xff; length];
                CONFIGURATION.read(offset, &mut piece);
                let expected = |at: usize| whole.get(offset as usize + at).copied().unwrap_or(0);
                assert!(piece.iter().enumerate().all(|(at, byte)| *byte == expected(at)), "{offset} {length}");
            }
        }
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_changes_it() {
        let both = CONFIGURATION.features(true) & CONFIGURATION.features(false);
        assert_eq!(CONFIGURATION.features(true) ^ both, feature::RO);
        assert_eq!(CONFIGURATION.features(false) ^ both, feature::DISCARD | feature::WRITE_ZEROES);
    }
}
