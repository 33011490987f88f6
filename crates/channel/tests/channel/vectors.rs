//! Gather and scatter lists of any shape arrive intact, through buffers far smaller than they are.

use std::io::{IoSlice, IoSliceMut, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use limosa_channel::{Channel, Options, ZeroCopy};
use proptest::prelude::*;

const TINY: Options = Options {
    tls: None,
    connect_timeout: None,
    read_timeout: None,
    write_timeout: None,
    send_buffer: Some(1),
    receive_buffer: Some(1),
    rate_limit: None,
    read_rate_limit: None,
    zero_copy: ZeroCopy::Off,
};

fn tiny_pair() -> (Channel, Channel) {
    let (a, b) = UnixStream::pair().unwrap();
    let channel = |fd: UnixStream| Channel::from_fd_with(fd.into(), &TINY).unwrap();
    (channel(a), channel(b))
}

fn tiny_pipe() -> (Channel, Channel) {
    let (reader, writer) = std::io::pipe().unwrap();
    let channel = |fd: OwnedFd| Channel::from_fd_with(fd, &TINY).unwrap();
    (channel(writer.into()), channel(reader.into()))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[2]).collect()
}

fn slices<'a>(data: &'a [u8], lengths: &[usize]) -> Vec<IoSlice<'a>> {
    let mut rest = data;
    lengths.iter().map(|&n| IoSlice::new(rest.split_off(..n).unwrap())).collect()
}

fn slices_mut<'a>(data: &'a mut [u8], lengths: &[usize]) -> Vec<IoSliceMut<'a>> {
    let mut rest = data;
    lengths.iter().map(|&n| IoSliceMut::new(rest.split_off_mut(..n).unwrap())).collect()
}

/// Writes one list and reads it into another shape of the same total length; a rest that the shapes leave is one slice.
fn passes_through(writer: &Channel, reader: &Channel, write: &[usize], read: &[usize]) {
    let (sum_write, sum_read): (usize, usize) = (write.iter().sum(), read.iter().sum());
    let total = sum_write.max(sum_read);
    let write = [write, &[total - sum_write, 0]].concat();
    let read = [read, &[total - sum_read, 0]].concat();
    let data = pattern(total);
    let mut received = vec![0; total];
    thread::scope(|scope| {
        scope.spawn(|| writer.write_all_vectored(&slices(&data, &write)).unwrap());
        reader.read_exact_vectored(&mut slices_mut(&mut received, &read)).unwrap();
    });
    assert!(received == data, "the bytes differ");
    assert_eq!((writer.counters().bytes_out, reader.counters().bytes_in), (total as u64, total as u64));
}

