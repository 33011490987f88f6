//! The part of a live destination in receiving a stream, which a stored one does not have.

use std::ops::Range;

use limosa_stream::PageSizes;

use crate::error::MigrateError;
use crate::pages::StreamSetup;

/// Called by the engine, on the thread of the main channel.
pub(crate) trait Hooks: Sync {
    /// Accepts or refuses the layout, before any page. `advised`: the page sizes that the source announced, if postcopy
    /// may follow.
    fn begin(&self, start: &StreamSetup, advised: Option<PageSizes>) -> Result<(), MigrateError>;

    /// Whether the VM may run here before all its pages have come.
    fn postcopy(&self) -> bool;

    /// Throws parts of a block away, behind everything that came before.
    fn discard(&self, block: usize, ranges: &[Range<u64>]) -> Result<(), MigrateError>;

    /// Loads device sections that carry their lengths, when every page is in its place. The source is answered behind
    /// it.
    fn load(&self, sections: &[u8]) -> Result<(), MigrateError>;
}
