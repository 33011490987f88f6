//! The steps for root, as data: a file to write, then commands. The same plan is executed or printed as one line.
//!
//! Law: deciding is pure (an os-release text and the apt sources go in, a plan comes out); only [`Plan::execute`] acts.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::sources::{self, SourceFile};
use crate::shell;

/// The distribution and its package sources.
pub(crate) struct Machine {
    /// `ID` of os-release: `debian`, `ubuntu`, ...
    pub(crate) id: String,
    /// `VERSION_ID`: `12`, `24.04`, ...; empty on Debian testing.
    pub(crate) version: String,
    /// `VERSION_CODENAME`: `bookworm`, `noble`, ...
    pub(crate) codename: String,
    /// The files apt reads.
    pub(crate) sources: Vec<SourceFile>,
}

impl Machine {
    /// Looks at this machine.
    pub(crate) fn this() -> Result<Self> {
        let text = std::fs::read_to_string("/etc/os-release").context("/etc/os-release")?;
        Ok(Self::from_os_release(&text, SourceFile::read_all(Path::new("/etc/apt"))?))
    }

    fn from_os_release(text: &str, sources: Vec<SourceFile>) -> Self {
        let value = |key: &str| {
            let found = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
            found.unwrap_or_default().trim_matches(['"', '\'']).to_owned()
        };
        Self { id: value("ID"), version: value("VERSION_ID"), codename: value("VERSION_CODENAME"), sources }
    }

    /// Whether this is Ubuntu; everything else that gets this far is Debian.
    pub(crate) fn is_ubuntu(&self) -> bool {
        self.id == "ubuntu"
    }
}

/// Steps for root.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    file: Option<(PathBuf, String)>,
    commands: Vec<Vec<String>>,
}

impl Plan {
    /// Fetch the package lists and nothing else.
    pub(crate) fn update_lists() -> Self {
        let mut plan = Self::default();
        plan.push(&["apt-get", "update"]);
        plan
    }

    fn push(&mut self, words: &[&str]) {
        self.commands.push(words.iter().map(|&word| word.to_owned()).collect());
    }

    fn push_install(&mut self, options: &[&str], packages: &[&str]) {
        // A machine that has just been started is often installing its own updates.
        let install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y"];
        self.push(&[&install[..], &["--no-install-recommends", "--no-remove"], options, packages].concat());
    }

    /// The plan as one line for a user who may use sudo.
    pub(crate) fn line(&self) -> String {
        let mut steps = Vec::new();
        if let Some((path, content)) = &self.file {
            let lines: Vec<String> = content.lines().map(shell::quoted).collect();
            steps.push(format!(r"printf '%s\n' {} > {}", lines.join(" "), shell::quoted(&path.to_string_lossy())));
        }
        for words in &self.commands {
            steps.push(words.iter().map(|word| shell::quoted(word)).collect::<Vec<_>>().join(" "));
        }
        let mut script = steps.join(" && ");
        if let Some((path, _)) = &self.file {
            // A source that cannot be fetched from would make every later update of this machine fail.
            script.push_str(&format!(" || {{ rm -f {}; exit 1; }}", shell::quoted(&path.to_string_lossy())));
        }
        format!("sudo sh -c {}", shell::quoted(&script))
    }

    /// Does it.
    pub(crate) fn execute(&self) -> Result<()> {
        if let Some((path, content)) = &self.file {
            eprintln!("+ write {}", path.display());
            std::fs::write(path, content).with_context(|| format!("writing {}", path.display()))?;
        }
        let done = self.run_commands();
        if let (Err(_), Some((path, _))) = (&done, &self.file) {
            // A source that cannot be fetched from would make every later update of this machine fail.
            eprintln!("+ remove {}", path.display());
            let _ = std::fs::remove_file(path);
        }
        done
    }

    fn run_commands(&self) -> Result<()> {
        for words in &self.commands {
            let (program, arguments) = words.split_first().context("an empty command")?;
            shell::run(Command::new(program).args(arguments).env("DEBIAN_FRONTEND", "noninteractive"))?;
        }
        Ok(())
    }
}

/// How to get `packages` on this machine, with a QEMU that is new enough.
pub(crate) fn install(machine: &Machine, packages: &[&str]) -> Result<Plan> {
    match machine.id.as_str() {
        "debian" => on_debian(machine, packages),
        "ubuntu" => on_ubuntu(machine, packages),
        other => bail!(
            "no recipe for `{other}`: install {} yourself (QEMU 9.0 or newer) on this system, or use Debian 12, \
             Debian 13 or Ubuntu",
            packages.join(" ")
        ),
    }
}

/// Debian 12 has QEMU 7.2 and its backports suite has 10.0; Debian 13 has 10.0.
fn on_debian(machine: &Machine, packages: &[&str]) -> Result<Plan> {
    let mut plan = Plan::default();
    match machine.version.parse::<u32>() {
        Ok(..=11) => bail!("Debian {} has no QEMU 9.0 or newer: use Debian 12 or newer", machine.version),
        Ok(12) => {
            let suite = format!("{}-backports", machine.codename);
            if !sources::offer(&machine.sources, &suite) {
                plan.file = Some(sources::with_suite(&machine.sources, &machine.codename, &suite)?);
            }
            plan.push(&["apt-get", "update"]);
            // Only QEMU is too old in the release itself.
            let (newer, rest): (Vec<&str>, Vec<&str>) = packages.iter().partition(|name| name.starts_with("qemu"));
            if !newer.is_empty() {
                plan.push_install(&["-t", &suite], &newer);
            }
            if !rest.is_empty() {
                plan.push_install(&[], &rest);
            }
        }
        // Testing and unstable carry no VERSION_ID.
        Ok(_) | Err(_) => {
            plan.push(&["apt-get", "update"]);
            plan.push_install(&[], packages);
        }
    }
    Ok(plan)
}

