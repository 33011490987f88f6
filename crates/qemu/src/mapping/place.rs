//! The RAM blocks of a snapshot that are its guest's memory, and where they are in the file.
//!
//! The law: **blocks are never guessed by name alone.** The record made at save decides; without one, size and name.

use limosa_snapshot::Snapshot;
use limosa_stream::mapped_ram::MappedBlock;

use super::MemoryConflict;
use crate::command_line::escaped;

/// A RAM block and its place in a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPlace {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub length: u64,
    /// Offset of its first byte in the file.
    pub offset: u64,
}

/// Shortest RAM block that is mapped from a file without a record of the guest's memory, in bytes: a device may have a
/// block of any name, such as `tpm-ppi`.
const UNRECORDED_FROM: u64 = 64 << 20;

impl BlockPlace {
    /// Returns the blocks of a snapshot that are its guest's memory: those recorded when it was saved. Without a
    /// record, large ones whose name is not a device's.
    ///
    /// # Errors
    /// The VM has a virtio-mem device, whose memory is plugged and unplugged.
    pub fn guest_memory_of(snapshot: &Snapshot) -> Result<Vec<Self>, MemoryConflict> {
        if !snapshot.layout().early_sections.is_empty() {
            return Err(MemoryConflict::from(
                "the VM has a virtio-mem device, whose memory is plugged and unplugged".to_owned(),
            ));
        }
        let recorded = snapshot.manifest().map(|manifest| manifest.guest_memory.as_slice()).unwrap_or_default();
        let places = snapshot.layout().blocks.iter().map(Self::from);
        Ok(places.filter(|place| place.is_guest_memory(recorded)).collect())
    }

    fn is_guest_memory(&self, recorded: &[String]) -> bool {
        if !recorded.is_empty() {
            return recorded.contains(&self.name);
        }
        let name = self.id();
        let of_device = ["vram", "rom", "bios"].iter().any(|end| name.ends_with(end));
        self.length >= UNRECORDED_FROM && !name.contains('/') && !name.contains("flash") && !of_device
    }

    /// The id of the memory backend that makes it.
    #[must_use]
    pub fn id(&self) -> &str {
        self.name.strip_prefix("/objects/").unwrap_or(&self.name)
    }

    /// The option value of a memory backend that maps the block, for `-object`.
    #[must_use]
    pub fn backend_option(&self, file: &str) -> String {
        format!(
            "memory-backend-file,id={},size={},mem-path={},offset={},share=off,readonly=on,rom=off",
            escaped(self.id()),
            self.length,
            escaped(file),
            self.offset
        )
    }
}

impl From<&MappedBlock> for BlockPlace {
    fn from(block: &MappedBlock) -> Self {
        Self { name: block.block.name.clone(), length: block.block.used_length, offset: block.pages_offset }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::Properties;

    fn place(name: &str, mebibytes: u64) -> BlockPlace {
        BlockPlace { name: name.into(), length: mebibytes << 20, offset: 4096 }
    }

    #[test]
    fn what_was_recorded_counts_and_without_a_record_nothing_small_or_of_a_device() {
        for (name, mebibytes, is_memory) in [
            ("pc.ram", 64, true),
            ("mem", 64, true),
            ("/objects/mem", 64, true),
            ("mach-virt.ram", 64, true),
            ("mem", 63, false),
            ("tpm-ppi", 1, false),
            ("vga.vram", 64, false),
            ("0000:00:02.0/vga.vram", 256, false),
            ("/rom@etc/acpi/tables", 64, false),
            ("pc.bios", 64, false),
            ("pc.rom", 64, false),
            ("system.flash0", 64, false),
        ] {
            assert_eq!(place(name, mebibytes).is_guest_memory(&[]), is_memory, "{name}");
            assert!(place(name, mebibytes).is_guest_memory(&["x".to_owned(), name.to_owned()]), "{name}");
            assert!(!place(name, mebibytes).is_guest_memory(&["another".to_owned()]), "{name}");
        }
    }

    #[test]
    fn the_printed_option_names_file_and_place() {
        let option = place("/objects/a,b", 1).backend_option("/srv/x,y");
        let list = Properties::parse(&option, "qom-type");
        assert_eq!(
            (list.get("id"), list.get("mem-path"), list.get("size")),
            (Some("a,b"), Some("/srv/x,y"), Some("1048576"))
        );
        assert!(list.is_on("readonly") && !list.is_on("rom") && !list.is_on("share"));
    }
}
