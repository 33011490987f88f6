//! The protections that a gate has had, for fences.
//!
//! Law: **the process whose VM was failed over is never taken again, and no other is refused** that is identified. A
//! standby may connect to the gate before its VM runs, and take the place of a VM that has died. So the VM of a
//! protection is the process that was connected when it stood still for the base: then it was certainly there, and no
//! other was.

use std::sync::Arc;

use limosa_socket::PeerProcess;
use uuid::Uuid;

/// Protections that were fenced and are remembered, beside those whose process lives.
const REMEMBERED: usize = 64;

/// A VM that has connected.
#[derive(Debug, Clone)]
pub(super) struct ConnectedVm {
    /// The number of its connection.
    pub(super) connection: u64,
    /// Its process; `None`: it is not identified.
    pub(super) process: Option<Arc<PeerProcess>>,
}

/// A protection whose series this gate has, or had.
#[derive(Debug, Clone)]
struct Protected {
    protection: Uuid,
    /// Its VM; `None`: none was connected at its first seal.
    vm: Option<ConnectedVm>,
}

impl Protected {
    fn process(&self) -> Option<&Arc<PeerProcess>> {
        self.vm.as_ref()?.process.as_ref()
    }

    fn has_live_process(&self) -> bool {
        self.process().is_some_and(|process| process.is_alive())
    }
}

/// The outcome of a fence.
#[derive(Debug)]
pub(super) enum Fenced {
    /// It is fenced now, with its VM.
    Now(Option<ConnectedVm>),
    /// It was fenced before.
    Before(Option<ConnectedVm>),
    /// The gate does not have it.
    Unknown,
}

/// The last series, and the protections that were fenced.
#[derive(Debug, Default)]
pub(super) struct Fences {
    last: Option<Protected>,
    fenced: Vec<Protected>,
}

impl Fences {
    /// Returns whether a series may begin, of the VM of this QEMU process if that is known: neither that VM nor that
    /// protection was fenced.
    pub(super) fn admits(&self, protection: Uuid, vm: Option<u32>) -> bool {
        let is_refused = |fenced: &Protected| {
            let is_its = vm.is_some() && fenced.process().and_then(|process| process.pid()) == vm;
            fenced.protection == protection || (is_its && fenced.has_live_process())
        };
        !self.fenced.iter().any(is_refused)
    }

    /// Notes that a series begins, and the VM that is connected while it stands still. The one before cannot be fenced
    /// any more.
    pub(super) fn begin(&mut self, protection: Uuid, vm: Option<ConnectedVm>) {
        self.last = Some(Protected { protection, vm });
    }

    /// Returns the outcome that a fence of a protection would have.
    pub(super) fn query(&self, protection: Uuid) -> Fenced {
        if let Some(before) = self.fenced.iter().find(|before| before.protection == protection) {
            return Fenced::Before(before.vm.clone());
        }
        // Keepers that name no protection all have the nil id, so no fence can name one of them.
        match self.last.as_ref().filter(|last| last.protection == protection && !protection.is_nil()) {
            Some(last) => Fenced::Now(last.vm.clone()),
            None => Fenced::Unknown,
        }
    }

    /// Fences a protection: its VM is refused from now on.
    pub(super) fn fence(&mut self, protection: Uuid) -> Fenced {
        let outcome = self.query(protection);
        if matches!(outcome, Fenced::Now(_)) {
            if self.fenced.len() >= REMEMBERED
                && let Some(at) = self.fenced.iter().position(|fenced| !fenced.has_live_process())
            {
                self.fenced.remove(at);
            }
            self.fenced.extend(self.last.take());
        }
        outcome
    }

    /// Whether a process is that of a VM that was fenced. `None` is one that is not identified: it may be, as long as
    /// such a process lives.
    pub(super) fn refuses(&self, process: Option<&PeerProcess>) -> bool {
        match process {
            Some(process) => self.fenced.iter().filter_map(Protected::process).any(|fenced| fenced.is(process)),
            None => self.fenced.iter().any(Protected::has_live_process),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// This process, as a VM.
    fn own(connection: u64) -> ConnectedVm {
        let (near, _far) = UnixStream::pair().unwrap();
        ConnectedVm { connection, process: Some(Arc::new(PeerProcess::of(near.as_fd()).unwrap())) }
    }

    fn is_own(vm: Option<&ConnectedVm>) -> bool {
        vm.is_some_and(|vm| vm.connection == 7)
    }

    fn refuses(fences: &Fences, vm: &ConnectedVm) -> bool {
        fences.refuses(vm.process.as_deref())
    }

    #[test]
    fn the_vm_that_stood_still_for_the_base_is_refused_whoever_is_connected_later() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        assert!(fences.admits(id, None));
        fences.begin(id, Some(own(7)));
        assert!(!refuses(&fences, &own(8)) && !fences.refuses(None));
        assert!(matches!(fences.query(id), Fenced::Now(vm) if is_own(vm.as_ref())));
        assert!(!refuses(&fences, &own(8)), "a query changes nothing");
        assert!(matches!(fences.fence(id), Fenced::Now(vm) if is_own(vm.as_ref())));
        assert!(refuses(&fences, &own(9)));
        assert!(matches!(fences.fence(id), Fenced::Before(vm) if is_own(vm.as_ref())));
        assert!(matches!(fences.query(id), Fenced::Before(vm) if is_own(vm.as_ref())));
    }

    #[test]
    fn a_process_that_cannot_be_told_from_others_is_refused_while_a_vm_that_was_fenced_lives() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        fences.begin(id, Some(own(7)));
        fences.fence(id);
        assert!(fences.refuses(None));
        // Nothing is known of the VM of this one, which its user has said to be off.
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        fences.begin(id, Some(ConnectedVm { connection: 1, process: None }));
        fences.fence(id);
        assert!(!fences.refuses(None));
    }

    #[test]
    fn a_protection_that_was_fenced_and_another_one_of_its_vm_do_not_begin_again() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        let pid = std::process::id();
        fences.begin(id, Some(own(7)));
        fences.fence(id);
        assert!(!fences.admits(id, None));
        assert!(!fences.admits(Uuid::new_v4(), Some(pid)));
        assert!(fences.admits(Uuid::new_v4(), Some(pid + 1)) && fences.admits(Uuid::new_v4(), None));
    }

    #[test]
    fn a_protection_that_the_gate_does_not_have_any_more_is_not_fenced() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        assert!(matches!(fences.fence(id), Fenced::Unknown));
        fences.begin(id, None);
        fences.begin(Uuid::nil(), None);
        assert!(matches!(fences.fence(id), Fenced::Unknown));
        assert!(matches!(fences.fence(Uuid::nil()), Fenced::Unknown));
    }

    #[test]
    fn a_protection_is_fenced_without_its_vm_and_nobody_is_refused_then() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        fences.begin(id, None);
        assert!(matches!(fences.fence(id), Fenced::Now(None)));
        assert!(!refuses(&fences, &own(1)));
        for _ in 0..3 * REMEMBERED {
            let id = Uuid::new_v4();
            fences.begin(id, None);
            assert!(matches!(fences.fence(id), Fenced::Now(None)));
        }
        assert_eq!(fences.fenced.len(), REMEMBERED);
    }
}
