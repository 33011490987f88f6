//! QEMU's migration format without I/O: sections, RAM records, commands, return path, mapped-ram layout.
//!
//! The law of this crate: **bytes in, facts out, and nothing else**. No file, socket or clock is touched here; whoever
//! drives a decoder brings the bytes, and whoever drives an encoder takes them away. Everything that is decoded comes
//! from outside and is hostile: no panic, no allocation from a length that was not checked, every error names the
//! stream offset, the section and what was expected there.
//!
//! | module | subject |
//! |---|---|
//! | [`configuration`] | file header and configuration record |
//! | [`section`] | section types, headers, footers |
//! | [`ram`] | RAM blocks and RAM records, written |
//! | [`command`] | commands of the main channel |
//! | [`decoder`] | the main channel, read |
//! | [`walk`] | a decoder driven over a file, page payloads skipped |
//! | [`multifd`] | packets of the channels beside the main one |
//! | [`xbzrle`] | deltas between two states of a page |
//! | [`return_path`] | what a destination tells its source |
//! | [`mapped_ram`] | where everything lies in a mapped-ram file |
//! | [`description`] | the JSON description of the device sections |
//! | [`outline`] | the same in full: fields and subsections by name |
//! | [`devices`] | the device tail: where it ends, which sections it holds |
//! | [`global_state`] | the section that carries the run state |
//! | [`vm`] | what a postcopy source says before the guest runs |
//!
//! # Example
//!
//! A stream of one RAM block with one page and one zero page, written and read back.
//!
//! ```
//! use limosa_stream::configuration::Configuration;
//! use limosa_stream::decoder::{Decoder, Event, Step};
//! use limosa_stream::ram::{self, RamBlock, RecordEncoder, RecordKind};
//! use limosa_stream::section;
//!
//! let blocks = [RamBlock::new("pc.ram", 0x2000)];
//! let mut stream = Vec::new();
//! Configuration::new("pc-i440fx-10.0").encode(&mut stream)?;
//! ram::encode_ram_start(2, &blocks, &mut stream)?;
//! section::encode_part(2, &mut stream);
//! let mut records = RecordEncoder::new(&blocks)?;
//! records.append(RecordKind::Page, 0, 0, &mut stream)?;
//! stream.extend_from_slice(&[0x5a; 4096]);
//! records.append(RecordKind::Zero, 0, 0x1000, &mut stream)?;
//! ram::encode_eos(2, &mut stream);
//! section::encode_eof(&mut stream);
//!
//! let mut decoder = Decoder::new();
//! let (mut at, mut pages, mut zeros) = (0, 0, 0);
//! loop {
//!     match decoder.step(&stream[at..])? {
//!         Step::Need(wanted) => panic!("{}", decoder.truncated(stream.len() - at, wanted)),
//!         Step::Event { consumed, event } => {
//!             at += consumed;
//!             match event {
//!                 Event::Page { block: 0, offset: 0 } => {
//!                     at += 4096; // the payload is the caller's
//!                     pages += 1;
//!                 }
//!                 Event::Zero { block: 0, offset: 0x1000 } => zeros += 1,
//!                 Event::EndOfStream => break,
//!                 _ => {}
//!             }
//!         }
//!     }
//! }
//! assert_eq!((pages, zeros, at), (1, 1, stream.len()));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod command;
pub mod configuration;
mod cursor;
pub mod decoder;
pub mod delimited_tail;
pub mod description;
pub mod device_sections;
pub mod devices;
pub mod error;
pub mod global_state;
pub mod mapped_ram;
pub mod multifd;
pub mod outline;
pub mod ram;
pub mod return_path;
pub mod section;
pub mod vm;
pub mod walk;
pub mod xbzrle;

pub use command::Command;
pub use configuration::Configuration;
pub use decoder::{Decoder, Event, Step};
pub use device_sections::DeviceSections;
pub use error::{EncodeError, Fault, Feature, StreamError};
pub use ram::RamBlock;
pub use return_path::{ReturnDecoder, ReturnMessage};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
