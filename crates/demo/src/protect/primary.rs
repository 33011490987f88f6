//! The process whose guest runs, until it is killed.

use std::path::Path;
use std::sync::Arc;

use limosa_channel::{Channel, Options, Uri};
use limosa_console::error_line;
use limosa_migrate::checkpoints::CheckpointSourceOptions;
use limosa_migrate::output::OutputGate;
use limosa_migrate::{Handle, LiveSource, LiveVm as _};

use super::printer::Printer;
use super::settings::ProtectSettings;
use super::vm::PrintingVm;
use crate::error::DemoError;
use crate::guest::{self, GuestKind, GuestOptions, Rate};

pub(super) fn run(socket: &Path, settings: &ProtectSettings) -> Result<(), DemoError> {
    let options =
        GuestOptions { rate: Rate::BytesPerSecond(settings.dirty_rate), log: settings.log, ..GuestOptions::default() };
    let guest = guest::boot(GuestKind::Threads, PrintingVm::memory(settings)?, &options)?;
    let printer = Printer::start(settings.line_every)?;
    let vm = PrintingVm { guest, printer: Arc::clone(&printer) };
    let logs = vm.guest.dirty_logs()?;
    let failed = |error: limosa_channel::ChannelError| DemoError::Guest(error_line(&error));
    let channel = Channel::connect(&Uri::Unix(socket.into()), &Options::default()).map_err(failed)?;
    let failed = |error: limosa_migrate::VmError| DemoError::Guest(error_line(&*error));
    let gates: [&dyn OutputGate; 1] = [&*printer];
    let mut options = CheckpointSourceOptions::default();
    (options.every, options.by_output) = (settings.every, settings.by_output);
    if settings.held {
        // From its first line on: without a base there is no survivor.
        printer.watch(&options.signal).map_err(failed)?;
        options.gates = &gates;
    }
    vm.resume().map_err(failed)?;
    let ended = LiveSource::new(&vm, logs, channel, &Handle::new()).make_checkpoints(&options);
    // Only a kill ends it, if all goes well.
    ended.result.map_err(|error| DemoError::Guest(error_line(&error)))
}
