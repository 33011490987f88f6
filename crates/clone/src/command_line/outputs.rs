//! Options other than disks that name what QEMU writes to: files, directories, sockets at which it listens, shared
//! memory.

use std::ffi::OsString;
use std::path::Path;

use limosa_qemu::command_line::{CommandOption, Properties, options};

use super::Ownership;
use super::own::is_character_device;

/// The file that `-audiodev wav` writes in QEMU's working directory if it is given none.
const DEFAULT_WAV: &str = "qemu.wav";

/// Options whose value is a character device in the old notation: `file:PATH`, `unix:PATH,server=on`.
const OLD_CHARDEVS: [&str; 8] =
    ["serial", "parallel", "debugcon", "monitor", "qmp", "qmp-pretty", "gdb", "virtioconsole"];

/// Refuses a command line whose clones would write to one file or directory, listen at one socket, use one device
/// server, or run in one memory.
///
/// # Errors
/// The option, and the object that it names.
pub(crate) fn check_outputs(args: &[OsString], ownership: &Ownership<'_>) -> Result<(), String> {
    let all = options(args);
    let servers = server_chardevs(&all);
    for option in &all {
        if let Some(property) = shared_global(option) {
            return Err(format!(
                "-global {}: {property} changes which files a device uses; give it to the device itself",
                option.value
            ));
        }
        for Output { path, how } in outputs(option, &servers) {
            let is_kept_by_nobody = how == How::Written && is_character_device(&path);
            if !ownership.is_own(&path) && !is_kept_by_nobody {
                return Err(format!(
                    "-{} {}: {} {path}, which all clones would share; give each clone its own ({{dir}}, {{name}}, {{n}})",
                    option.name,
                    option.value,
                    how.phrase()
                ));
            }
        }
    }
    Ok(())
}

/// Properties of devices by which clones could come to share a file, a directory or a server.
const SHARING: [&str; 4] = ["chardev", "pcap", "readonly", "rootdir"];

