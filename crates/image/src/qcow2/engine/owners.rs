//! The owners of an open image.

use std::sync::Arc;

use super::allocator::Allocator;
use super::cancelled_writes::CancelledWrites;
use super::context::Context;
use super::flusher::Flusher;
use super::guest_data::GuestData;
use super::header_owner::HeaderOwner;
use super::tables::Tables;

/// The owners that requests which change an image work with.
pub(super) struct Owners {
    pub(super) context: Arc<Context>,
    pub(super) header: Arc<HeaderOwner>,
    pub(super) allocator: Arc<Allocator>,
    pub(super) tables: Arc<Tables>,
    pub(super) flusher: Arc<Flusher>,
    pub(super) guest_data: Arc<GuestData>,
    pub(super) cancelled_writes: Arc<CancelledWrites>,
}
