//! The pages that the guest waits for, and the way to the source.
//!
//! Two laws. **Each host page is asked for once** on one connection. **No request is lost**: a page that the guest
//! waits for stays in the list until it has been placed, also if the connection breaks, and is asked for again on
//! the next one.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, Ordering::Relaxed, fence};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use limosa_channel::Channel;
use limosa_page::{AtomicPageBitmap, PageNumber, PageRange};
use limosa_stream::ReturnMessage;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::MigrateError;
use crate::live::destination::ram::Block;
use crate::source::sender::new_histogram;

/// The connection's other direction.
#[derive(Debug, Default)]
struct ReturnPath {
    channel: Option<Arc<Channel>>,
    /// The block that the last request on it named.
    named: Option<usize>,
}

#[derive(Debug)]
struct InFlight {
    /// Host pages, by block and first page, and since when they are waited for.
    pages: HashMap<(usize, u64), (PageRange, Instant)>,
    latency: Histogram<u64>,
}

/// Pages that were requested, or will be.
#[derive(Debug)]
pub(super) struct Requests {
    names: Vec<String>,
    path: Mutex<ReturnPath>,
    waiting: Mutex<InFlight>,
    arrived: Condvar,
    /// First pages of the host pages in `waiting`, to be looked at without a lock; by block.
    asked: Vec<AtomicPageBitmap>,
    pub(super) sent: AtomicU64,
}

