//! The files of a package, in the places where they are installed.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::dependencies::{self, Component};
use crate::shell;

/// Files of `contrib`, and their places. The name of a folder ends with a slash.
const CONTRIB: [(&str, &str); 9] = [
    ("limosa-disk@.service", "lib/systemd/system/"),
    ("limosa-nbd@.service", "lib/systemd/system/"),
    ("limosa-nbd@.socket", "lib/systemd/system/"),
    ("limosa-save@.service", "lib/systemd/system/"),
    ("limosa-save@.timer", "lib/systemd/system/"),
    ("limosa-vm@.service", "lib/systemd/system/"),
    ("limosa.sysusers", "lib/sysusers.d/limosa.conf"),
    ("60-limosa.rules", "lib/udev/rules.d/"),
    ("new-identity", "share/doc/limosa/examples/"),
];

/// Fills a folder with all that goes below `/usr`. `own` is the program for the machine that we run on: it prints its
/// pages and scripts.
pub(super) fn fill(usr: &Path, program: &Path, own: &Path, components: &[Component]) -> Result<()> {
    if usr.exists() {
        fs::remove_dir_all(usr).with_context(|| usr.display().to_string())?;
    }
    let place = |path: &str| -> Result<PathBuf> {
        let path = usr.join(path);
        let folder = path.parent().context("a file in no folder")?;
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        Ok(path)
    };
    copy(program, &place("bin/limosa")?, 0o755)?;
    let pages = place("share/man/man1/limosa.1")?;
    shell::run(Command::new(own).arg("man").arg(pages.parent().context("no folder for pages")?))?;
    for (shell, path) in [
        ("bash", "share/bash-completion/completions/limosa"),
        ("zsh", "share/zsh/site-functions/_limosa"),
        ("fish", "share/fish/vendor_completions.d/limosa.fish"),
    ] {
        write(&place(path)?, shell::output(Command::new(own).args(["completions", shell]))?.as_bytes())?;
    }
    for (file, to) in CONTRIB {
        let to = if to.ends_with('/') { format!("{to}{file}") } else { to.to_owned() };
        copy(&shell::workspace().join("contrib").join(file), &place(&to)?, 0o644)?;
    }
    for file in ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"] {
        copy(&shell::workspace().join(file), &place(&format!("share/doc/limosa/{file}"))?, 0o644)?;
    }
    write(&place("share/doc/limosa/licenses.txt")?, dependencies::licences(components)?.as_bytes())?;
    let bill = serde_json::to_string_pretty(&dependencies::bill_of_materials(components)).context("the bill")?;
    write(&place("share/doc/limosa/limosa.cdx.json")?, bill.as_bytes())
}

fn copy(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("copying {} to {}", from.display(), to.display()))?;
    fs::set_permissions(to, fs::Permissions::from_mode(mode)).with_context(|| to.display().to_string())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::File::create(path).and_then(|mut file| file.write_all(bytes)).with_context(|| path.display().to_string())?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).with_context(|| path.display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With the program that was built beside this test.
    #[test]
    fn a_package_has_a_page_for_each_command_and_no_empty_file() {
        let own = std::env::current_exe().unwrap();
        let program = own.ancestors().nth(2).unwrap().join("limosa");
        assert!(program.is_file(), "no {}: build the workspace", program.display());
        let folder = limosa_testkit::scratch().unwrap();
        let components = dependencies::components("limosa", &shell::host().unwrap()).unwrap();
        fill(folder.path(), &program, &program, &components).unwrap();
        let list = ["-type", "f", "-printf", "%P %s\n"];
        let files = shell::output(Command::new("find").arg(folder.path()).args(list)).unwrap();
        let help = shell::output(Command::new(&program).arg("--help")).unwrap();
        let commands = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        let names = commands.filter(|line| !line.starts_with("   ")).filter_map(|line| line.split_whitespace().next());
        let pages: Vec<_> =
            names.filter(|name| *name != "help").map(|name| format!("share/man/man1/limosa-{name}.1")).collect();
        assert!(pages.len() > 10, "{pages:?}");
        let has = |name: &str| files.lines().any(|line| line.starts_with(&format!("{name} ")));
        let more =
            ["bin/limosa", "lib/udev/rules.d/60-limosa.rules", "share/doc/limosa/licenses.txt"].map(str::to_owned);
        for name in pages.iter().chain(&more) {
            assert!(has(name), "a package would lack {name}; it has:\n{files}");
        }
        assert!(!files.lines().any(|line| line.ends_with(" 0")), "{files}");
    }
}
