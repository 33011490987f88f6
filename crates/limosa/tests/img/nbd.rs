//! Images at NBD servers: stock's, nbdkit's and limosa's own.

use std::io::Read as _;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use limosa_testkit::{Program, listens, wait_for};
use rustix::process::Signal;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::needs_qemu;

/// A server, ended when dropped.
pub(crate) struct Server(pub(crate) Program);

impl Drop for Server {
    fn drop(&mut self) {
        self.0.signal(Signal::TERM);
    }
}

fn start(name: &'static str, command: Command, socket: &Path) -> Server {
    let program = Program::start(name, command);
    wait_for("the server's socket", || listens(program.pid(), socket).then_some(()));
    Server(program)
}

/// `qemu-nbd WORDS` for several clients.
pub(crate) fn qemu_nbd(bed: &Bed, socket: &str, words: &[&str]) -> Server {
    let mut command = Command::new("qemu-nbd");
    command.args(["-t", "-e", "8", "-k"]).arg(bed.path(socket)).args(words).current_dir(bed.path(""));
    start("qemu-nbd", command, &bed.path(socket))
}

/// `nbdkit PLUGIN`, without what some servers do not have.
fn nbdkit(bed: &Bed, socket: &str, words: &[&str]) -> Server {
    let mut command = Command::new("nbdkit");
    command.args(["-f", "-U"]).arg(bed.path(socket)).args(words).current_dir(bed.path(""));
    start("nbdkit", command, &bed.path(socket))
}

fn uri(bed: &Bed, socket: &str) -> String {
    format!("nbd+unix:///?socket={}", bed.path(socket).display())
}

/// An image with data, zeros, and what was never written.
pub(crate) fn filled(bed: &Bed) {
    bed.create(&["-f", "qcow2", "disk", "64M"]);
    bed.qemu_io("disk", &["write -q -P 1 0 1M", "write -q -P 2 9M 100k", "write -q -z 20M 1M", "write -q -P 3 63M 1M"]);
}

#[test]
fn an_export_is_read_as_by_stock() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    let _server = qemu_nbd(&bed, "s", &["-r", "-f", "qcow2", "-x", "a-b", "disk"]);
    let socket = bed.path("s").display().to_string();
    let options = format!("driver=nbd,server.type=unix,server.path={socket},export=a-b");
    let json = format!("json:{{'driver':'raw','file':{{'driver':'nbd','path':'{socket}','export':'a-b'}}}}");
    for name in [&format!("nbd+unix:///a-b?socket={socket}"), &format!("nbd:unix:{socket}:exportname=a-b")] {
        bed.both_say(&["map", name]);
        bed.both_tell(&["map", "--output=json", name]);
        bed.both_tell(&["measure", "-O", "qcow2", "--output=json", name]);
        bed.both_say(&["compare", name, "disk"]);
        bed.both_refuse(&["check", name], "nothing to check");
    }
    bed.both_say(&["info", &format!("nbd+unix:///a-b?socket={socket}")]);
    bed.both_tell(&["info", "--output=json", &format!("nbd+unix:///a-b?socket={socket}")]);
    bed.both_tell(&["map", "--output=json", "--image-opts", &options]);
    Answer::from(bed.limosa(&["convert", "-O", "qcow2", "--image-opts", &options, "copy"])).success();
    Answer::from(bed.limosa(&["dd", "-O", "raw", "bs=1M", "count=10", &format!("if={json}"), "of=part"])).success();
    assert_eq!(bed.qemu_img(&["compare", "copy", "disk"]).success().stdout, "Images are identical.\n");
    assert_eq!(std::fs::metadata(bed.path("part")).unwrap().len(), 10 << 20);
    // A backing file at a server, as stock makes it.
    let backing = format!("nbd+unix:///a-b?socket={socket}");
    bed.create(&["-f", "qcow2", "-b", &backing, "-F", "raw", "top"]);
    bed.both_say(&["compare", "top", "disk"]);
    let refused = Answer::from(bed.limosa(&["map", "--untrusted", "top"]));
    assert_one_line(&refused, &["map"], "not trusted");
}

