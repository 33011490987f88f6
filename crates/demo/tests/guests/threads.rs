//! The guest whose processors are threads: it keeps its memory right, and a log of its writes misses none.
#![allow(missing_docs, reason = "a test")]

use std::sync::Arc;

use crate::acts::{copy, let_it_write};
use limosa_demo::guest::{self, GuestError, GuestKind, GuestOptions, LogKind, Rate};
use limosa_memory::dirty::DirtyPages;
use limosa_memory::{BlockOptions, GuestMemory};

fn memory() -> Arc<GuestMemory> {
    memory_of(3 << 20, 1 << 20)
}

fn memory_of(ram: u64, video: u64) -> Arc<GuestMemory> {
    let blocks = [("pc.ram", ram), ("vga.vram", video)].map(|(name, length)| BlockOptions::memfd(name, length));
    Arc::new(GuestMemory::new(blocks.map(|options| options.map().unwrap()).into()).unwrap())
}

fn busy() -> GuestOptions {
    GuestOptions { rate: Rate::Max, writers: 3, ..GuestOptions::default() }
}

#[test]
fn a_paused_guest_finds_its_memory_right_however_often_it_ran() {
    let guest = guest::boot(GuestKind::Threads, memory(), &busy()).unwrap();
    let mut before = 0;
    for _ in 0..20 {
        let_it_write(&*guest, 700);
        let verified = guest.verify().unwrap();
        assert!(verified.writes >= before + 700);
        assert_eq!(verified.pages, 1024);
        assert!(verified.zero_pages > 0);
        assert_eq!(guest.verify().unwrap(), verified, "nothing writes while it is paused");
        before = verified.writes;
    }
}

#[test]
fn a_guest_goes_on_in_copied_memory_and_notices_memory_that_lacks_one_page() {
    let source = guest::boot(GuestKind::Threads, memory(), &busy()).unwrap();
    let_it_write(&*source, 5000);
    let state = source.save().unwrap();

    let target = guest::receive(GuestKind::Threads, memory(), LogKind::Best).unwrap();
    assert!(matches!(target.verify(), Err(GuestError::NoState)));
    copy(source.memory(), target.memory(), &DirtyPages::full(source.memory()));
    target.load(&state).unwrap();
    assert_eq!(target.verify().unwrap(), source.verify().unwrap());
    let_it_write(&*target, 5000);
    assert!(target.verify().unwrap().writes >= source.writes() + 5000);

    target.memory().block(0).unwrap().write(77 * 4096, &[0xee; 8]).unwrap();
    assert!(matches!(target.verify(), Err(GuestError::Damaged { page: 77, offset: 0, .. })));
    let_it_write(&*target, 3000);
    assert!(
        matches!(target.verify(), Err(GuestError::Damaged { page: 77, .. })),
        "a writer noticed before it wrote there"
    );
}

#[test]
fn what_a_running_guest_must_not_be_asked_is_refused() {
    let guest = guest::boot(GuestKind::Threads, memory(), &busy()).unwrap();
    guest.run().unwrap();
    assert!(matches!(guest.verify(), Err(GuestError::NotPaused(_))));
    assert!(matches!(guest.save(), Err(GuestError::NotPaused(_))));
    assert!(matches!(guest.load(&[]), Err(GuestError::NotPaused(_))));
}

#[test]
fn options_that_do_not_fit_the_memory_are_refused() {
    let wrong = [
        GuestOptions { working_set: Some(5 << 20), ..GuestOptions::default() },
        GuestOptions { working_set: Some(0), ..GuestOptions::default() },
        GuestOptions { filled: Some(5 << 20), ..GuestOptions::default() },
        GuestOptions { writers: 0, ..GuestOptions::default() },
        GuestOptions { writers: 65, ..GuestOptions::default() },
        GuestOptions { writers: 3, working_set: Some(8192), ..GuestOptions::default() },
    ];
    for options in wrong {
        let refused = guest::boot(GuestKind::Threads, memory(), &options).err().expect("refused");
        assert!(matches!(refused, GuestError::Options { .. }), "{refused}");
    }
}

#[test]
fn a_shadow_kept_by_fetched_pages_alone_is_equal_at_every_pause_of_the_guest() {
    for log in [LogKind::WpAsync, LogKind::WpThread] {
        let options = GuestOptions { log, working_set: Some(320 << 10), ..busy() };
        let guest = guest::boot(GuestKind::Threads, memory_of(256 << 10, 128 << 10), &options).unwrap();
        let shadow = guest::receive(GuestKind::Threads, memory_of(256 << 10, 128 << 10), log).unwrap();
        let mut logs = guest.dirty_logs().unwrap();
        logs.start().unwrap();
        copy(guest.memory(), shadow.memory(), &DirtyPages::full(guest.memory()));
        for round in 0..1000 {
            guest.run().unwrap();
            // Some fetches while it writes, the last one while it does not.
            for _ in 0..round % 3 {
                let before = guest.writes();
                while guest.writes() == before {
                    std::thread::yield_now();
                }
                let mut dirty = DirtyPages::new(guest.memory());
                logs.fetch(&mut dirty).unwrap();
                copy(guest.memory(), shadow.memory(), &dirty);
            }
            guest.pause().unwrap();
            let mut dirty = DirtyPages::new(guest.memory());
            logs.fetch(&mut dirty).unwrap();
            copy(guest.memory(), shadow.memory(), &dirty);
            shadow.load(&guest.save().unwrap()).unwrap();
            let (mine, its) = (guest.verify().unwrap(), shadow.verify());
            assert_eq!(its.unwrap_or_else(|error| panic!("{log:?}, round {round}: {error}")), mine);
        }
        logs.stop().unwrap();
        assert!(guest.writes() > 1000, "{log:?}: it hardly ran");
    }
}
