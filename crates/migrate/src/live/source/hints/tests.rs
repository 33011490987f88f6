//! The rule of the hints against a model of a guest that takes back what it has called free, in any order of events.

use std::sync::atomic::AtomicU64;

use limosa_memory::dirty::{DirtyLogs, DirtyPages, SoftwareDirtyBitmap, SoftwareDirtyLog, Writers};
use limosa_memory::{BlockOptions, FreePagesError, GuestMemory};
use limosa_page::{PageBitmap, PageNumber, PageRange};
use limosa_stream::{Configuration, DeviceSections};
use proptest::prelude::*;

use super::super::owned::Owned;
use super::*;
use crate::live::{LiveVm, VmError};

const PAGES: u64 = 32;

/// A VM of one block, whose memory is not looked at: the model has its contents.
struct Vm(GuestMemory);

impl Vm {
    fn new() -> Self {
        Self(GuestMemory::new(vec![BlockOptions::anonymous("ram", PAGES * 4096).map().unwrap()]).unwrap())
    }
}

impl LiveVm for Vm {
    fn configuration(&self) -> Configuration {
        Configuration::new("none")
    }
    fn memory(&self) -> &GuestMemory {
        &self.0
    }
    fn writers(&self) -> Writers {
        Writers::VCPUS
    }
    fn pause(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn resume(&self) -> Result<(), VmError> {
        Ok(())
    }
    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        Err("it has none".into())
    }
}

/// A device without a guest: the test says what comes of a request, and when.
#[derive(Default)]
struct Device {
    lists: Mutex<Vec<Arc<dyn FreePageSink>>>,
    stopped: AtomicU64,
    done: AtomicU64,
    deaf: bool,
}

impl FreePageHinting for Device {
    fn request_list(&self, to: Arc<dyn FreePageSink>) -> Result<(), FreePagesError> {
        if self.deaf {
            return Err(FreePagesError::NotOffered { why: "it has no driver".into() });
        }
        self.lists.lock().push(to);
        Ok(())
    }
    fn stop_list(&self) {
        self.stopped.fetch_add(1, Relaxed);
    }
    fn return_pages(&self) {
        self.done.fetch_add(1, Relaxed);
    }
}

/// The treatment of the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Kept,
    /// A list stays open over a reading of the log.
    NotClosed,
    /// Hints for an old list are taken for hints of the new one.
    AnyList,
}

/// Who has a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// A program of the guest: its contents matter.
    Guest,
    Free,
    /// The balloon's driver, which has told it.
    Driver,
}

/// A guest and its driver, an engine's round, and the destination.
struct Model<'v> {
    rule: Rule,
    guard: Owned<'v, Vm>,
    vm: &'v Vm,
    marker: SoftwareDirtyBitmap,
    queue: Arc<DirtyPageQueue>,
    device: Arc<Device>,
    owner: Vec<Owner>,
    /// How often a page was written, at the source, and as it is at the destination.
    here: Vec<u64>,
    there: Vec<u64>,
    /// The list that the driver works for: it may be behind.
    list: usize,
    /// Hints that the driver has sent and the device has not.
    under_way: Vec<(usize, usize)>,
}

impl<'v> Model<'v> {
    fn new(vm: &'v Vm, rule: Rule) -> Self {
        let log = SoftwareDirtyLog::new(&vm.0, Writers::VCPUS);
        let marker = log.bitmap();
        let logs = DirtyLogs::new(Writers::VCPUS, vec![Box::new(log)]).unwrap();
        let (queue, device) = (Arc::<DirtyPageQueue>::default(), Arc::<Device>::default());
        let hints = Hints::new(Arc::clone(&device) as _, Arc::clone(&queue), vm.memory().layout(), Progress::new());
        let mut guard = Owned::new(vm, logs, Vec::new()).with_hints(Some(hints));
        guard.start_logs().unwrap();
        let pages = usize::try_from(PAGES).unwrap();
        let mut model = Self {
            rule,
            guard,
            vm,
            marker,
            queue,
            device,
            owner: (0..pages).map(|page| if page % 3 == 0 { Owner::Free } else { Owner::Guest }).collect(),
            here: vec![1; pages],
            there: vec![0; pages],
            list: 0,
            under_way: Vec::new(),
        };
        model.queue.start(vec![PageBitmap::full(PAGES)]);
        model.guard.ask_for_free_pages().unwrap();
        model
    }

