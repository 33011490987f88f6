//! Requests to the guest that take several steps: a list of free pages, after squeezing the guest or not.
//!
//! Steps are taken on the server's clock, never by the program that asked: it may be killed, and the guest gets its
//! memory back all the same. **Law: a job that ends, in any way, has put the target back and sent DONE; and every job
//! ends**, even if the guest never answers: each step has a time limit, a guest has to come nearer to the value that it
//! is asked for all the time, and a list names no more than there is. What people order meanwhile is the target from
//! then on, and nothing is put back over it.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_balloon::{Balloon, TargetTooSmall};
use limosa_memory::{FreePageHinting as _, FreePageSink};
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};

use crate::remedy;

/// How long a guest may not respond to a request.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a step may take, regardless of the guest's answers: this long, and for each GiB of the guest's memory
/// [`FOR_A_GIB`] more.
const LONGEST: Duration = Duration::from_secs(60);
/// A guest that zeroes what it lists (`init_on_alloc=1`) takes a second for it.
const FOR_A_GIB: Duration = Duration::from_secs(2);
/// Least memory that a guest keeps available.
const LEAST_RESERVE: u64 = 64 << 20;
/// Memory that a guest keeps at least. With less Linux ends processes, or panics.
const SMALLEST_RESERVE: u64 = 16 << 20;

/// The request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// Take what is available first, and give it back.
    pub(super) squeeze: bool,
    /// Bytes of it that remain.
    pub(super) reserve: Option<u64>,
}

/// The present job, or the last one.
#[derive(Default)]
pub(super) struct Jobs(Mutex<Option<Job>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Waiting for statistics that came after these.
    Statistics(u64),
    /// Taking what is available.
    Inflating,
    /// Giving it back.
    Deflating,
    Hinting,
    Over,
}

struct Job {
    phase: Phase,
    wanted: Wanted,
    begun: Instant,
    /// When the present step began.
    step: Instant,
    /// The target that was there before, if there was one.
    before: Option<u64>,
    /// It becomes the target again.
    puts_back: bool,
    /// Bytes that the guest had before, and at its smallest.
    squeezed: Option<(u64, u64)>,
    /// When the guest last made progress, and how far it was then: more is nearer.
    progress: (Instant, u64),
    took: Option<Duration>,
    error: Option<String>,
}

/// The device counts the list by itself.
struct Counted;

impl FreePageSink for Counted {
    fn add_range(&self, _range: Range<u64>) {}

    fn complete(&self) {}
}

impl Jobs {
    /// Begins a job.
    pub(super) fn begin(&self, balloon: &Balloon, wanted: Wanted) -> Result<(), String> {
        let mut jobs = self.lock();
        if jobs.as_ref().is_some_and(|job| job.phase != Phase::Over) {
            return Err(
                "a list of free pages is already in progress: wait for it, or end the `ctl` that requested it \
                (balloon-hint-stop for programs)"
                    .into(),
            );
        }
        let now = Instant::now();
        let phase = if wanted.squeeze {
            let before = balloon.statistics().map_or(0, |statistics| statistics.sequence);
            balloon.request_statistics().map_err(remedy::with_statistics)?;
            Phase::Statistics(before)
        } else {
            balloon.request_list(Arc::new(Counted)).map_err(|error| error.to_string())?;
            Phase::Hinting
        };
        *jobs = Some(Job {
            phase,
            wanted,
            begun: now,
            step: now,
            before: None,
            puts_back: false,
            squeezed: None,
            progress: (now, 0),
            took: None,
            error: None,
        });
        Ok(())
    }

    /// Sets the target that a client ordered. It applies at once, and again when a job that has squeezed the guest
    /// ends; a guest that is being squeezed is squeezed no further.
    pub(super) fn set_target(&self, balloon: &Balloon, bytes: u64) -> Result<(), TargetTooSmall> {
        let mut jobs = self.lock();
        balloon.set_target(bytes)?;
        if let Some(job) = jobs.as_mut().filter(|job| job.phase == Phase::Inflating) {
            job.puts_back = false;
            job.begin(Phase::Deflating, Instant::now());
        }
        Ok(())
    }

