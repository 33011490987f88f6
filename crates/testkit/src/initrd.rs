//! An initial RAM disk: a cpio archive of the "new ASCII" form (kernel docs: driver-api/early-userspace/buffer-format).

use anyhow::{Result, ensure};

/// An archive being written.
#[derive(Debug, Default)]
pub(crate) struct Initrd {
    archive: Vec<u8>,
    entries: u32,
}

impl Initrd {
    /// Adds a folder.
    pub(crate) fn folder(&mut self, path: &str) {
        self.entry(path, 0o040_755, (0, 0), &[]);
    }

    /// Adds a character device.
    pub(crate) fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, 0o020_600, (major, minor), &[]);
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) -> Result<()> {
        ensure!(u32::try_from(content.len()).is_ok(), "{path} is too large for an initrd");
        self.entry(path, 0o100_000 | permissions, (0, 0), content);
        Ok(())
    }

    /// The archive with its end mark.
    pub(crate) fn finish(mut self) -> Vec<u8> {
        self.entries = 0;
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.archive
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let name_size = u32::try_from(path.len() + 1).unwrap_or(u32::MAX);
        // inode, mode, user, group, links, time, size, device of the file (2), device (2), name's size, checksum
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
        self.archive.extend_from_slice(b"070701");
        for field in fields {
            self.archive.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.archive.extend_from_slice(path.as_bytes());
        self.archive.push(0);
        self.pad();
        self.archive.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.archive.resize(self.archive.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_a_header_of_110_bytes_then_name_and_content_padded_to_four() {
        let mut initrd = Initrd::default();
        initrd.file("ab", 0o644, b"hello").unwrap();
        let archive = initrd.finish();
        assert!(archive.starts_with(b"07070100000001000081a4"));
        assert_eq!(&archive[54..62], b"00000005");
        assert_eq!(&archive[94..102], b"00000003");
        assert_eq!(&archive[110..121], b"ab\0\0\0\0hello".as_slice().get(..11).unwrap());
        let trailer = 110 + 6 + 8;
        assert_eq!(&archive[trailer..trailer + 6], b"070701");
        assert!(archive[trailer..].windows(10).any(|window| window == b"TRAILER!!!"));
        assert_eq!(archive.len() % 4, 0);
    }
}
