//! The postcopy source against a destination whose memory is made of huge pages: a host page comes whole, on one
//! channel, with nothing between its pages, and once; for all requests, wherever it breaks off.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use crate::model::{Landed, Memory, Records, ask_host_page, pair, say};
use limosa_migrate::control::Stop;
use limosa_migrate::stored::{PageSource, PostcopyOptions, PostcopySource};
use limosa_migrate::{Handle, MigrateError};
use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_stream::{Command, Decoder, Event, ReturnMessage, postcopy};
use proptest::prelude::*;

/// Options for a destination whose blocks have this number of pages a host page.
fn options(memory: &Memory, each: &[u64]) -> PostcopyOptions {
    let sizes = memory.start.blocks.iter().zip(each).map(|(block, each)| (block.name.clone(), each * 4096));
    PostcopyOptions {
        answer_timeout: Duration::from_secs(10),
        page_sizes: sizes.collect(),
        ..PostcopyOptions::default()
    }
}

/// The destination's behaviour.
#[derive(Debug, Clone, Default)]
struct Script {
    /// Blocks and host pages to ask for, one at each event.
    asks: Vec<(usize, u64)>,
    /// Stop the job after this number of events.
    stop_after: Option<usize>,
    preempt: bool,
}

/// Runs a postcopy of `memory`, from its start or as a recovery of a destination that tells `had`; returns what landed
/// on the main channel and on the preempt channel.
fn transfer(
    memory: &Memory,
    each: &[u64],
    script: &Script,
    had: Option<&[PageBitmap]>,
) -> (Result<limosa_migrate::stats::PostcopyStats, MigrateError>, Landed, Landed) {
    let (near, far) = pair();
    let (near_preempt, far_preempt) = pair();
    let handle = Handle::new();
    thread::scope(|scope| {
        let (far, handle) = (&far, &handle);
        let urgent = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            let decoder = Decoder::for_preempt_channel(&memory.start.blocks).unwrap();
            Records::new(memory, decoder).with_host_pages(each).run(&far_preempt, &mut landed, |_| true);
            landed
        });
        let main = scope.spawn(move || {
            let mut landed = Landed::new(memory);
            let (mut asks, mut events, mut asking) = (script.asks.iter(), 0, false);
            let decoder = match had {
                None => Decoder::new(),
                Some(_) => Decoder::for_recovery(&memory.start.blocks, 2).unwrap(),
            };
            Records::new(memory, decoder).with_host_pages(each).run(far, &mut landed, |event| {
                match event {
                    Event::Command(Command::PostcopyAdvise(Some(sizes))) => {
                        assert_eq!(sizes.summary, each.iter().fold(0, |all, each| all | (each * 4096)));
                    }
                    Event::RamStart(blocks) => {
                        let listed: Vec<_> =
                            blocks.iter().map(|block| block.page_size.unwrap_or(4096) / 4096).collect();
                        assert_eq!(listed, each);
                    }
                    Event::Command(Command::Ping(token)) => say(far, &ReturnMessage::Pong(*token)),
                    Event::Package { .. } => {
                        asking = true;
                        say(far, &ReturnMessage::Pong(postcopy::PING_LOADED));
                    }
                    Event::Command(Command::ReceiveBitmap { block }) => {
                        let index = memory.start.blocks.iter().position(|known| known.name == *block).unwrap();
                        let bitmap = had.unwrap()[index].to_le_bytes();
                        say(far, &ReturnMessage::ReceivedBitmap { block: block.clone(), bitmap });
                    }
                    Event::Command(Command::PostcopyResume) => {
                        asking = true;
                        say(far, &ReturnMessage::ResumeAck(1));
                    }
                    Event::EndOfStream => say(far, &ReturnMessage::Shut(0)),
                    _ => {}
                }
                events += 1;
                if asking && let Some((block, host_page)) = asks.next() {
                    ask_host_page(far, memory, *block, *host_page, each[*block]);
                }
                if script.stop_after == Some(events) {
                    handle.control.stop(Stop::Pause);
                }
                true
            });
            landed
        });
        let mut source = PostcopySource::new(memory, near, handle).options(options(memory, each));
        if script.preempt {
            source = source.preempt(Box::new(move || Ok(near_preempt)));
        } else {
            drop(near_preempt);
        }
        let result = if had.is_none() { source.run() } else { source.recover() };
        (result, main.join().unwrap(), urgent.join().unwrap())
    })
}