/// Ubuntu 24.04 has QEMU 8.2 and its Cloud Archive a newer one; from 24.10 on the release itself is new enough.
fn on_ubuntu(machine: &Machine, packages: &[&str]) -> Result<Plan> {
    let number = |part: Option<&str>| part.and_then(|text| text.parse::<u32>().ok()).unwrap_or(0);
    let mut parts = machine.version.split('.');
    let release = (number(parts.next()), number(parts.next()));
    let mut plan = Plan::default();
    plan.push(&["apt-get", "update"]);
    if release < (24, 4) {
        bail!("Ubuntu {} has no QEMU 9.0 or newer: use Ubuntu 24.04 or newer", machine.version);
    }
    if release < (24, 10) {
        plan.push_install(&[], &["software-properties-common", "ubuntu-cloud-keyring"]);
        plan.push(&["add-apt-repository", "-y", "cloud-archive:epoxy"]);
        plan.push(&["apt-get", "update"]);
    }
    plan.push_install(&[], packages);
    Ok(plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(id: &str, version: &str, codename: &str, sources: Vec<SourceFile>) -> Machine {
        let text = format!("NAME=\"x\"\nID={id}\nVERSION_ID=\"{version}\"\nVERSION_CODENAME={codename}\n");
        Machine::from_os_release(&text, sources)
    }

    fn bookworm() -> Vec<SourceFile> {
        vec![SourceFile::parse("sources.list", "deb http://mirror.example/debian bookworm main\n")]
    }

    #[test]
    fn debian_12_takes_qemu_from_backports_of_its_own_mirror() {
        let plan = install(&machine("debian", "12", "bookworm", bookworm()), &["qemu-system-x86"]).unwrap();
        let line = plan.line();
        assert!(line.contains("deb http://mirror.example/debian bookworm-backports main"), "{line}");
        assert!(line.contains("-t bookworm-backports qemu-system-x86 || { rm -f"), "{line}");
        assert!(line.starts_with("sudo sh -c '") && !line.contains('\n'), "{line}");
    }

    #[test]
    fn a_machine_that_has_backports_already_gets_no_second_file() {
        let mut sources = bookworm();
        sources.push(SourceFile::parse("b.list", "deb http://mirror.example/debian bookworm-backports main\n"));
        let plan = install(&machine("debian", "12", "bookworm", sources), &["qemu-system-x86"]).unwrap();
        assert_eq!(plan.file, None);
    }

    #[test]
    fn debian_12_takes_everything_but_qemu_from_the_release_itself() {
        let machine = machine("debian", "12", "bookworm", bookworm());
        let line = install(&machine, &["qemu-utils", "libvirt-clients", "lzop"]).unwrap().line();
        assert!(line.contains("-t bookworm-backports qemu-utils && apt-get -o"), "{line}");
        assert!(line.contains("--no-remove libvirt-clients lzop ||"), "{line}");
        let line = install(&machine, &["lzop"]).unwrap().line();
        assert!(!line.contains("-t bookworm-backports"), "{line}");
    }

    #[test]
    fn debian_13_installs_from_its_release_and_old_releases_are_refused() {
        let plan = install(&machine("debian", "13", "trixie", Vec::new()), &["qemu-utils"]).unwrap();
        assert_eq!(
            plan.line(),
            "sudo sh -c 'apt-get update && apt-get -o DPkg::Lock::Timeout=300 install -y \
             --no-install-recommends --no-remove qemu-utils'"
        );
        assert!(install(&machine("debian", "11", "bullseye", Vec::new()), &["qemu-utils"]).is_err());
        assert!(install(&machine("fedora", "41", "", Vec::new()), &["qemu-utils"]).is_err());
    }

    #[test]
    fn ubuntu_takes_the_cloud_archive_only_where_the_release_is_too_old() {
        let old = install(&machine("ubuntu", "24.04", "noble", Vec::new()), &["qemu-system-x86"]).unwrap();
        assert!(old.line().contains("cloud-archive:"));
        let new = install(&machine("ubuntu", "25.10", "questing", Vec::new()), &["qemu-system-x86"]).unwrap();
        assert!(!new.line().contains("cloud-archive:"));
        assert!(install(&machine("ubuntu", "22.04", "jammy", Vec::new()), &["qemu-system-x86"]).is_err());
    }

    #[test]
    fn a_plan_for_root_runs_its_commands_in_order_and_stops_at_the_first_failure() {
        let folder = std::env::temp_dir().join(format!("limosa-xtask-plan-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let mut plan = Plan { file: Some((folder.join("a"), "one\n".to_owned())), commands: Vec::new() };
        let (a, b, c) = (folder.join("a"), folder.join("b"), folder.join("c"));
        let text = |path: &Path| path.to_string_lossy().into_owned();
        plan.push(&["cp", &text(&a), &text(&b)]);
        plan.push(&["false"]);
        plan.push(&["cp", &text(&a), &text(&c)]);
        let failed = plan.execute().is_err();
        let state = (std::fs::read_to_string(&b).unwrap(), c.exists());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(failed);
        assert_eq!(state, ("one\n".to_owned(), false));
    }
}
