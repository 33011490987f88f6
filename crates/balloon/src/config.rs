//! The configuration space: four numbers by which device and driver communicate.
//!
//! **Law: reading and writing it takes no lock.** A guest's virtual CPU is stopped while it waits for a configuration
//! read, and its driver may hold locks; so the thread that replies must not wait for the thread that processes the
//! queues, which may be discarding gigabytes or wait for that same guest. Each field is a separate atomic. (The fields
//! are independent, so a read of several may see values of different times, as on real hardware.)

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::hint::{DONE, STOP};
use crate::layout::Features;

/// The fields, little-endian, 4 bytes each (virtio 1.2, 5.5.4).
#[derive(Debug)]
pub(crate) struct Config {
    /// Pages of 4 KiB that the balloon should have. Written by the device.
    num_pages: AtomicU32,
    /// Pages of 4 KiB that it has. Written by the driver.
    actual: AtomicU32,
    /// The command for free-page lists. Written by the device.
    hint_command: AtomicU32,
    /// The value with which free pages are filled, if that feature was accepted. Written by the driver, and under QEMU
    /// before the device receives the accepted features.
    poison: AtomicU32,
    /// The driver has written `poison` since the device was connected.
    poison_said: AtomicBool,
    /// The last values of `num_pages` and `hint_command` that the driver has read.
    read: [AtomicU32; 2],
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_pages: AtomicU32::new(0),
            actual: AtomicU32::new(0),
            hint_command: AtomicU32::new(DONE),
            poison: AtomicU32::new(0),
            poison_said: AtomicBool::new(false),
            read: [AtomicU32::new(0), AtomicU32::new(DONE)],
        }
    }
}

/// The result of a write by the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ConfigWrite {
    /// [`Config::actual`] has changed.
    pub(crate) actual_changed: bool,
    /// Some bytes were for fields that the driver may not write, or for none.
    pub(crate) refused: bool,
}

impl Config {
    /// Copies bytes from `offset` on; zeros beyond the fields that `offered` provides.
    pub(crate) fn read(&self, offered: Features, offset: u32, into: &mut [u8]) {
        let fields = [&self.num_pages, &self.actual, &self.hint_command, &self.poison];
        let values = fields.map(|field| field.load(Ordering::Acquire).to_le_bytes());
        let bytes = values.as_flattened();
        let bytes = bytes.get(..offered.config_len() as usize).unwrap_or(bytes);
        let from = &bytes[bytes.len().min(offset as usize)..];
        let length = from.len().min(into.len());
        let (there, behind) = into.split_at_mut(length);
        there.copy_from_slice(&from[..length]);
        behind.fill(0);
        let end = offset as usize + length;
        for (at, known) in [0, 8].into_iter().zip(&self.read) {
            if let Some(value) = bytes.get(at..at + 4).filter(|_| offset as usize <= at && at + 4 <= end) {
                known.store(u32::from_le_bytes([value[0], value[1], value[2], value[3]]), Ordering::Release);
            }
        }
    }

    /// Whether the driver has read the device's fields since their last change. One that has read nothing yet has
    /// neither a balloon nor hinted pages.
    pub(crate) fn is_known(&self) -> bool {
        let fields = [&self.num_pages, &self.hint_command];
        fields
            .iter()
            .zip(&self.read)
            .all(|(field, known)| field.load(Ordering::Acquire) == known.load(Ordering::Acquire))
    }

    /// Accepts what the driver writes to its own fields, and ignores the rest. The field for poison exists only if that
    /// feature is `offered`.
    pub(crate) fn write(&self, offered: Features, offset: u32, bytes: &[u8]) -> ConfigWrite {
        let mut written = ConfigWrite::default();
        let field = |at: u64, field: &AtomicU32| {
            let mut mine = 0;
            let before = field.load(Ordering::Acquire);
            let mut value = before.to_le_bytes();
            for (place, byte) in (at..).zip(&mut value) {
                let given = place.checked_sub(u64::from(offset)).and_then(|index| usize::try_from(index).ok());
                if let Some(given) = given.and_then(|index| bytes.get(index)) {
                    *byte = *given;
                    mine += 1;
                }
            }
            let after = u32::from_le_bytes(value);
            field.store(after, Ordering::Release);
            (mine, before != after)
        };
        let (mut mine, changed) = field(4, &self.actual);
        written.actual_changed = changed;
        if offered.has(Features::PAGE_POISON) {
            let (poison, _) = field(12, &self.poison);
            if poison > 0 {
                self.poison_said.store(true, Ordering::Release);
            }
            mine += poison;
        }
        written.refused = mine != bytes.len();
        written
    }

    /// Returns whether the value changed.
    pub(crate) fn set_num_pages(&self, pages: u32) -> bool {
        self.num_pages.swap(pages, Ordering::AcqRel) != pages
    }

    pub(crate) fn num_pages(&self) -> u32 {
        self.num_pages.load(Ordering::Acquire)
    }

    pub(crate) fn actual(&self) -> u32 {
        self.actual.load(Ordering::Acquire)
    }

    pub(crate) fn set_hint_command(&self, command: u32) {
        self.hint_command.store(command, Ordering::Release);
    }