    /// Takes the next step if it can be taken. Never waits.
    pub(super) fn go_on(&self, balloon: &Balloon, now: Instant) {
        if let Some(job) = self.lock().as_mut().filter(|job| job.phase != Phase::Over) {
            job.go_on(balloon, now);
        }
    }

    /// Cancels the present job, if there is one.
    pub(super) fn give_up(&self, balloon: &Balloon) {
        if let Some(job) = self.lock().as_mut().filter(|job| job.phase != Phase::Over) {
            job.fail(balloon, "it was stopped");
        }
    }

    /// Returns its progress, for programs.
    pub(super) fn read(&self, balloon: &Balloon) -> Value {
        let jobs = self.lock();
        let Some(job) = jobs.as_ref() else { return json!({ "phase": "none" }) };
        let list = balloon.hint_list();
        let phase = match (job.phase, &job.error) {
            (Phase::Statistics(_), _) => "asking",
            (Phase::Inflating, _) => "inflating",
            (Phase::Deflating, _) => "deflating",
            (Phase::Hinting, _) => "hinting",
            (Phase::Over, None) => "completed",
            (Phase::Over, Some(_)) => "failed",
        };
        let mut answer = json!({ "phase": phase, "actual": balloon.size().actual });
        let Some(fields) = answer.as_object_mut() else { return answer };
        if job.phase == Phase::Hinting || (job.phase == Phase::Over && job.error.is_none()) {
            let took = list.requested_at.zip(list.last_buffer_at).map(|(asked, last)| last.duration_since(asked));
            fields.insert("blocks".into(), list.blocks.into());
            fields.insert("bytes".into(), list.bytes.into());
            fields.insert("list-ms".into(), took.map_or(0.0, limosa_console::quantity::millis).into());
        }
        if let Some((before, smallest)) = job.squeezed {
            fields.insert("squeezed".into(), before.saturating_sub(smallest).into());
        }
        if let Some(took) = job.took {
            fields.insert("total-ms".into(), limosa_console::quantity::millis(took).into());
        }
        if let Some(error) = &job.error {
            fields.insert("error".into(), error.as_str().into());
        }
        answer
    }

    fn lock(&self) -> MutexGuard<'_, Option<Job>> {
        self.0.lock()
    }
}

impl Job {
    fn begin(&mut self, phase: Phase, now: Instant) {
        (self.phase, self.step, self.progress) = (phase, now, (now, 0));
    }

    fn go_on(&mut self, balloon: &Balloon, now: Instant) {
        if !balloon.has_driver() {
            return self.fail(balloon, "the guest or its balloon driver has disconnected");
        }
        match self.phase {
            Phase::Statistics(before) => match balloon.statistics().filter(|came| came.sequence > before) {
                Some(statistics) => {
                    self.inflate(balloon, now, statistics.available_memory().or(statistics.free_memory()));
                }
                None => self.wait(balloon, now, 0, "the guest does not report how much memory it has available"),
            },
            Phase::Inflating => {
                let size = balloon.size();
                if let Some((_, smallest)) = &mut self.squeezed {
                    *smallest = size.actual.min(*smallest);
                }
                // Also a guest that has nothing left to give is squeezed.
                let over = self.is_silent(now, size.ram.saturating_sub(size.actual)) || self.is_late(balloon, now);
                if size.actual <= size.target || over {
                    self.put_back(balloon);
                    self.begin(Phase::Deflating, now);
                }
            }
            Phase::Deflating => {
                let size = balloon.size();
                if size.actual < size.target {
                    return self.wait(balloon, now, size.actual, "the guest does not deflate its balloon");
                }
                match balloon.request_list(Arc::new(Counted)) {
                    Ok(()) => self.begin(Phase::Hinting, now),
                    Err(error) => self.fail(balloon, &error.to_string()),
                }
            }
            Phase::Hinting => {
                let list = balloon.hint_list();
                if list.complete {
                    balloon.return_pages();
                    self.took = Some(self.begun.elapsed());
                    self.phase = Phase::Over;
                } else if list.bytes > balloon.size().ram {
                    self.fail(balloon, "the guest's list covers more than its memory, so it names pages twice");
                } else {
                    self.wait(balloon, now, list.blocks, "the guest does not answer, or does not end its list");
                }
            }
            Phase::Over => {}
        }
    }

