//! The system of a Linux guest: a busybox in an initial RAM disk, whose init takes commands from its console.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

use crate::initrd::Initrd;
use crate::requirement::guest_folder;

/// Its contents.
pub(crate) struct System<'a> {
    /// Modules that it loads at once, in this order. What the kernel has built in has no file.
    pub(crate) modules: &'a [&'a str],
    /// Where they are.
    pub(crate) modules_in: &'a Path,
    /// Lines of shell before anything is said, and one that runs in parallel with the commands.
    pub(crate) first: &'a str,
    pub(crate) beside: &'a str,
    /// Programs of the host, run by `host NAME ...`.
    pub(crate) programs: &'a [PathBuf],
}

/// The output of a command is collected and written at once: something else may print a line between two writes.
const INIT: &str = "\
#!/bin/busybox sh
/bin/busybox mkdir -p /proc /sys /dev /tmp
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
host() { program=/host/$1; shift; [ ! -e /host/ld.so ] || set -- --library-path /host \"$program\" \"$@\"; \
[ ! -e /host/ld.so ] || program=/host/ld.so; \"$program\" \"$@\"; }
FIRST
stty -echo
for module in MODULES; do
    if [ -e /modules/$module.ko ]; then insmod /modules/$module.ko || echo \"no module $module\"; fi
done
echo ready
BESIDE
while read -r line; do
    eval \"$line\" > /tmp/.said 2>&1
    status=$?
    if [ -n \"$(tail -c 1 /tmp/.said)\" ]; then echo >> /tmp/.said; fi
    cat /tmp/.said
    echo \"done $status\"
done
";

impl System<'_> {
    /// Writes the RAM disk into `folder`: where it is.
    pub(crate) fn write_initrd(&self, folder: &Path) -> Result<PathBuf> {
        let mut initrd = Initrd::default();
        for name in ["bin", "dev", "modules"] {
            initrd.folder(name);
        }
        for (name, minor) in [("null", 3), ("zero", 5), ("urandom", 9)] {
            initrd.character_device(&format!("dev/{name}"), 1, minor);
        }
        initrd.character_device("dev/console", 5, 1);
        let busybox = std::fs::read(guest_folder()?.join("busybox")).context("the guest's busybox")?;
        initrd.file("bin/busybox", 0o755, &busybox)?;
        for name in self.modules {
            let file = format!("{name}.ko");
            if let Ok(module) = std::fs::read(self.modules_in.join(&file)) {
                initrd.file(&format!("modules/{file}"), 0o644, &module)?;
            }
        }
        add_programs(&mut initrd, self.programs, folder)?;
        let init = INIT.replace("MODULES", &self.modules.join(" "));
        let init = init.replace("FIRST", self.first).replace("BESIDE", self.beside);
        initrd.file("init", 0o755, init.as_bytes())?;
        let path = folder.join("initrd");
        std::fs::write(&path, initrd.finish()).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

/// Puts programs into the initrd without what only a debugger needs, and the libraries that they are run with.
fn add_programs(initrd: &mut Initrd, programs: &[PathBuf], folder: &Path) -> Result<()> {
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

/// Returns the output of a program that has to succeed.
fn said(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}", error.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
