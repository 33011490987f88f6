//! Continuous checkpoints of a VM: two snapshot files in one directory, one of them always whole.
//!
//! `checkpoint.limosa` is the newest whole checkpoint. It is an ordinary snapshot file, which stock QEMU loads too, and
//! nothing is written to it while it has that name. Beside it is a spare with the same pages, which receives the next
//! checkpoint. A checkpoint counts from the moment when the two names are exchanged.
//!
//! ```text
//!                         put_pages, put_zero
//!                              ┌─────┐
//!   receive_base   finish      │     ▼     commit
//!  ────────────▶ ─────────▶ ┌─────────────┐ ────▶ ┌────────┐
//!                    │      │  receiving  │ abort │ behind │
//!                    │      └─────────────┘ ────▶ └────────┘
//!                    │              ▲   catch_up   │   ▲
//!                    │              └──────────────┘   │
//!                    └─────────────────────────────────┘
//! ```
//!
//! 1. [`CheckpointDirectory::open`] takes the directory: one process at a time. What a killed one has left is removed,
//!    but for `checkpoint.limosa`.
//! 2. [`CheckpointDirectory::receive_base`] gives the sink of the base, [`CheckpointBase::finish`] publishes it: it is
//!    checkpoint 0.
//! 3. [`CheckpointPair::catch_up`] makes the spare equal to it, in pieces as large as the caller likes. Nothing can be
//!    received before.
//! 4. The pair is the [`PageSink`](limosa_migrate::stored::PageSink) of the pages of the next checkpoint. They go to
//!    their places in the spare; those that are equal already are left out and counted.
//! 5. [`CheckpointPair::commit`] gets the device state, seals the spare and exchanges the names. If the checkpoint was
//!    cut off it is [`CheckpointPair::abort`] instead. After both, whether they fail or not, 3 is next: the pages that
//!    the two files do not have in common are copied from `checkpoint.limosa`.
//!
//! So the time during which a VM stands still is that of 4: sealing, exchanging and catching up can be done while it
//! runs.
//!
//! Readers lock the file that they open ([`Snapshot::lock_serving`](crate::Snapshot::lock_serving),
//! [`mapping_descriptor`](crate::Snapshot::mapping_descriptor)). A file that is locked when it becomes the spare is
//! left to its readers, and a new spare is made. A reader that takes no lock, like stock QEMU, may only read when no
//! more checkpoints are made.
//!
//! # Example
//!
//! ```
//! use std::io::IoSlice;
//! use limosa_migrate::stored::{PageSink, PageSource, StreamSetup};
//! use limosa_page::{PageNumber, PageRange};
//! use limosa_snapshot::{CheckpointDirectory, CheckpointOptions, Manifest, Snapshot};
//! # use limosa_stream::{Configuration, RamBlock};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! # let directory = tempfile::tempdir()?;
//! # let start = StreamSetup {
//! #     configuration: Configuration::new("pc-q35-11.1"),
//! #     section_id: 2,
//! #     blocks: vec![RamBlock::new("pc.ram", 2 * 4096)],
//! # };
//! # let mut devices = b"\x04\0\0\0\x03\x05timer\0\0\0\0\0\0\0\x01".to_vec();
//! # devices.extend_from_slice(b"12345678\x7e\0\0\0\x03\0");
//! # let json = br#"{"devices":[{"name":"timer","instance_id":0,"fields":[{"name":"t","type":"b","size":8}]}]}"#;
//! # let mut description = b"\x06\0\0\0".to_vec();
//! # description.push(u8::try_from(json.len())?);
//! # description.extend_from_slice(json);
//! let mut base = CheckpointDirectory::open(directory.path())?.receive_base(CheckpointOptions::default())?;
//! base.begin(&start)?;
//! base.put_pages(0, PageNumber(1), &[IoSlice::new(&[0x5a; 4096])])?;
//! let mut pair = base.finish(&[&devices[..], &description].concat(), Manifest::new())?;
//! while pair.catch_up(1024)? > 0 {}
//!
//! pair.put_pages(0, PageNumber(1), &[IoSlice::new(&[0x5a; 4096])])?; // Not changed, so not written.
//! pair.put_pages(0, PageNumber(0), &[IoSlice::new(&[0x5b; 4096])])?;
//! let checkpoint = pair.commit(&devices)?;
//! assert_eq!((checkpoint.number, checkpoint.pages.contents, checkpoint.pages.equal), (1, 2, 1));
//!
//! let mut page = [0; 4096];
//! Snapshot::open(&directory.path().join("checkpoint.limosa"))?.read(0, PageRange::whole_block(1), &mut page)?;
//! assert_eq!(page, [0x5b; 4096]);
//! # Ok(()) }
//! ```

mod base;
mod changes;
mod description;
mod directory;
mod pair;
mod spare;

pub use base::CheckpointBase;
pub use directory::{CHECKPOINT_NAME, CheckpointDirectory};
pub use pair::{Checkpoint, CheckpointOptions, CheckpointPages, CheckpointPair};