#[test]
fn an_export_whose_units_are_put_over_smaller_ones_is_read_and_written() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    let sizes = ["blocksize-minimum=64k", "blocksize-preferred=64k", "blocksize-maximum=1M"];
    let policy = ["--filter=blocksize-policy", "memory", "64M", "blocksize-error-policy=error"];
    let _server = nbdkit(&bed, "s", &[&policy[..], &sizes].concat());
    let uri = uri(&bed, "s");
    bed.qemu_io(&uri, &["write -q -P 7 30M 1k", "write -q -P 8 31M 40k"]);
    bed.both_say(&["compare", &uri, &uri]);
    bed.limosa(&["map", "--output=json", &uri]).success();
    for more in [&[][..], &["-W"]] {
        Answer::from(bed.limosa(&[&["convert", "-n", "-O", "raw"], more, &["disk", &uri]].concat())).success();
        assert_eq!(bed.qemu_img(&["compare", &uri, "disk"]).success().stdout, "Images are identical.\n");
        bed.qemu_io(&uri, &["write -q -P 7 30M 1k"]);
    }
}

#[test]
fn an_overlay_at_a_server_for_one_client_is_opened_once() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    let disk = bed.path("disk").display().to_string();
    bed.create(&["-f", "qcow2", "-b", "disk", "-F", "qcow2", "source"]);
    bed.qemu_io("source", &["write -q -P 5 2M 1M"]);
    bed.create(&["-f", "qcow2", "-b", &disk, "-F", "qcow2", "target"]);
    std::fs::File::options().write(true).open(bed.path("target")).unwrap().set_len(80 << 20).unwrap();
    let mut command = Command::new("qemu-nbd");
    command.args(["-f", "raw", "-k"]).arg(bed.path("s")).arg("target").current_dir(bed.path(""));
    let server = start("qemu-nbd", command, &bed.path("s"));
    let words = ["convert", "-n", "-O", "qcow2", "-B", &disk, "source", &uri(&bed, "s")];
    Answer::from(bed.limosa(&words)).success();
    drop(server);
    bed.wait_unlocked("target");
    assert_eq!(bed.qemu_img(&["compare", "target", "source"]).success().stdout, "Images are identical.\n");
}

#[test]
fn an_export_is_written_with_its_zeros() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    bed.create(&["-f", "qcow2", "target", "64M"]);
    bed.qemu_io("target", &["write -q -P 9 0 64M"]);
    {
        let _server = qemu_nbd(&bed, "s", &["-f", "qcow2", "target"]);
        Answer::from(bed.limosa(&["convert", "-n", "-O", "raw", "-W", "disk", &uri(&bed, "s")])).success();
    }
    bed.wait_unlocked("target");
    assert_eq!(bed.qemu_img(&["compare", "target", "disk"]).success().stdout, "Images are identical.\n");
    bed.qemu_img(&["check", "target"]).success();
    // A qcow2 image inside of an export, and one that is compressed.
    std::fs::File::create(bed.path("room")).unwrap().set_len(80 << 20).unwrap();
    {
        let _server = qemu_nbd(&bed, "t", &["-f", "raw", "room"]);
        bed.create(&["-f", "qcow2", "empty", "64M"]);
        let start = std::fs::read(bed.path("empty")).unwrap();
        std::fs::write(bed.path("room"), &start).unwrap();
        std::fs::File::options().write(true).open(bed.path("room")).unwrap().set_len(80 << 20).unwrap();
    }
    {
        let _server = qemu_nbd(&bed, "u", &["-f", "raw", "room"]);
        Answer::from(bed.limosa(&["convert", "-n", "-O", "qcow2", "disk", &uri(&bed, "u")])).success();
    }
    bed.wait_unlocked("room");
    assert_eq!(bed.qemu_img(&["compare", "-F", "qcow2", "disk", "room"]).stdout, "Images are identical.\n");
}