impl Requests {
    pub(super) fn new(blocks: &[Block<'_>], channel: Arc<Channel>) -> Self {
        Self {
            names: blocks.iter().map(|block| block.memory.name().to_owned()).collect(),
            path: Mutex::new(ReturnPath { channel: Some(channel), named: None }),
            waiting: Mutex::new(InFlight { pages: HashMap::new(), latency: new_histogram() }),
            arrived: Condvar::new(),
            asked: blocks.iter().map(|block| AtomicPageBitmap::new(block.memory.pages().len())).collect(),
            sent: AtomicU64::new(0),
        }
    }

    /// A host page is waited for: it is requested, unless it has been. `received` is asked once more behind that.
    ///
    /// # Errors
    /// The return path's; the page stays in the list.
    pub(super) fn wait_for(
        &self,
        block: usize,
        pages: PageRange,
        received: impl Fn() -> bool,
    ) -> Result<(), MigrateError> {
        // Under the lock, or `placed` could come between the two: it would take back the mark, find nothing in the
        // list, and what is put there then would stay for ever.
        let mut waiting = self.waiting();
        if self.asked.get(block).is_none_or(|asked| asked.set(pages.start)) {
            return Ok(());
        }
        waiting.pages.insert((block, pages.start.0), (pages, Instant::now()));
        drop(waiting);
        // The thread that places the page notes that first and looks at `asked` then; here it is the other way round,
        // so that one of the two sees the other.
        fence(Ordering::SeqCst);
        if received() {
            self.placed(block, pages.start);
            return Ok(());
        }
        self.ask(block, pages)
    }

    /// A host page has been placed, and is noted as received.
    pub(super) fn placed(&self, block: usize, first: PageNumber) {
        fence(Ordering::SeqCst);
        if self.asked.get(block).is_some_and(|asked| asked.get(first) && asked.clear(first)) {
            let mut waiting = self.waiting();
            if let Some((_, since)) = waiting.pages.remove(&(block, first.0)) {
                let nanos = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
                waiting.latency.saturating_record(nanos);
            }
            drop(waiting);
            self.arrived.notify_all();
        }
    }

    fn ask(&self, block: usize, pages: PageRange) -> Result<(), MigrateError> {
        let bytes = pages.bytes();
        let length = u32::try_from(bytes.end - bytes.start)
            .map_err(|_| MigrateError::Protocol(format!("a host page of {} pages", pages.len())))?;
        let mut path = self.path();
        let name = self.names.get(block).filter(|_| path.named != Some(block)).cloned();
        // Without a connection it waits for the next one.
        let Some(channel) = path.channel.clone() else { return Ok(()) };
        let mut message = Vec::new();
        ReturnMessage::RequestPages { block: name, start: bytes.start, length }.encode(&mut message)?;
        path.named = Some(block);
        channel.write_all(&message)?;
        self.sent.fetch_add(1, Relaxed);
        Ok(())
    }

    /// Says something else to the source.
    pub(super) fn say(&self, message: &ReturnMessage) -> Result<(), MigrateError> {
        let mut bytes = Vec::new();
        message.encode(&mut bytes)?;
        match &self.path().channel {
            Some(channel) => Ok(channel.write_all(&bytes)?),
            None => Ok(()),
        }
    }

    /// Nothing is asked for until there is a new connection.
    pub(super) fn disconnect(&self) {
        *self.path() = ReturnPath::default();
    }

    /// Continues over a new connection: sends `first` there, and requests again everything that is waited for.
    pub(super) fn reconnect(&self, channel: Arc<Channel>, first: &ReturnMessage) -> Result<(), MigrateError> {
        let mut bytes = Vec::new();
        first.encode(&mut bytes)?;
        channel.write_all(&bytes)?;
        // From here on new faults ask by themselves; one that does so twice is answered once.
        *self.path() = ReturnPath { channel: Some(channel), named: None };
        let waiting: Vec<_> = self.waiting().pages.iter().map(|((block, _), (pages, _))| (*block, *pages)).collect();
        waiting.into_iter().try_for_each(|(block, pages)| self.ask(block, pages))
    }

    /// How long the oldest request in flight has waited.
    pub(super) fn longest_wait(&self) -> Duration {
        let waiting = self.waiting();
        waiting.pages.values().map(|(_, since)| since.elapsed()).max().unwrap_or_default()
    }

    /// Waits until no request is in flight, or `over`, or one has waited longer than `answer_timeout`: whether none is
    /// in flight.
    pub(super) fn wait_until_answered(&self, answer_timeout: Option<Duration>, over: impl Fn() -> bool) -> bool {
        let mut waiting = self.waiting();
        loop {
            if waiting.pages.is_empty() {
                return true;
            }
            let longest = waiting.pages.values().map(|(_, since)| since.elapsed()).max().unwrap_or_default();
            if over() || answer_timeout.is_some_and(|answer_timeout| longest > answer_timeout) {
                return false;
            }
            let slice = Duration::from_millis(20);
            self.arrived.wait_for(&mut waiting, slice);
        }
    }

    /// From a fault to its page, nanoseconds.
    pub(super) fn latency(&self) -> Histogram<u64> {
        self.waiting().latency.clone()
    }

    fn waiting(&self) -> MutexGuard<'_, InFlight> {
        self.waiting.lock()
    }

    fn path(&self) -> MutexGuard<'_, ReturnPath> {
        self.path.lock()
    }
}

#[cfg(test)]
mod tests {
    use limosa_memory::{BlockOptions, GuestMemory};
    use limosa_stream::ReturnDecoder;

    use super::*;
    use crate::live::SharedMemoryMode;
    use crate::live::destination::ram::GuestRam;
    use crate::pages::StreamSetup;

    fn heard(channel: &Channel) -> Vec<ReturnMessage> {
        channel.set_timeouts(Some(Duration::from_millis(20)), None).unwrap();
        let mut decoder = ReturnDecoder::new(64);
        let mut room = [0; 4096];
        while let Ok(got @ 1..) = channel.read(&mut room) {
            decoder.push(&room[..got]);
        }
        std::iter::from_fn(|| decoder.next_message().unwrap()).collect()
    }

    fn pair() -> (Channel, Arc<Channel>) {
        let (near, far) = Channel::pair().unwrap();
        (near, Arc::new(Channel::from_fd(far).unwrap()))
    }

