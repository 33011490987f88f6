//! `cargo xtask test --packages`: packages are the same when they are built again elsewhere, and do their job in bare
//! systems that know limosa by its package alone.
//!
//! Law: the systems are folders of ours (mmdebstrap, from the machine's own mirror), in which all is run by chroot, in
//! namespaces that end with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use limosa_testkit::LinuxGuest;

use super::{emulated, folder, make};
use crate::setup::{self, Machine, packages::bootstrap};
use crate::shell;

/// The script that is run in each system.
const MAIN_JOB: &str = include_str!("main-job.sh");

/// The systems: suites of Debian with their own QEMU.
const SUITES: [&str; 2] = ["bookworm", "trixie"];

/// A user of the system without rights of its own.
const USER: &str = "4711";

/// Makes the packages twice, and tries them.
pub(crate) fn run() -> Result<()> {
    setup::run()?;
    if !setup::is_root()? {
        bail!("package tests run programs in other systems by chroot, which needs root");
    }
    let folder = folder();
    let packages = make(&[], &folder)?;
    let [deb, rpm, tarball] = [".deb", ".rpm", ".tar.gz"]
        .map(|end| packages.iter().find(|path| path.to_string_lossy().ends_with(end)).context("a package is missing"));
    let (deb, rpm, tarball) = (deb?, rpm?, tarball?);
    for suite in SUITES {
        let root = folder.join("roots").join(suite);
        make_root(suite, &root)?;
        let system = System { root: &root };
        // What a run left that was broken off.
        system.purge()?;
        system.take_away(tarball)?;
        system.expect_nothing_left()?;
        system.install(deb)?;
        system.try_job()?;
        system.purge()?;
        system.expect_nothing_left()?;
        system.unpack(tarball)?;
        system.try_job()?;
        system.take_away(tarball)?;
        system.expect_nothing_left()?;
        println!("package tests: {suite} is done");
    }
    check_rpm(rpm, &folder.join("roots/rpm"))?;
    emulated::run()?;
    // Last: it takes longest, and says least about what a user has.
    check_again(&packages)?;
    println!("package tests: {} packages are the same twice, and work", packages.len());
    Ok(())
}

/// Builds what is committed in another folder, and expects the same bytes.
fn check_again(packages: &[PathBuf]) -> Result<()> {
    let again = folder().join("again");
    if again.exists() {
        fs::remove_dir_all(&again).with_context(|| again.display().to_string())?;
    }
    shell::run(Command::new("git").args(["clone", "--quiet"]).arg(shell::workspace()).arg(&again))?;
    // They are not what is compared, and compiling them takes minutes.
    let own = again.join("target/packages");
    fs::create_dir_all(&own).with_context(|| own.display().to_string())?;
    shell::run(Command::new("cp").arg("--archive").arg(folder().join("tools")).arg(&own))?;
    let mut package = Command::new("cargo");
    package.current_dir(&again).env("CARGO_TARGET_DIR", again.join("target")).args(["xtask", "package"]);
    shell::run(&mut package)?;
    for path in packages {
        let name = path.file_name().context("a package without a name")?;
        let other = again.join("target/packages").join(name);
        let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
        if read(path)? != read(&other)? {
            bail!("{} and {} differ: it is not reproducible, or not all is committed", path.display(), other.display());
        }
    }
    fs::remove_dir_all(&again).with_context(|| again.display().to_string())
}

/// Makes a system with QEMU and nothing of ours, if it is not there.
fn make_root(suite: &str, root: &Path) -> Result<()> {
    if root.join("usr/bin/qemu-system-x86_64").exists() {
        return Ok(());
    }
    let folder = root.parent().context("a root in no folder")?;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let options = ["--variant=minbase", "--include=qemu-system-x86,adduser"];
    bootstrap(&Machine::this()?, suite, &options, folder, root)
}

/// A system in a folder.
struct System<'a> {
    root: &'a Path,
}

