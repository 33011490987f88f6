//! Options other than disks that name what QEMU writes to: files, directories, sockets at which it listens, shared
//! memory.

use std::ffi::OsString;
use std::path::Path;

use limosa_qemu::command_line::{CommandOption, Properties, options};

use super::Ownership;
use super::own::is_character_device;

/// Options whose value is a character device in the old notation: `file:PATH`, `unix:PATH,server=on`.
const OLD_CHARDEVS: [&str; 8] =
    ["serial", "parallel", "debugcon", "monitor", "qmp", "qmp-pretty", "gdb", "virtioconsole"];

/// Refuses a command line whose clones would write to one file or directory, listen at one socket, or run in one
/// memory.
///
/// # Errors
/// Which option, and what it names.
pub(crate) fn check_outputs(words: &[OsString], ownership: &Ownership<'_>) -> Result<(), String> {
    for option in options(words) {
        if let Some((path, what)) = output(&option)
            && !ownership.is_own(&path)
            && !is_character_device(&path)
        {
            return Err(format!(
                "-{} {}: {what} {path}, which all clones would share; give each clone its own ({{dir}}, {{name}}, {{n}})",
                option.name, option.value
            ));
        }
    }
    Ok(())
}

/// Returns the path that an option has QEMU write to, and how.
fn output(option: &CommandOption<'_>) -> Option<(String, &'static str)> {
    let value = option.value;
    let list = |first| Properties::read(value, first);
    let key = |list: &Properties, key: &str| list.get(key).filter(|path| !path.is_empty()).map(str::to_owned);
    match option.name {
        "pidfile" | "D" => Some((value.to_owned(), "QEMU writes")),
        name if OLD_CHARDEVS.contains(&name) => old_chardev(value),
        "chardev" => {
            let list = list("backend");
            let listens = list.is_on("server");
            match list.get("backend") {
                Some("socket") if listens => Some((key(&list, "path")?, "QEMU listens at")),
                Some("file" | "pipe") => Some((key(&list, "path")?, "QEMU writes")),
                _ => Some((key(&list, "logfile")?, "QEMU writes")),
            }
        }
        "virtfs" | "fsdev" => {
            let list = list("fsdriver");
            let path = key(&list, "path").filter(|_| !list.is_on("readonly"))?;
            Some((path, "the guest may write to"))
        }
        "object" => {
            let list = list("qom-type");
            match list.get("qom-type") {
                Some("memory-backend-file") if list.is_on("share") => {
                    // In a directory QEMU makes a file of its own, which has no name.
                    Some((key(&list, "mem-path").filter(|path| !Path::new(path).is_dir())?, "the guest's memory is"))
                }
                Some("filter-dump") => Some((key(&list, "file")?, "QEMU writes")),
                _ => None,
            }
        }
        "netdev" | "nic" => Some((key(&list("type"), "smb")?, "the guest may write to")),
        "audiodev" | "audio" => Some((key(&list("driver"), "path")?, "QEMU writes")),
        "trace" => Some((key(&list("enable"), "file")?, "QEMU writes")),
        "icount" => Some((key(&list("shift"), "rrfile")?, "QEMU writes")),
        "vnc" => Some((value.strip_prefix("unix:")?.split(',').next()?.to_owned(), "QEMU listens at")),
        "tpmdev" => {
            let list = list("type");
            Some((key(&list, "path").filter(|_| list.get("type") == Some("passthrough"))?, "the guest may write to"))
        }
        _ => None,
    }
}

fn old_chardev(value: &str) -> Option<(String, &'static str)> {
    let value = value.strip_prefix("mon:").unwrap_or(value);
    for kind in ["file:", "pipe:"] {
        if let Some(path) = value.strip_prefix(kind) {
            return Some((path.split(',').next()?.to_owned(), "QEMU writes"));
        }
    }
    let list = Properties::read(value.strip_prefix("unix:")?, "path");
    Some((list.get("path").filter(|_| list.is_on("server"))?.to_owned(), "QEMU listens at"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str) -> Result<(), String> {
        let words: Vec<_> = format!("qemu-system-x86_64 {line}").split(' ').map(OsString::from).collect();
        check_outputs(&words, &Ownership::new(Path::new("/c")))
    }

    #[test]
    fn what_all_clones_would_write_to_is_refused_by_name() {
        for line in [
            "-serial file:/srv/log",
            "-serial mon:file:/srv/log",
            "-qmp unix:/srv/qmp,server=on,wait=off",
            "-monitor unix:/srv/monitor,server,nowait",
            "-chardev socket,id=c,path=/srv/c,server=on",
            "-chardev file,id=c,path=/srv/c",
            "-chardev null,id=c,logfile=/srv/c",
            "-pidfile /srv/pid",
            "-D /srv/log",
            "-virtfs local,path=/srv,mount_tag=t,security_model=none",
            "-fsdev local,id=f,path=/srv,security_model=none",
            "-object memory-backend-file,id=m,size=1G,share=on,mem-path=/dev/shm/vm",
            r#"-object {"qom-type":"memory-backend-file","id":"m","share":true,"mem-path":"/dev/shm/vm"}"#,
            "-object filter-dump,id=f,netdev=n,file=/srv/dump",
            "-netdev user,id=n,smb=/srv",
            "-vnc unix:/srv/vnc",
            "-serial file:{dir}/../log",
        ] {
            let refused = check(line).expect_err(line);
            assert!(refused.contains(line.split(' ').next().unwrap()), "{line}: {refused}");
        }
    }

    #[test]
    fn what_is_each_clones_own_or_kept_by_nobody_is_not_refused() {
        for line in [
            "-serial file:{dir}/log -qmp unix:{dir}/second,server=on,wait=off -pidfile {dir}/pid",
            "-serial file:/srv/log-{n}",
            "-serial file:/dev/null -chardev file,id=c,path=/dev/null",
            "-chardev socket,id=c,path=/srv/collector",
            "-serial stdio -monitor none -serial pty",
            "-virtfs local,path=/srv,mount_tag=t,security_model=none,readonly=on",
            "-object memory-backend-file,id=m,size=1G,share=on,mem-path=/dev/shm",
            "-object memory-backend-file,id=m,size=1G,share=off,mem-path=/dev/shm/vm",
            "-netdev user,id=n -netdev tap,id=t,ifname=tap{n}",
        ] {
            check(line).expect(line);
        }
    }
}
