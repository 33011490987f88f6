//! The file system on the disk of a guest that serves requests, and what must be on it in the end.

use std::path::PathBuf;
use std::process::Command;

use limosa_testkit::DiskFormat;

use crate::disks::Bed;
use crate::overlays::qemu_img;
use crate::requests::{DISK, FILE_SYSTEM};
use crate::scene::text;
use crate::stage::limosa;

/// Makes the disk, with a file system at its beginning.
pub(crate) fn make_disk(bed: &Bed) {
    let (fresh, disk) = (bed.path("fresh"), bed.path("disk"));
    std::fs::File::create_new(&fresh).unwrap().set_len(DISK).unwrap();
    let size = format!("{}k", FILE_SYSTEM >> 10);
    tool("mke2fs", &["-q", "-F", "-t", "ext4", text(&fresh), &size], &[0]);
    qemu_img(&["convert", "-f", "raw", "-O", bed.format(), text(&fresh), text(&disk)]);
    std::fs::remove_file(fresh).unwrap();
}

/// Runs a program of e2fsprogs, or sqlite3; what it prints.
fn tool(name: &str, arguments: &[&str], statuses: &[i32]) -> String {
    let folders = ["/usr/sbin", "/sbin", "/usr/bin"].map(|folder| PathBuf::from(folder).join(name));
    let program = folders.iter().find(|path| path.is_file());
    let program = program.unwrap_or_else(|| panic!("no {name}: run `cargo xtask setup`"));
    let done = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let wrong = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(statuses.contains(&done.status.code().unwrap()), "{name} {arguments:?}: {}: {said}{wrong}", done.status);
    said
}

/// Expects a whole image with a whole file system and a whole database, which has what was acknowledged.
pub(crate) fn check_disk(bed: &Bed, acknowledged: u64) {
    let [disk, raw, database] = ["disk", "raw", "requests"].map(|name| bed.path(name));
    if bed.format == DiskFormat::Qcow2 {
        qemu_img(&["check", "-q", text(&disk)]);
        limosa(["img", "check", text(&disk)]).success();
    }
    qemu_img(&["convert", "-f", bed.format(), "-O", "raw", text(&disk), text(&raw)]);
    // The VM was killed: the journal is played back first.
    tool("e2fsck", &["-p", text(&raw)], &[0, 1]);
    tool("e2fsck", &["-f", "-n", text(&raw)], &[0]);
    for name in ["requests", "requests-journal"] {
        tool("debugfs", &["-R", &format!("dump /{name} {}", bed.path(name).display()), text(&raw)], &[0]);
    }
    let journal = bed.path("requests-journal");
    if std::fs::metadata(&journal).is_ok_and(|metadata| metadata.len() == 0) {
        std::fs::remove_file(journal).unwrap();
    }
    let said = tool("sqlite3", &[text(&database), "PRAGMA integrity_check; SELECT count(*), max(n) FROM log"], &[0]);
    let newest: u64 = said.trim_end().rsplit('|').next().unwrap().parse().unwrap_or_else(|_| panic!("{said}"));
    assert_eq!(said, format!("ok\n{newest}|{newest}\n"));
    assert!(newest >= acknowledged, "{acknowledged} requests were acknowledged, and the disk has {newest}");
}