    fn inflate(&mut self, balloon: &Balloon, now: Instant, available: Option<u64>) {
        let Some(available) = available else {
            return self.fail(balloon, "the guest does not report how much memory it has available");
        };
        let size = balloon.size();
        let wanted = self.wanted.reserve.unwrap_or_else(|| LEAST_RESERVE.max(size.ram / 16));
        let reserve = wanted.max(SMALLEST_RESERVE);
        let target = size.actual.saturating_sub(available.saturating_sub(reserve));
        self.squeezed = Some((size.actual, size.actual));
        (self.before, self.puts_back) = (balloon.target(), true);
        self.begin(Phase::Inflating, now);
        // What a guest says of itself is not believed further than its own memory goes; and it is not given what was
        // ordered away from it.
        if let Err(error) = balloon.set_target(target.max(reserve).min(size.actual).min(size.target)) {
            self.fail(balloon, &error.to_string());
        }
    }

    /// Fails if the guest has come no nearer for too long, or takes too long altogether.
    fn wait(&mut self, balloon: &Balloon, now: Instant, reached: u64, why: &str) {
        if self.is_silent(now, reached) {
            let why = format!("{why}; no answer for {} s", ANSWER_TIMEOUT.as_secs());
            self.fail(balloon, &why);
        } else if self.is_late(balloon, now) {
            let why = format!("{why} within {} s", longest(balloon).as_secs());
            self.fail(balloon, &why);
        }
    }

    fn is_silent(&mut self, now: Instant, reached: u64) -> bool {
        if reached > self.progress.1 {
            self.progress = (now, reached);
        }
        now.saturating_duration_since(self.progress.0) >= ANSWER_TIMEOUT
    }

    fn is_late(&self, balloon: &Balloon, now: Instant) -> bool {
        now.saturating_duration_since(self.step) >= longest(balloon)
    }

    fn fail(&mut self, balloon: &Balloon, why: &str) {
        balloon.return_pages();
        self.put_back(balloon);
        self.error = Some(why.to_owned());
        self.took = Some(self.begun.elapsed());
        self.phase = Phase::Over;
    }

    /// Gives the guest the memory back that it had before it was squeezed.
    fn put_back(&mut self, balloon: &Balloon) {
        if std::mem::take(&mut self.puts_back) {
            match self.before {
                // It was a target before, so it is one now.
                Some(before) => {
                    let _ = balloon.set_target(before);
                }
                None => balloon.clear_target(),
            }
        }
    }
}

/// How long a step may take.
fn longest(balloon: &Balloon) -> Duration {
    let gibs = u32::try_from(balloon.size().ram >> 30).unwrap_or(u32::MAX);
    LONGEST.saturating_add(FOR_A_GIB.saturating_mul(gibs))
}

#[cfg(test)]
mod tests {
    use limosa_balloon::{Features, GuestRam, HintState, Options, Strategy, Transport};
    use limosa_balloon_driver::{Driver, Machine, Pages, RINGS};
    use limosa_memory::{BlockOptions, GuestMemory};
    use vm_memory::{GuestAddress, GuestMemoryMmap};

    use super::*;

    const RAM: u64 = 256 << 20;
    const SQUEEZE: Wanted = Wanted { squeeze: true, reserve: None };
    const LIST: Wanted = Wanted { squeeze: false, reserve: None };

    struct Bus;

    impl Transport for Bus {
        fn config_changed(&self) {}

        fn kick(&self, _queue: usize) {}
    }

    fn ram(bytes: u64) -> Arc<GuestRam> {
        let block = BlockOptions::memfd("pc.ram", bytes).map().unwrap();
        let memory = Arc::new(GuestMemory::new(vec![block]).unwrap());
        Arc::new(GuestRam::new(memory, Strategy::Nothing))
    }

