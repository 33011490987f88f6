//! The snapshot table of an image.
//!
//! Law: lengths before allocation. Entries are as long as they say; a table whose entries say too much is no table.

use limosa_page::{BrokenInvariant, broken_invariant, invariant, to_usize};
use limosa_storage::{Buffer, Storage};

use super::field::Fields;
use super::header::{Header, L1_MOST};
use crate::error::ImageError;
use crate::offset::HostOffset;

/// Bytes of an entry whose places are fixed.
const FIXED: u64 = 40;
/// The most bytes of extra data: QEMU's limit.
const EXTRA_MOST: u64 = 1024;
/// Extra data that every entry of version 3 has.
const EXTRA_LEAST: u64 = 16;
/// Extra data of a new entry: the sizes of the VM's state and of the disk, and a count of instructions.
const EXTRA: u32 = 24;
/// The longest table in bytes: QEMU's limit.
pub(in crate::qcow2) const TABLE_MOST: u64 = 64 << 20;
/// The longest name of a new snapshot in bytes: QEMU's limit.
pub(in crate::qcow2) const NAME_MOST: usize = 255;

/// An internal snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Snapshot {
    /// Offset of its L1 table, and the number of its entries.
    pub l1: (HostOffset, u32),
    /// Its id, which is unique.
    pub id: String,
    /// Its name.
    pub name: String,
    /// Time of the snapshot: seconds since 1970, and nanoseconds.
    pub taken: (u32, u32),
    /// Running time of the guest in nanoseconds.
    pub vm_clock: u64,
    /// Bytes of the VM's state; 0 without one.
    pub vm_state_size: u64,
    /// Bytes of the disk at that time; `None`: its present size.
    pub disk_size: Option<u64>,
    /// Instructions that the guest had executed, if they were counted.
    pub icount: Option<u64>,
}

/// Reads the snapshots of an image.
///
/// # Errors
/// [`ImageError::Corrupt`] names the entry; what the storage says.
pub async fn read(storage: &dyn Storage, header: &Header) -> Result<Vec<Snapshot>, ImageError> {
    Ok(read_to_end(storage, header).await?.0)
}

/// Reads the snapshots of an image; also returns the end of the table in the file.
pub(in crate::qcow2) async fn read_to_end(
    storage: &dyn Storage,
    header: &Header,
) -> Result<(Vec<Snapshot>, u64), ImageError> {
    let (entries, end) = read_entries(storage, header).await?;
    Ok((entries.into_iter().map(|entry| entry.snapshot).collect(), end))
}

/// A snapshot, and its entry in the table, filled up to a multiple of 8 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::qcow2) struct Entry {
    pub(in crate::qcow2) snapshot: Snapshot,
    pub(in crate::qcow2) bytes: Vec<u8>,
}

impl Entry {
    /// The entry of a new snapshot, which has a disk size. Its names are at most as long as [`NAME_MOST`] says.
    pub(in crate::qcow2) fn new(snapshot: Snapshot) -> Result<Self, BrokenInvariant> {
        let name = |text: &str| {
            u16::try_from(text.len()).map_err(|_| broken_invariant("a snapshot's name is shorter than 64 KiB"))
        };
        let mut bytes = snapshot.l1.0.0.to_be_bytes().to_vec();
        let mut put = |field: &[u8]| bytes.extend_from_slice(field);
        put(&snapshot.l1.1.to_be_bytes());
        put(&name(&snapshot.id)?.to_be_bytes());
        put(&name(&snapshot.name)?.to_be_bytes());
        put(&snapshot.taken.0.to_be_bytes());
        put(&snapshot.taken.1.to_be_bytes());
        put(&snapshot.vm_clock.to_be_bytes());
        // The larger field in the extra data says it, too.
        put(&u32::try_from(snapshot.vm_state_size).unwrap_or(u32::MAX).to_be_bytes());
        put(&EXTRA.to_be_bytes());
        put(&snapshot.vm_state_size.to_be_bytes());
        let disk_size =
            snapshot.disk_size.ok_or_else(|| broken_invariant("a new snapshot has the size of its disk"))?;
        put(&disk_size.to_be_bytes());
        put(&snapshot.icount.unwrap_or(u64::MAX).to_be_bytes());
        put(snapshot.id.as_bytes());
        put(snapshot.name.as_bytes());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        Ok(Self { snapshot, bytes })
    }
}

