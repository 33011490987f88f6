//! Images in object stores and at web servers.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use limosa_testkit::{
    BUCKET, HttpFault, HttpProxy, ObjectServer, ObjectServerKind, Program, listens, stores_skipped, wait_for,
};
use rustix::process::Signal;

use crate::bed::{Answer, Bed, assert_one_line};
use crate::nbd::filled;
use crate::needs_qemu;

/// The program, run in the folder of a bed with the credentials of a server.
fn command(bed: &Bed, server: &ObjectServer, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.args(words).current_dir(bed.path("")).envs(ObjectServer::environment(server.address()));
    command.env("LIMOSA_CACHE_DIR", bed.path("cache"));
    command
}

fn run(bed: &Bed, server: &ObjectServer, words: &[&str]) -> Answer {
    Answer::from(crate::stage::start_command(command(bed, server, words)).wait())
}

fn img(bed: &Bed, server: &ObjectServer, words: &[&str]) -> Answer {
    run(bed, server, &[&["img"], words].concat())
}

fn uploaded(bed: &Bed, server: &ObjectServer) {
    filled(bed);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    let made = img(bed, server, &["convert", "--json", "-O", "qcow2", "disk", &object]).success();
    assert!(made.stderr.contains("written with"), "{made:?}");
    assert_eq!(made.json()["remote"]["parts"], 1);
}

#[test]
fn an_image_in_a_store_is_written_and_read_by_every_command() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    for kind in ObjectServerKind::ALL {
        let bed = Bed::new();
        let server = ObjectServer::start(kind).unwrap();
        uploaded(&bed, &server);
        let object = format!("s3://{BUCKET}/disk.qcow2");
        let info = img(&bed, &server, &["info", "--output", "json", &object]).success().json();
        assert_eq!((&info["filename"], &info["format"]), (&object.clone().into(), &"qcow2".into()));
        assert_eq!(info["virtual-size"], 64 << 20);
        assert_eq!(img(&bed, &server, &["compare", "disk", &object]).success().stdout, "Images are identical.\n");
        assert!(img(&bed, &server, &["check", &object]).success().stdout.contains("No errors"));
        img(&bed, &server, &["convert", "-O", "qcow2", "disk", "local.qcow2"]).success();
        // Where in the file a cluster is is left to the threads.
        let data = |image: &str| {
            let map = img(&bed, &server, &["map", "--output", "json", image]).success().json();
            let parts = map.as_array().unwrap().iter().filter(|part| part["data"] == true);
            parts.map(|part| part["length"].as_u64().unwrap()).sum::<u64>()
        };
        assert_eq!(data("local.qcow2"), data(&object));
        let measure =
            |image: &str| img(&bed, &server, &["measure", "-O", "raw", "--output", "json", image]).success().json();
        assert_eq!(measure("local.qcow2"), measure(&object));
        let copied = img(&bed, &server, &["convert", "--json", "-O", "raw", &object, "copy.raw"]).success().json();
        assert!(copied["remote"]["requests"].as_u64().unwrap() >= 1, "{copied}");
        assert_eq!(bed.qemu_img(&["compare", "copy.raw", "disk"]).success().stdout, "Images are identical.\n");
        img(&bed, &server, &["dd", &format!("if={object}"), "of=part.raw", "bs=1M", "count=2"]).success();
        // A backing file, by its name and by options.
        img(&bed, &server, &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &object, "top"]).success();
        img(&bed, &server, &["compare", "top", "disk"]).success();
        let options = format!("driver=qcow2,file.driver=s3,file.url={object}");
        img(&bed, &server, &["compare", "--image-opts", &options, "driver=qcow2,file.filename=disk"]).success();
        // A new object of an overlay and what is below it.
        let new = format!("s3://{BUCKET}/new.raw");
        img(&bed, &server, &["convert", "-O", "raw", "top", &new]).success();
        img(&bed, &server, &["compare", "-f", "raw", "-F", "raw", &new, "copy.raw"]).success();
    }
}

