//! Changes to QEMU's block graph: an overlay over a disk, and an overlay merged back.
//!
//! Facts found with QEMU 10.0.2:
//!
//! * `blockdev-add` opens an image that nothing uses; `blockdev-snapshot` puts it over a node, for everything that uses
//!   that node, in an iothread too, and opens the node's image read-only. In a `transaction` all of them happen or
//!   none.
//! * It works in the state `pre-switchover`, in a millisecond, and the migration continues as if nothing had been.
//! * `blockdev-del` refuses a node that is in use: the one question about that which cannot be overtaken by events.
//! * `block-commit` of a node that a device writes to becomes ready and waits for `job-complete`, which puts the lower
//!   node back in place; the upper one stays, unused. It works while the VM runs or is stopped, and, where a completed
//!   migration has taken the images' activity, after `blockdev-set-active` (10.0).

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{Monitor, need_list};
use crate::qmp::QmpError;

/// How long to wait for an event of a job before it is asked for again.
const LOOK: Duration = Duration::from_millis(50);

/// How long a job may take to go away once it is cancelled.
const CANCELLED_WITHIN: Duration = Duration::from_secs(10);

/// A job on a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockJob {
    /// Its id.
    pub id: String,
    /// Its type: `commit`, `mirror`, `backup`, `stream`, ...
    pub kind: String,
    /// Whether it waits for `job-complete`.
    pub ready: bool,
}

/// A job of any kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Job {
    /// Its id.
    pub(crate) id: String,
    /// Its state: `running`, `concluded`, ...
    status: String,
    /// The reason of its failure.
    pub(crate) error: Option<String>,
}

impl Job {
    /// Whether it is over, and waits to be dismissed.
    pub(crate) fn is_concluded(&self) -> bool {
        self.status == "concluded"
    }
}

impl Monitor {
    /// Opens the qcow2 image `file`, without what it stands on, as the node `node`. `direct` and `no_flush` as in
    /// QEMU's `cache` options.
    ///
    /// # Errors
    /// QEMU's, for example if it may not open the file.
    pub fn add_overlay(&self, node: &str, file: &str, direct: bool, no_flush: bool) -> Result<(), QmpError> {
        let cache = json!({ "direct": direct, "no-flush": no_flush });
        let protocol = json!({ "driver": "file", "filename": file, "discard": "unmap", "cache": cache });
        self.order(
            "blockdev-add",
            json!({ "driver": "qcow2", "node-name": node, "backing": null, "discard": "unmap", "cache": cache, "file": protocol }),
        )
    }

    /// Closes a node that was added. `Ok(false)` if QEMU has none of that name.
    ///
    /// # Errors
    /// QEMU's, if the node is in use; the connection's.
    pub fn remove_node(&self, node: &str) -> Result<bool, QmpError> {
        match self.order("blockdev-del", json!({ "node-name": node })) {
            Ok(()) => Ok(true),
            Err(error) if error.is_refusal() => {
                if self.has_node(node)? {
                    return Err(error);
                }
                Ok(false)
            }
            Err(other) => Err(other),
        }
    }

    fn has_node(&self, node: &str) -> Result<bool, QmpError> {
        Ok(self.node_names()?.iter().any(|name| name == node))
    }

    /// The names of all block nodes.
    ///
    /// # Errors
    /// The connection's.
    pub(crate) fn node_names(&self) -> Result<Vec<String>, QmpError> {
        const COMMAND: &str = "query-named-block-nodes";
        let answer = self.qmp().execute(COMMAND, json!({ "flat": true }))?;
        let name = |entry: &Value| entry.get("node-name").and_then(Value::as_str).map(str::to_owned);
        Ok(need_list(COMMAND, &answer)?.iter().filter_map(name).collect())
    }

