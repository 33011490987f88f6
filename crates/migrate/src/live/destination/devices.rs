//! Device sections, handed over by name.

use limosa_page::{broken_invariant, invariant};
use limosa_stream::{CompleteTail, OpaqueSection};

use crate::error::MigrateError;
use crate::live::IncomingVm;

/// Loads sections that carry their lengths: exactly those that `sections` consists of, because the source is told next
/// that all are loaded.
pub(super) fn load_delimited<V: IncomingVm + ?Sized>(vm: &V, sections: &[u8]) -> Result<(), MigrateError> {
    let (found, consumed) = OpaqueSection::decode_all(sections)?;
    invariant(consumed == sections.len(), "every byte of the device sections is part of a section that is loaded")?;
    load_each(vm, found)
}

/// Loads sections one by one.
pub(super) fn load_each<'s, V: IncomingVm + ?Sized>(
    vm: &V,
    sections: impl IntoIterator<Item = OpaqueSection<'s>>,
) -> Result<(), MigrateError> {
    sections.into_iter().try_for_each(|section| load(vm, section))
}

/// Loads the sections of a tail whose description was found. Bodies that begin with their length are of a VMM like this
/// one and given without it; those of stock QEMU are given as they are.
pub(super) fn load_found<V: IncomingVm + ?Sized>(
    vm: &V,
    tail: &[u8],
    devices: &CompleteTail,
) -> Result<(), MigrateError> {
    let sections = tail.get(devices.sections_range.clone());
    let sections = sections.ok_or_else(|| broken_invariant("the device sections are part of the tail"))?;
    if let Ok((found, length)) = OpaqueSection::decode_all(sections)
        && length == sections.len()
    {
        return load_each(vm, found);
    }
    devices.sections.iter().try_for_each(|section| {
        let state = tail.get(section.body.clone());
        let state = state.ok_or_else(|| broken_invariant("a device section's state is part of the tail"))?;
        let (instance, version) = (section.instance, section.version);
        load(vm, OpaqueSection { name: &section.name, instance, version, state })
    })
}

fn load<V: IncomingVm + ?Sized>(vm: &V, section: OpaqueSection<'_>) -> Result<(), MigrateError> {
    vm.load_device(section).map_err(|source| MigrateError::Vm { what: "take the state of its devices", source })
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use limosa_memory::{BlockOptions, GuestMemory};
    use limosa_stream::{DeviceSections, devices, section};

    use super::*;
    use crate::error::is_noticed;
    use crate::live::VmError;

    /// A VM that notes what it is given.
    struct Machine(GuestMemory, Mutex<Vec<Vec<u8>>>);

    impl IncomingVm for Machine {
        fn memory(&self) -> &GuestMemory {
            &self.0
        }

        fn load_device(&self, section: OpaqueSection<'_>) -> Result<(), VmError> {
            self.1.lock().unwrap().push(section.state.to_vec());
            Ok(())
        }

        fn start(&self) -> Result<(), VmError> {
            Ok(())
        }
    }

    #[test]
    fn bytes_of_device_state_that_would_not_be_loaded_are_noticed() {
        let machine = Machine(
            GuestMemory::new(vec![BlockOptions::anonymous("ram", 4096).map().unwrap()]).unwrap(),
            Mutex::default(),
        );
        let mut sections = DeviceSections::new();
        sections.push("timer", 0, 1, b"tick").unwrap();
        sections.push("serial", 0, 1, b"line").unwrap();
        load_delimited(&machine, sections.bytes()).unwrap();
        assert_eq!(*machine.1.lock().unwrap(), [b"tick", b"line"]);
        // A range that is one byte too long, and one that cuts a section off.
        let mut longer = sections.bytes().to_vec();
        longer.push(8);
        assert!(is_noticed(|| load_delimited(&machine, &longer)));
        let mut tail = sections.bytes().to_vec();
        tail.extend_from_slice(&[section::EOF, section::DESCRIPTION]);
        tail.extend_from_slice(&u32::try_from(sections.description().len()).unwrap().to_be_bytes());
        tail.extend_from_slice(&sections.description());
        let state = devices::find_tail_end(&tail, 0, 1 << 20).unwrap();
        let shorter = &tail[..state.sections_range.end - 1];
        assert!(is_noticed(|| load_found(&machine, shorter, &state)));
        assert_eq!(machine.1.lock().unwrap().len(), 2, "nothing of a wrong range is loaded");
    }
}
