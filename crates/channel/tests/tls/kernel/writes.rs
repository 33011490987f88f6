//! Writes that wait: a signal is no failure, and what was written is out.
#![allow(unsafe_code, reason = "signals single threads")]

use std::os::unix::thread::JoinHandleExt;

use limosa_testkit::let_usr1_interrupt;

use super::*;

/// Less than a record, so that each one is cut.
const SMALL: Option<usize> = Some(4096);

#[test]
fn a_signal_in_a_write_that_waits_changes_nothing() {
    needs_kernel_tls!();
    let_usr1_interrupt();
    let bed = Bed::new();
    for timeout in [None, Some(Duration::from_secs(30))] {
        let (client, server) = pair(&bed, KernelTls::On, KernelTls::On);
        client.set_timeouts(None, timeout).unwrap();
        client.set_buffers(SMALL, None).unwrap();
        let data = pattern(MUCH);
        let handle = client.try_clone().unwrap();
        let to_send = data.clone();
        let writes = thread::spawn(move || to_send.chunks(100_000).try_for_each(|piece| handle.write_all(piece)));
        let signal = || {
            // SAFETY: the handle is not joined yet, so the thread's id is valid.
            assert_eq!(unsafe { libc::pthread_kill(writes.as_pthread_t(), libc::SIGUSR1) }, 0);
        };
        // Nothing is read yet, and later it is, so that records are cut at any place.
        for _ in 0..50 {
            signal();
            thread::sleep(Duration::from_millis(5));
        }
        assert!(!writes.is_finished());
        let mut got = vec![0; data.len()];
        for piece in got.chunks_mut(10_000) {
            server.read_exact(piece).unwrap();
            if !writes.is_finished() {
                signal();
            }
        }
        writes.join().unwrap().unwrap();
        assert!(got == data);
        assert_eq!(client.counters().bytes_out, 1 + data.len() as u64);
        // Calls, not a loop that asks and asks.
        assert!(client.counters().calls_out < 10_000, "{:?}", client.counters());
        drop(client);
        assert_eq!(server.read(&mut got).unwrap(), 0);
    }
}

#[test]
fn what_a_write_has_returned_for_arrives_though_the_next_one_times_out() {
    needs_kernel_tls!();
    let bed = Bed::new();
    // Records that end here and there in the buffers.
    for length in [20_000, 33_333, 70_001] {
        let (client, server) = pair(&bed, KernelTls::On, KernelTls::On);
        client.set_timeouts(None, Some(Duration::from_millis(200))).unwrap();
        client.set_buffers(SMALL, None).unwrap();
        let data = pattern(length);
        let mut whole = 0;
        let error = loop {
            match client.write_all(&data) {
                Ok(()) => whole += 1,
                Err(error) => break error,
            }
        };
        assert!(error.is_timeout(), "{error}");
        drop(client);
        let mut got = vec![0; length];
        for _ in 0..whole {
            server.read_exact(&mut got).unwrap();
            assert!(got == data);
        }
        let mut more = 0;
        let error = loop {
            match server.read(&mut got) {
                Ok(0) => panic!("taken for an end"),
                Ok(bytes) => more += bytes,
                Err(error) => break error,
            }
        };
        assert!(error.lacks_close_notify() && more <= length, "{error}");
    }
}

#[test]
fn a_channel_whose_write_has_timed_out_is_dropped_at_once() {
    needs_kernel_tls!();
    let bed = Bed::new();
    let (client, _server) = pair(&bed, KernelTls::On, KernelTls::On);
    client.set_timeouts(None, Some(Duration::from_secs(5))).unwrap();
    client.set_buffers(SMALL, None).unwrap();
    let error = client.write_all(&vec![7; 64 << 20]).unwrap_err();
    assert!(error.is_timeout(), "{error}");
    let began = Instant::now();
    drop(client);
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
}

#[test]
fn a_shutdown_amid_a_write_does_not_announce_the_end() {
    needs_kernel_tls!();
    let bed = Bed::new();
    crate::transfers::shut_down_amid_a_write(&server(&bed, KernelTls::On), client(&bed, KernelTls::On));
}
