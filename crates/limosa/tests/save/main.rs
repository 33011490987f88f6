//! `limosa save` from outside: the real program, stock QEMU, guests whose memory can be proven.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../stage/kills.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod kills;

#[path = "../stage/overlays.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod overlays;

mod background;
mod channels;
mod guests;
mod kills_file;
mod kills_socket;
mod overlay;
mod overlay_kills;
mod packed;
mod plain;
mod stop;
