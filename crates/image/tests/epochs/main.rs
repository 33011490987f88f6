//! Epochs of a disk: image and log together are as of a kept epoch, whatever happens.

mod bed;
mod cuts;
mod keeper;
