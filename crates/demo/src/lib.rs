//! Built-in guests, and the two processes between which they move: what `limosa-demo` runs.

mod child;
pub mod end;
pub mod error;
mod folder;
pub mod guest;
pub mod live;
pub mod monitor;
pub mod pair;
pub mod protect;
pub mod report;
pub mod settings;
pub mod state;
pub mod trace;
pub mod witness;

pub use error::DemoError;
pub use folder::remove_folders;
pub use settings::Settings;
pub use trace::Trace;
pub use witness::Witness;
