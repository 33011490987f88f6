//! `cargo xtask demo disk`: a real Linux guest in stock QEMU works on a qcow2 image that limosa serves, while its
//! server is killed and another one takes over, and while the image gets an overlay.
//!
//! The guest writes to clusters that the image has: what a killed server had acknowledged is then in the file
//! (docs/serve.md says what is not).

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use limosa_testkit::{LinuxGuest, Machine, MemoryBackend, Process, Vm, scratch};

use super::{command_line, say, seconds};
use crate::{program, setup};

/// Bytes of the disk, all of them in the backing image.
const SIZE: u64 = 64 << 20;
/// Time for a line in a guest that is translated.
const LONG: Duration = Duration::from_secs(300);
/// How often the guest writes its data.
const TIMES: u32 = 40;

/// Runs the demonstration.
pub(crate) fn run() -> Result<()> {
    setup::run()?;
    let folder = scratch()?;
    let scene = Scene { limosa: program::build()?, folder: folder.path().to_owned() };
    let mut base = Vec::new();
    File::open("/dev/urandom")?.take(SIZE).read_to_end(&mut base)?;
    fs::write(scene.path("base.raw"), base).context("the backing image")?;
    scene.limosa(&["img", "create", "-q", "-f", "qcow2", "-b", "base.raw", "-F", "raw", "disk.qcow2"])?;
    let server = scene.serve()?;

    say("Booting Linux in stock QEMU, translated, with this disk:");
    say("-chardev socket,id=disk,path=disk.sock,reconnect-ms=50 -device vhost-user-blk-pci,chardev=disk,num-queues=2");
    let vm = scene.boot()?;
    let wanted = sum_of(&scene.path("base.raw"))?;
    same("the backing image, read by the guest", &wanted, &line(&vm, "md5sum < /dev/vda")?)?;

    let data = line(&vm, "head -c 16777216 /dev/urandom > /tmp/data && md5sum < /tmp/data")?;
    line(&vm, "dd if=/tmp/data of=/dev/vda bs=64k conv=fsync 2> /dev/null; echo written")?;
    say(&format!("\nThe guest writes 16 MiB {TIMES} times. Meanwhile its server is killed (-9), and started again:"));
    let writing = format!(
        "( for i in $(seq {TIMES}); do dd if=/tmp/data of=/dev/vda bs=64k conv=fsync || exit; done; touch /tmp/over ) \
         > /dev/null 2>&1 & echo begun"
    );
    line(&vm, &writing)?;
    sleep(Duration::from_millis(500));
    server.kill();
    drop(server);
    let begun = Instant::now();
    let server = scene.serve()?;
    say(&format!("The next server took over after {}.", seconds(begun.elapsed())));

    command_line(&["limosa", "serve", "ctl", "control", "snapshot", "''", "later.qcow2"]);
    scene.limosa(&["serve", "ctl", "control", "snapshot", "", "later.qcow2"])?;
    let frozen = fs::read(scene.path("disk.qcow2")).context("the frozen image")?;
    let end = Instant::now() + LONG;
    while line(&vm, "ls /tmp/over 2> /dev/null || echo no")? != "/tmp/over" {
        ensure!(Instant::now() < end, "the guest's writes did not end: one has failed");
        sleep(Duration::from_millis(200));
    }
    say("All of the guest's writes have succeeded.");
    let found = line(&vm, "echo 3 > /proc/sys/vm/drop_caches; head -c 16777216 /dev/vda | md5sum")?;
    same("what the guest wrote, read from the disk", &data, &found)?;
    ensure!(fs::read(scene.path("disk.qcow2"))? == frozen, "the frozen image was written to");
    drop(vm);
    scene.limosa(&["serve", "ctl", "control", "quit"])?;
    ensure!(server.wait(LONG)?.success(), "the server did not end well");
    say("The killed server had allocated clusters ahead, which are freed:");
    command_line(&["limosa", "img", "check", "-r", "leaks", "disk.qcow2"]);
    scene.limosa(&["img", "check", "-r", "leaks", "disk.qcow2"])?;
    for image in ["disk.qcow2", "later.qcow2"] {
        command_line(&["qemu-img", "check", image]);
        let status = Command::new("qemu-img").args(["check", image]).current_dir(&scene.folder).status();
        ensure!(status.context("qemu-img")?.success(), "{image} is damaged");
    }
    Ok(())
}

struct Scene {
    limosa: PathBuf,
    folder: PathBuf,
}

impl Scene {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.limosa);
        command.args(words).current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    fn limosa(&self, words: &[&str]) -> Result<()> {
        let status = self.command(words).status().context("limosa")?;
        ensure!(status.success(), "limosa {}: {status}", words.join(" "));
        Ok(())
    }

    /// Starts the server, and waits for its socket.
    fn serve(&self) -> Result<Process> {
        let words = ["serve", "disk.qcow2", "--vhost-user-blk", "disk.sock", "--queues", "2", "--control", "control"];
        let words = [&words[..], &["--allow-dir", ".", "--journal", "journals"]].concat();
        command_line(&[&["limosa"], &words[..]].concat());
        let server = Process::spawn("limosa serve", self.command(&words))?;
        let end = Instant::now() + LONG;
        // A socket that a killed server left does not answer.
        while std::os::unix::net::UnixStream::connect(self.path("control")).is_err() {
            ensure!(server.try_wait()?.is_none() && Instant::now() < end, "the server does not listen");
            sleep(Duration::from_millis(1));
        }
        Ok(server)
    }

    fn boot(&self) -> Result<Vm> {
        let chardev = format!("socket,id=disk,path={},reconnect-ms=50", self.path("disk.sock").display());
        let machine = Machine::linux(LinuxGuest::default()).backend(MemoryBackend::Memfd);
        let words = ["-chardev", &chardev, "-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"];
        let vm = words.iter().fold(machine, |machine, word| machine.argument(word)).start()?;
        vm.wait_counts(2)?;
        Ok(vm)
    }
}

/// The last line that a command of the guest prints.
fn line(vm: &Vm, command: &str) -> Result<String> {
    vm.shell_within(command, LONG)?.pop().context("a command that prints nothing")
}

fn sum_of(path: &Path) -> Result<String> {
    let output = Command::new("md5sum").stdin(File::open(path)?).output().context("md5sum")?;
    Ok(String::from_utf8(output.stdout)?)
}

/// Says a sum, if it is the same.
fn same(what: &str, wanted: &str, found: &str) -> Result<()> {
    let sum = |line: &str| line.split_whitespace().next().map(str::to_owned);
    ensure!(sum(wanted) == sum(found), "{what}: md5sum was {wanted:?} and is {found:?}");
    say(&format!("md5sum {} is right: {what}", sum(found).unwrap_or_default()));
    Ok(())
}
