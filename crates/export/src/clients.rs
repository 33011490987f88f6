//! The clients of an export: when their requests may begin, and what they have done.
//!
//! Laws: after [`Clients::quiesce`] no request is in flight, and none begins until [`Clients::resume`]. On the way of a
//! request a client writes only memory of its own: what all have done is summed up when it is asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use parking_lot::{Condvar, Mutex};

use crate::counters::{Outcome, Tally};
use crate::peer::{Peer, VmPeers};

/// Whether requests may begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, strum::FromRepr)]
#[repr(u8)]
pub(crate) enum Access {
    /// They may.
    Open,
    /// They wait.
    Quiesced,
    /// They are refused, and a client ends when it has its replies.
    Ended,
    /// They are refused, and a client ends when its requests in flight are done, without their replies.
    Cut,
}

/// Why an export is not quiesced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NotQuiesced {
    /// Requests are still in flight.
    Busy,
    /// Another thread has resumed it meanwhile.
    Resumed,
    /// It is being removed.
    Ended,
}

/// The clients of an export.
#[derive(Debug, Default)]
pub(crate) struct Clients {
    access: AtomicU8,
    members: Mutex<Members>,
    /// Notified when a client has no more requests in flight, or is gone.
    fewer: Condvar,
}

#[derive(Debug, Default)]
struct Members {
    present: Vec<Arc<Member>>,
    /// The work of those that are gone.
    gone: Tally,
    /// Those of them that have written, since a moment.
    gone_writers: VmPeers,
    /// The last front end of a device.
    front_end: Option<Arc<Peer>>,
}

/// The part of a client that others read. Aligned, so that no two clients share a cache line.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Member {
    /// Requests are in flight, or about to begin.
    busy: AtomicBool,
    /// It is a queue of a device.
    is_queue: bool,
    /// The other end of its connection.
    peer: Option<Arc<Peer>>,
    waker: AtomicWaker,
    tally: Mutex<Tally>,
}

impl Clients {
    pub(crate) fn access(&self) -> Access {
        // Nothing else is stored.
        Access::from_repr(self.access.load(Ordering::SeqCst)).unwrap_or(Access::Cut)
    }

    /// Returns the number of clients, without the queues of devices.
    pub(crate) fn count(&self) -> usize {
        self.members.lock().present.iter().filter(|member| !member.is_queue).count()
    }

    /// Whether a device has queues here, which stay as long as it does.
    pub(crate) fn has_queues(&self) -> bool {
        self.members.lock().present.iter().any(|member| member.is_queue)
    }

    /// Returns what all clients have done.
    pub(crate) fn tally(&self) -> Tally {
        let members = self.members.lock();
        let mut sum = members.gone.clone();
        members.present.iter().for_each(|member| sum.add(&member.tally.lock()));
        sum
    }

    /// Adds a client at the other end of a connection.
    pub(crate) fn join(self: &Arc<Self>, peer: Arc<Peer>) -> Client {
        self.add(Member { peer: Some(peer), ..Member::default() })
    }

    /// Adds a queue of a device.
    pub(crate) fn join_queue(self: &Arc<Self>) -> Client {
        self.add(Member { is_queue: true, ..Member::default() })
    }

    /// Notes the front end of a device.
    pub(crate) fn set_front_end(&self, peer: Arc<Peer>) {
        self.members.lock().front_end = Some(peer);
    }

    /// Returns the peers of all clients, and of the device's front end, and forgets who has written before.
    pub(crate) fn begin_peers(&self) -> VmPeers {
        let mut members = self.members.lock();
        members.gone_writers = VmPeers::default();
        let mut peers = members.peers(|_| true);
        members.front_end.iter().for_each(|front_end| peers.add(front_end));
        peers
    }

    /// Returns the peers that have written: those that are here, and those that are gone since the last
    /// [`begin_peers`](Self::begin_peers).
    pub(crate) fn writers(&self) -> VmPeers {
        let members = self.members.lock();
        let mut writers = members.gone_writers.clone();
        writers.add_all(&members.peers(Member::has_written));
        writers
    }

    fn add(self: &Arc<Self>, member: Member) -> Client {
        let member = Arc::new(member);
        self.members.lock().present.push(Arc::clone(&member));
        Client { clients: Arc::clone(self), member }
    }

