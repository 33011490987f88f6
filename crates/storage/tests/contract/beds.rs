//! The storages that the contract is put to: each file system here, cache mode and back end.

use std::path::Path;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::thread;

use limosa_storage::{Buffer, CacheMode, Create, FileOptions, FileStorage, Io, MemoryStorage, Storage, block_on};
use tempfile::TempDir;

use crate::promises;

/// Empty storages, as many as are asked for.
type Make<'a> = &'a dyn Fn() -> Arc<dyn Storage>;

fn files(folder: &Path, cache: CacheMode, io: Io, check: impl Fn(Make<'_>)) {
    let folder = TempDir::new_in(folder).unwrap();
    let count = std::cell::Cell::new(0);
    check(&|| {
        count.set(count.get() + 1);
        let options = FileOptions { cache, io, create: Create::New, ..FileOptions::default() };
        FileStorage::open(folder.path().join(format!("{}.img", count.get())), &options).unwrap()
    });
}

/// Keeps a ring that has registered the memory of buffers: other rings take it over then, after a few requests.
fn keep_a_ring_that_knows_buffers() {
    static KEPT: OnceLock<()> = OnceLock::new();
    KEPT.get_or_init(|| {
        let (report, done) = channel();
        thread::spawn(move || {
            tmpfs(CacheMode::Writeback, Io::Uring)(|make| {
                let storage = make();
                (0..5000).for_each(|_| block_on(storage.read(0, Buffer::zeroed(512).into())).unwrap());
            });
            report.send(()).unwrap();
            // With the process.
            loop {
                thread::park();
            }
        });
        done.recv().unwrap();
    });
}

/// A file that has been read so often that rings know it, and buffers' memory.
fn read_often(cache: CacheMode) -> impl Fn(fn(Make<'_>)) {
    move |check| {
        keep_a_ring_that_knows_buffers();
        files(&std::env::temp_dir(), cache, Io::Uring, |make| {
            check(&|| {
                let storage = make();
                for _ in 0..100 {
                    block_on(storage.read(0, Buffer::zeroed(4096).into())).unwrap();
                }
                storage
            });
        });
    }
}

/// A module for each storage, in it a test for each promise.
macro_rules! beds {
    ($($bed:ident: $run:expr;)*) => {
        $(mod $bed {
            use super::*;
            beds!(@promises $run =>
                what_is_written_is_read_and_the_rest_is_zeros,
                what_is_behind_the_end_is_zeros_and_writing_there_lengthens,
                parts_of_blocks_leave_their_neighbours_alone,
                a_vector_is_scattered_and_gathered_however_many_its_parts,
                empty_requests_change_nothing,
                zeroes_are_read_where_they_were_asked_for_and_nowhere_else,
                a_discard_leaves_zeros_or_what_was_there,
                the_length_is_as_it_was_set,
                space_is_there_and_what_was_in_it_stays,
                extents_cover_what_was_asked_and_promise_only_zeros,
                many_requests_at_once_leave_each_byte_one_or_the_other,
                dropped_requests_complete,
                a_request_may_be_polled_by_whoever_has_a_waker,
                a_request_may_be_begun_on_one_thread_and_finished_on_another,
                several_threads_have_requests_under_way,
                offsets_that_no_file_has_are_errors_or_zeros,
                random_requests_are_as_in_memory,
            );
        })*
    };
    (@promises $run:expr => $($promise:ident,)*) => {
        $(#[test]
        fn $promise() {
            $run(promises::$promise);
        })*
    };
}

fn memory(check: impl Fn(Make<'_>)) {
    check(&|| Arc::new(MemoryStorage::growing_to(1 << 30)));
}

fn disk(cache: CacheMode, io: Io) -> impl Fn(fn(Make<'_>)) {
    move |check| files(&std::env::temp_dir(), cache, io, check)
}

/// A filesystem that has fewer ways to make zeros, and needs no alignment.
fn tmpfs(cache: CacheMode, io: Io) -> impl Fn(fn(Make<'_>)) {
    move |check| files(Path::new("/dev/shm"), cache, io, check)
}

beds! {
    in_memory: memory;
    writeback_by_threads: disk(CacheMode::Writeback, Io::Threads);
    writethrough_by_threads: disk(CacheMode::Writethrough, Io::Threads);
    unsafe_by_threads: disk(CacheMode::Unsafe, Io::Threads);
    writeback_by_uring: disk(CacheMode::Writeback, Io::Uring);
    writeback_by_whatever_is_best: disk(CacheMode::Writeback, Io::Auto);
    writethrough_by_uring: disk(CacheMode::Writethrough, Io::Uring);
    none_by_uring: disk(CacheMode::None, Io::Uring);
    none_by_threads: disk(CacheMode::None, Io::Threads);
    directsync_by_uring: disk(CacheMode::Directsync, Io::Uring);
    directsync_by_threads: disk(CacheMode::Directsync, Io::Threads);
    read_often_by_uring: read_often(CacheMode::Writeback);
    read_often_without_cache_by_uring: read_often(CacheMode::None);
    tmpfs_without_cache_by_uring: tmpfs(CacheMode::None, Io::Uring);
    tmpfs_by_uring: tmpfs(CacheMode::Writeback, Io::Uring);
    tmpfs_by_threads: tmpfs(CacheMode::Writeback, Io::Threads);
}