#[test]
fn an_overlay_is_committed_to_a_new_object_and_stands_on_it() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    uploaded(&bed, &server);
    let (old, new) = (format!("s3://{BUCKET}/disk.qcow2"), format!("s3://{BUCKET}/new.qcow2"));
    img(&bed, &server, &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &old, "top"]).success();
    let io = ["bench", "-q", "-w", "-c", "40", "-s", "64k", "-S", "192k", "-o", "1M", "--pattern", "7", "top"];
    img(&bed, &server, &io).success();
    img(&bed, &server, &["convert", "-O", "raw", "top", "before.raw"]).success();
    let length = || std::fs::metadata(bed.path("top")).unwrap().len();
    let full = length();
    let refused = |words: &[&str], says: &str| {
        let answer = img(&bed, &server, words);
        assert_eq!(answer.status, Some(1), "{words:?}: {answer:?}");
        assert_one_line(&answer, words, says);
    };
    refused(&["commit", "--to", &old, "top"], "the object exists already");
    refused(&["commit", "--to", "file", "top"], "must be the URL of a new object");
    refused(&["commit", "--to", &new, "before.raw"], "--to needs a qcow2 overlay");
    refused(&["commit", "top"], "objects of stores are only read");
    img(&bed, &server, &["compare", "-f", "raw", "before.raw", "top"]).success();
    let kept = format!("s3://{BUCKET}/kept.qcow2");
    img(&bed, &server, &["commit", "-q", "-d", "--to", &kept, "top"]).success();
    assert_eq!(length(), full);
    img(&bed, &server, &["compare", "-f", "raw", "before.raw", "top"]).success();
    let committed = img(&bed, &server, &["commit", "--to", &new, "top"]).success();
    assert!(committed.stdout.contains("stands on s3://"), "{committed:?}");
    assert!(length() < full / 2, "it is empty");
    img(&bed, &server, &["compare", "-f", "raw", "before.raw", "top"]).success();
    img(&bed, &server, &["compare", "-f", "raw", "before.raw", &new]).success();
    let info = img(&bed, &server, &["info", "--output", "json", "top"]).success().json();
    assert_eq!(info["backing-filename"], new);
    // It is known which object it stands on.
    let serving = serve(&bed, &server, &["--overlay", &bed.path("top").display().to_string(), &new]);
    assert!(!end(serving).stderr.contains("no record"), "a replacement would be noticed");
}

#[test]
fn a_file_of_a_web_server_is_an_image() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::Open).unwrap();
    filled(&bed);
    std::fs::copy(bed.path("disk"), server.folder().join("disk.qcow2")).unwrap();
    let name = format!("http://{}/{BUCKET}/disk.qcow2", server.address());
    img(&bed, &server, &["compare", "disk", &name]).success();
    let info = img(&bed, &server, &["info", "--output", "json", &name]).success().json();
    assert_eq!(info["children"][0]["info"]["format"], "http");
}

#[test]
fn what_cannot_be_is_said_in_one_line() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    uploaded(&bed, &server);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    let refused = |words: &[&str], says: &str| {
        let answer = img(&bed, &server, words);
        assert_eq!(answer.status, Some(1), "{words:?}: {answer:?}");
        assert_one_line(&answer, words, says);
    };
    refused(&["convert", "-O", "raw", "disk", &object], "the object exists already");
    refused(&["convert", "-n", "-O", "raw", "disk", &object], "must not exist");
    let new = format!("s3://{BUCKET}/new.qcow2");
    refused(
        &["convert", "-O", "qcow2", "-o", "data_file=x", "disk", &new],
        "is an object, which has all of its contents",
    );
    refused(
        &["convert", "-O", "qcow2", "-B", "disk", "-F", "qcow2", "disk", &new],
        "give the backing file by an absolute path or a URL",
    );
    refused(&["info", &format!("s3://{BUCKET}/none")], "there is no such object (NoSuchKey)");
    // Which of the two there is not, this server does not say.
    refused(&["info", "s3://none-such/k"], "there is no such object (NoSuch");
    refused(&["info", &format!("s3://{BUCKET}/")], "the key must have 1 to 1024 bytes");
    refused(&["info", "https://user:secret@host/x"], "a URL with a user name or password is refused");
    refused(&["resize", &object, "1G"], "objects of stores are only read");
    refused(&["create", "-f", "raw", &object, "1M"], "objects of stores are only read");
    let mut wrong = command(&bed, &server, &["img", "info", &object]);
    wrong.env("AWS_SECRET_ACCESS_KEY", "another-secret");
    let answer = Answer::from(crate::stage::start_command(wrong).wait());
    assert_one_line(&answer, &[], "the store refuses access (403 SignatureDoesNotMatch)");
    assert!(!format!("{answer:?}").contains("another-secret"));
}

