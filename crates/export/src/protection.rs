//! The epochs of an export whose VM is protected: what a keeper orders.
//!
//! Laws: an export has one keeper at a time, and what another one orders changes nothing. While it is protected no
//! other command changes its disk, or relies on its file. A kept epoch is brought to the image by a thread of its own:
//! neither the keeper nor the VM waits for that.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use limosa_image::epochs::{EpochDisk, EpochOptions, EpochStatus};
use limosa_page::error_with_causes;
use limosa_storage::{Storage, block_on};
use parking_lot::{Condvar, Mutex};

use crate::clients::Access;
use crate::export::{Export, ExportError};
use crate::exports::Exports;
use crate::peer::VmPeers;

/// The most bytes of a keeper's name.
const KEEPER_MAX: usize = 256;

/// The protection of an export at a moment.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProtectionStatus {
    /// The name of its keeper.
    pub keeper: String,
    /// Its epochs.
    pub epochs: EpochStatus,
    /// The peers that may be its VM.
    pub peers: VmPeers,
    /// Why kept epochs could not be brought to the image the last time; they are in the log.
    pub failure: Option<String>,
}

/// The protection of an export.
#[derive(Debug)]
pub(crate) struct Protection {
    keeper: String,
    disk: Arc<EpochDisk>,
    merging: Arc<Merging>,
    /// Those that were connected when it began.
    peers: VmPeers,
}

/// Orders to the thread that merges.
#[derive(Debug, Default)]
struct Merging {
    orders: Mutex<Orders>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    wanted: bool,
    over: bool,
    failure: Option<String>,
}

impl Protection {
    fn start(export: &str, keeper: &str, disk: Arc<EpochDisk>, peers: VmPeers) -> std::io::Result<Self> {
        let (merging, merged, export) = (Arc::<Merging>::default(), Arc::clone(&disk), export.to_owned());
        let waits = Arc::clone(&merging);
        thread::Builder::new().name("epochs".into()).spawn(move || waits.run(&export, &merged))?;
        Ok(Self { keeper: keeper.to_owned(), disk, merging, peers })
    }
}

impl Drop for Protection {
    fn drop(&mut self) {
        self.merging.orders.lock().over = true;
        self.merging.changed.notify_all();
    }
}

impl Merging {
    fn order(&self) {
        self.orders.lock().wanted = true;
        self.changed.notify_all();
    }

    /// Merges when it is ordered, until protection is over.
    fn run(&self, export: &str, disk: &EpochDisk) {
        loop {
            let mut orders = self.orders.lock();
            self.changed.wait_while(&mut orders, |orders| !orders.wanted && !orders.over);
            if orders.over {
                return;
            }
            orders.wanted = false;
            drop(orders);
            let failure = block_on(disk.merge()).err().map(|error| error_with_causes(&error));
            let mut orders = self.orders.lock();
            if let Some(error) = failure.as_ref().filter(|_| orders.failure.is_none()) {
                tracing::error!(export, error, "kept epochs cannot be brought to the image, and stay in its log");
            }
            orders.failure = failure;
        }
    }
}

impl Export {
    /// Begins protection: from now on writes belong to epochs, the first of them `options.first`. `log` opens an empty
    /// log, while no request is in flight; those that are get `within`.
    ///
    /// # Errors
    /// [`ExportError::Protected`]; it is read-only; that of `log`; as of [`quiesce`](Self::quiesce). Nothing has
    /// changed then.
    pub fn protect<E: From<ExportError>>(
        &self,
        keeper: &str,
        log: impl FnOnce() -> Result<Arc<dyn Storage>, E>,
        options: &EpochOptions,
        within: Duration,
    ) -> Result<(), E> {
        if keeper.is_empty() || keeper.len() > KEEPER_MAX {
            return Err(ExportError::Keeper.into());
        }
        self.change(within, || {
            self.refuse_protected()?;
            let log = log()?;
            let begun = block_on(EpochDisk::begin(self.disk(), log, options));
            let disk = begun.map_err(ExportError::from)?;
            let peers = self.clients().begin_peers();
            let protection = Protection::start(self.name(), keeper, Arc::clone(&disk), peers);
            let protection = protection.map_err(|error| ExportError::Thread(Arc::new(error)))?;
            *self.protection.lock() = Some(protection);
            self.put(disk);
            Ok(())
        })
    }

