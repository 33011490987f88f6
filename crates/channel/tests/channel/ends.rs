//! How transfers end other than by completion: the data ends, the peer goes or stalls, this side has had enough.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use limosa_channel::{Channel, ChannelError, Operation, Options, Shutdown};

fn socket_pair() -> (Channel, OwnedFd) {
    let (a, b) = UnixStream::pair().unwrap();
    (Channel::from_fd(a.into()).unwrap(), b.into())
}

fn pipe_to_read() -> (Channel, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (Channel::from_fd(reader.into()).unwrap(), writer.into())
}

fn pipe_to_write() -> (Channel, OwnedFd) {
    let (reader, writer) = std::io::pipe().unwrap();
    (Channel::from_fd(writer.into()).unwrap(), reader.into())
}

#[test]
fn an_end_inside_what_was_expected_says_how_much_came() {
    for (reader, far) in [socket_pair(), pipe_to_read()] {
        let writer = Channel::from_fd(far).unwrap();
        writer.write_all(b"0123456789").unwrap();
        drop(writer);
        reader.read_exact(&mut [0; 4]).unwrap();
        let error = reader.read_exact(&mut [0; 100]).unwrap_err();
        assert!(error.is_closed());
        assert!(error.to_string().ends_with("the data ended at byte 10, after 6 of 100 expected bytes"), "{error}");
        match error {
            ChannelError::Closed { operation: Operation::Read, offset: 10, got: 6, wanted: 100, .. } => {}
            other => panic!("{other:?}"),
        }
        assert_eq!(reader.read(&mut [0; 4]).unwrap(), 0);
    }
}

#[test]
fn a_closed_peer_is_distinguished_from_other_errors() {
    for (writer, far) in [socket_pair(), pipe_to_write()] {
        drop(far);
        let error = writer.write_all(b"anyone?").unwrap_err();
        assert!(matches!(error, ChannelError::Broken { operation: Operation::Write, offset: 0, .. }), "{error:?}");
        assert!(error.is_closed() && !error.is_shut_down() && !error.is_timeout());
    }
}

#[test]
fn a_peer_that_goes_wakes_a_blocked_write() {
    for (writer, far) in [socket_pair(), pipe_to_write()] {
        thread::scope(|scope| {
            let write = scope.spawn(|| writer.write_all(&vec![0; 8 << 20]));
            // Not before the buffers have filled.
            while writer.counters().calls_out == 0 {
                thread::yield_now();
            }
            drop(far);
            assert!(write.join().unwrap().unwrap_err().is_closed());
        });
    }
}

#[test]
fn silence_ends_a_read_after_the_time_out() {
    for (reader, far) in [socket_pair(), pipe_to_read()] {
        let writer = Channel::from_fd(far).unwrap();
        let time = Duration::from_millis(50);
        reader.set_timeouts(Some(time), None).unwrap();
        writer.write_all(b"abc").unwrap();
        let error = reader.read_exact(&mut [0; 10]).unwrap_err();
        assert!(error.is_timeout(), "{error:?}");
        assert!(error.to_string().ends_with("nothing moved for 50ms at byte 3"), "{error}");
        // The channel is still good.
        writer.write_all(b"d").unwrap();
        assert_eq!(reader.read(&mut [0; 10]).unwrap(), 1);
        reader.set_timeouts(None, None).unwrap();
        thread::scope(|scope| {
            let got = scope.spawn(|| reader.read_exact(&mut [0; 1]));
            thread::sleep(2 * time);
            writer.write_all(b"e").unwrap();
            got.join().unwrap().unwrap();
        });
    }
}

#[test]
fn a_peer_that_takes_nothing_ends_a_write_after_the_time_out() {
    for (writer, _far) in [socket_pair(), pipe_to_write()] {
        writer.set_timeouts(None, Some(Duration::from_millis(50))).unwrap();
        let error = writer.write_all(&vec![0; 8 << 20]).unwrap_err();
        let sent = writer.counters().bytes_out;
        assert!(sent > 0, "the buffer took something");
        assert!(
            matches!(error, ChannelError::TimedOut { offset: Some(at), .. } if at == sent),
            "{error:?} after {sent}"
        );
    }
}

#[test]
fn a_slow_peer_is_not_a_silent_one() {
    for (reader, far) in [socket_pair(), pipe_to_read()] {
        let writer = Channel::from_fd(far).unwrap();
        reader.set_timeouts(Some(Duration::from_secs(2)), None).unwrap();
        thread::scope(|scope| {
            // In all longer than the time-out, each silence far shorter.
            scope.spawn(|| {
                for byte in 0..25 {
                    thread::sleep(Duration::from_millis(100));
                    writer.write_all(&[byte]).unwrap();
                }
            });
            let mut received = [0; 25];
            reader.read_exact(&mut received).unwrap();
            assert_eq!(received, std::array::from_fn(|i| u8::try_from(i).unwrap()));
        });
    }
}

