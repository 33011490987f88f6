//! `limosa receive` and `limosa send` from outside: the real program, stock QEMU at the other end, guests whose memory
//! can be proven. No monitor is given to limosa.
//!
//! One module for each feature.

#[path = "../stage/mod.rs"]
#[allow(unreachable_pub, reason = "it is shared with other test programs")]
mod stage;

#[path = "../restore/scene.rs"]
#[allow(dead_code, reason = "it is shared with other test programs")]
mod scene;

mod ends;

mod bad_input;
mod chain;
mod channels;
mod deltas;
mod receive;
mod send;
mod tls;