fn lengths() -> impl Strategy<Value = Vec<usize>> {
    let length = prop_oneof![4 => Just(0_usize), 8 => 1..9_usize, 2 => 100..5000_usize, 1 => Just(40_000_usize)];
    prop_oneof![
        6 => prop::collection::vec(length, 0..60),
        1 => prop::collection::vec(prop_oneof![Just(0_usize), 1..40_usize], 1000..3500),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn any_list_arrives_through_a_socket_with_tiny_buffers(write in lengths(), read in lengths()) {
        let (writer, reader) = tiny_pair();
        passes_through(&writer, &reader, &write, &read);
    }

    #[test]
    fn any_list_arrives_through_a_pipe_of_one_page(write in lengths(), read in lengths()) {
        let (writer, reader) = tiny_pipe();
        passes_through(&writer, &reader, &write, &read);
    }
}

#[test]
fn a_list_of_five_thousand_pages_takes_five_calls() {
    let (writer, far) = Channel::pair().unwrap();
    let reader = Channel::from_fd(far).unwrap();
    let page = pattern(4096);
    let list = vec![IoSlice::new(&page); 5000];
    let mut received = vec![0; 5000 * 4096];
    thread::scope(|scope| {
        scope.spawn(|| writer.write_all_vectored(&list).unwrap());
        reader.read_exact(&mut received).unwrap();
    });
    assert!(received.chunks(4096).all(|got| got == page));
    let counters = writer.counters();
    assert_eq!((counters.calls_out, counters.partial), (5000_u64.div_ceil(1024), 0));
}

#[test]
fn an_empty_list_makes_no_call() {
    let (channel, _far) = Channel::pair().unwrap();
    channel.write_all_vectored(&[]).unwrap();
    channel.write_all_vectored(&[IoSlice::new(b""); 3000]).unwrap();
    channel.read_exact_vectored(&mut []).unwrap();
    channel.read_exact(&mut []).unwrap();
    assert_eq!(channel.read(&mut []).unwrap(), 0);
    assert_eq!((channel.counters().calls_out, channel.counters().calls_in), (0, 0));
}

#[test]
fn a_peer_that_reads_byte_by_byte_gets_everything() {
    for (writer, mut reader) in [
        {
            let (a, b) = UnixStream::pair().unwrap();
            (Channel::from_fd_with(a.into(), &TINY).unwrap(), Box::new(b) as Box<dyn Read + Send>)
        },
        {
            let (reader, writer) = std::io::pipe().unwrap();
            (Channel::from_fd_with(writer.into(), &TINY).unwrap(), Box::new(reader) as _)
        },
    ] {
        let data = pattern(30_000);
        let lengths = [0, 1, 29_000, 0, 999];
        let received = thread::scope(|scope| {
            let received = scope.spawn(move || {
                let (mut received, mut byte) = (Vec::new(), [0]);
                while reader.read(&mut byte).unwrap() == 1 {
                    received.push(byte[0]);
                }
                received
            });
            writer.write_all_vectored(&slices(&data, &lengths)).unwrap();
            drop(writer);
            received.join().unwrap()
        });
        assert!(received == data, "the bytes differ");
    }
}

#[test]
fn a_descriptor_in_non_blocking_mode_works_as_any_other() {
    let (a, b) = UnixStream::pair().unwrap();
    a.set_nonblocking(true).unwrap();
    b.set_nonblocking(true).unwrap();
    let channel = |fd: UnixStream| Channel::from_fd_with(fd.into(), &TINY).unwrap();
    let (writer, reader) = (channel(a), channel(b));
    passes_through(&writer, &reader, &[100_000, 0, 7], &[3, 3, 90_000]);
    assert_ne!((writer.counters().partial, writer.counters().waits), (0, 0));
}

#[test]
fn both_directions_run_at_once() {
    let (a, b) = tiny_pair();
    let data = pattern(400_000);
    thread::scope(|scope| {
        for end in [&a, &b] {
            scope.spawn(|| end.write_all_vectored(&slices(&data, &[1, 399_999])).unwrap());
            scope.spawn(|| {
                let mut received = vec![0; data.len()];
                end.read_exact(&mut received).unwrap();
                assert!(received == data, "the bytes differ");
            });
        }
    });
}

#[test]
fn what_is_there_comes_without_waiting_for_more() {
    let (near, far) = Channel::pair().unwrap();
    let far = Channel::from_fd(far).unwrap();
    near.write_all(b"abcde").unwrap();
    let (mut a, mut b) = ([0; 3], [0; 100]);
    assert_eq!(far.read_vectored(&mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)]).unwrap(), 5);
    assert_eq!((&a, &b[..2]), (b"abc", &b"de"[..]));
}

#[test]
fn a_clone_shares_counters_and_keeps_the_connection_open() {
    let (near, far) = Channel::pair().unwrap();
    let far = Channel::from_fd(far).unwrap();
    let second = near.try_clone().unwrap();
    near.write_all(b"a").unwrap();
    drop(near);
    second.write_all(b"b").unwrap();
    assert_eq!(second.counters().bytes_out, 2);
    drop(second);
    let mut two = [0; 2];
    far.read_exact(&mut two).unwrap();
    assert_eq!((&two, far.read(&mut [0]).unwrap()), (b"ab", 0));
}
