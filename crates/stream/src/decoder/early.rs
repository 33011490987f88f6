//! The device section that comes before the pages.
//!
//! A virtio-mem device has to know which of its memory is plugged before pages come for it, so QEMU sends that state in
//! the setup of the migration, between the list of RAM blocks and the first page. Nothing in a stream delimits a device
//! section, but this one says itself how long it is. Fact (QEMU 10.0, seen on the wire): be64 address, be64 region
//! size, be64 block size, be32 node, be64 plugged bytes, and a bitmap of one bit a block in be64 words.

use limosa_page::to_usize;

use crate::cursor::{Cursor, Stop};
use crate::error::ErrorKind;
use crate::section::{self, SectionHeader, SectionKind};

/// How the name of the section ends; what is before it is the device's place.
const NAME: &str = "virtio-mem-device-early";
/// The version of it that is known.
const VERSION: u32 = 1;
/// Longest bitmap in bytes: 1 TiB in blocks of 2 MiB.
const BITMAP_LIMIT: u64 = 1 << 16;

/// Whether the device section with this header comes before the pages.
pub(super) fn is_early(header: &SectionHeader) -> bool {
    header.name.ends_with(NAME)
}

/// Takes a whole section, from its type byte to its footer.
pub(super) fn section<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8], Stop> {
    let mut ahead = cursor.fork();
    ahead.u8()?;
    let header = SectionHeader::read(SectionKind::Full, &mut ahead)?;
    if header.version != VERSION {
        return Err(cursor.fail(ErrorKind::expected(format!("version 1 of section {:?}", header.name), header.version)));
    }
    ahead.be64()?;
    let sizes_at = ahead.at();
    let (region, block) = (ahead.be64()?, ahead.be64()?);
    ahead.be32()?;
    ahead.be64()?;
    let Some(blocks) = region.checked_div(block) else {
        let error_kind = ErrorKind::expected(format!("a block size in section {:?}", header.name), "0");
        return Err(Stop::Fail { at: sizes_at + 8, error_kind });
    };
    let bitmap = blocks.div_ceil(64).saturating_mul(8);
    if bitmap > BITMAP_LIMIT {
        let error_kind =
            ErrorKind::TooLarge { what: "bitmap of a virtio-mem device", value: bitmap, limit: BITMAP_LIMIT };
        return Err(Stop::Fail { at: sizes_at, error_kind });
    }
    ahead.take(to_usize(bitmap))?;
    let footer_at = ahead.at();
    if ahead.u8()? != section::FOOTER || ahead.be32()? != header.id {
        let error_kind = ErrorKind::expected(
            format!("the footer of section {:?} (id {})", header.name, header.id),
            "something else",
        );
        return Err(Stop::Fail { at: footer_at, error_kind });
    }
    cursor.take(ahead.at() - cursor.at())
}
