//! A migration under way, as every phase needs it.

use super::link::{Link, Terms};
use super::owned::Owned;
use super::reports::Reports;
use crate::live::LiveVm;

/// A migration under way whose VM this side has.
pub(super) struct Attempt<'r, 'e, 'v, V: LiveVm + ?Sized> {
    pub(super) link: &'e Link<'e, 'v>,
    pub(super) terms: &'e Terms<'e>,
    pub(super) vm: &'r mut Owned<'v, V>,
    pub(super) reports: &'r mut Reports<'e>,
}
