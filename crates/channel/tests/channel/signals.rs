//! Signals that arrive in the middle of a transfer change nothing.
#![allow(unsafe_code, reason = "signals single threads")]

use std::os::unix::net::UnixStream;
use std::os::unix::thread::JoinHandleExt;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use limosa_channel::{Channel, Options};
use limosa_testkit::let_usr1_interrupt;

/// Signals the thread until the channel has seen `times` more interruptions.
fn interrupt<T>(thread: &JoinHandle<T>, channel: &Channel, times: u64) {
    let goal = channel.counters().interrupted + times;
    while channel.counters().interrupted < goal {
        assert!(!thread.is_finished(), "the transfer ended while it should be blocked");
        // SAFETY: the handle is not joined yet, so the thread's id is valid.
        assert_eq!(unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) }, 0);
        thread::sleep(Duration::from_millis(1));
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[2]).collect()
}

fn survives(writer: Channel, reader: Channel) {
    let_usr1_interrupt();
    let data = pattern(1 << 20);

    // Blocked in reading: before anything came, and again in the middle.
    let handle = reader.try_clone().unwrap();
    let length = data.len();
    let thread = thread::spawn(move || {
        let mut received = vec![0; length];
        handle.read_exact(&mut received).map(|()| received)
    });
    interrupt(&thread, &reader, 3);
    writer.write_all(&data[..1000]).unwrap();
    while reader.counters().bytes_in < 1000 {
        // A call that has moved bytes returns them when it is interrupted, and is not counted as interrupted.
        // SAFETY: the handle is not joined yet, so the thread's id is valid.
        assert_eq!(unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) }, 0);
        thread::sleep(Duration::from_millis(1));
    }
    interrupt(&thread, &reader, 3);
    writer.write_all(&data[1000..]).unwrap();
    assert!(thread.join().unwrap().unwrap() == data, "the bytes differ");

    // Blocked in writing: nothing is read yet.
    let handle = writer.try_clone().unwrap();
    let to_send = data.clone();
    let before = writer.counters().bytes_out;
    let thread = thread::spawn(move || handle.write_all(&to_send));
    interrupt(&thread, &writer, 3);
    let mut received = vec![0; length];
    reader.read_exact(&mut received).unwrap();
    thread.join().unwrap().unwrap();
    assert!(received == data, "the bytes differ");
    assert_eq!(writer.counters().bytes_out - before, length as u64);
}

#[test]
fn a_blocked_socket_survives_signals() {
    let (a, b) = UnixStream::pair().unwrap();
    survives(Channel::from_fd(a.into()).unwrap(), Channel::from_fd(b.into()).unwrap());
}

#[test]
fn a_blocked_socket_with_time_outs_survives_signals() {
    let (a, b) = UnixStream::pair().unwrap();
    let long = Some(Duration::from_secs(3600));
    let options = Options { read_timeout: long, write_timeout: long, ..Options::default() };
    let channel = |fd: UnixStream| Channel::from_fd_with(fd.into(), &options).unwrap();
    survives(channel(a), channel(b));
}

#[test]
fn a_blocked_pipe_survives_signals() {
    let (reader, writer) = std::io::pipe().unwrap();
    survives(Channel::from_fd(writer.into()).unwrap(), Channel::from_fd(reader.into()).unwrap());
}

#[test]
fn signals_do_not_put_off_a_time_out() {
    let_usr1_interrupt();
    let (near, _far) = Channel::pair().unwrap();
    near.set_timeouts(Some(Duration::from_millis(200)), None).unwrap();
    let handle = near.try_clone().unwrap();
    let thread = thread::spawn(move || handle.read_exact(&mut [0; 10]));
    // Each signal restarts the kernel's own clock, so only ours can end this loop.
    while !thread.is_finished() {
        // SAFETY: the handle is not joined yet, so the thread's id is valid.
        unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) };
        thread::sleep(Duration::from_millis(10));
    }
    let error = thread.join().unwrap().unwrap_err();
    assert!(error.is_timeout(), "{error}");
}