/// The pages of both channels; none may have come on both.
fn together(main: &Landed, urgent: &Landed) -> Vec<PageBitmap> {
    let both = main.received.iter().zip(&urgent.received).map(|(main, urgent)| {
        let mut all = main.clone();
        all.union_with(urgent);
        assert_eq!(all.count(), main.count() + urgent.count(), "a page came on both channels");
        all
    });
    both.collect()
}

/// The host pages with a page that is set, as the pages they consist of.
fn widened(pages: &PageBitmap, each: u64) -> PageBitmap {
    let mut all = PageBitmap::new(pages.len());
    for run in pages.runs() {
        let end = run.end.0.div_ceil(each) * each;
        all.set_range(PageRange::new(PageNumber(run.start.0 / each * each), PageNumber(end)));
    }
    all
}

#[test]
fn a_host_page_of_two_mib_with_holes_comes_whole_and_an_empty_one_only_if_it_is_asked_for() {
    // Host page 0 has a third of its pages, 1 none, 2 one, 3 none, 4 all.
    let memory = Memory::new(&[5 * 512, 7], |block, page| {
        block == 1 || matches!((page / 512, page % 512), (0, at) if at % 3 == 0) || page == 1500 || page / 512 == 4
    });
    for preempt in [false, true] {
        let script = Script { asks: vec![(0, 3), (0, 3), (0, 2)], preempt, ..Script::default() };
        let (result, main, urgent) = transfer(&memory, &[512, 1], &script, None);
        let stats = result.unwrap();
        assert_eq!((&main.wrong, &urgent.wrong), (&vec![], &vec![]));
        assert!(main.ended);
        let all = together(&main, &urgent);
        let whole: Vec<u64> = (0..5).filter(|page| all[0].get(PageNumber(page * 512))).collect();
        assert_eq!(whole, [0, 2, 3, 4]);
        assert_eq!((all[0].count(), all[1].count()), (4 * 512, 7));
        assert_eq!(stats.normal_pages, 171 + 1 + 512 + 7);
        assert_eq!(stats.zero_pages, (512 - 171) + 511 + 512);
        if preempt {
            assert!(urgent.received[0].get(PageNumber(3 * 512)), "what was asked for travels on its own channel");
        }
    }
}

#[test]
fn a_host_page_that_came_in_part_is_sent_whole_again() {
    let memory = Memory::new(&[4 * 16], |_, page| page % 5 != 0);
    let mut had = PageBitmap::new(64);
    // All of host page 0, all but one page of 1, one page of 2.
    had.set_range(PageRange::new(PageNumber(0), PageNumber(31)));
    had.set(PageNumber(40));
    let (result, main, urgent) = transfer(&memory, &[16], &Script::default(), Some(&[had]));
    result.unwrap();
    assert_eq!((&main.wrong, urgent.received[0].count()), (&vec![], 0));
    assert_eq!(main.received[0].runs().collect::<Vec<_>>(), [PageRange::new(PageNumber(16), PageNumber(64))]);
}

