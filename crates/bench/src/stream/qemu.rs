//! The other side: a VM that one stock QEMU sends to another, on the machine's own network, or in one of its own that
//! prefers Reno, which is what limosa's channels take between two processes of one machine.

use std::net::TcpListener;
use std::time::SystemTime;

use anyhow::{Context, Result};
use limosa_qemu::monitor::{MigrationStatus, Settings};

use super::transport::{RECEIVER, SENDER, Transport};
use crate::frame::Frame;
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::namespaces::Loopback;
use crate::options::Options;
use crate::vm::{Ram, Role, Vm};

/// A VM that is sent, and between which ends.
#[derive(Clone, Copy)]
pub(super) struct Sender<'a> {
    pub(super) vm: &'a Vm,
    /// Bytes of its memory.
    pub(super) memory: u64,
    /// The network of both ends; `None` is the machine's own.
    pub(super) network: Option<&'a Loopback>,
    pub(super) transport: Transport,
    pub(super) channels: u8,
}

/// Sends the VM once, to a fresh destination. QEMU is left at its defaults but for the bandwidth, which is not limited,
/// and the number of channels.
pub(super) fn run(options: &Options, sender: Sender<'_>, frame: &Frame) -> Result<Measured> {
    let source = sender.vm;
    let fresh = Ram::Own { content: None };
    let destination = Vm::start_in(sender.network, &options.qemu, sender.memory, fresh, Role::Destination)?;
    let uri = match sender.transport {
        Transport::Unix => format!("unix:{}", destination.at("incoming").display()),
        Transport::Tcp => format!("tcp:127.0.0.1:{}", free_port()?),
    };
    // QEMU does not send a VM again that has not run since it was sent.
    source.run()?;
    source.stop()?;
    source.forget_events()?;
    for side in [source, &destination] {
        side.tune(&[("multifd", true)])?;
        side.monitor.apply_settings(&Settings::new().parameter("multifd-channels", sender.channels))?;
    }
    frame.touch()?;
    let all = Stopwatch::start(&[destination.pid(), source.pid()])?;
    let before = [process_cpu(source.pid())?, process_cpu(destination.pid())?];
    let begin = SystemTime::now();
    destination.monitor.migrate_incoming(&uri)?;
    source.monitor.migrate(&uri, false)?;
    let end = destination.wait_migration(&MigrationStatus::Completed)?;
    source.wait_migration(&MigrationStatus::Completed)?;
    let sender_cpu = process_cpu(source.pid())?.saturating_sub(before[0]);
    let receiver_cpu = process_cpu(destination.pid())?.saturating_sub(before[1]);
    let measured = all.stop()?;
    let wall = end.duration_since(begin).context("the clock was set back meanwhile")?;
    let pages = source.monitor.migration()?.ram.map_or(0, |ram| ram.normal);
    Ok(Measured { wall, ..measured }
        .with(SENDER, millis(sender_cpu))
        .with(RECEIVER, millis(receiver_cpu))
        .with("pages", pages))
}

/// A free port of the loopback interface. If another process takes it before QEMU does, QEMU refuses to start.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("a port of the loopback interface")?;
    Ok(listener.local_addr()?.port())
}