#[test]
fn an_image_is_created_in_an_export() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    std::fs::write(bed.path("room"), vec![0xee; 8 << 20]).unwrap();
    {
        let _server = qemu_nbd(&bed, "s", &["-f", "raw", "room"]);
        Answer::from(bed.limosa(&["convert", "-c", "-O", "qcow2", "disk", &uri(&bed, "s")])).success();
        assert_eq!(bed.both_say(&["compare", &uri(&bed, "s"), "disk"]).status, Some(0));
        bed.both_tell(&["check", "--output=json", &uri(&bed, "s")]);
        let short = Answer::from(bed.limosa(&["convert", "-O", "raw", "disk", &uri(&bed, "s")]));
        assert_one_line(&short, &["convert"], "the length of an export is fixed");
    }
    // Old contents of the export do not become the disk's.
    bed.create(&["-f", "raw", "zeros", "8M"]);
    {
        let _server = qemu_nbd(&bed, "t", &["-f", "raw", "room"]);
        Answer::from(bed.limosa(&["convert", "-O", "raw", "zeros", &uri(&bed, "t")])).success();
    }
    assert!(std::fs::read(bed.path("room")).unwrap().iter().all(|byte| *byte == 0));
}

#[test]
fn parts_of_a_servers_units_are_written() {
    needs_qemu!();
    limosa_testkit::nbd_tool("nbdkit", ["--version"]).unwrap();
    let bed = Bed::new();
    filled(&bed);
    std::fs::File::create(bed.path("room")).unwrap().set_len(80 << 20).unwrap();
    // What is no multiple of a unit is an error there.
    let units = ["--filter=blocksize-policy", "file", "room", "blocksize-minimum=4096", "blocksize-error-policy=error"];
    let _server = nbdkit(&bed, "s", &units);
    let target = uri(&bed, "s");
    Answer::from(bed.limosa(&["convert", "-O", "qcow2", "-o", "cluster_size=512", "disk", &target])).success();
    Answer::from(bed.limosa(&["check", "-f", "qcow2", &target])).success();
    assert_eq!(
        bed.qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", "room", "disk"]).success().stdout,
        "Images are identical.\n"
    );
}

#[test]
fn an_export_is_not_written_under_an_image_that_stands_on_it() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "disk", "4M"]);
    std::fs::File::options().write(true).open(bed.path("disk")).unwrap().set_len(8 << 20).unwrap();
    let _server = qemu_nbd(&bed, "s", &["-f", "raw", "disk"]);
    std::os::unix::fs::symlink(bed.path("s"), bed.path("l")).unwrap();
    let (export, other_name) = (uri(&bed, "s"), uri(&bed, "l"));
    bed.create(&["-f", "qcow2", "-b", &export, "-F", "qcow2", "overlay"]);
    let before = std::fs::read(bed.path("disk")).unwrap();
    let (own, overlay) = ("part of its own backing chain", bed.path("overlay").display().to_string());
    for (words, why) in [
        (&["create", "-f", "qcow2", "-b", &export, "-F", "qcow2", &other_name][..], own),
        (&["create", "-f", "qcow2", "-b", &overlay, "-F", "qcow2", &other_name], own),
        (&["create", "-u", "-f", "qcow2", "-b", &export, "-F", "qcow2", &other_name, "4M"], "own backing file"),
        (&["rebase", "-f", "qcow2", "-b", &other_name, "-F", "qcow2", &export], own),
        (&["convert", "-O", "qcow2", "overlay", &other_name], "same file"),
        (&["convert", "-n", "-O", "raw", "overlay", &other_name], "same file"),
        (&["create", "-f", "raw", "-o", "preallocation=full", &export, "4M"], "length is fixed"),
    ] {
        let said = Answer::from(bed.limosa(words)).stderr;
        assert!(said.contains(why), "{words:?}: {said}");
        assert!(std::fs::read(bed.path("disk")).unwrap() == before, "{words:?}");
    }
}

