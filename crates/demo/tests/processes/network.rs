//! A live migration between two network namespaces, whose cable is pulled at random moments: for good, or for a while.
//! The laws are those of `precopy_chaos`.

use std::fs::File;
use std::io::IoSlice;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use crate::chaos::dice::Dice;
use crate::chaos::network::{Cable, skipped};
use crate::chaos::*;
use limosa_channel::{Channel, Listener, Options, Uri, ZeroCopy};
use limosa_demo::Settings;
use limosa_demo::settings::Transport;
use limosa_demo::state::{Role, State};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// A migration of 16 MiB that takes a quarter of a second, whose ends wait for each other for two thirds of one.
fn settings() -> Settings {
    let max_bandwidth = NonZeroU64::new(64 << 20);
    Settings { transport: Transport::Tcp, max_bandwidth, dirty_rate: 20 << 20, answer_timeout_ms: 700, ..small() }
}

/// Has the source send its guest over the cable.
fn set_off(cable: &Cable, source: &EndProcess, destination: &EndProcess, fresh: bool) {
    let at = Uri::Tcp { host: cable.address(2), port: 0 };
    let at = destination.monitor.listen("migrate-incoming", &at).unwrap();
    migrate(source, &at, fresh);
}

#[test]
fn a_cable_that_is_pulled_at_any_moment_leaves_one_guest_that_can_be_found() {
    if skipped() {
        return;
    }
    let cable = Cable::new();
    let mut outcomes = Vec::new();
    for seed in trials(8) {
        // On every other journey the kernel is lent the pages, on channels of their own.
        let settings = match seed % 2 {
            0 => settings(),
            _ => Settings { channels: 2, zero_copy: ZeroCopy::Msg, ..settings() },
        };
        let mut dice = Dice::new(seed ^ 0xcab1e);
        let (moment, pause) = (Duration::from_millis(dice.below(330)), dice.coin().then(|| dice.below(400)));
        println!("seed {seed}: pulled after {moment:?}, for {pause:?} ms");
        let mut scene = Scene::new();
        let source = scene.start(Role::Source, &settings, Some(cable.namespace(0)));
        let destination = scene.start(Role::Destination, &settings, Some(cable.namespace(1)));
        let (mut source, mut destination) = (scene.meet(source), scene.meet(destination));
        set_off(&cable, &source, &destination, true);
        thread::sleep(moment);
        cable.pull();
        if let Some(pause) = pause {
            thread::sleep(Duration::from_millis(pause));
            cable.put_back();
        }
        wait_stable(&mut source, &mut destination);
        // What was in the kernels' buffers may arrive now, and must not make either end's decision worse.
        cable.put_back();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(dice.below(300)) {
            wait_stable(&mut source, &mut destination);
        }
        let by_hand = source.status().is_some_and(|status| status.state == State::Undecided);
        let outcome = operate(&mut source, &mut destination, None, dice.coin());
        outcomes.push(outcome);
        match outcome {
            Whereabouts::Lost => panic!("lost, although no end was killed"),
            Whereabouts::Destination => drop(destination.memory()),
            Whereabouts::Source => {
                source.memory();
                let again = scene.start(Role::Destination, &settings, Some(cable.namespace(1)));
                let mut again = scene.meet(again);
                set_off(&cable, &source, &again, true);
                let outcome = operate(&mut source, &mut again, None, true);
                assert_eq!(outcome, Whereabouts::Destination, "another attempt: {}", words(&source.control));
                again.memory();
            }
        }
        assert_lawful(&scene, by_hand);
    }
    println!("{outcomes:?}");
}

#[test]
#[allow(unsafe_code, reason = "puts pages as guest memory is put")]
fn a_channel_whose_kernel_copies_what_it_is_lent_goes_on_by_splice() {
    if skipped() {
        return;
    }
    let cable = Cable::new();
    // A socket stays in the network that its thread was in.
    let enter = |end: usize| {
        let namespace = File::open(format!("/run/netns/{}", cable.namespace(end))).unwrap();
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
    };
    let page = vec![7; 4096];
    let pages: Vec<u8> = (0..500_000_u32).flat_map(u32::to_le_bytes).collect();
    thread::scope(|scope| {
        let listening = scope.spawn(|| {
            enter(1);
            Listener::bind(&Uri::Tcp { host: cable.address(2), port: 0 }, &Options::default()).unwrap()
        });
        let listener = listening.join().unwrap();
        let (uri, enter, page, pages) = (listener.local_uri().clone(), &enter, &page, &pages);
        let sending = scope.spawn(move || {
            enter(0);
            let channel = Channel::connect(&uri, &Options { zero_copy: ZeroCopy::Auto, ..Options::default() }).unwrap();
            // The peer could be anywhere.
            assert_eq!(channel.zero_copy(), ZeroCopy::Msg);
            for _ in 0..40 {
                let mut lending = channel.zero_copy_writer();
                lending.write_all(b"header", &[IoSlice::new(page)]).unwrap();
                lending.finish().unwrap();
            }
            assert_eq!(channel.zero_copy(), ZeroCopy::Splice);
            let counters = channel.counters();
            assert_eq!(
                (counters.zero_copy_completed, counters.zero_copy_copied),
                (counters.zero_copy_calls, counters.zero_copy_calls)
            );
            assert!((16..40).contains(&counters.zero_copy_calls), "{counters:?}");
            // What that way sends is right as well.
            let list = [&b"header"[..], pages]
                .map(|slice| libc::iovec { iov_base: slice.as_ptr().cast_mut().cast(), iov_len: slice.len() });
            let mut lending = channel.zero_copy_writer();
            // SAFETY: both slices outlive the call.
            unsafe { lending.write_pages(&list, 1) }.unwrap();
            lending.finish().unwrap();
            assert_eq!(channel.counters().spliced, pages.len() as u64);
        });
        let channel = listener.accept(Some(Duration::from_secs(30))).unwrap();
        let mut got = vec![0; 40 * (6 + 4096)];
        channel.read_exact(&mut got).unwrap();
        assert!(got.chunks(6 + 4096).all(|packet| packet == [&b"header"[..], page].concat()));
        let mut got = vec![0; 6 + pages.len()];
        channel.read_exact(&mut got).unwrap();
        assert!(got == [&b"header"[..], pages].concat());
        sending.join().unwrap();
    });
}
