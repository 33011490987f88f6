//! Commands of a keeper: the epochs of exports whose VMs are protected.

use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_export::Export;
use limosa_page::to_micros;
use serde_json::{Value, json};

use super::requests::{DropRequest, EpochRequest, LogRequest, ProtectRequest, UnprotectRequest};
use super::{QUIESCE, Steering};
use crate::serve::devices::BlockDevice;
use crate::serve::epochs::EpochLog;
use crate::serve::wanted::Wanted;
use crate::serve::{images, report};

impl Steering {
    /// Has the writes of an export belong to epochs.
    pub(super) fn protect(&self, request: &ProtectRequest) -> anyhow::Result<Value> {
        let ProtectRequest { name, keeper, first, log, log_size, timeout } = request;
        let _kept = self.keep()?;
        // No overlay is put on its image meanwhile.
        let medium = self.medium(name);
        let _alone = medium.lock();
        let (export, wanted) = self.served(name)?;
        let (id, log) = (*log, EpochLog::for_export(&export, &wanted)?);
        let options = log.options(self.images.boot())?.first(first.unwrap_or(1)).log(id);
        let options = log_size.map_or(options, |size| options.limit(size));
        let mut is_created = false;
        let create = || {
            let created = log.create()?;
            is_created = true;
            Ok::<_, anyhow::Error>(created)
        };
        let protected = export.protect(keeper, create, &options, timeout.map_or(QUIESCE, Duration::from_millis));
        if let Err(error) = protected {
            if is_created {
                log.remove()?;
            }
            return Err(self.explained(error));
        }
        self.servers.devices.iter().for_each(|device| device.notify_replaced(&export));
        Ok(state(&export))
    }

    /// Seals the open epoch of an export.
    pub(super) fn seal(&self, EpochRequest { name, keeper, epoch }: &EpochRequest) -> anyhow::Result<Value> {
        let export = self.export(name)?;
        export.seal_epoch(keeper, *epoch)?;
        Ok(json!({ "open": epoch.saturating_add(1) }))
    }

    /// Prepares a sealed epoch of an export.
    pub(super) fn prepare_epoch(&self, request: &LogRequest) -> anyhow::Result<Value> {
        let LogRequest { name, keeper, epoch, durable } = request;
        let _kept = self.keep()?;
        let export = self.export(name)?;
        let begun = Instant::now();
        export.prepare_epoch(keeper, *epoch, *durable)?;
        Ok(json!({ "prepared": epoch, "us": to_micros(begun.elapsed()) }))
    }

    /// Keeps a sealed or prepared epoch of an export.
    pub(super) fn keep_epoch(&self, request: &LogRequest) -> anyhow::Result<Value> {
        let LogRequest { name, keeper, epoch, durable } = request;
        let _kept = self.keep()?;
        let export = self.export(name)?;
        let begun = Instant::now();
        export.keep_epoch(keeper, *epoch, *durable)?;
        Ok(json!({ "kept": epoch, "us": to_micros(begun.elapsed()) }))
    }

    /// Drops what was written to an export after an epoch, and removes it, or serves it again.
    pub(super) fn drop_after(&self, request: &DropRequest) -> anyhow::Result<Value> {
        let DropRequest { name, keeper, epoch, serve_again, fence } = request;
        let _kept = self.keep()?;
        let begun = Instant::now();
        let again = if *serve_again { Some(self.again(name)?) } else { None };
        let before = self.export(name)?;
        let devices: Vec<_> = self.servers.devices.iter().filter(|device| device.is_of(&before)).collect();
        let cut = |_: &Arc<Export>| devices.iter().for_each(|device| device.cut());
        // Before it is removed: no other export gets the name.
        let is_new = self.dropped.lock().insert(name.clone());
        let dropped = self.exports.drop_after(name, (keeper, *epoch, *fence), cut);
        if self.exports.find(name).is_some() {
            // It was refused, or can be tried again.
            if is_new {
                self.dropped.lock().remove(name);
            }
        } else {
            self.images.forget(name);
            self.media.lock().remove(name);
        }
        let served = dropped.map_err(anyhow::Error::from).and_then(|peers| {
            if let Some(wanted) = again {
                self.serve_again(name, wanted, &devices)?;
            }
            Ok(peers)
        });
        if self.exports.find(name).is_none() {
            devices.iter().for_each(|device| device.abandon());
        }
        Ok(json!({ "epoch": epoch, "us": to_micros(begun.elapsed()), "vm": report::vm(&served?) }))
    }

    /// Serves the image of an export again that was dropped.
    fn serve_again(&self, name: &str, mut wanted: Wanted, devices: &[&BlockDevice]) -> anyhow::Result<()> {
        let export = images::open_export(&mut wanted, self.images.boot()).map_err(|error| self.explained(error))?;
        let added = self.exports.add(export)?;
        self.dropped.lock().remove(name);
        self.images.note(&added, wanted);
        devices.iter().try_for_each(|device| device.succeed(&added))
    }

    /// The image of an export that is served again when its VM is off, or refused.
    fn again(&self, name: &str) -> anyhow::Result<Wanted> {
        let (_, wanted) = self.served(name)?;
        Ok(Wanted { fenced: true, epoch: None, recovery: None, ..wanted })
    }

    /// Ends the protection of an export.
    pub(super) fn unprotect(&self, request: &UnprotectRequest) -> anyhow::Result<Value> {
        let UnprotectRequest { name, keeper, timeout } = request;
        let _kept = self.keep()?;
        let medium = self.medium(name);
        let _alone = medium.lock();
        let (export, wanted) = self.served(name)?;
        export.unprotect(keeper, timeout.map_or(QUIESCE, Duration::from_millis))?;
        self.servers.devices.iter().for_each(|device| device.notify_replaced(&export));
        // What it says has ended: the next server would only remove it.
        EpochLog::for_export(&export, &wanted)?.remove()?;
        Ok(report::description(&export).into())
    }
}

/// An export with its epochs.
fn state(export: &Export) -> Value {
    let mut answer = report::description(export);
    answer.insert("protection".into(), report::protection(export).into());
    answer.into()
}
