//! Files: vectored transfers at offsets.

use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::{MetadataExt, symlink};
use std::thread;

use limosa_channel::{Access, ChannelError, FileChannel, Uri};
use proptest::prelude::*;

fn scratch(base: u64) -> FileChannel {
    FileChannel::from_file(tempfile::tempfile().unwrap(), base)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_list_is_read_back_in_any_shape(
        write in prop::collection::vec(prop_oneof![Just(0_usize), 1..5000_usize], 0..1500),
        read in prop::collection::vec(prop_oneof![Just(0_usize), 1..5000_usize], 0..1500),
        base in 0..1_u64 << 40,
        offset in 0..1_u64 << 40,
    ) {
        let total = write.iter().sum::<usize>().min(read.iter().sum());
        let data: Vec<u8> = (0..total).map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[2]).collect();
        let mut received = vec![0; total];
        let file = scratch(base);
        let mut rest = data.as_slice();
        let list: Vec<_> =
            write.iter().map(|&n| IoSlice::new(rest.split_off(..n.min(rest.len())).unwrap())).collect();
        file.write_all_vectored_at(&list, offset).unwrap();
        let mut rest = received.as_mut_slice();
        let mut list: Vec<_> = read
            .iter()
            .map(|&n| {
                let n = n.min(rest.len());
                IoSliceMut::new(rest.split_off_mut(..n).unwrap())
            })
            .collect();
        file.read_exact_vectored_at(&mut list, offset).unwrap();
        prop_assert!(received == data);
        let length = if total == 0 { 0 } else { base + offset + total as u64 };
        prop_assert_eq!(file.file().metadata().unwrap().len(), length);
        prop_assert_eq!((file.counters().bytes_out, file.counters().bytes_in), (total as u64, total as u64));
    }
}

#[test]
fn a_file_that_is_too_short_says_where_it_ends() {
    let file = scratch(100);
    file.write_all_at(b"0123456789", 0).unwrap();
    let error =
        file.read_exact_vectored_at(&mut [IoSliceMut::new(&mut [0; 6]), IoSliceMut::new(&mut [0; 6])], 4).unwrap_err();
    assert!(matches!(error, ChannelError::Closed { offset: 110, got: 6, wanted: 12, .. }), "{error:?}");
}

#[test]
fn offsets_beyond_what_the_kernel_takes_are_errors() {
    let page = [1; 4096];
    for (base, offset) in [(u64::MAX, 1), (0, u64::MAX), (1, i64::MAX as u64), (0, i64::MAX as u64 - 10)] {
        let file = scratch(base);
        file.write_all_at(&page, offset).unwrap_err();
        file.read_exact_at(&mut [0; 10], offset).unwrap_err();
    }
}

#[test]
fn a_file_is_made_private_and_never_truncated() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let uri: Uri = format!("file:{},offset=0x10", path.display()).parse().unwrap();
    assert_eq!(FileChannel::open(&uri, Access::Read).unwrap_err().io_kind(), Some(std::io::ErrorKind::NotFound));
    assert!(!path.exists());
    let file = FileChannel::open(&uri, Access::ReadWrite).unwrap();
    file.write_all_at(b"abc", 1).unwrap();
    drop(file);
    assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    let file = FileChannel::open(&uri, Access::ReadWrite).unwrap();
    let mut word = [0; 4];
    file.read_exact_at(&mut word, 0).unwrap();
    assert_eq!((&word, file.base(), file.peer()), (b"\0abc", 16, uri.to_string().as_str()));
    let file = FileChannel::open(&uri, Access::Read).unwrap();
    let error = file.write_all_at(b"x", 0).unwrap_err();
    assert!(matches!(error, ChannelError::Io { offset: Some(16), .. }), "{error:?}");
}

#[test]
fn what_has_no_offsets_is_refused_without_waiting_for_it() {
    let directory = tempfile::tempdir().unwrap();
    let pipe = directory.path().join("pipe");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, mode).unwrap();
    let link = directory.path().join("link");
    symlink("/dev/null", &link).unwrap();
    for path in [pipe, link, directory.path().to_owned()] {
        let error = FileChannel::open(&Uri::File { path, offset: 0 }, Access::Read).unwrap_err();
        assert!(matches!(error, ChannelError::Unsupported { .. }), "{error:?}");
    }
    let socket: Uri = "unix:x".parse().unwrap();
    assert!(FileChannel::open(&socket, Access::Read).unwrap_err().to_string().contains("expected a file"));
}

#[test]
fn threads_share_a_file_without_a_position() {
    let file = scratch(0);
    thread::scope(|scope| {
        for part in 0..4_u8 {
            let file = &file;
            scope.spawn(move || {
                for index in 0..64_u64 {
                    let offset = (index * 4 + u64::from(part)) * 512;
                    file.write_all_at(&[part; 512], offset).unwrap();
                    let mut back = [9; 512];
                    file.read_exact_at(&mut back, offset).unwrap();
                    assert_eq!(back, [part; 512]);
                }
            });
        }
    });
    assert_eq!(file.counters().calls_out, 256);
}