    /// The value with which free pages are filled; `None`: the driver has not written it since the device was
    /// connected. A driver that has accepted the feature writes it once, before it gives any page; so one that has not
    /// written it here has written it to another process, and there may be no other sign of that.
    pub(crate) fn poison(&self) -> Option<u32> {
        self.poison_said.load(Ordering::Acquire).then(|| self.poison.load(Ordering::Acquire))
    }

    /// The driver was attached to another process before, which has received its writes.
    pub(crate) fn driver_resumed(&self) {
        // The last values it has read there are unknown: they count as different from these.
        self.know(u32::MAX, STOP);
    }

    /// The driver is gone, and its balloon with it. Returns whether it had one.
    pub(crate) fn forget_driver(&self) -> bool {
        self.know(0, DONE);
        self.actual.swap(0, Ordering::AcqRel) != 0
    }

    fn know(&self, num_pages: u32, hint_command: u32) {
        let [known_pages, known_command] = &self.read;
        known_pages.store(num_pages, Ordering::Release);
        known_command.store(hint_command, Ordering::Release);
    }

    /// Another guest was connected.
    pub(crate) fn forget_poison(&self) {
        self.poison_said.store(false, Ordering::Release);
        self.poison.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(config: &Config, features: Features, offset: u32, length: usize) -> Vec<u8> {
        let mut bytes = vec![0xaa; length];
        config.read(features, offset, &mut bytes);
        bytes
    }

    #[test]
    fn the_driver_writes_its_own_fields_and_no_others() {
        let config = Config::default();
        config.set_num_pages(0x0102_0304);
        let all = Features::ALL;
        assert_eq!(config.poison(), None);
        assert_eq!(config.write(all, 4, &7u32.to_le_bytes()), ConfigWrite { actual_changed: true, refused: false });
        assert_eq!(config.write(all, 4, &7u32.to_le_bytes()), ConfigWrite::default());
        assert_eq!(config.write(all, 12, &0xaau32.to_le_bytes()), ConfigWrite::default());
        for (offset, bytes) in [(0, &[1u8; 4][..]), (8, &[1; 4]), (16, &[1]), (u32::MAX, &[1; 8]), (2, &[4, 3, 7, 0])] {
            assert!(config.write(all, offset, bytes).refused, "{offset}");
        }
        assert_eq!((config.num_pages(), config.actual(), config.poison()), (0x0102_0304, 7, Some(0xaa)));
        assert_eq!(read(&config, all, 0, 16), [4, 3, 2, 1, 7, 0, 0, 0, 1, 0, 0, 0, 0xaa, 0, 0, 0]);
        // If the feature is not offered there is no such field.
        assert!(config.write(Features::STATS_VQ, 12, &[1; 4]).refused);
        assert_eq!(config.poison(), Some(0xaa));
    }

    #[test]
    fn beyond_the_end_there_are_zeros() {
        let config = Config::default();
        config.set_hint_command(u32::MAX);
        assert_eq!(read(&config, Features::FREE_PAGE_HINT, 8, 8), [255, 255, 255, 255, 0, 0, 0, 0]);
        assert_eq!(read(&config, Features::NONE, 8, 4), [0; 4]);
        assert_eq!(read(&config, Features::ALL, u32::MAX, 4), [0; 4]);
    }

    #[test]
    fn the_driver_knows_what_it_has_read_since_it_became_so() {
        let (config, all) = (Config::default(), Features::ALL);
        assert!(config.is_known(), "a driver that has read nothing has nothing");
        let set_target: fn(&Config, u32) = |config, pages| _ = config.set_num_pages(pages);
        for (offset, set) in [(0, set_target), (8, Config::set_hint_command)] {
            set(&config, 0x8000_0000);
            for (part, length) in [(offset, 3), (offset + 1, 4), (4, 4), (12, 4)] {
                read(&config, all, part, length);
                assert!(!config.is_known(), "{part} {length}");
            }
            read(&config, all, offset, 4);
            assert!(config.is_known());
            set(&config, 7);
            assert!(!config.is_known());
            // User-mode Linux and QEMU read from the beginning on.
            read(&config, all, 0, 12);
            assert!(config.is_known());
        }
        config.set_num_pages(0);
        config.set_hint_command(DONE);
        assert!(!config.is_known());
        config.forget_driver();
        assert!(config.is_known());
        config.driver_resumed();
        assert!(!config.is_known());
    }

    proptest! {
        #[test]
        fn any_write_changes_at_most_what_is_the_drivers(offset in 0u32..24, bytes in proptest::collection::vec(any::<u8>(), 0..24)) {
            let config = Config::default();
            config.set_num_pages(0x1111_1111);
            config.set_hint_command(0x2222_2222);
            let before = read(&config, Features::ALL, 0, 16);
            let written = config.write(Features::ALL, offset, &bytes);
            let after = read(&config, Features::ALL, 0, 16);
            for at in 0..16u32 {
                let given = at.checked_sub(offset).and_then(|index| bytes.get(index as usize));
                let own = (4..8).contains(&at) || (12..16).contains(&at);
                let expected = given.filter(|_| own).unwrap_or(&before[at as usize]);
                prop_assert_eq!(after[at as usize], *expected);
            }
            let own = (offset..).zip(&bytes).all(|(at, _)| matches!(at, 4..8 | 12..16));
            prop_assert_eq!(written.refused, !own);
        }
    }
}
