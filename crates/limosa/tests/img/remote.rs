//! Images in object stores and at web servers.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use limosa_testkit::{BUCKET, ObjectServer, ObjectServerKind, Program, stores_skipped, wait_for};
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
        for command in ["map", "measure"] {
            let of = |image: &str| {
                let options: &[&str] = if command == "measure" { &["-O", "raw"] } else { &[] };
                img(&bed, &server, &[&[command, "--output", "json"], options, &[image]].concat()).success().json()
            };
            assert_eq!(of("disk").as_array().map(Vec::len), of(&object).as_array().map(Vec::len), "{command}");
        }
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
    refused(&["info", &format!("s3://{BUCKET}/none")], "there is no such object (NoSuchKey)");
    refused(&["info", "s3://none-such/k"], "there is no such object (NoSuchBucket)");
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

/// `limosa serve WORDS` until clients can connect.
fn serve(bed: &Bed, server: &ObjectServer, words: &[&str]) -> Program {
    let socket = format!("unix:{}", bed.path("s").display());
    let _ = std::fs::remove_file(bed.path("s"));
    let all = [&["serve", "--journal", "off", "--nbd", &socket], words].concat();
    let program = Program::start("limosa serve", command(bed, server, &all));
    wait_for("the server's socket", || bed.path("s").exists().then_some(()));
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
