//! Populating with threads: all of it, up to a stop, and not beyond what a control group may have.

use std::io::{Read as _, Write as _};
use std::process::Stdio;

use limosa_memory::{BlockOptions, GuestMemory, MemcgHeadroom, PopulateStats, Populator};
use limosa_page::{PAGE_SIZE, PageNumber, PageRange};
use limosa_testkit::{HugePages, MemoryGroup};

const HUGE: u64 = 2 << 20;

fn range(start: u64, pages: u64) -> PageRange {
    PageRange::starting_at(PageNumber(start), pages)
}

fn with_workers(populator: &Populator<'_>, wanted: impl FnOnce()) {
    std::thread::scope(|scope| {
        let workers = [(); 3].map(|()| scope.spawn(|| populator.run()));
        wanted();
        for worker in workers {
            worker.join().unwrap().unwrap();
        }
    });
}

#[test]
fn all_that_was_wanted_is_populated_and_nothing_else() {
    let blocks = [BlockOptions::anonymous("ram", 5000 * PAGE_SIZE), BlockOptions::memfd("video", 3000 * PAGE_SIZE)];
    let memory = GuestMemory::new(blocks.map(|block| block.map().unwrap()).into()).unwrap();
    let populator = Populator::with_headroom(&memory, MemcgHeadroom::unlimited());
    with_workers(&populator, || {
        populator.add(0, range(3, 2000));
        populator.add(1, range(2990, 500));
        populator.add(0, range(4000, 1));
        populator.add(2, range(0, 10));
        populator.finish();
    });
    assert_eq!(populator.stats(), PopulateStats { populated: 2011, left_out: 0 });
    let found = |block: usize| {
        let block = memory.block(block).unwrap();
        block.populated(block.pages()).unwrap().runs().collect::<Vec<_>>()
    };
    assert_eq!(found(0), [range(3, 2000), range(4000, 1)]);
    assert_eq!(found(1), [range(2990, 10)]);
}

#[test]
fn memory_is_there_before_the_pages_of_a_full_guest_come() {
    let memory = GuestMemory::new(vec![BlockOptions::memfd("ram", 20_000 * PAGE_SIZE).map().unwrap()]).unwrap();
    let populator = Populator::with_headroom(&memory, MemcgHeadroom::unlimited());
    with_workers(&populator, || {
        for pages in range(0, 10_000).chunks(100) {
            populator.note_arrived(0, pages);
        }
        populator.finish();
    });
    // Nothing has come, so all that has memory was populated: nearly all that was reported, and a 32nd ahead.
    let stats = populator.stats();
    assert_eq!(stats.left_out, 0);
    assert!((7000..=8000).contains(&stats.populated), "{stats:?}");
    let found = memory.block(0).unwrap().populated(range(0, 20_000)).unwrap();
    assert_eq!(found.count(), stats.populated);
    assert!(found.runs().last().unwrap().end <= PageNumber(10_000 + 10_000 / 32));
}

#[test]
fn memory_may_become_known_while_threads_wait_and_what_came_before_is_forgotten() {
    let memory = GuestMemory::new(vec![BlockOptions::memfd("ram", 5000 * PAGE_SIZE).map().unwrap()]).unwrap();
    let populator = Populator::unbound(MemcgHeadroom::unlimited());
    with_workers(&populator, || {
        populator.add(0, range(0, 100));
        populator.note_arrived(0, range(0, 5000));
        populator.bind(&memory);
        populator.add(0, range(4000, 100));
        populator.finish();
    });
    assert_eq!(populator.stats(), PopulateStats { populated: 100, left_out: 0 });
    assert_eq!(memory.block(0).unwrap().populated(range(0, 5000)).unwrap().count(), 100);
    let never = Populator::unbound(MemcgHeadroom::unlimited());
    with_workers(&never, || never.stop());
}

