//! Descriptors passed with the bytes of a channel: the receiver that asked for them has them, no other has, and none is
//! left open.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use limosa_channel::{Channel, ChannelError};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_getfd};

fn pair() -> (Channel, Channel) {
    let (near, far) = Channel::pair().unwrap();
    (near, Channel::from_fd(far).unwrap())
}

/// The name of this test's files: tests may run at the same time in one process.
fn name() -> String {
    format!("passed-{:?}-", std::thread::current().id())
}

/// A file that holds its number.
fn file(number: u8) -> File {
    let mut file = File::from(memfd_create(name(), MemfdFlags::CLOEXEC).unwrap());
    file.write_all(&[number]).unwrap();
    file
}

fn number_in(fd: OwnedFd) -> u8 {
    assert!(fcntl_getfd(&fd).unwrap().contains(FdFlags::CLOEXEC));
    let mut file = File::from(fd);
    file.rewind().unwrap();
    let mut byte = [0];
    file.read_exact(&mut byte).unwrap();
    byte[0]
}

fn numbers(channel: &Channel) -> Vec<u8> {
    channel.take_descriptors().into_iter().map(number_in).collect()
}

fn borrowed(files: &[File]) -> Vec<BorrowedFd<'_>> {
    files.iter().map(AsFd::as_fd).collect()
}

/// Open files of this process that were made by [`file`].
fn open_files() -> usize {
    let name = name();
    let links =
        std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    links.filter(|target| target.to_string_lossy().contains(&name)).count()
}

#[test]
fn descriptors_come_with_their_bytes_in_order() {
    let (source, destination) = pair();
    destination.allow_descriptors(5);
    let files = [file(1), file(2), file(3)];
    let sent = vec![7; 3 << 20];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            source.write_all(&sent[..1000]).unwrap();
            source.write_all_with_descriptors(&sent[1000..2 << 20], &borrowed(&files)).unwrap();
            source.write_all_with_descriptors(&sent[2 << 20..], &borrowed(&files[..1])).unwrap();
        });
        let mut bytes = vec![0; sent.len()];
        let (before, behind) = bytes.split_at_mut(999);
        destination.read_exact(before).unwrap();
        assert_eq!(numbers(&destination), [0; 0], "they have not come yet");
        destination.read_exact(behind).unwrap();
        assert!(bytes == sent);
    });
    assert_eq!(numbers(&destination), [1, 2, 3, 1]);
    assert_eq!(numbers(&destination), [0; 0]);
    assert_eq!(destination.counters().bytes_in, 3 << 20);
}

#[test]
fn as_many_as_can_be_are_passed_at_once_and_not_one_more() {
    let (source, destination) = pair();
    destination.allow_descriptors(usize::MAX);
    let one = file(9);
    let most = vec![one.as_fd(); 253];
    source.write_all_with_descriptors(b"x", &most).unwrap();
    assert_eq!(destination.read(&mut [0; 10]).unwrap(), 1);
    assert_eq!(numbers(&destination), vec![9; 253]);
    let refused = source.write_all_with_descriptors(b"x", &vec![one.as_fd(); 254]);
    assert!(matches!(refused, Err(ChannelError::Unsupported { .. })));
    assert!(matches!(source.write_all_with_descriptors(b"", &most), Err(ChannelError::Unsupported { .. })));
}

#[test]
fn descriptors_that_were_not_asked_for_are_closed() {
    let (source, destination) = pair();
    let files = [file(1), file(2)];
    let before = open_files();
    for _ in 0..100 {
        source.write_all_with_descriptors(b"bytes", &borrowed(&files)).unwrap();
        let mut bytes = [0; 5];
        destination.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"bytes");
    }
    assert_eq!(open_files(), before);
    assert!(destination.take_descriptors().is_empty());
    destination.allow_descriptors(3);
    destination.allow_descriptors(0);
    source.write_all_with_descriptors(b"bytes", &borrowed(&files)).unwrap();
    destination.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(open_files(), before);
}

#[test]
fn more_descriptors_than_were_asked_for_are_the_peers_error_and_closed() {
    for (asked, passed) in [(1, 2), (2, 3), (2, 4), (3, 250)] {
        let (source, destination) = pair();
        let one = file(1);
        let before = open_files();
        destination.allow_descriptors(asked);
        source.write_all_with_descriptors(b"bytes", &vec![one.as_fd(); passed]).unwrap();
        let error = destination.read_exact(&mut [0; 5]).unwrap_err();
        let text = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
        assert!(format!("{error} {text}").contains(&format!("more than {asked} descriptors")), "{error} {text}");
        drop(destination);
        assert_eq!(open_files(), before, "{passed} for {asked}");
    }
}

#[test]
fn descriptors_that_were_not_taken_are_closed_with_the_channel() {
    let (source, destination) = pair();
    let one = file(1);
    let before = open_files();
    destination.allow_descriptors(10);
    source.write_all_with_descriptors(b"bytes", &[one.as_fd(); 4]).unwrap();
    destination.read_exact(&mut [0; 5]).unwrap();
    assert_eq!(open_files(), before + 4);
    let clone = destination.try_clone().unwrap();
    drop(destination);
    assert_eq!(open_files(), before + 4, "a clone has them");
    drop(clone);
    assert_eq!(open_files(), before);
}

#[test]
fn only_unix_sockets_pass_descriptors() {
    let listener = limosa_channel::Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &Default::default()).unwrap();
    let tcp = Channel::connect(listener.local_uri(), &Default::default()).unwrap();
    let (read, write) = std::io::pipe().unwrap();
    let pipe = Channel::from_fd(write.into()).unwrap();
    let one = file(1);
    for channel in [tcp, pipe] {
        assert!(!channel.passes_descriptors());
        let error = channel.write_all_with_descriptors(b"bytes", &[one.as_fd()]).unwrap_err();
        assert!(matches!(error, ChannelError::Unsupported { .. }), "{error}");
        assert_eq!(channel.counters().bytes_out, 0);
    }
    drop(read);
    assert!(pair().0.passes_descriptors());
}