    /// Has requests wait that have not begun, and waits until none is in flight. If that fails they begin again, unless
    /// they had to wait before. Returns whether they had not.
    pub(crate) fn quiesce(&self, within: Duration) -> Result<bool, NotQuiesced> {
        let begun_here = self.change(Access::Open, Access::Quiesced);
        let mut members = self.members.lock();
        let is_busy = |members: &mut Members| {
            self.access() == Access::Quiesced && members.present.iter().any(|member| member.is_busy())
        };
        let timed_out = self.fewer.wait_while_for(&mut members, is_busy, within).timed_out();
        drop(members);
        match self.access() {
            Access::Quiesced if timed_out && begun_here => {
                self.resume();
                Err(NotQuiesced::Busy)
            }
            Access::Quiesced if timed_out => Err(NotQuiesced::Busy),
            Access::Quiesced => Ok(begun_here),
            Access::Open => Err(NotQuiesced::Resumed),
            Access::Ended | Access::Cut => Err(NotQuiesced::Ended),
        }
    }

    /// Lets requests begin again. Returns false if the export is being removed.
    pub(crate) fn resume(&self) -> bool {
        let changed = self.change(Access::Quiesced, Access::Open);
        if changed {
            self.wake();
        }
        changed || self.access() == Access::Open
    }

    /// Refuses all further requests, and has all clients end.
    pub(crate) fn end(&self, access: Access) {
        debug_assert!(access >= Access::Ended, "it is not opened again");
        self.access.fetch_max(access as u8, Ordering::SeqCst);
        self.wake();
    }

    /// Waits until all clients are gone, at most for `within`. Returns whether they are.
    pub(crate) fn wait_gone(&self, within: Duration) -> bool {
        let mut members = self.members.lock();
        self.fewer.wait_while_for(&mut members, |members| !members.present.is_empty(), within);
        members.present.is_empty()
    }

    /// Waits as [`wait_gone`](Self::wait_gone) does; queues of devices that have ended stay, without a request.
    pub(crate) fn wait_gone_or_idle(&self, within: Duration) -> bool {
        let remains = |members: &mut Members| members.present.iter().any(|member| !member.is_queue || member.is_busy());
        let mut members = self.members.lock();
        !self.fewer.wait_while_for(&mut members, remains, within).timed_out()
    }