/// A dirty bitmap says nothing about holes: it is shown, and what is copied is read.
#[test]
fn a_dirty_bitmap_of_an_export_is_shown_and_not_believed_to_be_holes() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "disk", "8M"]);
    bed.qemu_io("disk", &["write -q -P 1 0 1M"]);
    bed.qemu_img(&["bitmap", "--add", "--enable", "disk", "b"]).success();
    bed.qemu_io("disk", &["write -q -P 2 512k 1M", "write -q -P 3 7M 1M"]);
    let _server = qemu_nbd(&bed, "s", &["-r", "-f", "qcow2", "-B", "b", "-A", "disk"]);
    let socket = bed.path("s").display().to_string();
    for context in ["qemu:dirty-bitmap:b", "qemu:allocation-depth"] {
        let options = format!("driver=nbd,server.type=unix,server.path={socket},x-dirty-bitmap={context}");
        for words in [&["map", "--output=json"][..], &["map"], &["map", "--output=json", "-s", "600k", "-l", "7M"]] {
            bed.both_say(&[words, &["--image-opts", &options]].concat());
        }
        Answer::from(bed.limosa(&["convert", "-O", "qcow2", "--image-opts", &options, "copy"])).success();
        assert_eq!(bed.qemu_img(&["compare", "copy", "disk"]).success().stdout, "Images are identical.\n");
    }
}

/// The header was written by the command itself, but a server can give back another one: it must not lead anywhere.
#[test]
fn a_server_that_exchanges_a_new_image_gets_no_file() {
    needs_qemu!();
    let bed = Bed::new();
    let (secret, victim) = (vec![b's'; 4 << 20], vec![b'v'; 4096]);
    std::fs::write(bed.path("secret"), &secret).unwrap();
    std::fs::write(bed.path("victim"), &victim).unwrap();
    std::fs::write(bed.path("source"), vec![1; (2 << 20) + 4096]).unwrap();
    bed.create(&[
        "-f",
        "qcow2",
        "-o",
        &format!("data_file={},cluster_size=2M", bed.path("victim").display()),
        "with-data",
        "4M",
    ]);
    std::fs::write(bed.path("victim"), &victim).unwrap();
    let backing = bed.path("secret").display().to_string();
    bed.create(&["-f", "qcow2", "-o", "cluster_size=2M", "-b", &backing, "-F", "raw", "with-backing", "4M"]);
    std::fs::File::create(bed.path("room")).unwrap().set_len(32 << 20).unwrap();
    for name in ["with-data", "with-backing"] {
        std::fs::File::options().write(true).open(bed.path(name)).unwrap().set_len(32 << 20).unwrap();
        let (before, after) = (format!("{name}-1"), format!("{name}-2"));
        let _first = qemu_nbd(&bed, &before, &["-f", "raw", "room"]);
        let _other = qemu_nbd(&bed, &after, &["-f", "raw", name]);
        let front = format!("{name}-front");
        exchange(&bed.path(&front), bed.path(&before), bed.path(&after));
        let ended = bed.limosa(&["convert", "-f", "raw", "-O", "qcow2", "source", &uri(&bed, &front)]);
        drop((_first, _other));
        assert!(std::fs::read(bed.path("victim")).unwrap() == victim, "{name}: {}", Answer::from(ended).stderr);
        bed.wait_unlocked(name);
        let got = std::fs::read(bed.path(name)).unwrap();
        assert!(!got.windows(512).any(|window| window == &secret[..512]), "{name}");
    }
}