#[test]
fn a_stop_leaves_out_what_waits() {
    let memory = GuestMemory::new(vec![BlockOptions::memfd("ram", 1 << 30).map().unwrap()]).unwrap();
    let populator = Populator::with_headroom(&memory, MemcgHeadroom::unlimited());
    populator.add(0, range(0, 1 << 18));
    populator.stop();
    populator.add(0, range(0, 100));
    populator.run().unwrap();
    assert_eq!(populator.stats(), PopulateStats { populated: 0, left_out: (1 << 18) + 100 });
    assert_eq!(memory.block(0).unwrap().populated(range(0, 1 << 18)).unwrap().count(), 0);
}

#[test]
fn a_pool_without_huge_pages_left_ends_it_and_not_the_process() {
    let _pages = HugePages::reserve(2 * HUGE).unwrap();
    // More than the pool has, also if other processes reserve some meanwhile.
    let memory = BlockOptions::anonymous("ram", 1 << 40).huge_pages(HUGE).map().unwrap();
    let memory = GuestMemory::new(vec![memory]).unwrap();
    let populator = Populator::new(&memory);
    populator.add(0, range(0, 512));
    // The last one is at the end of an address range that no machine has memory for; only its own page is asked for.
    populator.finish();
    populator.run().unwrap();
    assert_eq!(populator.stats(), PopulateStats { populated: 512, left_out: 0 });
    drop(populator);
    let free = |name: &str| {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse::<u64>().unwrap()
    };
    let populator = Populator::new(&memory);
    populator.add(0, range(512, (free("HugePages_Total:") + 4) * 512));
    populator.finish();
    populator.run().unwrap();
    assert!(populator.stats().left_out >= 512, "{:?}", populator.stats());
}

#[test]
fn huge_pages_are_asked_for_and_refused_as_wished() {
    let block = BlockOptions::anonymous("ram", 8 * HUGE).map().unwrap();
    let start = format!("{:x}-", block.host_address().addr());
    let flags = || {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let own = smaps.lines().skip_while(|line| !line.starts_with(&start));
        let flags = own.into_iter().find(|line| line.starts_with("VmFlags:")).unwrap();
        flags.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    block.advise_huge_pages(block.pages(), true).unwrap();
    assert!(flags().contains(&"hg".to_owned()), "{:?}", flags());
    block.advise_huge_pages(block.pages(), false).unwrap();
    assert!(flags().contains(&"nh".to_owned()), "{:?}", flags());
    // Pages of the pool are always huge.
    let pool = BlockOptions::anonymous("ram", HUGE).huge_pages(HUGE).map().unwrap();
    pool.advise_huge_pages(pool.pages(), false).unwrap();
}

const LIMITED: &str = "LIMOSA_TEST_LIMITED";

/// The other process of the test below: wants four times the memory that it may have.
#[test]
fn limited_process() {
    if std::env::var_os(LIMITED).is_none() {
        return;
    }
    // Until it is in its control group.
    std::io::stdin().read_exact(&mut [0]).unwrap();
    let memory = GuestMemory::new(vec![BlockOptions::memfd("ram", 512 << 20).map().unwrap()]).unwrap();
    let populator = Populator::new(&memory);
    with_workers(&populator, || {
        populator.add(0, range(0, 1 << 17));
        populator.finish();
    });
    let stats = populator.stats();
    assert_eq!(stats.populated + stats.left_out, 1 << 17);
    assert!(stats.populated * PAGE_SIZE >= 32 << 20, "{stats:?}: some of it fits");
    assert!(stats.populated * PAGE_SIZE <= 128 << 20, "{stats:?}");
}

#[test]
fn a_process_in_a_control_group_populates_what_it_may_have_and_is_not_killed() {
    let group = MemoryGroup::create("populate", 128 << 20).unwrap();
    let mut command = limosa_testkit::own_test!(limited_process);
    command.env(LIMITED, "1");
    let mut limited = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    group.add(limited.id()).unwrap();
    limited.stdin.take().unwrap().write_all(&[1]).unwrap();
    let output = limited.wait_with_output().unwrap();
    assert!(output.status.success(), "{}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    assert_eq!(group.killed().unwrap(), 0);
}