    fn write(&mut self, page: usize) {
        self.owner[page] = Owner::Guest;
        self.here[page] += 1;
        self.marker.mark(0, PageRange::starting_at(PageNumber(page as u64), 1));
    }

    /// An event, on a page if it concerns one.
    fn event(&mut self, kind: u8, page: usize) {
        match (kind % 12, self.owner[page]) {
            (0 | 1, Owner::Guest) => self.write(page),
            (2, Owner::Guest) => self.owner[page] = Owner::Free,
            // An allocation; or the driver's shrinker gives a page back, and a program gets it at once.
            (3 | 4, Owner::Free | Owner::Driver) => self.write(page),
            (5, Owner::Driver) => self.owner[page] = Owner::Free,
            (6 | 7, Owner::Free) => {
                self.owner[page] = Owner::Driver;
                self.under_way.push((self.list, page));
            }
            (8 | 9, _) => self.tell(page),
            (10, _) => {
                self.list = self.device.lists.lock().len() - 1;
            }
            (11, _) if page.is_multiple_of(4) => self.next_round(page.is_multiple_of(8)),
            (11, _) => drop(self.send(page as u64)),
            _ => {}
        }
    }

    /// A hint arrives, not in any order.
    fn tell(&mut self, at: usize) {
        if self.under_way.is_empty() {
            return;
        }
        let (list, page) = self.under_way.swap_remove(at % self.under_way.len());
        let lists = self.device.lists.lock().clone();
        let list = if self.rule == Rule::AnyList { lists.len() - 1 } else { list };
        let at = page as u64 * 4096;
        lists[list].add_range(at..at + 4096);
    }

    /// Sends this number of pages. Returns whether there were any.
    fn send(&mut self, most: u64) -> bool {
        let mut runs = Vec::new();
        let found = self.queue.claim_pages(&mut runs, most.max(1)).is_some();
        for page in runs.iter().flat_map(PageRange::iter) {
            let page = usize::try_from(page.0).unwrap();
            self.there[page] = self.here[page];
        }
        found
    }

    fn next_round(&mut self, asks: bool) {
        while self.send(PAGES) {}
        let mut dirty = DirtyPages::new(&self.vm.0);
        self.guard.fetch(&mut dirty).unwrap();
        if self.rule == Rule::NotClosed {
            self.queue.stay_open();
        }
        self.queue.start(dirty.blocks().to_vec());
        if asks {
            self.guard.ask_for_free_pages().unwrap();
        }
    }

    /// The VM stops, and the rest is sent. The page that was lost, if one was.
    fn finish(mut self) -> Option<usize> {
        self.next_round(false);
        while !self.under_way.is_empty() {
            self.tell(0);
        }
        while self.send(PAGES) {}
        (0..self.owner.len()).find(|page| self.owner[*page] == Owner::Guest && self.here[*page] != self.there[*page])
    }
}

fn run(rule: Rule, events: &[(u8, u8)]) -> Option<usize> {
    let vm = Vm::new();
    let mut model = Model::new(&vm, rule);
    for (kind, page) in events {
        model.event(*kind, usize::from(*page) % model.owner.len());
    }
    model.finish()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_write_is_lost_in_any_order_of_hints_writes_and_rounds(events in prop::collection::vec(any::<(u8, u8)>(), 0..400)) {
        prop_assert_eq!(run(Rule::Kept, &events), None);
    }
}

