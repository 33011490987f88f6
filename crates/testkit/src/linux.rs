//! The Linux guest: the distribution's kernel with a busybox whose init counts and takes commands.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::busybox::System;
use crate::requirement::guest_folder;

/// In the order in which they can be loaded; a kernel that has one built in has no file for it.
const MODULES: [&str; 10] = [
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
    "failover",
    "net_failover",
    "virtio_net",
];

/// The kernel's TLS and the ciphers of TLS 1.3, likewise.
const TLS_MODULES: [&str; 13] = [
    "crypto_null",
    "gf128mul",
    "ghash-generic",
    "ctr",
    "aes_generic",
    "gcm",
    "libchacha",
    "chacha_generic",
    "chacha",
    "libpoly1305",
    "poly1305_generic",
    "chacha20poly1305",
    "tls",
];

/// Linux with busybox. On its serial port it prints `count N` about ten times a second, and runs each line it gets
/// there as a shell line, whose output is followed by `done STATUS`. [`crate::Vm::shell`] and
/// [`crate::Vm::wait_counts`] use that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxGuest {
    /// Whether virtio devices get their drivers.
    pub modules: bool,
    /// Whether the kernel gets TLS, if its module was unpacked.
    pub tls: bool,
    /// More words for the kernel's command line.
    pub kernel_words: String,
    /// Programs of the host that it has too, by their names, in `/host`; run there by `host NAME ...` with the host's
    /// libraries, if they need any.
    pub programs: Vec<PathBuf>,
}

impl Default for LinuxGuest {
    fn default() -> Self {
        Self { modules: true, tls: false, kernel_words: String::new(), programs: Vec::new() }
    }
}

/// The serial port is its console; a counter has lines between those of the commands.
const CONSOLE: &str = "mount -t devtmpfs dev /dev 2>/dev/null
exec 0</dev/ttyS0 1>/dev/ttyS0 2>&1";
const COUNTER: &str = "( n=0; while :; do n=$((n+1)); echo \"count $n\"; sleep 0.1; done ) &";

impl LinuxGuest {
    /// QEMU's arguments; the initrd is written into `folder`.
    pub(crate) fn arguments(&self, folder: &Path) -> Result<Vec<(&'static str, String)>> {
        let parts = guest_folder()?;
        let virtio: &[&str] = if self.modules { &MODULES } else { &[] };
        let tls: &[&str] = if self.tls { &TLS_MODULES } else { &[] };
        let modules = [virtio, tls].concat();
        let system = System {
            modules: &modules,
            modules_in: &parts.join("modules"),
            first: CONSOLE,
            beside: COUNTER,
            programs: &self.programs,
        };
        let path = system.write_initrd(folder)?;
        let words = format!("console=ttyS0 quiet panic=-1 init_on_alloc=0 {}", self.kernel_words);
        Ok(vec![
            ("-kernel", parts.join("vmlinuz").to_string_lossy().into_owned()),
            ("-initrd", path.to_string_lossy().into_owned()),
            ("-append", words.trim().to_owned()),
            ("-cpu", "max".to_owned()),
        ])
    }
}
