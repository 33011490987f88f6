//! The postcopy source against a destination that behaves as QEMU's does.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::model::{Landed, Memory, Records, ask, pair, say};
use limosa_migrate::control::Stop;
use limosa_migrate::stored::{BlockRange, Milestone, PostcopyOptions, PostcopySource};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_stream::{Decoder, Event, ReturnMessage, postcopy};
use proptest::prelude::*;

fn impatient() -> PostcopyOptions {
    PostcopyOptions { answer_timeout: Duration::from_secs(10), ..PostcopyOptions::default() }
}

/// Answers the prologue's PING and the package's, then ends with SHUT when the stream does.
fn answer(channel: &limosa_channel::Channel, event: &Event) {
    match event {
        Event::Command(limosa_stream::Command::Ping(token)) => say(channel, &ReturnMessage::Pong(*token)),
        Event::Package { .. } => say(channel, &ReturnMessage::Pong(postcopy::PING_LOADED)),
        Event::EndOfStream => say(channel, &ReturnMessage::Shut(0)),
        _ => {}
    }
}

/// As [`answer`], of a destination that has these pages already.
fn answer_recovery(channel: &limosa_channel::Channel, memory: &Memory, had: &[PageBitmap], event: &Event) {
    match event {
        Event::Command(limosa_stream::Command::ReceiveBitmap { block }) => {
            let index = memory.start.blocks.iter().position(|known| known.name == *block).unwrap();
            let bitmap = had[index].to_le_bytes();
            // QEMU's fault thread may still leave out the name that the broken channel was told.
            say(channel, &ReturnMessage::RequestPages { block: None, start: 0, length: 4096 });
            say(channel, &ReturnMessage::ReceivedBitmap { block: block.clone(), bitmap });
        }
        Event::Command(limosa_stream::Command::PostcopyResume) => say(channel, &ReturnMessage::ResumeAck(1)),
        event => answer(channel, event),
    }
}

fn every_third(_: usize, page: u64) -> bool {
    page % 3 != 1
}

#[test]
fn every_stored_page_arrives_exactly_once_and_the_stream_ends() {
    let memory = Memory::new(&[5000, 7, 300], every_third);
    let (near, far) = pair();
    let handle = Handle::new();
    let loaded = AtomicBool::new(false);
    thread::scope(|scope| {
        let destination = scope.spawn(|| {
            let mut landed = Landed::new(&memory);
            Records::new(&memory, Decoder::new()).run(&far, &mut landed, |event| {
                answer(&far, event);
                true
            });
            landed
        });
        let stats = PostcopySource::new(&memory, near, &handle)
            .options(impatient())
            .on_milestone(|milestone| loaded.store(milestone == Milestone::DevicesLoaded, Ordering::Relaxed))
            .run()
            .unwrap();
        let landed = destination.join().unwrap();
        assert_eq!(landed.wrong, Vec::<String>::new());
        assert!(landed.ended);
        assert_eq!(landed.missing(&memory), 0);
        assert_eq!(stats.normal_pages, landed.received.iter().map(PageBitmap::count).sum::<u64>());
        assert_eq!(stats.requests, 0);
    });
}

#[test]
fn a_requested_page_comes_before_the_rest_of_the_background() {
    // A limit of 4 MiB/s makes the background slow: 5,000 pages would take 5 s.
    let memory = Memory::new(&[20_000], |_, _| true);
    let (near, far) = pair();
    let handle = Handle::new();
    handle.control.set_max_bandwidth(std::num::NonZeroU64::new(4 << 20));
    thread::scope(|scope| {
        let handle = &handle;
        let destination = scope.spawn(|| {
            let mut landed = Landed::new(&memory);
            let mut order = Vec::new();
            Records::new(&memory, Decoder::new()).run(&far, &mut landed, |event| {
                answer(&far, event);
                match event {
                    Event::Package { .. } => ask(&far, &memory, 0, 19_000),
                    Event::Page { offset, .. } => {
                        order.push(offset / 4096);
                        if offset / 4096 == 19_000 {
                            handle.control.set_max_bandwidth(None);
                        }
                    }
                    _ => {}
                }
                true
            });
            (landed, order)
        });
        let stats = PostcopySource::new(&memory, near, handle).options(impatient()).run().unwrap();
        let (landed, order) = destination.join().unwrap();
        assert_eq!(landed.wrong, Vec::<String>::new());
        assert_eq!(landed.missing(&memory), 0);
        let position = order.iter().position(|page| *page == 19_000).unwrap();
        assert!(position < 2000, "the requested page was the {position}th to come");
        assert_eq!(order.get(position + 1), Some(&19_001), "the background goes on near the fault");
        assert_eq!(stats.requests, 1);
    });
}