/// Passes the first connection to one server, and others to another one, until the test ends.
fn exchange(front: &Path, first: PathBuf, other: PathBuf) {
    let listener = UnixListener::bind(front).unwrap();
    thread::spawn(move || {
        let servers = std::iter::once(first).chain(std::iter::repeat(other));
        for (client, server) in listener.incoming().zip(servers) {
            let (client, server) = (client.unwrap(), UnixStream::connect(server).unwrap());
            let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
            let (mut from, mut to) = (server, client);
            thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    });
}

#[test]
fn servers_without_structured_replies_are_understood() {
    needs_qemu!();
    limosa_testkit::nbd_tool("nbdkit", ["--version"]).unwrap();
    let bed = Bed::new();
    std::fs::write(bed.path("raw"), [7; 300 << 10]).unwrap();
    let without = ["--no-sr", "file", "raw"];
    for (socket, words) in [
        ("a", &without[..]),
        ("b", &["file", "raw"]),
        ("c", &["--filter=blocksize-policy", "file", "raw", "blocksize-minimum=4096", "blocksize-preferred=4096"]),
    ] {
        let _server = nbdkit(&bed, socket, words);
        assert_eq!(bed.both_say(&["compare", &uri(&bed, socket), "raw"]).status, Some(0), "{words:?}");
        let target = format!("{socket}.copy");
        Answer::from(bed.limosa(&["convert", "-O", "raw", &uri(&bed, socket), &target])).success();
        assert_eq!(std::fs::read(bed.path(&target)).unwrap(), [7; 300 << 10], "{words:?}");
    }
    let _server =
        nbdkit(&bed, "d", &["--tls=off", "--filter=error", "memory", "1M", "error-pread=EIO", "error-pread-rate=100%"]);
    let failed = Answer::from(bed.limosa(&["convert", "-O", "raw", &uri(&bed, "d"), "out"]));
    assert_one_line(&failed, &["convert"], "cannot read nbd+unix:");
    assert!(!bed.path("out").exists());
}

/// Forwards one connection, and ends it after `most` bytes of the server.
fn cut_off(front: &Path, server: PathBuf, most: u64) {
    let listener = UnixListener::bind(front).unwrap();
    thread::spawn(move || {
        let (client, _) = listener.accept().unwrap();
        let server = UnixStream::connect(server).unwrap();
        let (mut from, mut to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
        thread::spawn(move || _ = std::io::copy(&mut from, &mut to));
        let _ = std::io::copy(&mut server.take(most), &mut &client);
        let _ = client.shutdown(Shutdown::Both);
    });
}

#[test]
fn a_lost_connection_is_not_salvaged_as_zeros_and_read_errors_are() {
    needs_qemu!();
    limosa_testkit::nbd_tool("nbdkit", ["--version"]).unwrap();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "disk", "16M"]);
    bed.qemu_io("disk", &["write -q -P 1 0 16M"]);
    let _server = qemu_nbd(&bed, "s", &["-r", "-f", "raw", "disk"]);
    for (front, more) in [("f", &[][..]), ("g", &["--salvage"])] {
        cut_off(&bed.path(front), bed.path("s"), 5 << 20);
        let name = uri(&bed, front);
        let words = [&["convert"], more, &["-m", "1", "-f", "raw", "-O", "raw", &name, "new"]].concat();
        let ours = Answer::from(bed.limosa(&words));
        assert_eq!((ours.status, bed.path("new").exists()), (Some(1), false), "{ours:?}");
        assert_one_line(&ours, &words, "the server closed the connection (after 5242880 bytes)");
    }
    // The server answers, and stays.
    let read = "if [ $4 -lt 66048 ] && [ $(($4 + $3)) -gt 65536 ]; then echo EIO >&2; exit 1; fi; \
                head -c $3 /dev/zero | tr '\\000' '\\001'";
    let read = format!("pread={read}");
    let _bad = nbdkit(&bed, "b", &["eval", "get_size=echo 1M", &read]);
    let name = uri(&bed, "b");
    let words = |more: &[&'static str]| {
        let rest = [&name[..], "new"].map(str::to_owned);
        let front = ["convert", "-f", "raw", "-O", "raw"].iter().chain(more).map(|word| (*word).to_owned());
        front.chain(rest).collect::<Vec<_>>()
    };
    let run = |words: &[String]| Answer::from(bed.limosa(&words.iter().map(String::as_str).collect::<Vec<_>>()));
    assert_one_line(&run(&words(&[])), &[], "Input/output error");
    for more in [&["--salvage"][..], &["--salvage", "-q"]] {
        let ours = run(&words(more)).success();
        let says = "limosa: warning: 512 bytes at 65536 could not be read; written as zeros to the target\n";
        assert_eq!(ours.stderr, if more.contains(&"-q") { "" } else { says });
        let mut expected = vec![1; 1 << 20];
        expected[65536..66048].fill(0);
        assert!(std::fs::read(bed.path("new")).unwrap() == expected);
    }
}

