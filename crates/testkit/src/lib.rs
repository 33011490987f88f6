//! Real guests for limosa's tests: stock QEMU with a guest whose memory can be proven consistent after a migration.
//!
//! - [`Machine`] describes a VM once; a source and a destination started from it match.
//! - [`Vm`] is a running QEMU with two QMP monitors: one for the testkit's own [`Qmp`] client, one left free for
//!   limosa.
//! - [`HeartbeatGuest`] is a boot sector that bumps one byte per page, page after page, pass after pass, and prints the
//!   pass on the serial port: a page that a migration loses, repeats or mixes up fails [`check_heartbeat`].
//! - [`LinuxGuest`] is the distribution's kernel with busybox that counts on its serial port and takes commands there.
//! - [`UmlGuest`] is user-mode Linux: a whole kernel as a process, with devices over vhost-user, that takes commands
//!   too.
//! - [`pattern`] is what a program in such a guest holds, so that every page differs from any other.
//! - [`Prefill`] fills the memory of a VM that never runs with pages that can be recomputed and compared.
//! - [`Libvirt`] is libvirt's QEMU driver without a daemon, for files and domains of its own.
//! - [`Authority`] issues certificates, good ones and bad ones, for TLS.
//! - `image` (feature `image`) makes qcow2 images in memory, for tests of `limosa-image`.
//! - [`qemu_img`] and [`qemu_io`] make disk images, look at them and change them; [`cryptsetup`] does it with LUKS.
//! - [`NbdClient`] speaks NBD, also what no honest client says.
//! - [`BlkClient`] is a driver of virtio-blk over vhost-user, also a dishonest one.
//! - [`on_reflinks`] gives a test a filesystem whose files share space, and whose power can be cut.
//! - [`ObjectServer`] is an object store on this machine; [`HttpProxy`] before it delays, cuts and refuses.
//! - [`Proxy`] and [`kill9_after`] break things between and inside processes.
//! - [`Poisoning`] is an allocator that shows who reads memory that was freed.
//! - [`let_usr1_interrupt`] has a signal do nothing but interrupt.
//!
//! Laws: every process is ended by its pid, even if the test is killed; sockets are in folders of mode 0700; no
//! crate of limosa is used here, so that a test checks limosa by independent means. The exception is `image`, which
//! sets up what a test works on.
//!
//! ```no_run
//! use limosa_testkit::{HeartbeatGuest, Machine};
//! use std::time::Duration;
//!
//! # fn main() -> anyhow::Result<()> {
//! // Migrate a running guest from one stock QEMU to another and prove that nothing was lost.
//! let machine = Machine::heartbeat(HeartbeatGuest::default());
//! let source = machine.start()?;
//! source.wait_heartbeats(2)?;
//! let destination = machine.start_incoming()?;
//! source.migrate_to(&destination)?;
//! destination.wait_heartbeats(2)?;
//! let heartbeat = destination.check_heartbeat()?;
//! println!("pass {} (mod 256), {} pages into it", heartbeat.ahead, heartbeat.pages_ahead);
//! # Ok(())
//! # }
//! ```

mod backend;
mod blk;
mod busybox;
#[cfg(feature = "certificates")]
mod certificates;
mod cgroup;
mod descendants;
mod disk_tools;
mod fault;
mod file_server;
mod heartbeat;
mod http_proxy;
#[cfg(feature = "image")]
pub mod image;
mod initrd;
mod libvirt;
mod linux;
mod machine;
mod nbd;
mod object_server;
mod own_test;
pub mod pattern;
mod plain_migration;
mod poisoning;
mod prefill;
mod process;
mod program;
mod proxy;
mod qmp;
mod reflink;
mod requirement;
mod scratch;
mod serial;
mod series;
mod signal;
mod uml;
mod vm;

pub use backend::{HugePages, MemoryBackend};
pub use blk::{BLK_DATA, BLK_SLOTS, BlkClient, BlkCommand, BlkDescriptor, BlkReply, BlkSettings};
#[cfg(feature = "certificates")]
pub use certificates::{Authority, TlsEnd, Validity};
pub use cgroup::MemoryGroup;
pub use disk_tools::{cryptsetup, nbd_tool, qemu_img, qemu_img_output, qemu_io};
pub use fault::{Kill, kill9, kill9_after};
pub use file_server::FileServer;
pub use heartbeat::{Heartbeat, HeartbeatError, HeartbeatGuest, check_heartbeat, pass_numbers};
pub use http_proxy::{HttpFault, HttpProxy, HttpRequest};
pub use libvirt::{Libvirt, libvirt_skipped};
pub use linux::LinuxGuest;
pub use machine::{Accelerator, Disk, DiskFormat, Machine, VmPair};
pub use nbd::{NbdChunk, NbdClient, NbdCommand, NbdReply};
pub use object_server::{BUCKET, CREDENTIALS, ObjectServer, ObjectServerKind, stores_skipped};
pub use own_test::{own_test_command, without_crate};
pub use poisoning::Poisoning;
pub use prefill::{PageKind, Prefill};
pub use process::{Process, is_alive, listens};
pub use program::{Ended, Program, wait_for, wait_gone};
pub use proxy::{Direction, Proxy};
pub use qmp::{Qmp, QmpFailure};
pub use reflink::{ReflinkFolder, on_reflinks};
pub use requirement::{note_skip, qemu_skipped, require_qemu, skipped, uml_folder, uml_skipped};
pub use scratch::scratch;
pub use serial::{Line, Serial};
pub use series::{Series, series_skipped};
pub use signal::let_usr1_interrupt;
pub use uml::{Uml, UmlGuest, on_uml};
pub use vm::Vm;

/// Bytes of a guest page.
pub const PAGE: u64 = 4096;
