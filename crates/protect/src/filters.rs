//! Output held by QEMU itself, for a VM that was not prepared with a gate: two `filter-buffer` objects on each network.
//!
//! ```text
//! card ──► inner (the open epoch) ──► outer (sealed epochs) ──► back end
//!                        seal: all of it             commit: all of it
//! ```
//!
//! Law: **what is in the outer one belongs to a checkpoint, and leaves when that counts.** A filter that is switched
//! off passes on what it has, and one that is switched on again holds what comes after that: both are sent to QEMU as
//! one, and answered before the VM continues.
//!
//! Facts found with QEMU 11.1: the filter that was made first is the outer one, of the frames that the VM sends; a
//! network that has a vhost back end or more than one queue can have none. A filter holds 10,000 packets, and drops
//! more without a word. One that is removed passes on what it has.

use std::sync::atomic::{AtomicBool, Ordering};

use limosa_migrate::VmError;
use limosa_migrate::output::{OutputCounters, OutputGate, OutputSignal};
use limosa_qemu::monitor::{Monitor, OutputFilter};
use limosa_qemu::qmp::QmpError;

use crate::error::ProtectError;

/// A filter that does not do what is needed.
#[derive(Debug, thiserror::Error)]
enum FilterError {
    /// QEMU puts none there.
    #[error("the network {network} can have no filters, as QEMU says: {said}")]
    Refused { network: String, said: String },
    /// QEMU's failure.
    #[error("the filters of the network {network} failed")]
    Failed { network: String, source: QmpError },
}

/// The two filters of a network.
#[derive(Debug)]
struct Filters {
    network: String,
    outer: OutputFilter,
    inner: OutputFilter,
}

/// The filters of all networks of a VM.
#[derive(Debug)]
pub(crate) struct FilteredOutput<'a> {
    monitor: &'a Monitor,
    all: Vec<Filters>,
    /// They are in QEMU.
    made: AtomicBool,
}

impl<'a> FilteredOutput<'a> {
    /// Plans filters for all networks of the VM; changes nothing.
    pub(crate) fn plan(monitor: &'a Monitor) -> Result<Self, ProtectError> {
        let refused = |why: String| Err(ProtectError::Refused(why));
        let mut all: Vec<Filters> = Vec::new();
        for (number, network) in monitor.network_backends()?.into_iter().enumerate() {
            let id = network.id;
            if all.iter().any(|before| before.network == id) {
                return refused(format!("the network {id} has several queues, and QEMU cannot filter it"));
            }
            if network.is_hub_port {
                return refused(format!(
                    "the network {id} is a port of a hub, whose filters hold what comes for the VM"
                ));
            }
            if network.kind.starts_with("vhost") {
                return refused(format!("the network {id} ({}) does not pass through QEMU's filters", network.kind));
            }
            let [outer, inner] = ["outer", "inner"].map(|part| OutputFilter::new(&format!("limosa-{part}-{number}")));
            all.push(Filters { network: id, outer, inner });
        }
        if all.is_empty() {
            return refused("the VM has no network whose output could be held".into());
        }
        Ok(Self { monitor, all, made: AtomicBool::new(false) })
    }

    /// The ids of all filters, in the order in which they can be removed.
    pub(crate) fn ids(&self) -> Vec<String> {
        let both = self.all.iter().flat_map(|filters| [&filters.inner, &filters.outer]);
        both.map(|filter| filter.id().to_owned()).collect()
    }

    /// Does something to the filters of each network.
    fn each(&self, order: impl Fn(&Filters) -> Result<(), QmpError>) -> Result<(), VmError> {
        let failed = |filters: &Filters, source| FilterError::Failed { network: filters.network.clone(), source };
        self.all.iter().try_for_each(|filters| Ok(order(filters).map_err(|error| failed(filters, error))?))
    }
}

impl OutputGate for FilteredOutput<'_> {
    /// Makes the filters, which hold nothing yet. The record of the job must know them.
    fn watch(&self, _signal: &OutputSignal) -> Result<(), VmError> {
        if self.made.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let made = self.all.iter().try_for_each(|Filters { network, outer, inner }| {
            // In this order: the first one is the outer one.
            let made = self.monitor.add_output_filters(network, [outer, inner]);
            made.map_err(|error| match error.desc() {
                Some(said) => FilterError::Refused { network: network.clone(), said: said.to_owned() },
                None => FilterError::Failed { network: network.clone(), source: error },
            })
        });
        Ok(made?)
    }

    fn seal(&self, epoch: u64) -> Result<(), VmError> {
        self.each(|Filters { outer, inner, .. }| match epoch {
            // The outer one first: nothing is between them.
            0 => self.monitor.switch_output_filters([(outer, true), (inner, true)]),
            _ => self.monitor.switch_output_filters([(inner, false), (inner, true)]),
        })
    }

    fn commit(&self, _epoch: u64) -> Result<(), VmError> {
        self.each(|Filters { outer, .. }| self.monitor.switch_output_filters([(outer, false), (outer, true)]))
    }

    /// Lets everything out: a filter cannot drop, and only a VM that continues has filters that something is in. They
    /// are removed at the end of the job.
    fn abort(&self, _epoch: u64) -> Result<(), VmError> {
        let off = self
            .each(|Filters { outer, inner, .. }| self.monitor.switch_output_filters([(inner, false), (outer, false)]));
        match off {
            // What was in them went with QEMU.
            Err(error) if is_gone(&error) => Ok(()),
            off => off,
        }
    }

    /// None: QEMU's filters do not count.
    fn counters(&self) -> OutputCounters {
        OutputCounters::default()
    }
}

fn is_gone(error: &VmError) -> bool {
    matches!(error.downcast_ref(), Some(FilterError::Failed { source, .. }) if source.is_gone())
}
