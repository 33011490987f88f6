//! Breaking images in every way.

use limosa_storage::testing::SeededRandom;

/// Where the tables of an image lie, read as simply as can be.
pub(crate) struct Tables {
    pub(crate) cluster: u64,
    /// Offsets of entries of 8 bytes, by kind of table.
    pub(crate) kinds: Vec<(&'static str, Vec<u64>)>,
}

fn number(bytes: &[u8], at: u64) -> u64 {
    let at = usize::try_from(at).unwrap();
    bytes.get(at..at + 8).map_or(0, |field| u64::from_be_bytes(field.try_into().unwrap()))
}

fn half(bytes: &[u8], at: u64) -> u64 {
    number(bytes, at) >> 32
}

impl Tables {
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let cluster = 1 << half(bytes, 20);
        let entries = |at: u64, count: u64| (0..count).map(|entry| at + entry * 8).collect::<Vec<_>>();
        let pointed = |table: &[u64]| -> Vec<u64> {
            table.iter().map(|at| number(bytes, *at) & 0x00ff_ffff_ffff_fe00).filter(|at| *at != 0).collect()
        };
        let l1 = entries(number(bytes, 40), half(bytes, 36));
        let mut l2: Vec<_> = pointed(&l1).into_iter().flat_map(|at| entries(at, cluster / 8)).collect();
        // Mostly entries that say something.
        let used: Vec<_> = l2.iter().copied().filter(|at| number(bytes, *at) != 0).collect();
        l2.truncate(64);
        l2.extend(used.iter().chain(&used).chain(&used));
        let refcounts = entries(number(bytes, 48), half(bytes, 56) * cluster / 8);
        let blocks: Vec<_> = pointed(&refcounts).into_iter().flat_map(|at| entries(at, cluster.min(256) / 8)).collect();
        let used: Vec<_> = refcounts.into_iter().take(4).collect();
        let snapshots = entries(number(bytes, 64), if half(bytes, 60) > 0 { 16 } else { 0 });
        let mut kinds = vec![("l1", l1), ("l2", l2), ("refcount table", used), ("refcount block", blocks)];
        let mut at = number(bytes, 64);
        for _ in 0..half(bytes, 60) {
            let l1 = entries(number(bytes, at), half(bytes, at + 8));
            kinds.push((
                "snapshot l2",
                pointed(&l1).into_iter().flat_map(|at| entries(at, cluster.min(512) / 8)).collect(),
            ));
            kinds.push(("snapshot l1", l1));
            let lengths = half(bytes, at + 36) + (half(bytes, at + 12) >> 16) + (half(bytes, at + 12) & 0xffff);
            at += (40 + lengths).next_multiple_of(8);
        }
        kinds.push(("snapshot table", snapshots));
        if let Some(at) = bytes.windows(4).take(4096).position(|word| word == [0x23, 0x85, 0x28, 0x75]) {
            let directory = number(bytes, at as u64 + 24);
            kinds.push(("bitmap directory", entries(directory, 4)));
            kinds.push(("bitmap table", entries(number(bytes, directory), half(bytes, directory + 8))));
        }
        kinds.retain(|(_, entries)| !entries.is_empty());
        Self { cluster, kinds }
    }

    /// Breaks one thing, and says which.
    pub(crate) fn break_one(&self, bytes: &mut [u8], chance: &mut SeededRandom) -> String {
        let (kind, places) = chance.choose(&self.kinds);
        let at = *chance.choose(places);
        let before = number(bytes, at);
        let somewhere = chance.below(bytes.len() as u64 / self.cluster + 2) * self.cluster;
        let after = match chance.below(12) {
            0 => 0,
            1 => before ^ 1 << 63,
            2 => before ^ 1 << 62,
            3 => before ^ 1 << chance.below(64),
            4 => before ^ 1,
            5 => somewhere | before & 1 << 63,
            6 => somewhere | 1 << 63,
            7 => somewhere + 512,
            8 => before.wrapping_add(self.cluster),
            9 => number(bytes, *chance.choose(places)),
            10 => (bytes.len() as u64 + chance.below(3) * self.cluster) | before & 1 << 63,
            _ => chance.bits(),
        };
        let index = usize::try_from(at).unwrap();
        if let Some(place) = bytes.get_mut(index..index + 8) {
            place.copy_from_slice(&after.to_be_bytes());
        }
        format!("{kind} at {at:#x}: {before:#018x} -> {after:#018x}")
    }
}
