//! The other side: a VM that one stock QEMU sends to another, on the machine's own network, or in one of its own that prefers Reno,
//! which is what limosa's channels take between two processes of one machine.

use std::cell::RefCell;
use std::net::TcpListener;
use std::time::SystemTime;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::Transport;
use crate::Options;
use crate::frame::Frame;
use crate::measure::{Measured, Stopwatch, millis, process_cpu};
use crate::namespaces::Loopback;
use crate::vm::{Ram, Role, Vm};

/// Sends the VM of `source` once, to a fresh destination. QEMU is left at its defaults but for the bandwidth, which is not
/// limited, and the number of channels.
pub(super) fn run(
    options: &Options,
    memory: u64,
    (source, network): (&RefCell<Vm>, Option<&Loopback>),
    transport: Transport,
    channels: u8,
    frame: &Frame,
) -> Result<Measured> {
    let fresh = Ram::Own { content: None };
    let mut destination = Vm::start_in(network, &options.qemu, memory, fresh, Role::Destination)?;
    let source = &mut *source.borrow_mut();
    let uri = match transport {
        Transport::Unix => format!("unix:{}", destination.at("incoming").display()),
        Transport::Tcp => format!("tcp:127.0.0.1:{}", free_port()?),
    };
    let uri = json!({ "uri": uri });
    // QEMU does not send a VM again that has not run since it was sent.
    source.run()?;
    source.stop()?;
    source.qmp.forget_events();
    for side in [&mut *source, &mut destination] {
        side.tune(&[("multifd", true)])?;
        side.qmp.execute("migrate-set-parameters", &json!({ "multifd-channels": channels }))?;
    }
    frame.touch()?;
    let all = Stopwatch::start(&[destination.pid(), source.pid()])?;
    let before = [process_cpu(source.pid())?, process_cpu(destination.pid())?];
    let begin = SystemTime::now();
    destination.qmp.execute("migrate-incoming", &uri)?;
    source.qmp.execute("migrate", &uri)?;
    let end = destination.qmp.wait_migration("completed")?;
    source.qmp.wait_migration("completed")?;
    let sender = process_cpu(source.pid())?.saturating_sub(before[0]);
    let receiver = process_cpu(destination.pid())?.saturating_sub(before[1]);
    let measured = all.stop()?;
    let wall = end.duration_since(begin).context("the clock was set back meanwhile")?;
    let state = source.qmp.execute("query-migrate", &json!({}))?;
    let pages = state.pointer("/ram/normal").and_then(Value::as_u64).unwrap_or(0);
    Ok(Measured { wall, ..measured }
        .with(super::SENDER, millis(sender))
        .with(super::RECEIVER, millis(receiver))
        .with("pages", pages))
}

/// A port of the loopback interface on which nobody listens. Somebody may take it before QEMU does, who then refuses.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("a port of the loopback interface")?;
    Ok(listener.local_addr()?.port())
}
