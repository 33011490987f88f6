//! A gather list of own bytes and guest memory: pages go out from where they live.
//!
//! **Law: an entry of the list lives as long as the list.** Own bytes are borrowed as slices, guest memory as the block
//! that it belongs to; no reference to guest memory is made, and none of it is looked at here.
#![allow(unsafe_code, reason = "names guest memory to the kernel")]

use std::marker::PhantomData;

use libc::iovec;
use limosa_channel::{Channel, ChannelError, ZeroCopyWriter};
use limosa_memory::MemoryBlock;
use limosa_page::PageRange;

/// The memory that one call sends.
#[derive(Debug, Default)]
pub(crate) struct Gather<'m> {
    list: Vec<iovec>,
    lent: PhantomData<&'m MemoryBlock>,
}

impl<'m> Gather<'m> {
    /// An empty list in the room that this one had.
    pub(crate) fn emptied<'n>(self) -> Gather<'n> {
        let mut list = self.list;
        list.clear();
        Gather { list, lent: PhantomData }
    }

    /// Adds bytes of this process alone.
    pub(crate) fn bytes(&mut self, bytes: &'m [u8]) {
        if !bytes.is_empty() {
            self.list.push(iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
        }
    }

    /// Adds pages of a block; `false` if it has not all of them.
    pub(crate) fn pages(&mut self, block: &'m MemoryBlock, pages: PageRange) -> bool {
        let place = block.iovec(pages);
        self.list.extend(place);
        place.is_some()
    }

    /// Sends all of it, in order.
    pub(crate) fn put(&self, channel: &Channel) -> Result<(), ChannelError> {
        // SAFETY: every entry names a slice or a part of a mapped block that was borrowed for 'm, which has not ended.
        unsafe { channel.write_all_raw(&self.list) }
    }

    /// As [`put`](Self::put), the pages lent where the channel does that, behind the first `copied` entries, which are
    /// not.
    pub(crate) fn lend(&self, lending: &mut ZeroCopyWriter<'_, '_>, copied: usize) -> Result<(), ChannelError> {
        // SAFETY: as above; of guest memory it is known that it may be read later.
        unsafe { lending.write_pages(&self.list, copied) }
    }
}
