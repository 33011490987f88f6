//! The rate limit: kept on average, changed while a thread waits, shared between channels.

use std::io::{IoSlice, Read};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Channel, Options, RateLimit};

fn rate(bytes_per_second: u64) -> Option<NonZeroU64> {
    NonZeroU64::new(bytes_per_second)
}

#[test]
fn a_blocked_taker_wakes_when_the_rate_is_raised() {
    for raised in [rate(u64::MAX), None] {
        let limit = RateLimit::new(rate(1));
        // A debt of two centuries.
        limit.take(1 << 33);
        thread::scope(|scope| {
            let taker = scope.spawn(|| limit.take(1));
            thread::sleep(Duration::from_millis(20));
            assert!(!taker.is_finished());
            limit.clone().set(raised);
            assert!(taker.join().unwrap() > Duration::ZERO);
        });
        assert_eq!(limit.get(), raised);
    }
}

#[test]
fn puts_never_run_ahead_of_the_limit() {
    const RATE: u64 = 32 << 20;
    let (near, far) = UnixStream::pair().unwrap();
    let options = Options { rate_limit: Some(RateLimit::new(rate(RATE))), ..Options::default() };
    let channel = Channel::from_fd_with(near.into(), &options).unwrap();
    let page = [1; 4096];
    let began = Instant::now();
    let drain = thread::spawn(move || std::io::copy(&mut far.take(u64::MAX), &mut std::io::sink()).unwrap());
    // One slice far above a call's share, and a list of several batches.
    channel.write_all(&vec![2; 8 << 20]).unwrap();
    channel.write_all_vectored(&vec![IoSlice::new(&page); 2048]).unwrap();
    let elapsed = began.elapsed().as_nanos();
    // The last call's share (a batch of pages at this rate) is paid for only by the next one, and idle time may have
    // earned a tenth of a second's worth. A slow machine only takes longer, so there is no upper bound here.
    let sent = u128::from(channel.counters().bytes_out);
    assert_eq!(sent, 16 << 20);
    let allowed = u128::from(RATE) * elapsed / 1_000_000_000 + u128::from((512 * (4096 + 128)) + RATE / 10);
    assert!(sent <= allowed, "{sent} bytes in {elapsed} ns, at most {allowed} allowed");
    assert!(channel.counters().throttled_ns > 0);
    assert!(channel.counters().calls_out >= 8, "in portions");
    drop(channel);
    assert_eq!(drain.join().unwrap(), 16 << 20);
}

#[test]
fn a_limit_breaks_no_batch() {
    // Pages with their headers: as many entries as one call takes.
    let (header, page) = ([3; 9], [4; 4096]);
    let batch: Vec<_> = (0..512).flat_map(|_| [IoSlice::new(&header), IoSlice::new(&page)]).collect();
    for limit in [None, rate(30 << 20), rate(125_000_000)] {
        let (near, far) = UnixStream::pair().unwrap();
        let options = Options { rate_limit: Some(RateLimit::new(limit)), ..Options::default() };
        let channel = Channel::from_fd_with(near.into(), &options).unwrap();
        let drain = thread::spawn(move || std::io::copy(&mut far.take(u64::MAX), &mut std::io::sink()).unwrap());
        let began = Instant::now();
        for _ in 0..3 {
            channel.write_all_vectored(&batch).unwrap();
        }
        let elapsed = began.elapsed().as_nanos();
        assert_eq!(channel.counters().calls_out, 3, "{limit:?}");
        // What the first two owe was waited for, but for a tenth of a second's worth.
        let owed = limit.map_or(0, |limit| 2 * 512 * 4105 * 1_000_000_000 / u128::from(limit.get()));
        assert!(elapsed + 100_000_000 >= owed, "{limit:?}: {elapsed} ns for {owed}");
        drop(channel);
        assert_eq!(drain.join().unwrap(), 3 * 512 * 4105);
    }
}

#[test]
fn a_write_in_progress_speeds_up_when_the_limit_is_lifted() {
    let (channel, far) = Channel::pair().unwrap();
    let mut far = UnixStream::from(far);
    channel.rate_limit().set(rate(1));
    let limit = channel.rate_limit();
    let write = thread::spawn(move || channel.write_all(&vec![3; 8 << 20]));
    let mut first = [0; 4096];
    far.read_exact(&mut first).unwrap();
    assert!(!write.is_finished());
    limit.set(None);
    let mut rest = Vec::new();
    far.read_to_end(&mut rest).unwrap();
    write.join().unwrap().unwrap();
    assert_eq!(first.len() + rest.len(), 8 << 20);
}

#[test]
fn channels_can_share_one_limit() {
    let limit = RateLimit::new(rate(1));
    let options = Options { rate_limit: Some(limit.clone()), ..Options::default() };
    let (a, _a) = UnixStream::pair().unwrap();
    let (b, _b) = UnixStream::pair().unwrap();
    let channel = |fd: UnixStream| Channel::from_fd_with(fd.into(), &options).unwrap();
    let (a, b) = (channel(a), channel(b));
    a.write_all(&[0; 4096]).unwrap();
    thread::scope(|scope| {
        let write = scope.spawn(|| b.write_all(b"x"));
        thread::sleep(Duration::from_millis(20));
        assert!(!write.is_finished(), "the other channel's debt holds it back");
        limit.set(None);
        write.join().unwrap().unwrap();
    });
}

#[test]
fn gets_never_run_ahead_of_their_limit_and_wake_at_a_shutdown() {
    const RATE: u64 = 4 << 20;
    let (writer, far) = Channel::pair().unwrap();
    let limit = RateLimit::new(rate(RATE));
    let options = Options { read_rate_limit: Some(limit.clone()), ..Options::default() };
    let channel = Channel::from_fd_with(far, &options).unwrap();
    thread::scope(|scope| {
        let feeder = scope.spawn(|| writer.write_all(&vec![3; 64 << 20]));
        let began = Instant::now();
        channel.read_exact(&mut vec![0; 2 << 20]).unwrap();
        let allowed = u128::from(RATE) * began.elapsed().as_nanos() / 1_000_000_000 + u128::from(RATE / 20 + RATE / 10);
        assert!(2 << 20 <= allowed, "at most {allowed} allowed");
        assert!(channel.counters().throttled_ns > 0);
        // A thread that waits for the limit is woken.
        limit.set(rate(1));
        let getter = scope.spawn(|| channel.read_exact(&mut vec![0; 1 << 20]));
        thread::sleep(Duration::from_millis(20));
        channel.shutdown(limosa_channel::Shutdown::Both).unwrap();
        assert!(getter.join().unwrap().unwrap_err().is_shut_down());
        assert!(feeder.join().unwrap().is_err());
    });
}

#[test]
fn what_had_come_before_a_shutdown_is_still_got_under_a_limit() {
    let (writer, far) = Channel::pair().unwrap();
    let limit = RateLimit::new(rate(1));
    // A debt of two centuries.
    limit.take(1 << 33);
    let options = Options { read_rate_limit: Some(limit), ..Options::default() };
    let channel = Channel::from_fd_with(far, &options).unwrap();
    writer.write_all(b"page").unwrap();
    thread::scope(|scope| {
        let getter = scope.spawn(|| {
            let mut bytes = [0; 8];
            channel.read(&mut bytes).map(|got| bytes[..got].to_vec())
        });
        thread::sleep(Duration::from_millis(20));
        channel.shutdown(limosa_channel::Shutdown::Read).unwrap();
        assert_eq!(getter.join().unwrap().unwrap(), b"page");
        assert!(channel.read(&mut [0; 8]).unwrap_err().is_shut_down());
    });
}
