//! libvirt's QEMU driver inside `virsh` itself: no daemon is asked, started or left behind.
//!
//! `qemu:///embed?root=FOLDER` keeps configuration, state and sockets of the driver in a folder of ours (libvirt docs:
//! QEMU driver, embedded). As root the driver wants an account that only the packages of libvirt's daemon make; where
//! it is missing, `virsh` gets its own mount namespace in which there is one.
//!
//! Law: a domain's QEMU is no child of ours, so a keeper holds its process id and ends it when we are gone in any way.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use tempfile::TempDir;

use crate::heartbeat::HeartbeatGuest;
use crate::machine::write_boot_disk;
use crate::requirement::skipped;

/// The account of QEMU processes that libvirt is built with on Debian and Ubuntu.
const ACCOUNT: &str = "libvirt-qemu";

/// Whether `LIMOSA_SKIP_LIBVIRT=1` is set: then a test that needs libvirt returns at once, and is counted as skipped.
pub fn libvirt_skipped() -> bool {
    skipped("LIMOSA_SKIP_LIBVIRT")
}

/// A private libvirt; its domains end with it.
#[derive(Debug)]
pub struct Libvirt {
    keepers: Vec<Child>,
    folder: TempDir,
}

impl Libvirt {
    /// Sets one up in its own folder.
    ///
    /// # Errors
    /// libvirt is not installed; the message names the command that installs it.
    pub fn start() -> Result<Self> {
        let version = Command::new("virsh").arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output();
        if !version.is_ok_and(|output| output.status.success()) {
            bail!("virsh is missing: run `cargo xtask setup` (or skip with LIMOSA_SKIP_LIBVIRT=1)");
        }
        let this = Self { keepers: Vec::new(), folder: crate::scratch()? };
        std::fs::create_dir_all(this.root().join("etc")).context("libvirt's configuration")?;
        let (configuration, log) = (this.root().join("etc/qemu.conf"), this.path("libvirt.log"));
        let text = "user = \"root\"\ngroup = \"root\"\ndynamic_ownership = 0\nremember_owner = 0\nsecurity_driver = \"none\"\n\
                    namespaces = []\ncgroup_controllers = []\nstdio_handler = \"file\"\n";
        std::fs::write(configuration, text).context("libvirt's configuration")?;
        std::fs::write(log, "").context("libvirt's log")?;
        for name in ["passwd", "group"] {
            let mut accounts = std::fs::read_to_string(Path::new("/etc").join(name)).context("the accounts")?;
            accounts.push_str(match name {
                "passwd" => "libvirt-qemu:x:64055:65534::/nonexistent:/usr/sbin/nologin\n",
                _ => "libvirt-qemu:x:64055:\n",
            });
            std::fs::write(this.path(name), accounts).context("the accounts")?;
        }
        Ok(this)
    }

    /// A path in its folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn root(&self) -> PathBuf {
        self.path("root")
    }

    /// The XML of a domain that runs the heartbeat guest, with a monitor for limosa and its serial port in the file
    /// `serial`.
    ///
    /// # Errors
    /// The guest's disk cannot be made.
    pub fn heartbeat_domain(&self, name: &str, guest: &HeartbeatGuest) -> Result<String> {
        let disk = self.path("heartbeat.img");
        if !disk.exists() {
            write_boot_disk(&disk, guest)?;
        }
        let memory = (guest.span().end + (64 << 20)) >> 10;
        let at = |name: &str| self.path(name).display().to_string();
        Ok(format!(
            "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>\n\
             <name>{name}</name><memory unit='KiB'>{memory}</memory><vcpu>1</vcpu>\n\
             <os><type arch='x86_64' machine='q35'>hvm</type><boot dev='hd'/></os><features><acpi/></features>\n\
             <devices><emulator>{}</emulator>\n\
             <disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{}'/>\
             <target dev='vda' bus='virtio'/><readonly/></disk>\n\
             <controller type='usb' model='none'/><memballoon model='none'/>\n\
             <serial type='file'><source path='{}'/></serial></devices>\n\
             <qemu:commandline><qemu:arg value='-qmp'/><qemu:arg value='unix:{},server=on,wait=off'/></qemu:commandline>\n\
             </domain>\n",
            emulator()?.display(),
            disk.display(),
            at("serial"),
            at("qmp"),
        ))
    }

    /// Starts a domain.
    ///
    /// # Errors
    /// libvirt's own message.
    pub fn create(&mut self, name: &str, xml: &str) -> Result<()> {
        let file = self.path("domain.xml");
        std::fs::write(&file, xml).context("the domain's XML")?;
        self.virsh(&["create", &file.display().to_string()])?;
        let pid = self.pid(name)?;
        // Reads until we are gone, by the end of the pipe.
        let mut keeper = Command::new("sh");
        keeper.args(["-c", "read _; kill -9 \"$0\" 2>/dev/null", &pid.to_string()]);
        keeper.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        self.keepers.push(keeper.spawn().context("a keeper")?);
        Ok(())
    }

    /// The process id of a running domain's QEMU.
    ///
    /// # Errors
    /// It does not run.
    pub fn pid(&self, name: &str) -> Result<u32> {
        let path = self.root().join(format!("run/qemu/{name}.pid"));
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        text.trim().parse().with_context(|| format!("{}: {text:?}", path.display()))
    }

    /// The words that a running domain's QEMU was started with.
    ///
    /// # Errors
    /// It does not run.
    pub fn command_line(&self, name: &str) -> Result<Vec<String>> {
        let bytes = std::fs::read(format!("/proc/{}/cmdline", self.pid(name)?)).context("the domain's command line")?;
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        Ok(words.map(|word| String::from_utf8_lossy(word).into_owned()).collect())
    }

    /// Runs one command of virsh; returns what it printed.
    ///
    /// # Errors
    /// libvirt's own message.
    pub fn virsh(&self, words: &[&str]) -> Result<String> {
        let uri = format!("qemu:///embed?root={}", self.root().display());
        let mut command = if needs_account()? {
            let mut command = Command::new("unshare");
            let script =
                "mount --bind \"$0/passwd\" /etc/passwd && mount --bind \"$0/group\" /etc/group && exec virsh \"$@\"";
            command.args(["--mount", "sh", "-c", script]).arg(self.folder.path());
            command
        } else {
            Command::new("virsh")
        };
        command.args(["-q", "-c", &uri]).args(words).stdin(Stdio::null());
        let output = command.output().context("virsh")?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let lines: Vec<&str> = said.lines().filter(|line| line.contains("error")).collect();
            bail!("virsh {}: {}: {}", words.join(" "), output.status, lines.join("; "));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Drop for Libvirt {
    fn drop(&mut self) {
        for keeper in &mut self.keepers {
            // Its standard input ends: it kills what it keeps, and ends.
            drop(keeper.stdin.take());
            let _ = keeper.wait();
        }
    }
}

/// Whether libvirt misses its account: it asks for it only as root.
fn needs_account() -> Result<bool> {
    let root = std::fs::metadata("/proc/self").context("/proc/self")?.uid() == 0;
    let accounts = std::fs::read_to_string("/etc/passwd").context("the accounts")?;
    Ok(root && !accounts.lines().any(|line| line.split(':').next() == Some(ACCOUNT)))
}

/// The QEMU in `PATH`: libvirt wants its path.
fn emulator() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found =
        std::env::split_paths(&path).map(|folder| folder.join("qemu-system-x86_64")).find(|file| file.is_file());
    found.context("qemu-system-x86_64 is missing: run `cargo xtask setup`")
}
