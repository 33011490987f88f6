//! The protections that a gate has had, as far as a fence needs them.
//!
//! Law: **the process whose VM was failed over is never taken again, and no other is refused.** A standby may connect to
//! the gate before its VM runs, and take the place of a VM that has died. So the VM of a protection is the process that
//! was connected when it stood still for the base: then it was certainly there, and no other was.

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
    /// Its process; `None`: it cannot be told from others.
    pub(super) process: Option<Arc<PeerProcess>>,
}

/// A protection whose series this gate has, or had.
#[derive(Debug, Clone)]
struct Protected {
    protection: Uuid,
    /// Its VM; `None` before its first seal, or if none was connected then.
    vm: Option<ConnectedVm>,
    is_sealed: bool,
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
    /// Notes that a series begins, of the VM of this QEMU process if that is known. Returns false if that VM or that
    /// protection was fenced.
    pub(super) fn begin(&mut self, protection: Uuid, vm: Option<u32>) -> bool {
        let is_refused = |fenced: &Protected| {
            let is_its = vm.is_some() && fenced.process().and_then(|process| process.pid()) == vm;
            fenced.protection == protection || (is_its && fenced.has_live_process())
        };
        if self.fenced.iter().any(is_refused) {
            return false;
        }
        self.last = Some(Protected { protection, vm: None, is_sealed: false });
        true
    }

    /// Notes the VM that is connected while it stands still.
    pub(super) fn seal(&mut self, vm: impl FnOnce() -> Option<ConnectedVm>) {
        if let Some(last) = self.last.as_mut().filter(|last| !last.is_sealed) {
            (last.vm, last.is_sealed) = (vm(), true);
        }
    }

    /// Fences a protection: its VM is refused from now on.
    pub(super) fn fence(&mut self, protection: Uuid) -> Fenced {
        if let Some(before) = self.fenced.iter().find(|before| before.protection == protection) {
            return Fenced::Before(before.vm.clone());
        }
        // A keeper that does not say its name cannot be meant.
        let Some(last) = self.last.take_if(|last| last.protection == protection && !protection.is_nil()) else {
            return Fenced::Unknown;
        };
        if self.fenced.len() >= REMEMBERED
            && let Some(at) = self.fenced.iter().position(|fenced| !fenced.has_live_process())
        {
            self.fenced.remove(at);
        }
        let vm = last.vm.clone();
        self.fenced.push(last);
        Fenced::Now(vm)
    }

    /// Whether a process is that of a VM that was fenced.
    pub(super) fn refuses(&self, process: &PeerProcess) -> bool {
        self.fenced.iter().filter_map(Protected::process).any(|fenced| fenced.is(process))
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

    #[test]
    fn the_vm_that_stood_still_for_the_base_is_refused_whoever_is_connected_later() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        assert!(fences.begin(id, None));
        fences.seal(|| Some(own(7)));
        fences.seal(|| panic!("its VM is known"));
        assert!(!fences.refuses(own(8).process.as_ref().unwrap()));
        assert!(matches!(fences.fence(id), Fenced::Now(vm) if is_own(vm.as_ref())));
        assert!(fences.refuses(own(9).process.as_ref().unwrap()));
        assert!(matches!(fences.fence(id), Fenced::Before(vm) if is_own(vm.as_ref())));
    }

    #[test]
    fn a_protection_that_was_fenced_and_another_one_of_its_vm_do_not_begin_again() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        let pid = std::process::id();
        assert!(fences.begin(id, Some(pid)));
        fences.seal(|| Some(own(7)));
        fences.fence(id);
        assert!(!fences.begin(id, None));
        assert!(!fences.begin(Uuid::new_v4(), Some(pid)));
        assert!(fences.begin(Uuid::new_v4(), Some(pid + 1)) && fences.begin(Uuid::new_v4(), None));
    }

    #[test]
    fn a_protection_that_the_gate_does_not_have_any_more_is_not_fenced() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        assert!(matches!(fences.fence(id), Fenced::Unknown));
        assert!(fences.begin(id, None) && fences.begin(Uuid::nil(), None));
        assert!(matches!(fences.fence(id), Fenced::Unknown));
        assert!(matches!(fences.fence(Uuid::nil()), Fenced::Unknown));
    }

    #[test]
    fn a_protection_is_fenced_before_its_vm_was_seen_and_nobody_is_refused_then() {
        let (mut fences, id) = (Fences::default(), Uuid::new_v4());
        assert!(fences.begin(id, None));
        fences.seal(|| None);
        assert!(matches!(fences.fence(id), Fenced::Now(None)));
        assert!(!fences.refuses(own(1).process.as_ref().unwrap()));
        for _ in 0..3 * REMEMBERED {
            let id = Uuid::new_v4();
            assert!(fences.begin(id, None));
            assert!(matches!(fences.fence(id), Fenced::Now(None)));
        }
        assert_eq!(fences.fenced.len(), REMEMBERED);
    }
}
