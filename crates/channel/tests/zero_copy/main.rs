//! Memory that is lent arrives as it was written, under every method, and is not reused before it is returned.
//!
//! Freed memory is poisoned in this binary: a buffer that is reused while the kernel still reads it shows in what
//! arrives.

mod peers;
mod reuse;

use std::io::IoSlice;
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU64;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Options, RateLimit, Shutdown, ZeroCopy, ZeroCopyWriter};
use limosa_testkit::Poisoning;
use proptest::prelude::*;
use rustix::mm::{MapFlags, ProtFlags, mmap};

#[global_allocator]
static ALLOCATOR: Poisoning = Poisoning;

#[derive(Clone, Copy, Debug)]
enum Transport {
    Tcp,
    Tcp6,
    Unix,
}

const TRANSPORTS: [Transport; 3] = [Transport::Tcp, Transport::Tcp6, Transport::Unix];

/// Two connected sockets.
fn ends(transport: Transport) -> (OwnedFd, OwnedFd) {
    let tcp = |address: &str| {
        let listener = TcpListener::bind(address).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (near.into(), listener.accept().unwrap().0.into())
    };
    match transport {
        Transport::Tcp => tcp("127.0.0.1:0"),
        Transport::Tcp6 => tcp("[::1]:0"),
        Transport::Unix => {
            let (near, far) = UnixStream::pair().unwrap();
            (near.into(), far.into())
        }
    }
}

fn connected(transport: Transport, options: &Options) -> Result<(Channel, Channel), ChannelError> {
    let (near, far) = ends(transport);
    Ok((Channel::from_fd_with(near, options)?, Channel::from_fd(far)?))
}

/// Two ends with a small receive buffer, so that data stays in flight until it is read.
fn narrow(transport: Transport, zero_copy: ZeroCopy) -> (Channel, Channel) {
    let (near, far) = ends(transport);
    let wide = Options { zero_copy, send_buffer: Some(4 << 20), ..Options::default() };
    let slow = Options { receive_buffer: Some(64 << 10), ..Options::default() };
    (Channel::from_fd_with(near, &wide).unwrap(), Channel::from_fd_with(far, &slow).unwrap())
}

fn methods(transport: Transport) -> &'static [ZeroCopy] {
    match transport {
        Transport::Tcp | Transport::Tcp6 => &ZeroCopy::ALL,
        Transport::Unix => &[ZeroCopy::Off, ZeroCopy::Auto, ZeroCopy::Splice],
    }
}

fn pattern(length: usize) -> Vec<u8> {
    // Never what freed memory is filled with.
    (0..length).map(|i| i.wrapping_mul(0x9e37_79b9).to_le_bytes()[2] & 0x7f).collect()
}

fn slices<'a>(data: &'a [u8], lengths: &[usize]) -> Vec<IoSlice<'a>> {
    let mut rest = data;
    lengths.iter().map(|&n| IoSlice::new(rest.split_off(..n).unwrap())).collect()
}

/// As guest memory is written: the first `copied` entries are own bytes.
#[allow(unsafe_code, reason = "guest memory is written by address")]
fn write_pages(lending: &mut ZeroCopyWriter<'_, '_>, list: &[IoSlice<'_>], copied: usize) -> Result<(), ChannelError> {
    let list: Vec<libc::iovec> = list
        .iter()
        .map(|slice| libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len: slice.len() })
        .collect();
    // SAFETY: the slices are borrowed for longer than the call.
    unsafe { lending.write_pages(&list, copied) }
}

