//! Peers that take little, nothing, or close one half or both, and what becomes of the loans.

use std::io::IoSlice;
use std::thread;
use std::time::Duration;

use limosa_channel::{ChannelError, Shutdown, ZeroCopy};

use super::*;

#[test]
fn loans_that_do_not_come_back_are_waited_for_as_long_as_the_time_out_says() {
    let (writer, _reader) = narrow(Transport::Tcp, ZeroCopy::Msg);
    writer.set_timeouts(None, Some(Duration::from_millis(80))).unwrap();
    let buffer = pattern(1 << 20);
    let mut lending = writer.zero_copy_writer();
    lending.write_all(b"", &[IoSlice::new(&buffer)]).unwrap();
    let error = lending.flush().unwrap_err();
    assert!(error.is_timeout(), "{error}");
}

#[test]
fn a_shutdown_wakes_a_thread_that_waits_for_loans() {
    let (writer, _reader) = narrow(Transport::Tcp, ZeroCopy::Msg);
    let buffer = pattern(1 << 20);
    thread::scope(|scope| {
        let flushed = scope.spawn(|| {
            let mut lending = writer.zero_copy_writer();
            let write = lending.write_all(b"", &[IoSlice::new(&buffer)]);
            write.and_then(|()| lending.flush())
        });
        thread::sleep(Duration::from_millis(30));
        writer.shutdown(Shutdown::Both).unwrap();
        let error = flushed.join().unwrap().unwrap_err();
        assert!(error.is_shut_down(), "{error}");
    });
}

#[test]
fn what_was_lent_before_the_end_of_the_data_leaves_like_what_was_copied() {
    for &zero_copy in &ZeroCopy::ALL {
        let (writer, reader) = narrow(Transport::Tcp, zero_copy);
        let data = pattern(1 << 20);
        let mut received = vec![0; data.len()];
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut lending = writer.zero_copy_writer();
                lending.write_all(b"", &[IoSlice::new(&data)]).unwrap();
                writer.shutdown(Shutdown::Write).unwrap();
                lending.finish().unwrap();
            });
            for part in received.chunks_mut(64 << 10) {
                reader.read_exact(part).unwrap();
            }
        });
        assert!(received == data, "{zero_copy}");
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "{zero_copy}");
    }
}

#[test]
fn a_peer_that_is_gone_ends_the_wait_for_loans() {
    let (writer, reader) = narrow(Transport::Tcp, ZeroCopy::Msg);
    let buffer = pattern(1 << 20);
    let mut lending = writer.zero_copy_writer();
    lending.write_all(b"", &[IoSlice::new(&buffer)]).unwrap();
    // With bytes unread, which resets the connection.
    drop(reader);
    // What was queued is thrown away and comes back, or the wait says what happened.
    if let Err(error) = lending.flush() {
        assert!(error.is_closed(), "{error:?}");
    }
    let error = loop {
        if let Err(error) = lending.write_all(b"", &[IoSlice::new(&buffer)]).and_then(|()| lending.flush()) {
            break error;
        }
    };
    assert!(error.is_closed(), "{error:?}");
}

#[test]
fn a_peer_that_has_closed_its_half_still_gets_what_is_lent() {
    for transport in TRANSPORTS {
        for &zero_copy in methods(transport) {
            let (writer, reader) = narrow(transport, zero_copy);
            reader.shutdown(Shutdown::Write).unwrap();
            let data = pattern(1 << 20);
            let mut received = vec![0; 2 * data.len()];
            thread::scope(|scope| {
                scope.spawn(|| {
                    send_pages(&writer, &[IoSlice::new(b""), IoSlice::new(&data)], 1).unwrap();
                    let mut lending = writer.zero_copy_writer();
                    lending.write_all(b"", &[IoSlice::new(&data)]).unwrap();
                    lending.finish().unwrap();
                    writer.shutdown(Shutdown::Write).unwrap();
                });
                for part in received.chunks_mut(64 << 10) {
                    reader.read_exact(part).unwrap();
                }
                assert_eq!(reader.read(&mut [0]).unwrap(), 0);
            });
            assert!(received == data.repeat(2), "{zero_copy} over {transport:?}");
            assert_eq!(writer.read(&mut [0]).unwrap(), 0);
        }
    }
}

#[test]
fn what_is_lent_still_leaves_when_both_ends_have_said_their_last_word() {
    let (writer, reader) = narrow(Transport::Tcp, ZeroCopy::Msg);
    reader.shutdown(Shutdown::Write).unwrap();
    let data = pattern(1 << 20);
    let mut lending = writer.zero_copy_writer();
    lending.write_all(b"", &[IoSlice::new(&data)]).unwrap();
    writer.shutdown(Shutdown::Write).unwrap();
    let mut received = vec![0; data.len()];
    thread::scope(|scope| {
        let finished = scope.spawn(|| lending.finish());
        // Long enough for a wait that takes the two ends for the end of the connection.
        thread::sleep(Duration::from_millis(50));
        reader.read_exact(&mut received).unwrap();
        finished.join().unwrap().unwrap();
    });
    assert!(received == data);
}

#[test]
fn a_peer_that_reads_no_more_is_gone_whatever_way_pages_leave() {
    // A unix socket's peer can say so; over TCP it is seen by what becomes of the data.
    for &zero_copy in methods(Transport::Unix) {
        let (writer, reader) = narrow(Transport::Unix, zero_copy);
        reader.shutdown(Shutdown::Read).unwrap();
        let data = pattern(300_000);
        let errors = [
            send_pages(&writer, &[IoSlice::new(&data)], 0).unwrap_err(),
            writer.zero_copy_writer().write_all(b"", &[IoSlice::new(&data)]).unwrap_err(),
        ];
        assert!(errors.iter().all(ChannelError::is_closed), "{zero_copy}: {errors:?}");
    }
}

#[test]
fn a_loan_that_is_dropped_unfinished_cuts_the_connection_and_nothing_of_it_leaves_any_more() {
    let (writer, reader) = narrow(Transport::Tcp, ZeroCopy::Msg);
    writer.set_timeouts(None, Some(Duration::from_millis(50))).unwrap();
    let length = 1 << 20;
    let buffer = pattern(length);
    let mut lending = writer.zero_copy_writer();
    lending.write_all(b"", &[IoSlice::new(&buffer)]).unwrap();
    drop(lending);
    drop(buffer);
    let mut received = vec![0; length];
    let mut got = 0;
    let error = loop {
        match reader.read(&mut received[got..]) {
            Ok(0) => break None,
            Ok(more) => got += more,
            Err(error) => break Some(error),
        }
    };
    assert!(got < length, "all of it has come");
    assert!(error.is_none_or(|error| error.is_closed()));
    assert!(received[..got] == pattern(length)[..got], "poison has arrived");
}