#[test]
fn an_object_that_exists_is_noticed_before_the_work() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    uploaded(&bed, &server);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    // The source does not even exist.
    let words = ["img", "convert", "-O", "raw", "none", &object];
    let answer = run(&bed, &server, &words);
    assert_one_line(&answer, &words, &format!("{object}: the object exists already"));
}

/// `limosa serve WORDS` until clients can connect.
fn serve(bed: &Bed, server: &ObjectServer, words: &[&str]) -> Program {
    let socket = format!("unix:{}", bed.path("s").display());
    let _ = std::fs::remove_file(bed.path("s"));
    let all = [&["serve", "--journal", "off", "--nbd", &socket], words].concat();
    let program = Program::start("limosa serve", command(bed, server, &all));
    wait_for("the server's socket", || listens(program.pid(), &bed.path("s")).then_some(()));
    program
}

fn end(program: Program) -> limosa_testkit::Ended {
    program.signal(Signal::TERM);
    program.wait()
}

#[test]
fn an_object_is_served_and_written_on_top_of() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    uploaded(&bed, &server);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    let export = format!("nbd+unix:///?socket={}", bed.path("s").display());
    {
        let serving = serve(&bed, &server, &[&object]);
        assert_eq!(
            bed.qemu_img(&["compare", "-F", "raw", "disk", &export]).success().stdout,
            "Images are identical.\n"
        );
        let ended = end(serving);
        assert!(ended.stderr.contains("object stores: ") && ended.status.success(), "{ended:?}");
    }
    for (round, pattern) in ["7", "8"].iter().enumerate() {
        let serving = serve(&bed, &server, &["--overlay", "top.qcow2", &object]);
        let mut io = Command::new("qemu-io");
        io.args(["-f", "raw", "-c", &format!("write -q -P {pattern} {round}M 64k")]);
        if round == 1 {
            io.args(["-c", "read -q -P 7 0 64k"]);
        }
        let status = io.args([OsStr::new("-c"), OsStr::new("read -q -P 1 100k 100k"), OsStr::new(&export)]).status();
        assert!(status.unwrap().success());
        assert!(end(serving).status.success());
    }
    assert!(Path::new(&bed.path("top.qcow2")).exists());
    let words = ["serve", "--overlay", "top.qcow2", "disk", "--nbd", "unix:never"];
    let answer = run(&bed, &server, &words);
    assert_one_line(&answer, &words, &format!("top.qcow2: is on top of {object}, not of "));
}

#[test]
fn an_overlay_of_an_object_that_was_replaced_is_refused() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    uploaded(&bed, &server);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    let overlay = ["--overlay", "top.qcow2", &object];
    assert!(end(serve(&bed, &server, &overlay)).status.success());
    assert!(end(serve(&bed, &server, &overlay)).status.success());
    // Another object of the same name and length.
    let file = server.folder().join("disk.qcow2");
    let mut bytes = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    std::fs::write(bed.path("other"), &bytes).unwrap();
    img(&bed, &server, &["convert", "-f", "raw", "-O", "raw", "other", &object]).success();
    let words = [&["serve", "--nbd", "unix:never"], &overlay[..]].concat();
    let answer = run(&bed, &server, &words);
    assert_one_line(&answer, &words, "the object was replaced since the overlay was made: it is ETag ");
    // One that has another backing file has no record of it.
    img(&bed, &server, &["rebase", "-u", "-F", "raw", "-b", &object, "top.qcow2"]).success();
    let ended = end(serve(&bed, &server, &overlay));
    assert!(ended.stderr.contains("has no record of the object below it"), "{ended:?}");
}