#[test]
fn page_sizes_that_do_not_fit_the_vm_are_refused_before_anything_is_sent() {
    let memory = Memory::new(&[512 + 1], |_, _| true);
    for (name, size) in [("block0", 2 << 20), ("block0", 3 << 12), ("other", 4096)] {
        let (near, far) = pair();
        let handle = Handle::new();
        let page_sizes = BTreeMap::from([(name.to_owned(), size)]);
        let options = PostcopyOptions { page_sizes, ..PostcopyOptions::default() };
        let error = PostcopySource::new(&memory, near, &handle).options(options).run().unwrap_err();
        assert!(matches!(&error, MigrateError::PageSize { block, .. } if block == name), "{error}");
        assert_eq!(far.read(&mut [0; 64]).unwrap_or_default(), 0, "something was sent");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn whatever_is_asked_for_and_wherever_it_breaks_off_every_host_page_comes_whole_and_once(
        shape in proptest::collection::vec((prop_oneof![Just(1u64), Just(2), Just(16), Just(512)], 1u64..12), 1..4),
        holes in proptest::collection::vec(any::<bool>(), 1..700),
        asks in proptest::collection::vec((any::<usize>(), any::<u64>()), 0..60),
        stop_after in proptest::option::of(0usize..6000),
        torn in proptest::collection::vec(any::<u64>(), 0..20),
        (preempt, preempt_again) in any::<(bool, bool)>(),
    ) {
        let each: Vec<u64> = shape.iter().map(|(each, _)| *each).collect();
        let lengths: Vec<u64> = shape.iter().map(|(each, host_pages)| each * host_pages).collect();
        let memory = Memory::new(&lengths, |_, page| holes[usize::try_from(page).unwrap() % holes.len()]);
        let asks: Vec<_> = asks.into_iter().map(|(block, page)| (block % shape.len(), page % shape[block % shape.len()].1)).collect();
        let script = Script { asks: asks.clone(), stop_after, preempt };
        let (result, main, urgent) = transfer(&memory, &each, &script, None);
        prop_assert_eq!((&main.wrong, &urgent.wrong), (&vec![], &vec![]));
        let mut received = together(&main, &urgent);
        for run in urgent.received.iter().enumerate().flat_map(|(block, pages)| pages.runs().map(move |run| (block, run))) {
            for page in run.1.iter() {
                prop_assert!(asks.contains(&(run.0, page.0 / each[run.0])), "page {page} of block {} was not asked for", run.0);
            }
        }
        match result {
            Ok(_) => prop_assert!(main.ended),
            // Stopped between the end of the stream and its answer: every page has been placed, as is checked below.
            Err(MigrateError::Paused) if main.ended => {}
            Err(MigrateError::Paused) => {
                // Parts of host pages are told as well: they were never placed, and count for nothing.
                let report = Mutex::new(received.clone());
                for (index, page) in torn.iter().enumerate() {
                    let block = index % shape.len();
                    let page = PageNumber(page % lengths[block]);
                    if each[block] > 1 && !received[block].get(page) {
                        report.lock().unwrap()[block].set(page);
                        let whole = PageRange::starting_at(PageNumber(page.0 / each[block] * each[block]), each[block]);
                        if report.lock().unwrap()[block].count_in(whole) == each[block] {
                            report.lock().unwrap()[block].clear(page);
                        }
                    }
                }
                let report = report.into_inner().unwrap();
                let script = Script { asks, stop_after: None, preempt: preempt_again };
                let (result, main, urgent) = transfer(&memory, &each, &script, Some(&report));
                prop_assert!(result.is_ok(), "{:?}", result.err());
                prop_assert_eq!((&main.wrong, &urgent.wrong), (&vec![], &vec![]));
                prop_assert!(main.ended);
                for (before, now) in received.iter_mut().zip(together(&main, &urgent)) {
                    prop_assert_eq!(before.count() + now.count(), { before.union_with(&now); before.count() }, "a page came again");
                }
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
        for (block, received) in received.iter().enumerate() {
            prop_assert!(*received == widened(received, each[block]), "parts of host pages came");
            let mut missing = memory.stored_bitmap(block).clone();
            missing.subtract(received);
            prop_assert_eq!(missing.count(), 0);
        }
    }
}
