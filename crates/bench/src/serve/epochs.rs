//! A disk whose writes belong to epochs, as those of a protected VM do.
//!
//! The client stands still while an epoch is sealed, as a VM does. It is prepared, kept and copied from the log to the
//! image beside the requests of the next one.

use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use limosa_qemu::qmp::{MonitorAddress, Options, Qmp};
use serde_json::json;

use super::client::{self, Clients, Load, Outcome};
use super::servers::EXPORT;

/// Epochs of a run.
const EPOCHS: u64 = 20;
/// The name of their keeper.
const KEEPER: &str = "limosa-bench";

/// Puts the load on a server with this control socket. The time is that until the last epoch is kept.
pub(super) fn run(clients: &mut Clients, load: &Load, control: &Path) -> Result<Outcome> {
    let connect = || Qmp::connect(&MonitorAddress::Unix(control.to_owned()), &Options::default());
    let (sealer, keeper) = (connect()?, connect()?);
    sealer.execute("export-protect", json!({ "name": EXPORT, "keeper": KEEPER }))?;
    let order = |qmp: &Qmp, command: &str, epoch: u64| {
        qmp.execute(command, json!({ "name": EXPORT, "keeper": KEEPER, "epoch": epoch })).map(drop)
    };
    let (sealed, to_keep) = mpsc::channel();
    let begun = Instant::now();
    let mut latencies = Vec::new();
    thread::scope(|scope| {
        let keeping = scope.spawn(|| {
            to_keep.into_iter().try_for_each(|epoch| {
                order(&keeper, "export-prepare", epoch)?;
                order(&keeper, "export-keep", epoch)
            })
        });
        for epoch in 1..=EPOCHS {
            let [first, next] = [epoch - 1, epoch].map(|epoch| load.count * epoch / EPOCHS);
            let part = Load { first, count: next - first, ..load.clone() };
            latencies.extend(client::run(clients, &part)?.latencies);
            order(&sealer, "export-seal", epoch)?;
            sealed.send(epoch).context("the epochs cannot be kept")?;
        }
        drop(sealed);
        keeping.join().map_err(|_| anyhow!("the thread that keeps epochs panicked"))?.context("keeping an epoch")
    })?;
    let wall = begun.elapsed();
    let end = json!({ "name": EXPORT, "keeper": KEEPER, "timeout": 60_000 });
    sealer.execute_within("export-unprotect", end, Duration::from_secs(60))?;
    Ok(Outcome { wall, latencies })
}