    fn page(page: u64) -> PageRange {
        PageRange::starting_at(PageNumber(page), 1)
    }

    #[test]
    fn a_page_is_asked_for_once_a_connection_until_it_comes() {
        let blocks = ["ram", "vga"].map(|name| BlockOptions::anonymous(name, 16 * 4096).map().unwrap());
        let memory = GuestMemory::new(blocks.into()).unwrap();
        let ram = GuestRam::new(false, false);
        let start = StreamSetup {
            configuration: limosa_stream::Configuration::new("demo"),
            section_id: 2,
            blocks: ["ram", "vga"].map(|name| limosa_stream::RamBlock::new(name, 16 * 4096)).into(),
        };
        ram.begin(&memory, SharedMemoryMode::Sent, &start, None).unwrap();
        let (source, channel) = pair();
        let requests = Requests::new(ram.blocks(), channel);
        for (block, number) in [(0, 1), (0, 2), (0, 1), (1, 1), (0, 5)] {
            requests.wait_for(block, page(number), || false).unwrap();
        }
        requests.wait_for(0, page(9), || true).unwrap();
        let ask = |block: Option<&str>, page: u64| ReturnMessage::RequestPages {
            block: block.map(str::to_owned),
            start: page * 4096,
            length: 4096,
        };
        let wanted = [ask(Some("ram"), 1), ask(None, 2), ask(Some("vga"), 1), ask(Some("ram"), 5)];
        assert_eq!(heard(&source), wanted);

        requests.placed(0, PageNumber(2));
        assert_eq!(requests.latency().len(), 2); // That which had come before it was asked for, too.
        requests.disconnect();
        requests.wait_for(1, page(7), || false).unwrap();
        let (source, channel) = pair();
        requests.reconnect(channel, &ReturnMessage::ResumeAck(1)).unwrap();
        let again = heard(&source);
        assert_eq!((again.len(), &again[0]), (5, &ReturnMessage::ResumeAck(1)));
        assert!(!requests.wait_until_answered(Some(Duration::ZERO), || false));
        for (block, number) in [(0, 1), (1, 1), (0, 5), (1, 7)] {
            requests.placed(block, PageNumber(number));
        }
        assert!(requests.wait_until_answered(None, || false));
        assert_eq!(requests.latency().len(), 6);
    }

    #[test]
    fn a_page_that_comes_while_it_is_asked_for_is_not_waited_for_afterwards() {
        const PAGES: u64 = 1 << 16;
        let blocks = vec![BlockOptions::anonymous("ram", PAGES * 4096).map().unwrap()];
        let memory = GuestMemory::new(blocks).unwrap();
        let ram = GuestRam::new(false, false);
        let start = StreamSetup {
            configuration: limosa_stream::Configuration::new("demo"),
            section_id: 2,
            blocks: vec![limosa_stream::RamBlock::new("ram", PAGES * 4096)],
        };
        ram.begin(&memory, SharedMemoryMode::Sent, &start, None).unwrap();
        let (_source, channel) = pair();
        let requests = Requests::new(ram.blocks(), channel);
        requests.disconnect();
        let (come, at) = (AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..PAGES {
                    while at.load(Ordering::SeqCst) < number {
                        std::hint::spin_loop();
                    }
                    // As soon as the mark is seen: nowhere else is there less time for the list.
                    for _ in 0..100_000 {
                        if requests.asked[0].get(PageNumber(number)) {
                            break;
                        }
                        std::hint::spin_loop();
                    }
                    come.store(number + 1, Ordering::SeqCst);
                    requests.placed(0, PageNumber(number));
                }
            });
            for number in 0..PAGES {
                at.store(number, Ordering::SeqCst);
                requests.wait_for(0, page(number), || come.load(Ordering::SeqCst) > number).unwrap();
            }
        });
        assert!(requests.wait_until_answered(Some(Duration::ZERO), || false), "{:?}", requests.waiting().pages.keys());
    }
}