/// Waits until the call is under way, which may be just before it blocks: a wake that came too early would be found out
/// by a hang in some of the rounds.
fn until_called(calls: impl Fn() -> u64, before: u64) {
    while calls() == before {
        thread::yield_now();
    }
}

#[test]
fn a_shutdown_from_a_third_thread_wakes_both_directions() {
    for round in 0..50 {
        let (near, far) = socket_pair();
        thread::scope(|scope| {
            let read = scope.spawn(|| near.read_exact(&mut [0; 10]));
            let write = scope.spawn(|| near.write_all(&vec![0; 8 << 20]));
            until_called(|| near.counters().calls_in, 0);
            until_called(|| near.counters().calls_out, 0);
            if round % 2 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
            near.shutdown(Shutdown::Both).unwrap();
            let (read, write) = (read.join().unwrap().unwrap_err(), write.join().unwrap().unwrap_err());
            assert!(read.is_shut_down() && write.is_shut_down(), "{read:?}, {write:?}");
        });
        drop(far);
    }
}

#[test]
fn a_shutdown_wakes_a_thread_that_waits_for_a_pipe() {
    for round in 0..50 {
        let (reader, _writer) = pipe_to_read();
        let (writer, _reader) = pipe_to_write();
        thread::scope(|scope| {
            let read = scope.spawn(|| reader.read(&mut [0; 10]));
            let write = scope.spawn(|| writer.write_all(&vec![0; 8 << 20]));
            until_called(|| reader.counters().calls_in, 0);
            until_called(|| writer.counters().calls_out, 0);
            if round % 2 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
            reader.shutdown(Shutdown::Both).unwrap();
            writer.try_clone().unwrap().shutdown(Shutdown::Both).unwrap();
            let (read, write) = (read.join().unwrap().unwrap_err(), write.join().unwrap().unwrap_err());
            assert!(read.is_shut_down() && write.is_shut_down(), "{read:?}, {write:?}");
        });
    }
}

#[test]
fn a_shutdown_wakes_a_thread_that_waits_for_the_rate_limit() {
    for (writer, _far) in [socket_pair(), pipe_to_write()] {
        writer.rate_limit().set(std::num::NonZeroU64::new(1));
        writer.write_all(&[0; 4096]).unwrap();
        thread::scope(|scope| {
            let write = scope.spawn(|| writer.write_all(b"an hour later"));
            thread::sleep(Duration::from_millis(20));
            assert!(!write.is_finished());
            writer.shutdown(Shutdown::Write).unwrap();
            assert!(write.join().unwrap().unwrap_err().is_shut_down());
        });
    }
}

#[test]
fn one_direction_can_be_shut_down_alone() {
    let (near, far) = socket_pair();
    let far = Channel::from_fd(far).unwrap();
    near.write_all(b"last words").unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    assert!(near.write_all(b"more").unwrap_err().is_shut_down());
    far.read_exact(&mut [0; 10]).unwrap();
    assert_eq!(far.read(&mut [0]).unwrap(), 0, "the peer sees the end");
    far.write_all(b"reply").unwrap();
    near.read_exact(&mut [0; 5]).unwrap();
}

#[test]
fn what_came_before_a_read_shutdown_can_still_be_read() {
    let (near, far) = socket_pair();
    let far = Channel::from_fd(far).unwrap();
    far.write_all(b"word").unwrap();
    near.shutdown(Shutdown::Read).unwrap();
    let mut word = [0; 4];
    near.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"word");
    assert!(near.read(&mut word).unwrap_err().is_shut_down());
}

#[test]
fn a_second_shutdown_and_one_after_the_peer_are_no_errors() {
    let (near, far) = socket_pair();
    drop(far);
    near.shutdown(Shutdown::Both).unwrap();
    near.shutdown(Shutdown::Both).unwrap();
}

#[test]
fn a_time_out_of_zero_is_a_short_one_and_not_for_ever() {
    let (near, _far) = socket_pair();
    near.set_timeouts(Some(Duration::ZERO), Some(Duration::ZERO)).unwrap();
    assert!(near.read_exact(&mut [0; 1]).unwrap_err().is_timeout());
}

#[test]
fn options_apply_to_a_descriptor() {
    let (a, _b) = UnixStream::pair().unwrap();
    let time = Some(Duration::from_millis(30));
    let options = Options { read_timeout: time, send_buffer: Some(usize::MAX), ..Options::default() };
    let channel = Channel::from_fd_with(a.into(), &options).unwrap();
    assert!(channel.read_exact(&mut [0; 1]).unwrap_err().is_timeout());
}