/// Reads the entries of the snapshot table; also returns its end in the file.
pub(in crate::qcow2) async fn read_entries(
    storage: &dyn Storage,
    header: &Header,
) -> Result<(Vec<Entry>, u64), ImageError> {
    let (start, count) = header.snapshots;
    let length = storage.length()?;
    let mut found = Vec::new();
    let mut at = start.0;
    for number in 0..count {
        let corrupt = |why: String| ImageError::Corrupt {
            image: storage.name().clone(),
            table: format!("snapshot table at {start}, entry {number}"),
            why,
        };
        let fixed = bytes(storage, at, FIXED).await?;
        let fields = Fields(&fixed);
        let extra = u64::from(fields.u32(36));
        let (id, name) = (u64::from(fields.u16(12)), u64::from(fields.u16(14)));
        let end = at.saturating_add(FIXED + extra + id + name);
        if extra > EXTRA_MOST || end - start.0 > TABLE_MOST || end > length {
            let why = format!("its {} bytes at {at:#x} are not in the file, or more than can be", end - at);
            return Err(corrupt(why));
        }
        if header.version > 2 && extra < EXTRA_LEAST {
            return Err(corrupt(format!("{extra} bytes of extra data; version 3 has {EXTRA_LEAST}: repair the image")));
        }
        let rest = bytes(storage, at + FIXED, extra + id + name).await?;
        let l1 = (HostOffset(fields.u64(0)), fields.u32(8));
        if l1.0.0 & (header.geometry().cluster_size() - 1) != 0 || l1.1 > L1_MOST {
            return Err(corrupt(format!("an L1 table of {} entries at {}", l1.1, l1.0)));
        }
        let snapshot = decode(&fixed, &rest, extra, id)?;
        let mut bytes = [fixed, rest].concat();
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        found.push(Entry { snapshot, bytes });
        at = end.next_multiple_of(8);
    }
    Ok((found, at))
}

/// Decodes an entry that was read as long as its lengths say.
fn decode(fixed: &[u8], rest: &[u8], extra: u64, id: u64) -> Result<Snapshot, BrokenInvariant> {
    let fields = Fields(fixed);
    let split = |bytes: &'_ [u8], at: u64| -> Result<usize, BrokenInvariant> {
        let at = to_usize(at);
        invariant(at <= bytes.len(), "a snapshot's entry is read whole").map(|()| at)
    };
    let (extra, names) = rest.split_at(split(rest, extra)?);
    let (id, name) = names.split_at(split(names, id)?);
    let more = |at: usize| (extra.len() >= at + 8).then(|| Fields(extra).u64(at));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Snapshot {
        l1: (HostOffset(fields.u64(0)), fields.u32(8)),
        id: text(id),
        name: text(name),
        taken: (fields.u32(16), fields.u32(20)),
        vm_clock: fields.u64(24),
        vm_state_size: more(0).unwrap_or_else(|| u64::from(fields.u32(32))),
        disk_size: more(8),
        icount: more(16).filter(|count| *count != u64::MAX),
    })
}

/// A part of the file.
async fn bytes(storage: &dyn Storage, at: u64, length: u64) -> Result<Vec<u8>, ImageError> {
    let found = Buffer::zeroed(to_usize(length));
    storage.read(at, found.clone().into()).await?;
    Ok(found.to_vec())
}

#[cfg(test)]
mod tests {
    use limosa_storage::{MemoryStorage, block_on};
    use proptest::prelude::*;

    use super::*;
    use crate::qcow2::offline::create::{CreateOptions, create};