#[test]
fn limosa_reads_what_limosa_serves() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    let socket: PathBuf = bed.path("s");
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command
        .args(["serve", "--read-only", "disk", "--nbd"])
        .arg(format!("unix:{}", socket.display()))
        .current_dir(bed.path(""));
    let _server = start("limosa serve", command, &socket);
    let name = uri(&bed, "s");
    assert_eq!(bed.both_say(&["compare", &name, "disk"]).status, Some(0));
    bed.both_tell(&["map", "--output=json", &name]);
}

#[test]
fn a_confined_server_serves_an_export_of_another_one() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    let _stock = qemu_nbd(&bed, "s", &["-r", "-f", "qcow2", "disk"]);
    let socket: PathBuf = bed.path("t");
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    // The thread that receives from stock's server must not run when the process confines itself.
    command.args(["serve", "--sandbox", "auto", "--read-only", "-f", "raw", &uri(&bed, "s"), "--name", ""]);
    command.args(["--nbd", &format!("unix:{}", socket.display())]).current_dir(bed.path(""));
    let server = start("limosa serve", command, &socket);
    assert_eq!(bed.both_say(&["compare", &uri(&bed, "t"), "disk"]).status, Some(0));
    assert!(!server.0.stderr().contains("other threads"), "{}", server.0.stderr());
}

#[test]
fn a_server_that_is_not_there_is_named_in_one_line() {
    let bed = Bed::new();
    let absent = format!("nbd+unix:///x?socket={}", bed.path("absent").display());
    for (words, says) in [
        (&["info", absent.as_str()][..], "cannot connect to unix:"),
        (&["info", "nbd://127.0.0.1:1/x"], "127.0.0.1:1"),
        (&["convert", "-O", "raw", &absent, "out"], "cannot connect to unix:"),
        (&["create", "-q", "-f", "raw", &absent, "1M"], "cannot connect to unix:"),
        (&["create", "-q", "-f", "qcow2", "-o", &format!("data_file={absent}"), "x", "1M"], "must be a file"),
        (&["info", "nbds://host/x"], "TLS"),
        (&["info", "nbd:x"], "expected nbd://"),
    ] {
        assert_one_line(&Answer::from(bed.limosa(words)), words, says);
    }
}

#[test]
fn a_disk_of_nothing_has_a_length() {
    needs_qemu!();
    let bed = Bed::new();
    let null = "json:{'driver': 'raw', 'file': {'driver': 'null-co', 'size': 3145728, 'read-zeroes': true}}";
    bed.both_tell(&["map", "--output=json", null]);
    bed.both_say(&["info", "null-co://"]);
    Answer::from(bed.limosa(&["convert", "-O", "qcow2", null, "out"])).success();
    assert_eq!(bed.both_tell(&["map", "--output=json", "out"]).as_array().unwrap().len(), 1);
    Answer::from(bed.limosa(&["convert", "-n", "-O", "raw", "out", "null-co://"])).success();
}