#[test]
fn a_requested_page_that_was_never_stored_is_answered_as_zero() {
    let memory = Memory::new(&[1000], |_, page| page != 500);
    let (near, far) = pair();
    let handle = Handle::new();
    thread::scope(|scope| {
        let destination = scope.spawn(|| {
            let mut landed = Landed::new(&memory);
            Records::new(&memory, Decoder::new()).run(&far, &mut landed, |event| {
                answer(&far, event);
                if let Event::Package { .. } = event {
                    ask(&far, &memory, 0, 500);
                }
                true
            });
            landed
        });
        let stats = PostcopySource::new(&memory, near, &handle).options(impatient()).run().unwrap();
        let landed = destination.join().unwrap();
        assert_eq!(landed.wrong, Vec::<String>::new());
        assert_eq!(stats.zero_pages, u64::from(landed.received[0].get(PageNumber(500))));
    });
}

#[test]
fn only_requested_pages_travel_on_the_preempt_channel() {
    let memory = Memory::new(&[30_000, 100], every_third);
    let (near, far) = pair();
    let (near_preempt, far_preempt) = pair();
    let handle = Handle::new();
    let asked = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let (memory, far, asked) = (&memory, &far, &asked);
        let urgent = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            let mut records = Records::new(memory, Decoder::for_preempt_channel(&memory.start.blocks).unwrap());
            records.run(&far_preempt, &mut landed, |_| true);
            landed
        });
        let main = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            Records::new(memory, Decoder::new()).run(far, &mut landed, |event| {
                answer(far, event);
                if let Event::Package { .. } = event {
                    for page in (0..30_000).rev().step_by(97) {
                        asked.lock().unwrap().push(page);
                        ask(far, memory, 0, page);
                    }
                }
                true
            });
            landed
        });
        let stats = PostcopySource::new(memory, near, &handle)
            .options(impatient())
            .preempt(Box::new(move || Ok(near_preempt)))
            .run()
            .unwrap();
        let main = main.join().unwrap();
        let urgent = urgent.join().unwrap();
        assert_eq!((main.wrong, urgent.wrong), (Vec::new(), Vec::new()));
        let asked = asked.lock().unwrap();
        for run in urgent.received[0].runs() {
            for page in run.iter() {
                assert!(asked.contains(&page.0), "page {page} was not asked for");
            }
        }
        let mut all = main.received[0].clone();
        let both = all.count() + urgent.received[0].count();
        all.union_with(&urgent.received[0]);
        assert_eq!(all.count(), both, "a page came on both channels");
        assert!(memory_is_covered(memory, &all));
        assert_eq!(stats.requests, urgent.received[0].count());
    });
}

fn memory_is_covered(memory: &Memory, received: &PageBitmap) -> bool {
    let mut wanted = limosa_migrate::stored::PageSource::stored_bitmap(memory, 0).clone();
    wanted.subtract(received);
    wanted.count() == 0
}

#[test]
fn a_source_that_cannot_be_read_closes_the_channel_and_never_ends_the_stream() {
    let memory = Memory::new(&[5000], |_, _| true);
    memory.reads_left.store(1000, Ordering::Relaxed);
    let (near, far) = pair();
    let handle = Handle::new();
    thread::scope(|scope| {
        let destination = scope.spawn(|| {
            let mut landed = Landed::new(&memory);
            Records::new(&memory, Decoder::new()).run(&far, &mut landed, |event| {
                answer(&far, event);
                true
            });
            landed
        });
        let error = PostcopySource::new(&memory, near, &handle).options(impatient()).run().unwrap_err();
        assert!(matches!(error, MigrateError::Source(_)), "{error}");
        let landed = destination.join().unwrap();
        assert!(!landed.ended);
        assert_eq!(landed.wrong, Vec::<String>::new(), "no page came wrong or as zero");
    });
}

#[test]
fn a_pause_breaks_off_and_a_recovery_sends_exactly_the_rest() {
    let memory = Memory::new(&[9000, 64], every_third);
    let (near, far) = pair();
    let handle = Handle::new();
    let mut landed = thread::scope(|scope| {
        let (handle, memory) = (&handle, &memory);
        let destination = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            let mut came = 0;
            Records::new(memory, Decoder::new()).run(&far, &mut landed, |event| {
                answer(&far, event);
                came += 1;
                if came == 2000 {
                    handle.control.stop(Stop::Pause);
                }
                true
            });
            landed
        });
        let error = PostcopySource::new(memory, near, handle).options(impatient()).run().unwrap_err();
        assert!(matches!(error, MigrateError::Paused), "{error}");
        destination.join().unwrap()
    });
    assert!(landed.missing(&memory) > 0 && !landed.ended);

    let (near, far) = pair();
    let handle = Handle::new();
    thread::scope(|scope| {
        let memory = &memory;
        let landed = &mut landed;
        let destination = scope.spawn(move || {
            let had = landed.received.clone();
            let mut records = Records::new(memory, Decoder::for_recovery(&memory.start.blocks, 2).unwrap());
            records.run(&far, landed, |event| {
                answer_recovery(&far, memory, &had, event);
                true
            });
        });
        let source = PostcopySource::new(memory, near, &handle).options(impatient());
        assert_eq!(source.recover().unwrap().requests, 0);
        destination.join().unwrap();
    });
    assert_eq!(landed.wrong, Vec::<String>::new());
    assert_eq!(landed.missing(&memory), 0);
    assert!(landed.ended);
}

