//! VMs of all kinds saved and restored: machine types, devices, libvirt.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../stage/overlays.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod overlays;

#[path = "../stage/clones.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod clone_scene;

mod clones;
mod clones_disks;
mod clones_interrupted;
mod devices;
mod identity;
mod layouts;
mod libvirt;
mod matrix;
