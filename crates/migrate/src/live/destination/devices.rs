//! Device sections, handed over by name.

use limosa_stream::{DeviceState, OpaqueSection};

use crate::error::MigrateError;
use crate::live::IncomingVm;

/// Loads sections that carry their lengths.
pub(super) fn load_delimited<V: IncomingVm + ?Sized>(vm: &V, sections: &[u8]) -> Result<(), MigrateError> {
    let (found, _) = OpaqueSection::decode_all(sections)?;
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
    devices: &DeviceState,
) -> Result<(), MigrateError> {
    let sections = tail.get(devices.sections_range.clone()).unwrap_or_default();
    if let Ok((found, length)) = OpaqueSection::decode_all(sections)
        && length == sections.len()
    {
        return load_each(vm, found);
    }
    devices.sections.iter().try_for_each(|section| {
        let state = tail.get(section.body.clone()).unwrap_or_default();
        let (instance, version) = (section.instance, section.version);
        load(vm, OpaqueSection { name: &section.name, instance, version, state })
    })
}

fn load<V: IncomingVm + ?Sized>(vm: &V, section: OpaqueSection<'_>) -> Result<(), MigrateError> {
    vm.load_device(section).map_err(|source| MigrateError::Vm { what: "take the state of its devices", source })
}
