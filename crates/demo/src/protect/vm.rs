//! A built-in guest with a printer, as the engine wants a VM.

use std::sync::Arc;

use limosa_memory::dirty::Writers;
use limosa_memory::{BlockOptions, GuestMemory};
use limosa_migrate::{LiveVm, VmError};
use limosa_stream::{Configuration, DeviceSections, OpaqueSection};

use super::printer::Printer;
use super::settings::ProtectSettings;
use crate::error::DemoError;
use crate::guest::{Guest, STATE_VERSION};

/// The names of its devices.
const GUEST: &str = "guest";
const PRINTER: &str = "printer";

/// The VM.
pub(super) struct PrintingVm {
    pub(super) guest: Box<dyn Guest>,
    pub(super) printer: Arc<Printer>,
}

impl PrintingVm {
    /// Memory for such a guest.
    pub(super) fn memory(settings: &ProtectSettings) -> Result<Arc<GuestMemory>, DemoError> {
        let made = BlockOptions::memfd("pc.ram", settings.memory).map().and_then(|block| GuestMemory::new(vec![block]));
        Ok(Arc::new(made.map_err(|error| DemoError::Settings(error.to_string()))?))
    }

    /// Takes the state of both devices.
    pub(super) fn load(&self, sections: &[u8]) -> Result<(), VmError> {
        let (sections, _) = OpaqueSection::decode_all(sections)?;
        for section in sections {
            match section.name {
                GUEST => self.guest.load(section.state)?,
                PRINTER => self.printer.set_number(u64::from_be_bytes(section.state.try_into()?)),
                other => return Err(format!("there is no device {other:?}").into()),
            }
        }
        Ok(())
    }
}

impl LiveVm for PrintingVm {
    fn configuration(&self) -> Configuration {
        Configuration::new("limosa-demo-protect")
    }

    fn memory(&self) -> &GuestMemory {
        self.guest.memory()
    }

    fn writers(&self) -> Writers {
        self.guest.writers()
    }

    fn pause(&self) -> Result<(), VmError> {
        self.printer.set_running(false);
        Ok(self.guest.pause()?)
    }

    fn resume(&self) -> Result<(), VmError> {
        self.guest.run()?;
        self.printer.set_running(true);
        Ok(())
    }

    fn device_sections(&self) -> Result<DeviceSections, VmError> {
        let mut sections = DeviceSections::new();
        sections.push(GUEST, 0, STATE_VERSION.into(), &self.guest.save()?)?;
        sections.push(PRINTER, 0, 1, &self.printer.number().to_be_bytes())?;
        Ok(sections)
    }
}