#[test]
fn the_model_loses_writes_as_soon_as_the_rule_is_taken_out() {
    for rule in [Rule::NotClosed, Rule::AnyList] {
        let mut seed = 88_172_645_463_325_252_u64;
        let mut event = || {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            let [kind, page, ..] = seed.to_le_bytes();
            (kind, page)
        };
        let lost = (0..200).filter(|_| run(rule, &(0..400).map(|_| event()).collect::<Vec<_>>()).is_some()).count();
        assert!(lost > 0, "{rule:?}");
    }
}

fn hints(device: &Arc<Device>, queue: &Arc<DirtyPageQueue>) -> Hints {
    Hints::new(Arc::clone(device) as _, Arc::clone(queue), Vm::new().memory().layout(), Progress::new())
}

#[test]
fn the_guest_gets_its_pages_back_once_on_every_way_out() {
    let (device, queue) = (Arc::<Device>::default(), Arc::<DirtyPageQueue>::default());
    drop(hints(&device, &queue));
    assert_eq!(device.done.load(Relaxed), 0, "it was never asked");
    let mut asked = hints(&device, &queue);
    asked.ask();
    asked.end();
    drop(asked);
    assert_eq!(device.done.load(Relaxed), 1);
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let mut asked = hints(&device, &queue);
        asked.ask();
        std::panic::resume_unwind(Box::new(()));
    }));
    assert!(panicked.is_err());
    assert_eq!(device.done.load(Relaxed), 2);
}

#[test]
fn a_list_is_waited_for_until_it_is_complete_and_a_guest_that_cannot_be_asked_is_not() {
    let (device, queue) = (Arc::<Device>::default(), Arc::<DirtyPageQueue>::default());
    let mut asked = hints(&device, &queue);
    asked.ask();
    let (now, tick) = (Instant::now(), Duration::from_millis(1));
    assert!(asked.wait(Some(now + Duration::from_secs(3600)), tick));
    assert!(!asked.wait(Some(now), tick), "the time is over");
    assert!(asked.wait(None, tick), "no time is ever over");
    asked.ask();
    let lists = device.lists.lock().clone();
    lists[0].complete();
    assert!(asked.wait(Some(now + Duration::from_secs(3600)), tick), "the end of an old list is none");
    lists[1].complete();
    assert!(!asked.wait(Some(now + Duration::from_secs(3600)), tick));
    let HintStats { lists, complete, list_took, .. } = asked.stats();
    assert_eq!((lists, complete), (2, 1));
    assert!(list_took.is_some());

    let deaf = Arc::new(Device { deaf: true, ..Device::default() });
    let mut asked = hints(&deaf, &queue);
    asked.ask();
    assert!(!asked.wait(Some(now + Duration::from_secs(3600)), tick));
    assert_eq!(asked.stats().refused.as_deref(), Some("the guest does not report its free pages: it has no driver"));
}

#[test]
fn what_is_no_memory_is_counted_and_passed_over() {
    let (device, queue) = (Arc::<Device>::default(), Arc::<DirtyPageQueue>::default());
    queue.remember_free(vec![PageBitmap::new(PAGES)]);
    queue.start(vec![PageBitmap::full(PAGES)]);
    let mut asked = hints(&device, &queue);
    asked.ask();
    let list = Arc::clone(&device.lists.lock()[0]);
    let nowhere = [(0, 0), (1, 4096), (u64::MAX - 4096, u64::MAX), (PAGES * 4096, u64::MAX), (8192, 0), (4096, 8191)];
    for (start, end) in nowhere {
        list.add_range(start..end);
    }
    assert_eq!((queue.taken(), asked.stats().outside, asked.stats().ranges), (0, 6, 0));
    // Overlapping ones count once.
    list.add_range(8192..5 * 4096);
    list.add_range(0..6 * 4096);
    assert_eq!((queue.taken(), asked.stats().ranges), (6, 2));
    asked.close();
    list.add_range(0..u64::MAX);
    assert_eq!((queue.taken(), asked.stats().late), (6, 1));
    let free: Vec<_> = queue.take_free()[0].runs().collect();
    assert_eq!(free, [PageRange::whole_block(6)]);
}