/// The same, and a flush.
fn send_pages(channel: &Channel, list: &[IoSlice<'_>], copied: usize) -> Result<(), ChannelError> {
    let mut lending = channel.zero_copy_writer();
    write_pages(&mut lending, list, copied)?;
    lending.finish()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn lists_of_any_shape_arrive_the_same_under_every_method_and_over_every_transport(
        lengths in prop_oneof![
            6 => prop::collection::vec(prop_oneof![Just(0_usize), 1..9_usize, 100..5000_usize, Just(40_000_usize)], 0..60),
            1 => prop::collection::vec(0..40_usize, 1000..2500),
            2 => prop::collection::vec(Just(4096_usize), 100..600),
        ],
        copied in 0..5_usize,
        begin in 0..9_usize,
        limit in prop_oneof![Just(None), Just(NonZeroU64::new(200 << 20))],
    ) {
        let total = begin + lengths.iter().sum::<usize>();
        let data = pattern(total);
        let list = slices(&data[begin..], &lengths);
        for transport in TRANSPORTS {
            for &zero_copy in methods(transport) {
                let rate_limit = Some(RateLimit::new(limit));
                let options = Options { zero_copy, rate_limit, ..Options::default() };
                let (writer, reader) = connected(transport, &options).unwrap();
                let mut received = vec![0; 2 * (total - begin)];
                thread::scope(|scope| {
                    scope.spawn(|| {
                        send_pages(&writer, &list, copied).unwrap();
                        let (head, lent) = list.split_at(copied.min(list.len()));
                        let head: Vec<u8> = head.iter().flat_map(|slice| slice.to_vec()).collect();
                        let mut lending = writer.zero_copy_writer();
                        lending.write_all(&head, lent).unwrap();
                        lending.finish().unwrap();
                    });
                    reader.read_exact(&mut received).unwrap();
                });
                let expected = [&data[begin..], &data[begin..]].concat();
                prop_assert!(received == expected, "{zero_copy} over {transport:?}: the bytes differ");
                let counters = writer.counters();
                prop_assert_eq!(counters.bytes_out, expected.len() as u64);
                prop_assert_eq!(counters.zero_copy_calls, counters.zero_copy_completed);
                let pages: u64 = lengths.iter().skip(copied).map(|length| *length as u64).sum();
                let spliced = writer.zero_copy() == ZeroCopy::Splice;
                prop_assert_eq!(counters.spliced, if spliced { pages } else { 0 });
                prop_assert_eq!(counters.zero_copy_calls != 0, zero_copy == ZeroCopy::Msg && pages != 0);
            }
        }
    }
}

#[test]
fn a_header_without_pages_does_not_wait_for_what_follows() {
    for transport in TRANSPORTS {
        for &zero_copy in methods(transport) {
            let (writer, reader) = connected(transport, &Options { zero_copy, ..Options::default() }).unwrap();
            // What is held back leaves after 200 ms.
            let mut fastest = Duration::MAX;
            for _ in 0..5 {
                let begun = Instant::now();
                send_pages(&writer, &[IoSlice::new(b"zero pages"), IoSlice::new(b"")], 1).unwrap();
                reader.read_exact(&mut [0; 10]).unwrap();
                fastest = fastest.min(begun.elapsed());
            }
            assert!(fastest < Duration::from_millis(150), "{zero_copy} over {transport:?}: {fastest:?}");
        }
    }
}

#[test]
fn what_a_channel_does_with_pages_is_what_was_named_or_what_is_best_there() {
    for (transport, setting, method) in [
        (Transport::Tcp, ZeroCopy::Off, ZeroCopy::Off),
        (Transport::Tcp, ZeroCopy::Msg, ZeroCopy::Msg),
        (Transport::Tcp, ZeroCopy::Splice, ZeroCopy::Splice),
        // The peer is on this machine.
        (Transport::Tcp, ZeroCopy::Auto, ZeroCopy::Splice),
        (Transport::Tcp6, ZeroCopy::Auto, ZeroCopy::Splice),
        (Transport::Unix, ZeroCopy::Auto, ZeroCopy::Splice),
    ] {
        let (writer, _reader) = connected(transport, &Options { zero_copy: setting, ..Options::default() }).unwrap();
        assert_eq!(writer.zero_copy(), method, "{setting} over {transport:?}");
        assert_eq!(writer.try_clone().unwrap().zero_copy(), method);
    }
}

#[test]
fn a_method_that_a_transport_has_not_is_refused_before_a_byte_has_moved() {
    let named = |zero_copy| Options { zero_copy, ..Options::default() };
    let error = connected(Transport::Unix, &named(ZeroCopy::Msg)).unwrap_err();
    assert!(error.to_string().ends_with("MSG_ZEROCOPY is for TCP; on a unix socket splice saves the copy"), "{error}");
    for zero_copy in [ZeroCopy::Msg, ZeroCopy::Splice] {
        let (_reader, writer) = std::io::pipe().unwrap();
        let error = Channel::from_fd_with(writer.into(), &named(zero_copy)).unwrap_err();
        assert!(error.to_string().contains("zero-copy needs a socket of its own"), "{error}");
    }
    let (_reader, writer) = std::io::pipe().unwrap();
    let writer = Channel::from_fd_with(writer.into(), &named(ZeroCopy::Auto)).unwrap();
    assert_eq!(writer.zero_copy(), ZeroCopy::Off);
}

#[test]
fn a_flush_of_nothing_takes_nothing_off_the_socket() {
    for transport in TRANSPORTS {
        for &zero_copy in methods(transport) {
            let (writer, reader) = connected(transport, &Options { zero_copy, ..Options::default() }).unwrap();
            reader.write_all(b"an answer").unwrap();
            reader.shutdown(Shutdown::Write).unwrap();
            let mut lending = writer.zero_copy_writer();
            lending.flush().unwrap();
            lending.finish().unwrap();
            let mut answer = [0; 9];
            writer.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, b"an answer");
            writer.zero_copy_writer().finish().unwrap();
        }
    }
}