    /// Returns the state of its protection; `None`: it is not protected.
    #[must_use]
    pub fn protection(&self) -> Option<ProtectionStatus> {
        let protection = self.protection.lock();
        protection.as_ref().map(|Protection { keeper, disk, merging, peers }| ProtectionStatus {
            keeper: keeper.clone(),
            epochs: disk.status(),
            peers: self.vm_peers(peers),
            failure: merging.orders.lock().failure.clone(),
        })
    }

    /// Returns the peers that may be its VM: those that were there when protection began, and who has written since.
    fn vm_peers(&self, begun: &VmPeers) -> VmPeers {
        let mut peers = begun.clone();
        peers.add_all(&self.clients().writers());
        peers
    }

    /// Seals the open epoch, as [`EpochDisk::seal`] does: while the VM is stopped, and all its requests are answered.
    ///
    /// # Errors
    /// [`ExportError::NotProtected`], [`ExportError::OtherKeeper`]; as of [`EpochDisk::seal`].
    pub fn seal_epoch(&self, keeper: &str, epoch: u64) -> Result<(), ExportError> {
        Ok(self.protected_by(keeper)?.0.seal(epoch)?)
    }

    /// Prepares a sealed epoch, as [`EpochDisk::prepare`] does.
    ///
    /// # Errors
    /// As of [`seal_epoch`](Self::seal_epoch) and [`EpochDisk::prepare`].
    pub fn prepare_epoch(&self, keeper: &str, epoch: u64, durable: bool) -> Result<(), ExportError> {
        Ok(block_on(self.protected_by(keeper)?.0.prepare(epoch, durable))?)
    }

    /// Keeps a sealed or prepared epoch, as [`EpochDisk::keep`] does, and has it brought to the image.
    ///
    /// # Errors
    /// As of [`seal_epoch`](Self::seal_epoch) and [`EpochDisk::keep`].
    pub fn keep_epoch(&self, keeper: &str, epoch: u64, durable: bool) -> Result<(), ExportError> {
        let (disk, merging) = self.protected_by(keeper)?;
        block_on(disk.keep(epoch, durable))?;
        merging.order();
        Ok(())
    }

    /// Ends protection: the open epoch becomes the image's, durably. Requests wait meanwhile; those in flight get
    /// `within`.
    ///
    /// # Errors
    /// As of [`seal_epoch`](Self::seal_epoch), [`quiesce`](Self::quiesce) and [`EpochDisk::end`]: it stays protected.
    pub fn unprotect(&self, keeper: &str, within: Duration) -> Result<(), ExportError> {
        self.change(within, || {
            let (disk, _) = self.protected_by(keeper)?;
            block_on(disk.end())?;
            self.put(Arc::clone(disk.image()));
            *self.protection.lock() = None;
            Ok(())
        })
    }

    /// Fails if it is protected.
    pub(crate) fn refuse_protected(&self) -> Result<(), ExportError> {
        match &*self.protection.lock() {
            None => Ok(()),
            Some(protection) => {
                let (name, keeper) = (self.name().to_owned(), protection.keeper.clone());
                Err(ExportError::Protected { name, keeper })
            }
        }
    }

    fn protected_by(&self, keeper: &str) -> Result<(Arc<EpochDisk>, Arc<Merging>), ExportError> {
        match &*self.protection.lock() {
            None => Err(ExportError::NotProtected(self.name().to_owned())),
            Some(protection) if protection.keeper != keeper => {
                let (name, keeper) = (self.name().to_owned(), protection.keeper.clone());
                Err(ExportError::OtherKeeper { name, keeper })
            }
            Some(protection) => Ok((Arc::clone(&protection.disk), Arc::clone(&protection.merging))),
        }
    }
}