#[test]
fn the_first_pages_come_before_all_others_in_their_order_also_after_a_recovery() {
    let memory = Memory::new(&[20_000, 64], |_, page| page % 5 != 4);
    let ranges = [(0, 15_000, 15_300), (1, 10, 20), (0, 7, 9), (0, 19_998, 20_000)];
    let first = ranges
        .map(|(block, start, end)| BlockRange { block, pages: PageRange::new(PageNumber(start), PageNumber(end)) });
    let wanted: Vec<_> = ranges
        .iter()
        .flat_map(|&(block, start, end)| (start..end).map(move |page| (block, page)))
        .filter(|(_, page)| page % 5 != 4)
        .collect();
    let options = || PostcopyOptions { batch_pages: 16, first: first.to_vec(), ..impatient() };
    let pages = |event: &Event| match event {
        Event::Page { block, offset } => Some((*block, offset / 4096)),
        _ => None,
    };
    let (near, far) = pair();
    let handle = Handle::new();
    let (mut landed, before) = thread::scope(|scope| {
        let (handle, memory) = (&handle, &memory);
        let destination = scope.spawn(move || {
            let (mut landed, mut order) = (Landed::new(memory), Vec::new());
            Records::new(memory, Decoder::new()).run(&far, &mut landed, |event| {
                answer(&far, event);
                order.extend(pages(event));
                if order.len() == 100 {
                    handle.control.stop(Stop::Pause);
                }
                true
            });
            (landed, order)
        });
        let error = PostcopySource::new(memory, near, handle).options(options()).run().unwrap_err();
        assert!(matches!(error, MigrateError::Paused), "{error}");
        destination.join().unwrap()
    });
    let sent_first = before.len().min(wanted.len());
    assert_eq!(before[..sent_first], wanted[..sent_first]);

    let (near, far) = pair();
    let handle = Handle::new();
    let left: Vec<_> = wanted.into_iter().filter(|page| !before.contains(page)).collect();
    let after = thread::scope(|scope| {
        let (memory, landed) = (&memory, &mut landed);
        let destination = scope.spawn(move || {
            let (had, mut order) = (landed.received.clone(), Vec::new());
            let mut records = Records::new(memory, Decoder::for_recovery(&memory.start.blocks, 2).unwrap());
            records.run(&far, landed, |event| {
                order.extend(pages(event));
                answer_recovery(&far, memory, &had, event);
                true
            });
            order
        });
        PostcopySource::new(memory, near, &handle).options(options()).recover().unwrap();
        destination.join().unwrap()
    });
    assert_eq!(after[..left.len()], left);
    assert_eq!((landed.wrong.len(), landed.missing(&memory), landed.ended), (0, 0, true));
}

#[test]
fn a_destination_that_fails_or_vanishes_or_stalls_is_an_error_of_its_own() {
    let memory = Memory::new(&[100], |_, _| true);
    for (status, expected) in [(Some(1), "status 1"), (None, "without reporting a result")] {
        let (near, far) = pair();
        let handle = Handle::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut landed = Landed::new(&memory);
                Records::new(&memory, Decoder::new()).run(&far, &mut landed, |event| {
                    if *event == Event::EndOfStream {
                        if let Some(status) = status {
                            say(&far, &ReturnMessage::Shut(status));
                        }
                        far.shutdown(limosa_channel::Shutdown::Both).unwrap();
                    } else {
                        answer(&far, event);
                    }
                    true
                });
            });
            let error = PostcopySource::new(&memory, near, &handle).options(impatient()).run().unwrap_err();
            let said = error.to_string();
            assert!(said.contains(expected) || said.contains("closed the return path before"), "{said}");
        });
    }
    // The destination neither reads nor answers.
    let (near, far) = pair();
    let handle = Handle::new();
    let options = PostcopyOptions { answer_timeout: Duration::from_millis(50), ..PostcopyOptions::default() };
    let error = PostcopySource::new(&memory, near, &handle)
        .options(options)
        .preempt(Box::new(|| unreachable!("the first PING was not answered")))
        .run()
        .unwrap_err();
    assert!(matches!(error, MigrateError::AnswerTimedOut { .. }), "{error}");
    drop(far);
}

