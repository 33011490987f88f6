//! Epochs of a disk: after any failure image and log together are as of a kept epoch.

mod bed;
mod cuts;
mod keeper;