#[test]
#[allow(unsafe_code, reason = "maps memory that cannot be lent")]
fn memory_that_can_be_copied_but_not_lent_is_copied() {
    // SAFETY: makes a descriptor.
    let secret = unsafe { libc::syscall(libc::SYS_memfd_secret, 0) };
    assert!(secret >= 0, "memfd_secret (Linux 5.14): {}", std::io::Error::last_os_error());
    // SAFETY: a new descriptor without another owner.
    let secret = unsafe { OwnedFd::from_raw_fd(i32::try_from(secret).unwrap()) };
    let data = pattern(300_000);
    rustix::fs::ftruncate(&secret, data.len() as u64).unwrap();
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping of as many bytes as are written, at an address that the kernel chooses; it stays.
    let mapped = unsafe {
        let start = mmap(std::ptr::null_mut(), data.len(), protection, flags, &secret, 0).unwrap().cast::<u8>();
        start.copy_from_nonoverlapping(data.as_ptr(), data.len());
        std::slice::from_raw_parts(start, data.len())
    };
    for transport in TRANSPORTS {
        for &zero_copy in methods(transport) {
            let (writer, reader) = connected(transport, &Options { zero_copy, ..Options::default() }).unwrap();
            let mut received = vec![0; 2 * data.len()];
            thread::scope(|scope| {
                scope.spawn(|| {
                    send_pages(&writer, &[IoSlice::new(mapped)], 0).unwrap();
                    send_pages(&writer, &[IoSlice::new(&data)], 0).unwrap();
                });
                reader.read_exact(&mut received).unwrap();
            });
            assert!(received == [&data[..], &data].concat(), "{zero_copy} over {transport:?}: the bytes differ");
        }
    }
}

/// Runs in a process of its own, because a limit of the process is changed.
mod alone {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    /// Sets the number of bytes that this thread may pin.
    fn limited(bytes: u64) {
        let mut sets = capabilities(None).unwrap();
        sets.effective.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, sets).unwrap();
        let maximum = getrlimit(Resource::Memlock).maximum;
        setrlimit(Resource::Memlock, Rlimit { current: Some(bytes), maximum }).unwrap();
    }

    #[test]
    #[ignore = "changes limits of its process: run by the test below"]
    fn with_little_memory_to_lock() {
        let named = |zero_copy| Options { zero_copy, ..Options::default() };
        limited(64 << 10);
        let error = connected(Transport::Tcp, &named(ZeroCopy::Msg)).unwrap_err();
        assert!(matches!(error, ChannelError::MemoryLock { limit: 65_536, least: 1_064_960, .. }), "{error:?}");
        let error = error.to_string();
        assert!(error.contains("RLIMIT_MEMLOCK is 64 KiB, and MSG_ZEROCOPY pins at least 1040 KiB"), "{error}");
        connected(Transport::Tcp, &named(ZeroCopy::Splice)).unwrap();

        // It was enough when the channel was made, and is not when it sends.
        limited(8 << 20);
        for (bytes, copies) in [(256 << 10, false), (0, true)] {
            let (writer, reader) = connected(Transport::Tcp, &named(ZeroCopy::Msg)).unwrap();
            limited(bytes);
            let data = pattern(3 << 20);
            let mut received = vec![0; data.len()];
            thread::scope(|scope| {
                scope.spawn(|| {
                    limited(bytes);
                    send_pages(&writer, &[IoSlice::new(b"header"), IoSlice::new(&data)], 1).unwrap();
                });
                let mut header = [0; 6];
                reader.read_exact(&mut header).unwrap();
                reader.read_exact(&mut received).unwrap();
                assert_eq!(&header, b"header");
            });
            assert!(received == data, "the bytes differ");
            let counters = writer.counters();
            // It is not tried over and over.
            assert!((1..100).contains(&counters.zero_copy_refused), "{counters:?}");
            assert_eq!(counters.zero_copy_calls, counters.zero_copy_completed, "{counters:?}");
            assert!(!copies || counters.zero_copy_calls == 0, "{counters:?}");
            limited(8 << 20);
        }
    }
}

#[test]
fn too_little_memory_to_lock_is_refused_at_the_start_and_only_slower_later() {
    let me = std::env::current_exe().unwrap();
    let output = std::process::Command::new(me)
        .args(["--ignored", "--exact", "alone::with_little_memory_to_lock", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&output.stderr));
}
