//! Memory shared by both ends of a migration on one host: passed as descriptors, not as pages.

use std::fs::File;
use std::io::{self, Seek as _, SeekFrom};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{FileType, SealFlags, fcntl_add_seals, fstat};

use crate::block::{BlockOptions, MemoryBlock};
use crate::error::MemoryError;

impl MemoryBlock {
    /// Whether the memory can be passed by the descriptor of its file.
    pub fn is_passable(&self) -> bool {
        self.is_shared() && self.file().is_some()
    }

    /// Returns a descriptor of its memory if the memory is passable, otherwise one of /dev/null.
    ///
    /// # Errors
    /// [`MemoryError::Kernel`]: the file cannot be reopened (no /proc, or its permissions changed).
    pub fn descriptor_to_pass(&self) -> Result<OwnedFd, MemoryError> {
        let kernel = |operation, source| MemoryError::Kernel { block: self.name().to_owned(), operation, source };
        let open = |path: &str| File::options().read(true).write(true).open(path);
        match self.file().filter(|_| self.is_passable()) {
            Some((file, offset)) => {
                let path = format!("/proc/self/fd/{}", file.as_raw_fd());
                let mut file = open(&path).map_err(|e| kernel("opening its file again to pass it", e))?;
                file.seek(SeekFrom::Start(offset)).map_err(|e| kernel("lseek", e))?;
                Ok(file.into())
            }
            None => Ok(open("/dev/null").map_err(|e| kernel("opening /dev/null", e))?.into()),
        }
    }
}

/// The memory of a block that another process passed.
///
/// A block that is shared and has a file is *passable*: a process with the file's descriptor has the memory. The file
/// offset of the passed descriptor is the start of the block in the file, so only the descriptor is sent. (The file is
/// reopened for that: duplicates of one descriptor share their offset.) A descriptor of /dev/null stands for a block
/// that is not passed, so that the list is as long as the list of blocks in the stream.
///
/// Touching memory past the end of its file raises SIGBUS. So both the creator and the receiver seal a memfd against
/// truncation; for other files the receiver trusts the sender.
#[derive(Debug)]
pub struct PassedBlock {
    name: String,
    length: u64,
    file: File,
    offset: u64,
}

impl PassedBlock {
    /// Converts the descriptor passed for the block with this name and length; `None`: the block was not passed.
    ///
    /// # Errors
    /// [`MemoryError::Layout`]: it is no memory, or shorter than the block.
    pub fn from_fd(name: &str, length: u64, fd: OwnedFd) -> Result<Option<Self>, MemoryError> {
        let layout = |why: String| MemoryError::Layout { block: name.to_owned(), why };
        let kernel = |operation, source: io::Error| MemoryError::Kernel { block: name.to_owned(), operation, source };
        let stat = fstat(&fd).map_err(|e| kernel("fstat", e.into()))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {}
            FileType::CharacterDevice => return Ok(None),
            other => return Err(layout(format!("what was passed for it is no file ({other:?})"))),
        }
        // Succeeds only for a memfd that may be sealed; it may be sealed already.
        let _ = fcntl_add_seals(&fd, SealFlags::SHRINK);
        let stat = fstat(&fd).map_err(|e| kernel("fstat", e.into()))?;
        let mut file = File::from(fd);
        let offset = file.stream_position().map_err(|e| kernel("lseek", e))?;
        let size = stat.st_size.cast_unsigned();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(layout(format!(
                "the file that was passed for it has {size} bytes, {length} at {offset} are wanted"
            )));
        }
        Ok(Some(Self { name: name.to_owned(), length, file, offset }))
    }

    /// Returns the block's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Always false: a block has at least one page.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the options to map it, shared with the sender.
    pub fn into_options(self) -> BlockOptions {
        BlockOptions::file(self.name, self.length, self.file.into(), self.offset)
    }
}

#[cfg(test)]
mod tests {
    use limosa_page::PAGE_SIZE;

    use super::*;

    #[test]
    fn a_passed_block_is_the_same_memory_wherever_in_its_file_it_lies() {
        let file = BlockOptions::memfd("x", 64 * PAGE_SIZE).map().unwrap();
        let file = file.file().unwrap().0.try_clone_to_owned().unwrap();
        let block = BlockOptions::file("pc.ram", 8 * PAGE_SIZE, file, 16 * PAGE_SIZE).map().unwrap();
        block.write(5, b"contents").unwrap();
        let passed = PassedBlock::from_fd("pc.ram", block.len(), block.descriptor_to_pass().unwrap()).unwrap().unwrap();
        let other = passed.into_options().map().unwrap();
        let mut bytes = [0; 8];
        other.read(5, &mut bytes).unwrap();
        assert_eq!(&bytes, b"contents");
        assert_eq!(other.file().unwrap().1, 16 * PAGE_SIZE);
        // Asking for holes moves the offset of one descriptor and not of the other.
        assert_eq!(block.populated(block.pages()).unwrap().count(), 1);
        assert_eq!(other.populated(other.pages()).unwrap().count(), 1);
    }

    #[test]
    fn the_giver_cannot_shorten_what_was_taken() {
        let memfd = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&memfd, 4 * PAGE_SIZE).unwrap();
        let given = memfd.try_clone().unwrap();
        PassedBlock::from_fd("ram", 4 * PAGE_SIZE, given).unwrap().unwrap();
        assert!(rustix::fs::ftruncate(&memfd, PAGE_SIZE).is_err());
        let own = BlockOptions::memfd("ram", 4 * PAGE_SIZE).map().unwrap();
        assert!(rustix::fs::ftruncate(own.file().unwrap().0, PAGE_SIZE).is_err());
    }

    #[test]
    fn private_memory_is_not_passed_and_what_is_no_memory_is_refused() {
        let private = BlockOptions::anonymous("ram", 4 * PAGE_SIZE).map().unwrap();
        assert!(!private.is_passable());
        assert!(PassedBlock::from_fd("ram", private.len(), private.descriptor_to_pass().unwrap()).unwrap().is_none());
        let shared = BlockOptions::memfd("ram", 4 * PAGE_SIZE).map().unwrap();
        let short =
            PassedBlock::from_fd("ram", 5 * PAGE_SIZE, shared.descriptor_to_pass().unwrap()).unwrap_err().to_string();
        assert!(short.contains("has 16384 bytes, 20480 at 0 are wanted"), "{short}");
        let (pipe, _writer) = io::pipe().unwrap();
        let pipe = PassedBlock::from_fd("ram", 4096, pipe.into()).unwrap_err().to_string();
        assert!(pipe.contains("no file"), "{pipe}");
        let folder = File::open("/").unwrap();
        assert!(PassedBlock::from_fd("ram", 4096, folder.into()).is_err());
    }
}
