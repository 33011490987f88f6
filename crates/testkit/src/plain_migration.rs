//! Stock QEMU by itself: migration to another QEMU, save to and load from a mapped-ram file. The yardstick of
//! limosa's tests, and the proof of the testkit's own.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::{Value, json};

use crate::vm::Vm;

/// How long a migration may take: for a stuck one, not a measure.
const MIGRATION: Duration = Duration::from_secs(300);

impl Vm {
    /// Migrates to `destination` over a unix socket with stock QEMU's means and waits until the guest is there.
    ///
    /// # Errors
    /// QEMU's own message.
    pub fn migrate_to(&self, destination: &Self) -> Result<()> {
        let uri = format!("unix:{}", destination.folder().join("incoming").display());
        self.lift_limits()?;
        destination.execute("migrate-incoming", json!({ "uri": uri }))?;
        self.execute("migrate", json!({ "uri": uri }))?;
        self.wait_migrated()?;
        destination.wait_migrated()
    }

    /// Saves into a mapped-ram file with stock QEMU's means. The VM is left in `postmigrate`. `threads` multifd
    /// channels, 0 for none.
    ///
    /// # Errors
    /// QEMU's own message.
    pub fn save_file(&self, path: &Path, threads: u8) -> Result<()> {
        self.mapped_ram(threads)?;
        self.lift_limits()?;
        self.execute("migrate", json!({ "uri": format!("file:{}", path.display()) }))?;
        self.wait_migrated()
    }

    /// Loads a mapped-ram file into a destination with stock QEMU's means: eagerly.
    ///
    /// # Errors
    /// QEMU's own message.
    pub fn load_file(&self, path: &Path, threads: u8) -> Result<()> {
        self.mapped_ram(threads)?;
        let uri = format!("file:{}", path.display());
        self.execute("migrate-incoming", json!({ "uri": uri, "exit-on-error": false }))?;
        self.wait_migrated()
    }

    /// Sets or clears migration capabilities.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn set_capabilities(&self, capabilities: &[(&str, bool)]) -> Result<()> {
        let list: Vec<Value> =
            capabilities.iter().map(|(name, state)| json!({ "capability": name, "state": state })).collect();
        self.execute("migrate-set-capabilities", json!({ "capabilities": list })).map(drop)
    }

    /// Waits until QEMU calls its migration, outgoing or incoming, completed.
    ///
    /// # Errors
    /// It failed or was cancelled: QEMU's own message.
    pub fn wait_migrated(&self) -> Result<()> {
        let end = Instant::now() + MIGRATION;
        loop {
            let state = self.execute("query-migrate", json!({}))?;
            match state["status"].as_str() {
                Some("completed") => return Ok(()),
                Some(status @ ("failed" | "cancelled" | "postcopy-paused")) => {
                    bail!("migration {status}: {}", state["error-desc"].as_str().unwrap_or("QEMU gives no reason"));
                }
                status if Instant::now() >= end => bail!("the migration is still {status:?} after {MIGRATION:?}"),
                _ => std::thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    fn mapped_ram(&self, threads: u8) -> Result<()> {
        self.set_capabilities(&[("mapped-ram", true), ("multifd", threads > 0)])?;
        if threads > 0 {
            self.execute("migrate-set-parameters", json!({ "multifd-channels": threads }))?;
        }
        Ok(())
    }

    /// No bandwidth limit (QEMU's default is 128 MiB/s).
    fn lift_limits(&self) -> Result<()> {
        self.execute("migrate-set-parameters", json!({ "max-bandwidth": 0 })).map(drop)
    }
}
