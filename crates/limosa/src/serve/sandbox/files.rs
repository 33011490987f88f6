//! Names: what may be opened, made, removed and connected to (landlock).

use std::os::fd::OwnedFd;

use anyhow::Context as _;
use landlock::{
    ABI, Access as _, AccessFs, AccessNet, PathBeneath, PathFd, Ruleset, RulesetAttr as _, RulesetCreatedAttr as _,
    RulesetStatus, Scope, make_bitflags,
};
use rustix::fs::{FileType, Mode, OFlags};

use super::Needs;

/// The newest interface whose rights are asked for. An older kernel enforces those that it has.
const NEWEST: ABI = ABI::V6;

/// Restricts this thread. Returns false if the kernel has no landlock.
///
/// # Errors
/// The kernel has a part of the rules only, which it enforces.
pub(super) fn restrict(needs: &Needs) -> anyhow::Result<bool> {
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(NEWEST))?
        .handle_access(AccessNet::from_all(NEWEST))?
        .scope(Scope::from_all(NEWEST))?
        .create()?;
    for file in open_files() {
        // One that is in no mounted file system cannot have a rule, and is not opened again by name.
        let _ = (&mut rules).add_rule(PathBeneath::new(file, AccessFs::ReadFile));
    }
    for folder in &needs.socket_folders {
        let fd = PathFd::new(folder).with_context(|| folder.display().to_string())?;
        (&mut rules).add_rule(PathBeneath::new(fd, AccessFs::RemoveFile))?;
    }
    let image = make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | IoctlDev | ReadDir | MakeReg | RemoveFile});
    for folder in &needs.image_folders {
        let fd = PathFd::new(folder).with_context(|| format!("--allow-dir {}", folder.display()))?;
        (&mut rules).add_rule(PathBeneath::new(fd, image))?;
    }
    if let Some(folder) = &needs.journal_folder {
        let fd = PathFd::new(folder).with_context(|| format!("--journal {}", folder.display()))?;
        let journal = make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | MakeReg | RemoveFile});
        (&mut rules).add_rule(PathBeneath::new(fd, journal))?;
    }
    match rules.restrict_self()?.ruleset {
        RulesetStatus::FullyEnforced => Ok(true),
        RulesetStatus::NotEnforced => Ok(false),
        RulesetStatus::PartiallyEnforced => anyhow::bail!("this kernel has not all of it, and enforces what it has"),
    }
}

/// The files and block devices that are open: those of the chains. Rings open them again, only to read
/// (`limosa_storage`'s registered files); a process that cannot see its own descriptors cannot do that either.
fn open_files() -> Vec<OwnedFd> {
    let Ok(names) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let open = |name| rustix::fs::open(name, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let is_file = |fd: &OwnedFd| {
        let kind = rustix::fs::fstat(fd).map(|found| FileType::from_raw_mode(found.st_mode));
        matches!(kind, Ok(FileType::RegularFile | FileType::BlockDevice))
    };
    names.flatten().filter_map(|name| open(name.path()).ok()).filter(is_file).collect()
}