    fn change(&self, from: Access, to: Access) -> bool {
        self.access.compare_exchange(from as u8, to as u8, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Wakes all clients, and those who wait for them.
    fn wake(&self) {
        let members = self.members.lock();
        members.present.iter().for_each(|member| member.waker.wake());
        self.fewer.notify_all();
    }
}

impl Members {
    fn peers(&self, is_wanted: impl Fn(&Member) -> bool) -> VmPeers {
        let mut peers = VmPeers::default();
        let wanted = self.present.iter().filter(|member| is_wanted(member));
        wanted.filter_map(|member| member.peer.as_ref()).for_each(|peer| peers.add(peer));
        peers
    }
}

impl Member {
    fn has_written(&self) -> bool {
        let counters = self.tally.lock().counters;
        counters.writes + counters.zeroes > 0
    }

    fn is_busy(&self) -> bool {
        self.busy.load(Ordering::SeqCst)
    }
}

/// A client's place among those of an export, until it is dropped. One thread uses it.
#[derive(Debug)]
pub(crate) struct Client {
    clients: Arc<Clients>,
    member: Arc<Member>,
}

impl Client {
    /// Has `waker` woken when requests may begin again, or the client must end.
    pub(crate) fn register(&self, waker: &Waker) {
        self.member.waker.register(waker);
    }

    pub(crate) fn access(&self) -> Access {
        self.clients.access()
    }

    /// Announces that requests begin. They may if it returns [`Access::Open`].
    pub(crate) fn enter(&self) -> Access {
        if self.member.busy.load(Ordering::Relaxed) {
            return self.access();
        }
        // Announced before it is looked up, as `quiesce` forbids before it looks: one of the two sees the other.
        self.member.busy.store(true, Ordering::SeqCst);
        let access = self.access();
        if access != Access::Open {
            self.leave();
        }
        access
    }

    /// Announces that no request is in flight any more.
    pub(crate) fn leave(&self) {
        if !self.member.busy.load(Ordering::Relaxed) {
            return;
        }
        self.member.busy.store(false, Ordering::SeqCst);
        if self.access() != Access::Open {
            // Under the lock of the one who waits: it has not looked yet, or sleeps.
            let _members = self.clients.members.lock();
            self.clients.fewer.notify_all();
        }
    }

    /// Counts requests that are done, and clears `done`.
    pub(crate) fn count(&self, done: &mut Vec<Outcome>) {
        if !done.is_empty() {
            // Contended only while the sum is computed.
            let mut tally = self.member.tally.lock();
            done.drain(..).for_each(|outcome| tally.count(&outcome));
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut members = self.clients.members.lock();
        members.present.retain(|member| !Arc::ptr_eq(member, &self.member));
        members.gone.add(&self.member.tally.lock());
        if let Some(peer) = self.member.peer.as_ref().filter(|_| self.member.has_written()) {
            members.gone_writers.add(peer);
        }
        self.clients.fewer.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::counters::RequestKind;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(20);

    fn anybody() -> Arc<Peer> {
        Arc::new(Peer::Unknown)
    }

    #[test]
    fn quiescing_waits_for_requests_in_flight_and_no_other_begins() {
        let clients = Arc::<Clients>::default();
        let (one, two) = (clients.join(anybody()), clients.join(anybody()));
        assert_eq!(one.enter(), Access::Open);
        assert_eq!(clients.quiesce(SHORT), Err(NotQuiesced::Busy));
        assert_eq!(two.enter(), Access::Open, "a failed attempt holds nothing up");
        two.leave();
        let waiting = thread::spawn({
            let clients = Arc::clone(&clients);
            move || clients.quiesce(LONG)
        });
        while clients.access() == Access::Open {
            thread::yield_now();
        }
        assert_eq!((one.enter(), two.enter()), (Access::Quiesced, Access::Quiesced));
        assert!(!waiting.is_finished());
        one.leave();
        assert_eq!(waiting.join().unwrap(), Ok(true));
        // Somebody else's attempt that fails does not end this one.
        assert_eq!(clients.quiesce(SHORT), Ok(false));
        assert!(clients.resume());
        assert_eq!(one.enter(), Access::Open);
    }

    #[test]
    fn an_export_that_is_ended_is_neither_quiesced_nor_resumed() {
        let clients = Arc::<Clients>::default();
        let client = clients.join(anybody());
        assert_eq!(clients.quiesce(SHORT), Ok(true));
        clients.end(Access::Cut);
        clients.end(Access::Ended);
        assert_eq!((client.enter(), clients.resume()), (Access::Cut, false));
        assert_eq!(clients.quiesce(SHORT), Err(NotQuiesced::Ended));
        assert!(!clients.wait_gone(SHORT));
        drop(client);
        assert!(clients.wait_gone(SHORT));
    }

    #[test]
    fn counters_of_clients_that_are_gone_stay() {
        let clients = Arc::<Clients>::default();
        let (one, two) = (clients.join(anybody()), clients.join(anybody()));
        for client in [&one, &two] {
            let outcome = Outcome { kind: RequestKind::Read, length: 512, failed: false, time: SHORT };
            let mut done = vec![outcome; 3];
            client.count(&mut done);
            assert!(done.is_empty());
        }
        let sum = || (clients.tally().counters.reads, clients.tally().counters.read_bytes);
        drop(one);
        assert_eq!((sum(), clients.count()), ((6, 3072), 1));
        drop(two);
        assert_eq!((sum(), clients.count()), ((6, 3072), 0));
        assert_eq!(clients.tally().latencies.of(RequestKind::Read).map(hdrhistogram::Histogram::len), Some(6));
    }

    #[test]
    fn no_request_is_in_flight_after_quiescing_however_threads_are_scheduled() {
        let clients = Arc::<Clients>::default();
        let (in_flight, over) = (Arc::<AtomicU8>::default(), Arc::<AtomicBool>::default());
        let threads: Vec<_> = (0..3)
            .map(|_| {
                let (client, in_flight, over) = (clients.join(anybody()), Arc::clone(&in_flight), Arc::clone(&over));
                thread::spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        if client.enter() == Access::Open {
                            in_flight.fetch_add(1, Ordering::SeqCst);
                            in_flight.fetch_sub(1, Ordering::SeqCst);
                            client.leave();
                        }
                    }
                })
            })
            .collect();
        for _ in 0..2000 {
            clients.quiesce(LONG).unwrap();
            assert_eq!(in_flight.load(Ordering::SeqCst), 0);
            assert!(clients.resume());
        }
        over.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn who_has_written_is_known_when_it_is_gone_and_who_has_read_is_not() {
        let clients = Arc::<Clients>::default();
        let there = clients.join(Arc::new(Peer::OtherHost));
        assert!(clients.begin_peers().has_other_hosts());
        drop(there);
        let (reader, writer) = (clients.join(anybody()), clients.join(Arc::new(Peer::OtherHost)));
        let of = |kind| vec![Outcome { kind, length: 512, failed: false, time: SHORT }];
        reader.count(&mut of(RequestKind::Read));
        assert!(!clients.writers().has_other_hosts());
        writer.count(&mut of(RequestKind::Zero));
        assert!(clients.writers().has_other_hosts() && clients.writers().are_recognized());
        drop((reader, writer));
        assert!(clients.writers().has_other_hosts() && clients.writers().are_recognized());
        assert!(!clients.begin_peers().has_other_hosts() && !clients.writers().has_other_hosts());
    }
}