#[test]
fn a_signal_ends_a_server_whose_store_does_not_answer() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    let proxy = HttpProxy::start(server.address()).unwrap();
    proxy.set_faults(|_| HttpFault::Drop);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    let mut command = command(&bed, &server, &["serve", "--nbd", "unix:never", &object]);
    command.envs(ObjectServer::environment(proxy.address()));
    let serving = Program::start("limosa serve", command);
    wait_for("a request", || (!proxy.take_requests().is_empty()).then_some(()));
    let ended = end(serving);
    assert_eq!(ended.status.code(), Some(128 + 15), "{ended:?}");
    assert!(ended.stderr.contains("interrupted; the images were not all open yet"), "{ended:?}");
}

#[test]
fn a_signal_ends_an_upload_which_the_same_command_continues() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    let proxy = HttpProxy::start(server.address()).unwrap();
    let bytes: Vec<u8> = (0..40_u32 << 18).flat_map(|word| word.wrapping_mul(0x9e37_79b9).to_le_bytes()).collect();
    std::fs::write(bed.path("noise"), bytes).unwrap();
    let object = format!("s3://{BUCKET}/noise.raw");
    let words = ["img", "convert", "-q", "-f", "raw", "-O", "raw", "noise", &object];
    let mut parts = 0;
    proxy.set_faults(move |request| {
        parts += u32::from(request.method == "PUT");
        if parts > 2 { HttpFault::Drop } else { HttpFault::None }
    });
    let mut first = command(&bed, &server, &words);
    // A raw image needs no room anywhere.
    first.envs(ObjectServer::environment(proxy.address())).env("TMPDIR", "/nonexistent");
    let sending = Program::start("limosa img", first);
    let mut sent = 0;
    wait_for("parts", || {
        sent += proxy.take_requests().iter().filter(|request| request.method == "PUT").count();
        (sent > 3).then_some(())
    });
    let ended = end(sending);
    assert_eq!(ended.status.code(), Some(128 + 15), "{ended:?}");
    assert!(ended.stderr.contains("interrupted; run the same command to continue the upload"), "{ended:?}");
    proxy.set_faults(|_| HttpFault::None);
    let words = [&words[..2], &["--json"], &words[2..]].concat();
    let mut again = command(&bed, &server, &words);
    again.envs(ObjectServer::environment(proxy.address()));
    let done = Answer::from(crate::stage::start_command(again).wait()).success().json();
    assert!(done["remote"]["parts-resumed"].as_u64() >= Some(1), "{done}");
}

#[test]
fn a_server_in_its_sandbox_refuses_an_object_at_once() {
    needs_qemu!();
    if stores_skipped() {
        return;
    }
    let bed = Bed::new();
    let server = ObjectServer::start(ObjectServerKind::S3s).unwrap();
    uploaded(&bed, &server);
    let object = format!("s3://{BUCKET}/disk.qcow2");
    let control = bed.path("control").display().to_string();
    let add = ["serve", "ctl", &control, "add", &object, "--name", "object", "--read-only"];
    let serving = serve(&bed, &server, &["--control", &control, "disk"]);
    assert_one_line(&run(&bed, &server, &add), &add, "the server is in a sandbox and makes no connections");
    assert!(end(serving).status.success());
    // Without a sandbox it is served.
    let serving = serve(&bed, &server, &["--control", &control, "--sandbox", "off", "disk"]);
    run(&bed, &server, &add).success();
    assert!(end(serving).status.success());
}