    /// A guest whose driver never answers.
    fn silent() -> Balloon {
        let balloon = Balloon::new(Options::default());
        balloon.set_memory(ram(RAM));
        balloon.attach(Arc::new(Bus));
        balloon.ack_features(Features::ALL);
        // But for what it fills free pages with.
        balloon.write_config(12, &[0; 4]);
        balloon
    }

    fn said(jobs: &Jobs, balloon: &Balloon) -> (String, String) {
        let answer = jobs.read(balloon);
        let text = |name: &str| answer.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        (text("phase"), text("error"))
    }

    #[test]
    fn a_guest_that_never_answers_gets_its_pages_back() {
        for wanted in [LIST, SQUEEZE] {
            let (jobs, balloon) = (Jobs::default(), silent());
            jobs.begin(&balloon, wanted).unwrap();
            let now = Instant::now();
            jobs.go_on(&balloon, now);
            assert!(!["failed", "completed"].contains(&&*said(&jobs, &balloon).0));
            jobs.go_on(&balloon, now + ANSWER_TIMEOUT * 2);
            let (phase, error) = said(&jobs, &balloon);
            assert!(phase == "failed" && error.contains("no answer for 10 s"), "{phase}: {error}");
            assert_eq!((balloon.hint_list().state, balloon.size().target), (HintState::Done, RAM));
            jobs.begin(&balloon, LIST).unwrap();
        }
    }

    #[test]
    fn a_squeeze_that_ends_early_has_put_the_target_back() {
        for ending in 0..2 {
            let (jobs, balloon) = (Jobs::default(), silent());
            balloon.set_target(RAM / 2).unwrap();
            jobs.begin(&balloon, SQUEEZE).unwrap();
            let now = Instant::now();
            jobs.lock().as_mut().unwrap().inflate(&balloon, now, Some(200 << 20));
            assert_eq!(balloon.size().target, RAM - ((200 - 64) << 20));
            if ending == 0 {
                jobs.give_up(&balloon);
            } else {
                // The driver goes.
                balloon.attach(Arc::new(Bus));
                jobs.go_on(&balloon, now);
            }
            assert_eq!((said(&jobs, &balloon).0.as_str(), balloon.size().target), ("failed", RAM / 2));
        }
    }

    /// The guest reports its size every five seconds without end: forth and back, and a page at a time.
    #[test]
    fn a_guest_that_comes_no_nearer_or_takes_for_ever_is_not_waited_for() {
        for (creeps, expected) in [(false, "no answer for 10 s"), (true, "within 60 s")] {
            let (jobs, balloon) = (Jobs::default(), silent());
            jobs.begin(&balloon, SQUEEZE).unwrap();
            let mut now = Instant::now();
            jobs.lock().as_mut().unwrap().inflate(&balloon, now, Some(200 << 20));
            for round in 0..40u32 {
                let pages = match jobs.lock().as_ref().unwrap().phase {
                    Phase::Inflating if creeps => 1000 + round,
                    _ if creeps => 1000 - round,
                    _ => 1000 + round % 2,
                };
                balloon.write_config(4, &pages.to_le_bytes());
                now += ANSWER_TIMEOUT / 2;
                jobs.go_on(&balloon, now);
            }
            let (phase, error) = said(&jobs, &balloon);
            assert!(phase == "failed" && error.contains(expected), "{creeps} {phase}: {error}");
            assert_eq!(balloon.size().target, RAM);
        }
    }

    /// Always the same block is free.
    struct Same;

    impl Pages for Same {
        fn allocate(&mut self, _length: u64) -> Option<u64> {
            Some(64 << 20)
        }

        fn free(&mut self, _block: Range<u64>) {}
    }