impl Exports {
    /// Drops all that the VM of an export wrote after an epoch, which is kept first if it is sealed. All requests fail
    /// from then on, its clients are cut off, and the export is removed; its image is as of that epoch, durably, closed
    /// and unlocked. `cut_devices` ends the devices of the export. The VM is refused from then on under this name, as
    /// far as it is recognized; with `fence` it must be, and clients of other hosts are refused if it was one. Returns
    /// the VM's peers. Blocks until it is done.
    ///
    /// # Errors
    /// [`ExportError::NotFound`]; [`ExportError::Unrecognized`], with `fence`; as of [`Export::seal_epoch`]; there is
    /// no such epoch: nothing has changed then. The image or the log fails: requests fail from then on, and dropping
    /// can be tried again.
    pub fn drop_after(
        &self,
        name: &str,
        (keeper, epoch, fence): (&str, u64, bool),
        cut_devices: impl FnOnce(&Arc<Export>),
    ) -> Result<VmPeers, ExportError> {
        let export = self.find(name).ok_or_else(|| ExportError::NotFound(name.to_owned()))?;
        let (disk, _) = export.protected_by(keeper)?;
        let peers = || export.protection().map(|status| status.peers).unwrap_or_default();
        if fence && !peers().are_recognized() {
            return Err(ExportError::Unrecognized(name.to_owned()));
        }
        // First of all: nothing that a client sends from now on has an effect.
        block_on(disk.drop_after(epoch))?;
        // With those who have written until just now. There is no way back: one of them that is not recognized is cut
        // off, and what it wrote is gone.
        let peers = peers();
        self.refuse(name, &peers, fence);
        self.forget(&export);
        export.end_clients(Access::Cut);
        cut_devices(&export);
        export.close_dropped()?;
        Ok(peers)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use limosa_image::raw::{Raw, RawOptions};
    use limosa_storage::MemoryStorage;
    use limosa_storage::testing::RequestHolder;

    use super::*;
    use crate::counters::{Outcome, RequestKind};
    use crate::peer::Peer;

    #[test]
    fn a_writer_that_appears_while_writes_are_dropped_does_not_make_that_fail() {
        let image = Arc::new(MemoryStorage::with_contents(vec![0; 4096], 4096));
        let exports = Exports::new();
        let export = Export::new("vm", Raw::open(image, &RawOptions::default()).unwrap()).unwrap();
        let export = exports.add(export).unwrap();
        let (near, _far) = UnixStream::pair().unwrap();
        let vm = export.clients().join(Arc::new(Peer::of(near.as_fd())));
        let holder = RequestHolder::new();
        holder.release_all();
        let log = holder.wrap(Arc::new(MemoryStorage::growing_to(1 << 20)));
        let within = Duration::from_secs(60);
        export.protect("k", || Ok::<_, ExportError>(log), &EpochOptions::default(), within).unwrap();
        drop(vm);
        export.seal_epoch("k", 1).unwrap();
        holder.hold_again();
        thread::scope(|scope| {
            let dropping = scope.spawn(|| exports.drop_after("vm", ("k", 1, true), |_| {}));
            while holder.waiting().is_empty() {
                assert!(!dropping.is_finished());
                thread::yield_now();
            }
            // Its server cannot tell it from others.
            let late = export.clients().join(Arc::new(Peer::Unknown));
            let (kind, time) = (RequestKind::Write, Duration::ZERO);
            late.count(&mut vec![Outcome { kind, length: 512, failed: false, time }]);
            drop(late);
            holder.release_all();
            dropping.join().unwrap().unwrap();
        });
        assert!(exports.find("vm").is_none());
    }
}
