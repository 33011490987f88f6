//! Destinations whose memory is the snapshot.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::Path;

use limosa_testkit::Machine;

use crate::stage::limosa;

/// The options that limosa prints for a QEMU that maps the snapshot: words of `-object`, by the backend's id.
pub(crate) fn object(snapshot: &Path, id: &str) -> String {
    let printed = limosa(["inspect", "--qemu-args", "--json", snapshot.to_str().unwrap()]).json();
    let words: Vec<String> = serde_json::from_value(printed["arguments"].clone()).unwrap();
    let mut objects = words.windows(2).filter(|pair| pair[0] == "-object").map(|pair| pair[1].clone());
    objects.find(|object| object.contains(&format!("id={id},"))).unwrap_or_else(|| panic!("no {id} in {words:?}"))
}

/// This machine, as a destination whose memory is the snapshot.
pub(crate) fn mapped(machine: &Machine, snapshot: &Path) -> Machine {
    machine.clone().memory_object(&object(snapshot, "mem"))
}