    #[test]
    fn a_list_that_names_a_block_for_ever_comes_to_its_end() {
        let (jobs, balloon) = (Jobs::default(), Arc::new(silent()));
        let rings = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(1 << 40), RINGS)]).unwrap();
        let machine = Machine::new(Arc::clone(&balloon), Arc::new(rings), 1 << 40);
        let mut driver = Driver::probe(machine, Arc::new(Mutex::new(Same)), Features::ALL).unwrap();
        jobs.begin(&balloon, LIST).unwrap();
        let rounds = (0..100).take_while(|_| {
            driver.poll().unwrap();
            jobs.go_on(&balloon, Instant::now());
            said(&jobs, &balloon).0 == "hinting"
        });
        assert!(rounds.count() < 10);
        assert!(said(&jobs, &balloon).1.contains("names pages twice"), "{:?}", said(&jobs, &balloon));
        assert_eq!(balloon.hint_list().state, HintState::Done);
    }

    #[test]
    fn a_target_that_is_ordered_during_a_squeeze_is_what_is_left_of_it() {
        for phase in [Phase::Inflating, Phase::Deflating, Phase::Hinting] {
            let (jobs, balloon) = (Jobs::default(), silent());
            jobs.begin(&balloon, SQUEEZE).unwrap();
            // Before it is squeezed, too: the squeeze takes what is ordered for what was there.
            jobs.set_target(&balloon, RAM / 4 * 3).unwrap();
            let now = Instant::now();
            jobs.lock().as_mut().unwrap().inflate(&balloon, now, Some(200 << 20));
            let squeezed = balloon.size().target;
            assert!(squeezed < RAM / 4 * 3);
            if phase != Phase::Inflating {
                balloon.write_config(4, &u32::try_from((RAM - squeezed) / 4096).unwrap().to_le_bytes());
                jobs.go_on(&balloon, now);
                assert_eq!(balloon.size().target, RAM / 4 * 3);
            }
            if phase == Phase::Hinting {
                balloon.write_config(4, &0u32.to_le_bytes());
                jobs.go_on(&balloon, now);
            }
            assert_eq!(jobs.lock().as_ref().unwrap().phase, phase);
            jobs.set_target(&balloon, RAM / 2).unwrap();
            assert_eq!(balloon.size().target, RAM / 2, "it holds at once");
            jobs.go_on(&balloon, now);
            jobs.go_on(&balloon, now + ANSWER_TIMEOUT * 2);
            jobs.give_up(&balloon);
            assert_eq!((said(&jobs, &balloon).0.as_str(), balloon.size().target), ("failed", RAM / 2), "{phase:?}");
        }
    }

    #[test]
    fn a_guest_without_a_target_has_none_after_a_squeeze() {
        let (jobs, balloon) = (Jobs::default(), silent());
        jobs.begin(&balloon, SQUEEZE).unwrap();
        jobs.lock().as_mut().unwrap().inflate(&balloon, Instant::now(), Some(200 << 20));
        assert!(balloon.target().is_some());
        jobs.give_up(&balloon);
        assert_eq!(balloon.target(), None);
        // Memory is plugged in, or the next guest has more.
        balloon.set_memory(ram(2 * RAM));
        assert_eq!(balloon.size().target, 2 * RAM);
    }

    #[test]
    fn what_a_guest_says_it_has_available_leaves_it_its_reserve() {
        for available in [0, 1 << 20, 300 << 20, u64::MAX] {
            let (jobs, balloon) = (Jobs::default(), silent());
            jobs.begin(&balloon, SQUEEZE).unwrap();
            jobs.lock().as_mut().unwrap().inflate(&balloon, Instant::now(), Some(available));
            assert!((LEAST_RESERVE..=RAM).contains(&balloon.size().target), "{available}: {:?}", balloon.size());
        }
        // A reserve of nothing would leave it nothing.
        let (jobs, balloon) = (Jobs::default(), silent());
        jobs.begin(&balloon, Wanted { squeeze: true, reserve: Some(0) }).unwrap();
        jobs.lock().as_mut().unwrap().inflate(&balloon, Instant::now(), Some(u64::MAX));
        assert_eq!(balloon.size().target, SMALLEST_RESERVE);
    }
}
