//! The Linux guest: the distribution's kernel with a busybox whose init counts and takes commands.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::initrd::Initrd;
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

/// Linux with busybox. On its serial port it prints `count N` about ten times a second, and runs each line it gets there
/// as a shell line, whose output is followed by `done STATUS`. [`crate::Vm::shell`] and [`crate::Vm::wait_counts`] use that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinuxGuest {
    /// Whether virtio devices get their drivers.
    pub modules: bool,
    /// Whether the kernel gets TLS, if its module was unpacked.
    pub tls: bool,
    /// More words for the kernel's command line.
    pub kernel_words: String,
    /// Programs of the host that it has too, by their names, in `/host`; run there by `host NAME ...` with the host's libraries,
    /// if they need any.
    pub programs: Vec<PathBuf>,
}

impl Default for LinuxGuest {
    fn default() -> Self {
        Self { modules: true, tls: false, kernel_words: String::new(), programs: Vec::new() }
    }
}

/// What a command says is collected and written at once: between two writes the counter may have its line.
const INIT: &str = "\
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
host() { program=/host/$1; shift; [ ! -e /host/ld.so ] || set -- --library-path /host \"$program\" \"$@\"; \
[ ! -e /host/ld.so ] || program=/host/ld.so; \"$program\" \"$@\"; }
exec 0</dev/ttyS0 1>/dev/ttyS0 2>&1
stty -echo
for module in MODULES; do
    if [ -e /modules/$module.ko ]; then insmod /modules/$module.ko || echo \"no module $module\"; fi
done
echo ready
( n=0; while :; do n=$((n+1)); echo \"count $n\"; sleep 0.1; done ) &
while read -r line; do
    eval \"$line\" > /tmp/.said 2>&1
    status=$?
    if [ -n \"$(tail -c 1 /tmp/.said)\" ]; then echo >> /tmp/.said; fi
    cat /tmp/.said
    echo \"done $status\"
done
";

impl LinuxGuest {
    /// QEMU's arguments; the initrd is written into `folder`.
    pub(crate) fn arguments(&self, folder: &Path) -> Result<Vec<(&'static str, String)>> {
        let parts = guest_folder()?;
        let mut initrd = Initrd::default();
        initrd.folder("bin");
        initrd.folder("dev");
        initrd.character_device("dev/console", 5, 1);
        let busybox = std::fs::read(parts.join("busybox")).context("the guest's busybox")?;
        initrd.file("bin/busybox", 0o755, &busybox)?;
        let virtio: &[&str] = if self.modules { &MODULES } else { &[] };
        let tls: &[&str] = if self.tls { &TLS_MODULES } else { &[] };
        let modules = [virtio, tls].concat();
        if !modules.is_empty() {
            initrd.folder("modules");
            for name in &modules {
                let file = format!("modules/{name}.ko");
                if let Ok(module) = std::fs::read(parts.join(&file)) {
                    initrd.file(&file, 0o644, &module)?;
                }
            }
        }
        add_programs(&mut initrd, &self.programs, folder)?;
        initrd.file("init", 0o755, INIT.replace("MODULES", &modules.join(" ")).as_bytes())?;
        let path = folder.join("initrd");
        std::fs::write(&path, initrd.finish()).with_context(|| path.display().to_string())?;
        let words = format!("console=ttyS0 quiet panic=-1 init_on_alloc=0 {}", self.kernel_words);
        Ok(vec![
            ("-kernel", parts.join("vmlinuz").to_string_lossy().into_owned()),
            ("-initrd", path.to_string_lossy().into_owned()),
            ("-append", words.trim().to_owned()),
            ("-cpu", "max".to_owned()),
        ])
    }
}

/// Puts programs into the initrd without what only a debugger needs, and the libraries that they are run with.
pub(crate) fn add_programs(initrd: &mut Initrd, programs: &[PathBuf], folder: &Path) -> Result<()> {
    if programs.is_empty() {
        return Ok(());
    }
    initrd.folder("host");
    let mut libraries = BTreeSet::new();
    for program in programs {
        let name = program.file_name().context("a program has a name")?.to_string_lossy();
        let stripped = folder.join(&*name);
        said(Command::new("strip").arg("-o").args([&stripped, program]))?;
        let content = std::fs::read(&stripped).with_context(|| stripped.display().to_string())?;
        initrd.file(&format!("host/{name}"), 0o755, &content)?;
        // Lines of `name => path (address)`, and the loader's `path (address)`.
        let listed = said(Command::new("ldd").arg(program))?;
        let paths = listed.split_ascii_whitespace().filter(|word| word.starts_with('/'));
        libraries.extend(paths.map(PathBuf::from));
    }
    for library in libraries {
        let name = library.file_name().context("a library has a name")?.to_string_lossy().into_owned();
        let name = if name.starts_with("ld-linux") { "ld.so".to_owned() } else { name };
        let content = std::fs::read(&library).with_context(|| library.display().to_string())?;
        initrd.file(&format!("host/{name}"), 0o755, &content)?;
    }
    Ok(())
}

/// What a program says that has to succeed.
fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
