//! Any bytes as an image that comes through a pipe: what is converted is what the image has in a file.

#![no_main]

use std::io::{Cursor, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use libfuzzer_sys::fuzz_target;
use limosa_fuzz::image::{MOST, open};
use limosa_image::chain::OpenOptions;
use limosa_image::convert::{ConvertRequest, ConvertTarget, InputStream, NewTarget, OutputStream, Streams};
use limosa_image::qcow2::Header;
use limosa_image::raw::CreateOptions;
use limosa_image::{Disk, Format, GuestOffset, NewImage, NewImageFormat, UnfinishedFiles};
use limosa_storage::{Buffer, CacheMode, Io, MemoryStorage, block_on};

/// A pipe into memory.
#[derive(Debug, Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no thread panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|data: &[u8]| {
    let storage = MemoryStorage::with_contents(data.to_vec(), MOST.max(data.len() as u64));
    // Each byte of the disk is written.
    if block_on(Header::read(&storage)).is_ok_and(|header| header.size > MOST) {
        return;
    }
    let written = Written::default();
    let streams = Streams::new(
        Some(InputStream::new("input", Some(Format::Qcow2), Cursor::new(data.to_vec()))),
        Some(OutputStream::new("output", written.clone())),
    );
    let raw =
        NewImage::new(PathBuf::from("output"), CacheMode::Writeback, NewImageFormat::Raw(CreateOptions::default()));
    let target = ConvertTarget::New(NewTarget::new(raw, Io::CallerThread, OpenOptions::default()));
    let mut request = ConvertRequest::new(Vec::new(), target);
    request.options.max_in_flight = 1;
    let unfinished = UnfinishedFiles::new();
    let Ok(prepared) = block_on(request.prepare_streams(streams, &unfinished)) else { return };
    if prepared.run(&|_| ControlFlow::Continue(())).is_err() {
        return;
    }
    let written = written.0.lock().expect("no thread panics");
    // Only of a file is it known at once which tables, those of refcounts too, are past its end.
    let Some(disk) = open(&storage, true) else { return };
    let length = usize::try_from(disk.len()).expect("at most 4 MiB");
    let found = Buffer::zeroed(length);
    block_on(disk.read(GuestOffset(0), found.clone().into())).expect("what a pipe had is in the file");
    assert!(found.to_vec() == written[..length], "a pipe and a file have the same contents");
    assert!(written[length..].iter().all(|byte| *byte == 0) && written.len() - length < 512);
});
