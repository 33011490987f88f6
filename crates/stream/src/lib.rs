//! QEMU's migration format without I/O: sections, RAM records, commands, return path, mapped-ram layout.
//!
//! The law of this crate: **bytes in, facts out, and nothing else**. No file, socket or clock is touched here; the
//! caller of a decoder brings the bytes, and the caller of an encoder takes them away. Everything that is decoded comes
//! from outside and is hostile: no panic, no allocation from a length that was not checked, every error names the
//! stream offset, the section and what was expected there.
//!
//! | names | subject |
//! |---|---|
//! | [`Configuration`], [`configuration`] | file header and configuration record |
//! | [`SectionHeader`], [`section`] | section types, headers, footers |
//! | [`RamBlock`], [`RecordEncoder`], [`ram`] | RAM blocks and RAM records, written |
//! | [`Command`] | commands of the main channel |
//! | [`Decoder`] | the main channel, read |
//! | [`StreamWalk`] | a decoder driven over a file, page payloads skipped |
//! | [`multifd`] | packets of the multifd channels |
//! | [`xbzrle`] | deltas between two states of a page |
//! | [`ReturnMessage`], [`ReturnDecoder`] | messages of a destination to its source |
//! | [`mapped_ram`] | layout of a mapped-ram file |
//! | [`Vmdesc`] | the JSON description of the device sections |
//! | [`vmdesc`] | the same in full: fields and subsections by name |
//! | [`devices`] | the device tail: where it ends, which sections it holds |
//! | [`DeviceSections`], [`OpaqueSection`], [`FramedSections`] | device sections of a VMM with formats of its own |
//! | [`GlobalState`] | the section that carries the run state |
//! | [`postcopy`] | commands of a postcopy source before the guest runs |
//! | [`colo`] | messages between the checkpoints of a stream |
//!
//! # Example
//!
//! A stream of one RAM block with one page and one zero page, written and read back.
//!
//! ```
//! use limosa_stream::{ram, section, Configuration, Decoder, Event, RamBlock, RecordEncoder, RecordKind, Step};
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
//!         Step::Need(wanted) => panic!("{}", decoder.truncated_error(stream.len() - at, wanted)),
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

pub mod colo;
mod command;
pub mod configuration;
mod cursor;
mod decoder;
mod device_sections;
pub mod devices;
mod error;
mod framed_sections;
mod global_state;
pub mod mapped_ram;
pub mod multifd;
pub mod postcopy;
pub mod ram;
mod return_path;
pub mod section;
pub mod vmdesc;
mod walk;
pub mod xbzrle;

pub use command::{Command, DISCARD_LIMIT, PageSizes};
pub use configuration::{Configuration, MultifdRules};
pub use decoder::{Decoder, DecoderOptions, Event, Step};
pub use device_sections::{DeviceSections, OpaqueSection};
pub use devices::{CompleteTail, DeviceSection, DeviceTailFinder};
pub use error::{EncodeError, ErrorKind, StreamError, UnsupportedFeature};
pub use framed_sections::{FramedSections, TailStep};
pub use global_state::{
    GLOBAL_STATE_LENGTH, GLOBAL_STATE_SECTION, GlobalState, RUN_STATE_FIELD_LENGTH, replace_run_state,
};
pub use ram::{RamBlock, RecordEncoder, RecordKind};
pub use return_path::{RECEIVED_BITMAP_END, RETURN_MESSAGE_LIMIT, ReturnDecoder, ReturnMessage};
pub use section::{SectionHeader, SectionKind};
pub use vmdesc::{DEVICES_LIMIT, DeviceSize, VMDESC_LIMIT, Vmdesc};
pub use walk::{ReadAt, StreamWalk, WalkError};

/// The example of the README, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