#[test]
fn the_stream_does_not_end_before_devices_are_loaded_pages_placed_and_the_gate_is_open() {
    let memory = Memory::new(&[300], every_third);
    let (near, far) = pair();
    let handle = Handle::new();
    let asked = AtomicBool::new(false);
    thread::scope(|scope| {
        let (memory, far, asked) = (&memory, &far, &asked);
        let destination = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            let mut pings = Vec::new();
            Records::new(memory, Decoder::new()).run(far, &mut landed, |event| {
                match event {
                    // The devices are still being loaded, and wait for a page that was never stored.
                    Event::Package { .. } => ask(far, memory, 0, 1),
                    Event::Zero { .. } => {
                        assert!(pings.is_empty(), "asked before the devices were loaded");
                        say(far, &ReturnMessage::Pong(postcopy::PING_LOADED));
                    }
                    Event::Command(limosa_stream::Command::Ping(token)) if *token == postcopy::PING_PACKAGED => {
                        pings.push(*token);
                        say(far, &ReturnMessage::Pong(*token));
                    }
                    Event::EndOfStream => {
                        assert!(asked.load(Ordering::Relaxed), "the gate was not asked");
                        say(far, &ReturnMessage::Shut(0));
                    }
                    event => answer(far, event),
                }
                true
            });
            (landed, pings)
        });
        let placed = AtomicBool::new(false);
        PostcopySource::new(memory, near, &handle)
            .options(impatient())
            .on_milestone(|milestone| placed.store(milestone == Milestone::AllPlaced, Ordering::Relaxed))
            .end_condition(|| {
                assert!(placed.load(Ordering::Relaxed));
                asked.swap(true, Ordering::Relaxed)
            })
            .run()
            .unwrap();
        let (landed, pings) = destination.join().unwrap();
        assert_eq!(pings, [postcopy::PING_PACKAGED]);
        assert_eq!((landed.wrong.len(), landed.missing(memory), landed.ended), (0, 0, true));
    });
}

#[test]
fn a_page_that_the_preempt_channel_cannot_read_keeps_the_stream_from_ending() {
    let memory = Memory::new(&[64], |_, _| true);
    memory.reads_left.store(63, Ordering::Relaxed);
    let (near, far) = pair();
    let (near_preempt, _far_preempt) = pair();
    let handle = Handle::new();
    handle.control.set_max_bandwidth(std::num::NonZeroU64::new(256 << 10));
    thread::scope(|scope| {
        let (memory, far) = (&memory, &far);
        let destination = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            Records::new(memory, Decoder::new()).run(far, &mut landed, |event| {
                answer(far, event);
                if let Event::Package { .. } = event {
                    (0..64).for_each(|page| ask(far, memory, 0, page));
                }
                true
            });
            landed
        });
        let result = PostcopySource::new(memory, near, &handle)
            .options(PostcopyOptions { batch_pages: 1, ..impatient() })
            .preempt(Box::new(move || Ok(near_preempt)))
            .run();
        assert!(matches!(result, Err(MigrateError::Source(_))), "{result:?}");
        assert!(!destination.join().unwrap().ended);
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_asked_for_in_whatever_order_every_page_comes_once(
        pages in 1u64..3000,
        holes in proptest::collection::vec(any::<bool>(), 1..64),
        asks in proptest::collection::vec((0usize..2, any::<u64>()), 0..200),
    ) {
        let memory = Memory::new(&[pages, 50], |_, page| holes[usize::try_from(page).unwrap() % holes.len()]);
        let (near, far) = pair();
        let handle = Handle::new();
        thread::scope(|scope| {
            let destination = scope.spawn(|| {
                let mut landed = Landed::new(&memory);
                let mut asks = asks.iter();
                Records::new(&memory, Decoder::new()).run(&far, &mut landed, |event| {
                    answer(&far, event);
                    if let (Event::Package { .. } | Event::Page { .. }, Some((block, page))) = (event, asks.next()) {
                        let pages = memory.start.blocks[*block].pages();
                        ask(&far, &memory, *block, page % pages);
                    }
                    true
                });
                landed
            });
            PostcopySource::new(&memory, near, &handle).options(impatient()).run().unwrap();
            let landed = destination.join().unwrap();
            assert_eq!(landed.wrong, Vec::<String>::new());
            assert_eq!(landed.missing(&memory), 0);
        });
    }
}