    /// An image with a snapshot table of these bytes at 0x40000.
    fn image(table: &[u8], count: u32) -> (MemoryStorage, Header) {
        let storage = MemoryStorage::growing_to(1 << 20);
        let options = CreateOptions { size: 1 << 20, ..CreateOptions::default() };
        let mut header = block_on(create(&storage, None, &options)).unwrap();
        header.snapshots = (HostOffset(0x4_0000), count);
        block_on(storage.write(0x4_0000, Buffer::from_slice(table).into())).unwrap();
        (storage, header)
    }

    fn entry(extra: &[u64], id: &str, name: &str) -> Vec<u8> {
        let mut bytes = 0x5_0000_u64.to_be_bytes().to_vec();
        bytes.extend(3_u32.to_be_bytes());
        bytes.extend(u16::try_from(id.len()).unwrap().to_be_bytes());
        bytes.extend(u16::try_from(name.len()).unwrap().to_be_bytes());
        bytes.extend([1000_u32.to_be_bytes(), 7_u32.to_be_bytes()].concat());
        bytes.extend(99_u64.to_be_bytes());
        bytes.extend(5_u32.to_be_bytes());
        bytes.extend(u32::try_from(extra.len() * 8).unwrap().to_be_bytes());
        bytes.extend(extra.iter().flat_map(|field| field.to_be_bytes()));
        bytes.extend([id.as_bytes(), name.as_bytes()].concat());
        bytes.resize(bytes.len().next_multiple_of(8), 0);
        bytes
    }

    #[test]
    fn entries_are_as_long_as_they_say() {
        let table = [entry(&[1 << 40, 77], "1", "before the upgrade"), entry(&[0, 78, 4, 8], "2", "")].concat();
        let (storage, header) = image(&table, 2);
        let found = block_on(read(&storage, &header)).unwrap();
        let first = Snapshot {
            l1: (HostOffset(0x5_0000), 3),
            id: "1".into(),
            name: "before the upgrade".into(),
            taken: (1000, 7),
            vm_clock: 99,
            vm_state_size: 1 << 40,
            disk_size: Some(77),
            icount: None,
        };
        let second = Snapshot {
            id: "2".into(),
            name: String::new(),
            vm_state_size: 0,
            disk_size: Some(78),
            icount: Some(4),
            ..first
        };
        assert_eq!(found, [first, second]);
    }

    #[test]
    fn a_new_entry_is_read_back() {
        for (name, vm_state_size, icount) in [("before", 0, None), ("", 5 << 40, Some(7))] {
            let new = Snapshot {
                l1: (HostOffset(0x5_0000), 3),
                id: "12".into(),
                name: name.into(),
                taken: (1000, 7),
                vm_clock: 99,
                vm_state_size,
                disk_size: Some(1 << 20),
                icount,
            };
            let new = Entry::new(new).unwrap();
            let (storage, header) = image(&new.bytes, 1);
            assert_eq!(block_on(read_entries(&storage, &header)).unwrap().0, [new]);
        }
    }

    #[test]
    fn an_entry_that_says_too_much_is_named() {
        let mut long = entry(&[0, 0], "1", "a");
        long[36..40].copy_from_slice(&2000_u32.to_be_bytes());
        let said = |table: &[u8], count| {
            let (storage, header) = image(table, count);
            block_on(read(&storage, &header)).unwrap_err().to_string()
        };
        assert_eq!(
            said(&[entry(&[0, 0], "1", "a"), long].concat(), 2),
            "memory: snapshot table at 0x40000, entry 1: its 2042 bytes at 0x40040 are not in the file, or more than can be"
        );
        assert!(said(&entry(&[0], "1", "a"), 1).contains("8 bytes of extra data"));
        assert!(said(&entry(&[0, 0], "1", "a"), 65536).contains("entry 1"));
    }

    proptest! {
        #[test]
        fn any_table_is_taken_or_refused(table in prop::collection::vec(any::<u8>(), 0..400), count in 0_u32..5) {
            let (storage, header) = image(&table, count);
            let _ = block_on(read(&storage, &header));
        }
    }
}