    /// Puts each overlay over its node, all of them at one instant or none: pairs of the node below and the overlay.
    ///
    /// # Errors
    /// QEMU's; then nothing has changed.
    pub fn put_overlays<'a>(&self, pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<(), QmpError> {
        let actions: Vec<Value> = pairs
            .map(|(node, overlay)| json!({ "type": "blockdev-snapshot", "data": { "node": node, "overlay": overlay } }))
            .collect();
        self.order("transaction", json!({ "actions": actions }))
    }

    /// The jobs on block devices.
    ///
    /// # Errors
    /// The connection's.
    pub fn block_jobs(&self) -> Result<Vec<BlockJob>, QmpError> {
        const COMMAND: &str = "query-block-jobs";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let text = |job: &Value, key: &str| job.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let one = |job: &Value| BlockJob {
            id: text(job, "device"),
            kind: text(job, "type"),
            ready: job.get("ready").and_then(Value::as_bool).unwrap_or(false),
        };
        Ok(need_list(COMMAND, &answer)?.iter().map(one).collect())
    }

    /// Writes what is in `overlay` into the node `base` below it, and has `base` take its place. The job has the
    /// overlay's name; one that is there already is continued. What is written meanwhile comes along; after an error
    /// the overlay is what it was.
    ///
    /// `Ok(false)`: not done by `limit`, and cancelled; or it failed on the way (QEMU's log says how).
    ///
    /// # Errors
    /// QEMU's, if it does not begin; the connection's.
    pub fn merge_overlay(&self, overlay: &str, base: &str, limit: Instant) -> Result<bool, QmpError> {
        self.merge_overlay_then(overlay, base, limit, &mut || true)
    }

    /// As [`merge_overlay`](Self::merge_overlay). `may_end` is called when `base` has all of the overlay, before it
    /// takes its place and is written to by itself; if it returns false, the overlay stays.
    pub(crate) fn merge_overlay_then(
        &self,
        overlay: &str,
        base: &str,
        limit: Instant,
        may_end: &mut dyn FnMut() -> bool,
    ) -> Result<bool, QmpError> {
        let find = || Ok::<_, QmpError>(self.block_jobs()?.into_iter().find(|job| job.id == overlay));
        if find()?.is_none() {
            // Where a completed migration has left them inactive; an older QEMU has no such command, and none is needed
            // for a VM that runs.
            if let Err(error) = self.order("blockdev-set-active", json!({ "active": true }))
                && !error.is_refusal()
            {
                return Err(error);
            }
            let arguments = json!({ "job-id": overlay, "device": overlay, "top-node": overlay, "base-node": base });
            self.order("block-commit", arguments)?;
        }
        let (mut cancelled, mut ends) = (None, None);
        while let Some(job) = find()? {
            match cancelled {
                None if Instant::now() >= limit || ends == Some(false) => {
                    cancelled = Some(Instant::now() + CANCELLED_WITHIN);
                    self.try_order("block-job-cancel", json!({ "device": overlay, "force": true }))?;
                }
                None if job.ready && *ends.get_or_insert_with(&mut *may_end) => {
                    self.try_order("job-complete", json!({ "id": overlay }))?;
                }
                Some(end) if Instant::now() >= end => return Ok(false),
                _ => {}
            }
            self.qmp().wait_event(&["BLOCK_JOB_READY", "BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"], LOOK)?;
        }
        // In place again if nothing uses the overlay; asked before it is removed.
        Ok(cancelled.is_none())
    }

    /// Begins to write what is in the node `top` into the node `base` below it, where `top` is below the node `active`,
    /// which a device writes to. `job` stays until it is [dismissed](Self::dismiss_job); then `top` is in no chain.
    ///
    /// # Errors
    /// QEMU's; the connection's.
    pub(crate) fn begin_commit(&self, job: &str, active: &str, top: &str, base: &str) -> Result<(), QmpError> {
        let nodes =
            json!({ "job-id": job, "device": active, "top-node": top, "base-node": base, "auto-dismiss": false });
        self.order("block-commit", nodes)
    }

    /// The jobs.
    ///
    /// # Errors
    /// The connection's.
    pub(crate) fn jobs(&self) -> Result<Vec<Job>, QmpError> {
        const COMMAND: &str = "query-jobs";
        let answer = self.qmp().execute(COMMAND, Value::Null)?;
        let text = |job: &Value, key: &str| job.get(key).and_then(Value::as_str).map(str::to_owned);
        let one = |job: &Value| Job {
            id: text(job, "id").unwrap_or_default(),
            status: text(job, "status").unwrap_or_default(),
            error: text(job, "error"),
        };
        Ok(need_list(COMMAND, &answer)?.iter().map(one).collect())
    }

    /// Forgets a job that is over.
    ///
    /// # Errors
    /// QEMU's; the connection's.
    pub(crate) fn dismiss_job(&self, job: &str) -> Result<(), QmpError> {
        self.order("job-dismiss", json!({ "id": job }))
    }

    /// Cancels a job, if there is one of this id, and waits until it is gone or `limit` has come.
    ///
    /// # Errors
    /// The connection's.
    pub(crate) fn cancel_job(&self, job: &str, limit: Instant) -> Result<(), QmpError> {
        while let Some(found) = self.jobs()?.into_iter().find(|found| found.id == job) {
            if found.is_concluded() {
                return self.try_order("job-dismiss", json!({ "id": job }));
            }
            if Instant::now() >= limit {
                return Ok(());
            }
            self.try_order("block-job-cancel", json!({ "device": job, "force": true }))?;
            self.qmp().wait_event(&["JOB_STATUS_CHANGE"], LOOK)?;
        }
        Ok(())
    }

    /// A command whose refusal changes nothing: it comes again, or its time is over.
    fn try_order(&self, command: &str, arguments: Value) -> Result<(), QmpError> {
        match self.order(command, arguments) {
            Err(error) if error.is_refusal() => Ok(()),
            other => other,
        }
    }
}
