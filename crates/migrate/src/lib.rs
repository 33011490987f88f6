//! Migration engines: source and destination roles over any place that pages come from or go to.
//!
//! An engine speaks QEMU's migration stream over a [`Channel`](limosa_channel::Channel) and moves pages between it and a
//! [`PageSource`] or a [`PageSink`]. It is written once: whether pages live in a stored file or in a guest's memory is the
//! trait's affair, and so is where they end up. Engines block in vectored system calls, a thread for each channel; they
//! are watched through [`Progress`] and reached into through [`Control`].
//!
//! | role | starts the guest | module |
//! |---|---|---|
//! | destination, precopy | when all has arrived and is acknowledged | [`destination`] |
//! | source, precopy | when all has been sent | [`source::precopy`] |
//! | source, postcopy | at once; pages follow, requested ones first | [`source::postcopy`] |

pub mod control;
pub mod control_socket;
pub mod destination;
pub mod error;
pub mod pages;
pub mod progress;
pub mod source;

pub use control::{Control, Stop};
pub use control_socket::{ControlSocket, Job};
pub use destination::{Destination, DestinationOptions, DestinationStats, Incoming};
pub use error::MigrateError;
pub use pages::{PageError, PageSink, PageSource, StreamStart};
pub use progress::{Phase, Progress, ProgressReading};
pub use source::postcopy::{Milestone, PostcopyOptions, PostcopySource, PostcopyStats};
pub use source::precopy::{PrecopyOptions, PrecopySource, PrecopyStats};
