//! Pieces of files, sent past user space.

use std::fs::File;
use std::io::{ErrorKind, IoSlice, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Options, Shutdown};

/// A file of this process that holds a pattern, and the pattern.
fn patterned(length: usize) -> (File, Vec<u8>) {
    let bytes: Vec<u8> = (0..length).map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[2]).collect();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    (file, bytes)
}

fn small(buffer: usize, near: impl Into<OwnedFd>, far: impl Into<OwnedFd>) -> (Channel, Channel) {
    let options = Options { send_buffer: Some(buffer), receive_buffer: Some(buffer), ..Options::default() };
    let channel = |fd: OwnedFd| Channel::from_fd_with(fd, &options).unwrap();
    (channel(near.into()), channel(far.into()))
}

/// Over TCP and a unix socket.
fn small_sockets() -> [(Channel, Channel); 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (a, b) = UnixStream::pair().unwrap();
    // Below a segment, which is 64 KiB here, TCP sends by its timer.
    [small(128 << 10, near, listener.accept().unwrap().0), small(4096, a, b)]
}

/// These, and a pipe.
fn small_ends() -> [(Channel, Channel); 3] {
    let (reader, writer) = std::io::pipe().unwrap();
    let [tcp, unix] = small_sockets();
    [tcp, unix, small(4096, writer, reader)]
}

#[test]
fn a_piece_of_a_file_goes_through_sockets_and_pipes_as_it_is() {
    let (file, bytes) = patterned(3_000_000);
    for (writer, reader) in small_ends() {
        for (offset, length) in [(0, 3_000_000), (4096, 8192), (1, 100_001), (2_999_999, 1), (17, 0)] {
            let mut received = vec![0; length];
            thread::scope(|scope| {
                scope.spawn(|| writer.send_file(&file, offset as u64, length as u64).unwrap());
                reader.read_exact(&mut received).unwrap();
            });
            assert!(received == bytes[offset..offset + length], "{length} bytes at {offset}");
        }
        assert_eq!(writer.counters().bytes_out, reader.counters().bytes_in);
    }
}

#[test]
fn a_file_that_is_too_short_or_that_the_kernel_cannot_send_is_an_error_that_says_so() {
    let (file, _) = patterned(10_000);
    for (writer, reader) in small_ends() {
        thread::scope(|scope| {
            scope.spawn(|| reader.read_exact(&mut [0; 9_000]).unwrap());
            let error = writer.send_file(&file, 1_000, 9_001).unwrap_err();
            assert_eq!(error.io_kind(), Some(ErrorKind::UnexpectedEof), "{error}");
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains("ends at byte 10000, 1 bytes too early"), "{cause}");
        });
        let folder = File::open("/").unwrap();
        let error = writer.send_file(&folder, 0, 100).unwrap_err();
        assert!(matches!(error, ChannelError::Unsupported { .. }), "{error:?}");
        drop(reader);
        // Over TCP it is the answer to the first bytes that says so.
        let error = loop {
            if let Err(error) = writer.send_file(&file, 0, 100) {
                break error;
            }
        };
        assert!(error.is_closed(), "{error:?}");
    }
}

#[test]
fn a_peer_that_takes_nothing_and_a_shutdown_end_the_sending_of_a_file() {
    let (file, _) = patterned(3_000_000);
    for (writer, _reader) in small_ends() {
        writer.set_timeouts(None, Some(Duration::from_millis(50))).unwrap();
        let error = writer.send_file(&file, 0, 3_000_000).unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        writer.set_timeouts(None, None).unwrap();
        thread::scope(|scope| {
            let sending = scope.spawn(|| writer.send_file(&file, 0, 3_000_000));
            writer.shutdown(Shutdown::Both).unwrap();
            assert!(sending.join().unwrap().unwrap_err().is_shut_down());
        });
    }
}

#[test]
fn a_peer_that_has_closed_its_half_still_gets_a_file_and_what_is_written() {
    let (file, bytes) = patterned(1_000_000);
    for (writer, reader) in small_sockets() {
        reader.shutdown(Shutdown::Write).unwrap();
        let mut received = vec![0; 2 * bytes.len()];
        thread::scope(|scope| {
            scope.spawn(|| {
                writer.send_file(&file, 0, bytes.len() as u64).unwrap();
                writer.write_all_vectored(&bytes.chunks(5000).map(IoSlice::new).collect::<Vec<_>>()).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
            });
            reader.read_exact(&mut received).unwrap();
            assert_eq!(reader.read(&mut [0]).unwrap(), 0);
        });
        assert!(received == bytes.repeat(2), "the bytes differ");
        assert_eq!(writer.read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn a_peer_that_reads_no_more_is_gone_for_a_file_and_for_what_is_written() {
    let (file, bytes) = patterned(1_000_000);
    let [_, (writer, reader)] = small_sockets();
    reader.shutdown(Shutdown::Read).unwrap();
    let errors = [
        writer.send_file(&file, 0, bytes.len() as u64).unwrap_err(),
        writer.write_all_vectored(&[IoSlice::new(&bytes)]).unwrap_err(),
    ];
    assert!(errors.iter().all(ChannelError::is_closed), "{errors:?}");
}