/// Returns the property of a `-global` that decides about files, if it is one: devices are checked by their own
/// options.
fn shared_global(option: &CommandOption<'_>) -> Option<&'static str> {
    if option.name != "global" {
        return None;
    }
    // `driver.property=value`, or `driver=,property=,value=`.
    let list = Properties::parse(option.value, "driver");
    let short = option.value.split_once('=').and_then(|(name, _)| name.rsplit_once('.'));
    let property = list.get("property").or_else(|| short.map(|(_, property)| property))?;
    SHARING.into_iter().find(|known| *known == property)
}

/// A path that clones must not share.
#[derive(Debug)]
struct Output {
    path: String,
    how: How,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum How {
    Written,
    Listened,
    Served,
    Guest,
    Memory,
}

impl How {
    const fn phrase(self) -> &'static str {
        match self {
            Self::Written => "QEMU writes",
            Self::Listened => "QEMU listens at",
            Self::Served => "a device's server is at",
            Self::Guest => "the guest may write to",
            Self::Memory => "the guest's memory is",
        }
    }
}

/// Ids of the character devices behind which a server of a device is: it keeps a disk, a file system or a TPM.
fn server_chardevs(all: &[CommandOption<'_>]) -> Vec<String> {
    let user = |option: &CommandOption<'_>| match option.name {
        "device" => {
            Some(Properties::parse(option.value, "driver")).filter(|list| kind_is(list, "driver", "vhost-user"))
        }
        "netdev" | "tpmdev" => Some(Properties::parse(option.value, "type")),
        "object" => {
            Some(Properties::parse(option.value, "qom-type")).filter(|list| kind_is(list, "qom-type", "cryptodev"))
        }
        _ => None,
    };
    let users = all.iter().filter_map(user);
    users.filter_map(|list| list.get("chardev").map(str::to_owned)).collect()
}

fn kind_is(list: &Properties, key: &str, start: &str) -> bool {
    list.get(key).is_some_and(|kind| kind.starts_with(start))
}

/// The paths of an option that clones must not share.
fn outputs(option: &CommandOption<'_>, servers: &[String]) -> Vec<Output> {
    let value = option.value;
    let list = |first| Properties::parse(value, first);
    let of = |list: &Properties, key: &str, how: How| {
        let path = list.get(key).filter(|path| !path.is_empty());
        path.map(|path| Output { path: path.to_owned(), how })
    };
    let found = match option.name {
        "pidfile" | "D" | "qtest-log" => vec![Some(Output { path: value.to_owned(), how: How::Written })],
        name if OLD_CHARDEVS.contains(&name) => vec![old_chardev(value)],
        "chardev" => {
            let list = list("backend");
            let how = match list.get("backend") {
                Some("socket") if list.is_on("server") => Some(How::Listened),
                Some("socket") if list.get("id").is_some_and(|id| servers.iter().any(|server| server == id)) => {
                    Some(How::Served)
                }
                Some("file" | "pipe") => Some(How::Written),
                _ => None,
            };
            vec![how.and_then(|how| of(&list, "path", how)), of(&list, "logfile", How::Written)]
        }
        "virtfs" | "fsdev" => {
            let list = list("fsdriver");
            vec![of(&list, "path", How::Guest).filter(|_| !list.is_on("readonly"))]
        }
        "object" => {
            let list = list("qom-type");
            match list.get("qom-type") {
                Some("memory-backend-file") if list.is_on("share") => {
                    // In a directory QEMU makes a file of its own, which has no name.
                    vec![of(&list, "mem-path", How::Memory).filter(|memory| !Path::new(&memory.path).is_dir())]
                }
                Some("filter-dump") => vec![of(&list, "file", How::Written)],
                _ => Vec::new(),
            }
        }
        "device" => {
            let list = list("driver");
            let writable = list.get("readonly").is_some() && !list.is_on("readonly");
            vec![of(&list, "rootdir", How::Guest).filter(|_| writable), of(&list, "pcap", How::Written)]
        }
        "netdev" | "nic" | "net" => vec![of(&list("type"), "smb", How::Guest)],
        "audiodev" | "audio" => {
            let list = list("driver");
            let is_wav = list.get("driver") == Some("wav");
            let default = || Output { path: DEFAULT_WAV.to_owned(), how: How::Written };
            vec![of(&list, "path", How::Written).or_else(|| is_wav.then(default))]
        }
        "trace" => vec![of(&list("enable"), "file", How::Written)],
        "icount" => vec![of(&list("shift"), "rrfile", How::Written)],
        "vnc" => {
            let path = value.strip_prefix("unix:").and_then(|path| path.split(',').next());
            vec![path.map(|path| Output { path: path.to_owned(), how: How::Listened })]
        }
        "tpmdev" => vec![of(&list("type"), "path", How::Guest)],
        _ => Vec::new(),
    };
    found.into_iter().flatten().collect()
}

fn old_chardev(value: &str) -> Option<Output> {
    let value = value.strip_prefix("mon:").unwrap_or(value);
    for kind in ["file:", "pipe:"] {
        if let Some(path) = value.strip_prefix(kind) {
            return Some(Output { path: path.split(',').next()?.to_owned(), how: How::Written });
        }
    }
    let list = Properties::parse(value.strip_prefix("unix:")?, "path");
    let path = list.get("path").filter(|_| list.is_on("server"))?;
    Some(Output { path: path.to_owned(), how: How::Listened })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str) -> Result<(), String> {
        let args: Vec<_> = format!("qemu-system-x86_64 {line}").split(' ').map(OsString::from).collect();
        check_outputs(&args, &Ownership::new(Path::new("/c")))
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
            "-object memory-backend-file,id=m,size=1G,share=on,mem-path=/dev/null",
            "-tpmdev passthrough,id=t,path=/dev/null",
            "-chardev socket,id=c,server=on,path={dir}/s,logfile=/srv/log",
            "-chardev socket,id=c,path=/srv/blk -device vhost-user-blk-pci,chardev=c",
            "-chardev socket,id=c,path=/srv/tpm -tpmdev emulator,id=t,chardev=c",
            "-device usb-mtp,rootdir=/srv,readonly=off",
            "-serial file:{dir}/../log",
            "-audiodev wav,id=a",
            "-audiodev wav,id=a,path=/srv/sound.wav",
            r#"-audiodev {"driver":"wav","id":"a"}"#,
            "-audio driver=wav,model=hda",
            "-global usb-mtp.rootdir=/srv",
            "-global usb-mtp.readonly=off",
            "-global driver=vhost-user-blk-pci,property=chardev,value=c",
            "-global usb-storage.pcap={dir}/usb",
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
            "-chardev socket,id=c,path=/srv/collector -device virtserialport,chardev=c",
            "-chardev socket,id=c,path={dir}/blk -device vhost-user-blk-pci,chardev=c",
            "-device usb-mtp,rootdir=/srv",
            "-serial stdio -monitor none -serial pty",
            "-virtfs local,path=/srv,mount_tag=t,security_model=none,readonly=on",
            "-object memory-backend-file,id=m,size=1G,share=on,mem-path=/dev/shm",
            "-object memory-backend-file,id=m,size=1G,share=off,mem-path=/dev/shm/vm",
            "-netdev user,id=n -netdev tap,id=t,ifname=tap{n}",
            "-audiodev wav,id=a,path={dir}/sound.wav -audiodev none,id=b",
            "-global ICH9-LPC.disable_s3=1 -global driver=kvm-pit,property=lost_tick_policy,value=delay",
        ] {
            check(line).expect(line);
        }
    }
}