impl System<'_> {
    /// A command in it, with its own processes and mounts.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--pid", "--fork", "--kill-child", "sh", "-ec"]);
        command.arg(
            "mount --bind /dev \"$0/dev\"; mount -t proc proc \"$0/proc\"; mount -t tmpfs tmp \"$0/tmp\" -o mode=1777; \
             exec chroot \"$@\"",
        );
        command.arg(self.root).arg(self.root).args(words);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/").env("LC_ALL", "C.UTF-8");
        command
    }

    fn install(&self, deb: &Path) -> Result<()> {
        fs::copy(deb, self.root.join("limosa.deb")).context("the package")?;
        shell::run(&mut self.command(&["dpkg", "--install", "/limosa.deb"]))?;
        // udev makes the group, where it is.
        shell::run(&mut self.command(&["sh", "-ec", "getent group kvm || addgroup --system kvm"]))?;
        shell::run(&mut self.command(&["sh", "-ec", "limosa --version; test -s /usr/share/man/man1/limosa-save.1*"]))
    }

    fn purge(&self) -> Result<()> {
        shell::run(&mut self.command(&["dpkg", "--purge", "limosa"]))
    }

    /// Unpacks the static program with its pages, as docs/packaging.md says.
    fn unpack(&self, tarball: &Path) -> Result<()> {
        let mut tar = Command::new("tar");
        tar.arg("--extract").arg("--file").arg(tarball).arg("--directory").arg(self.root.join("usr"));
        shell::run(tar.args(["--strip-components", "1"]))?;
        shell::run(&mut self.command(&["limosa", "--version"]))
    }

    /// Removes all that a tarball has put here.
    fn take_away(&self, tarball: &Path) -> Result<()> {
        let listed = shell::output(Command::new("tar").arg("--list").arg("--file").arg(tarball))?;
        let places = listed.lines().filter_map(|line| line.split_once('/')).filter(|(_, place)| !place.is_empty());
        // Folders come before what is in them.
        for (_, place) in places.collect::<Vec<_>>().into_iter().rev() {
            let path = self.root.join("usr").join(place);
            if place.ends_with('/') {
                // Others may have files there.
                let _ = fs::remove_dir(path);
            } else if path.exists() {
                fs::remove_file(&path).with_context(|| path.display().to_string())?;
            }
        }
        Ok(())
    }

    fn expect_nothing_left(&self) -> Result<()> {
        let left = "find / -xdev -iname '*limosa*' ! -path '/guest/*' ! -name limosa.deb ! -path '/var/lib/dpkg/*'";
        let left = shell::output(&mut self.command(&["sh", "-c", left]))?;
        if !left.is_empty() {
            bail!("the package left behind:\n{left}");
        }
        Ok(())
    }

    /// Does the main job as root, and as a user of the group kvm.
    fn try_job(&self) -> Result<()> {
        let guest = self.root.join("guest");
        fs::create_dir_all(&guest).context("the guest's folder")?;
        let words = LinuxGuest::default().arguments(&guest)?;
        let value = |name: &str| {
            let found = words.iter().find(|(option, _)| *option == name).map(|(_, value)| value);
            found.with_context(|| format!("the guest has no {name}"))
        };
        fs::copy(value("-kernel")?, guest.join("kernel")).context("the guest's kernel")?;
        fs::rename(value("-initrd")?, guest.join("initrd")).context("the guest's initrd")?;
        fs::write(guest.join("words"), value("-append")?).context("the guest's words")?;
        fs::write(guest.join("main-job.sh"), MAIN_JOB).context("the main job")?;
        shell::run(Command::new("chmod").args(["-R", "a+rX"]).arg(&guest))?;
        shell::run(&mut self.command(&["sh", "/guest/main-job.sh"]))?;
        let user = ["setpriv", "--reuid", USER, "--regid", "kvm", "--clear-groups", "sh", "/guest/main-job.sh"];
        shell::run(&mut self.command(&user))
    }
}

/// Unpacks an RPM by rpm itself, into a folder of its own, and runs what is in it.
fn check_rpm(rpm: &Path, root: &Path) -> Result<()> {
    if root.exists() {
        fs::remove_dir_all(root).with_context(|| root.display().to_string())?;
    }
    fs::create_dir_all(root).with_context(|| root.display().to_string())?;
    let rpm_in = |words: &[&str]| {
        let mut command = Command::new("rpm");
        command.arg("--root").arg(root).args(words);
        command
    };
    // The mirrors of systems with RPM are not this machine's: what the package needs is not there.
    shell::run(rpm_in(&["--install", "--nodeps"]).arg(rpm))?;
    shell::run(&mut rpm_in(&["--verify", "--nodeps", "limosa"]))?;
    let needs = shell::output(&mut rpm_in(&["--query", "--requires", "limosa"]))?;
    if !needs.contains("glibc >= 2.34") {
        bail!("the RPM needs:\n{needs}");
    }
    shell::run(Command::new(root.join("usr/bin/limosa")).arg("--version"))
}
