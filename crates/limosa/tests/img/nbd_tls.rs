//! Images at NBD servers whose connections are encrypted.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use limosa_testkit::{Authority, Program, TlsEnd, Validity, wait_for};

use crate::bed::{Answer, Bed, assert_one_line};
use crate::nbd::{Server, filled, qemu_nbd};
use crate::needs_qemu;

/// Words for a qemu-nbd with the certificates of the folder `pki`.
const SERVER: [&str; 4] = ["--object", "tls-creds-x509,id=s,endpoint=server,dir=pki", "--tls-creds", "s"];

/// Words for a client with the certificates of a folder, and the options of the export at a socket.
fn client(folder: &str, socket: &Path, hostname: &str) -> (String, String) {
    let object = format!("tls-creds-x509,id=t,endpoint=client,dir={folder}");
    let socket = socket.display();
    (object, format!("driver=nbd,server.type=unix,server.path={socket},tls-creds=t,tls-hostname={hostname}"))
}

#[test]
fn an_encrypted_export_is_read_and_written_as_by_stock() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    Authority::new().unwrap().equip(&bed.path("pki")).unwrap();
    let (object, options) = client("pki", &bed.path("s"), "localhost");
    {
        let _server = qemu_nbd(&bed, "s", &[&SERVER[..], &["-r", "-f", "qcow2", "disk"]].concat());
        let words = ["--object", &object, "--image-opts", &options];
        let info = Answer::from(bed.limosa(&[&["info"], &words[..]].concat())).success();
        assert!(info.stdout.contains("\"tls-creds\":\"t\""), "the name leads there again: {}", info.stdout);
        bed.both_tell(&[&["measure", "-O", "qcow2", "--output=json"], &words[..]].concat());
        bed.both_tell(&[&["map", "--output=json"], &words[..]].concat());
        Answer::from(bed.limosa(&[&["convert", "-O", "qcow2"], &words[..], &["copy"]].concat())).success();
    }
    assert_eq!(bed.qemu_img(&["compare", "copy", "disk"]).success().stdout, "Images are identical.\n");
    bed.create(&["-f", "raw", "target", "64M"]);
    {
        let _server = qemu_nbd(&bed, "t", &[&SERVER[..], &["-f", "raw", "target"]].concat());
        let (object, options) = client("pki", &bed.path("t"), "localhost");
        let words = ["convert", "-n", "--object", &object, "--target-image-opts", "disk", &options];
        Answer::from(bed.limosa(&words)).success();
    }
    bed.wait_unlocked("target");
    assert_eq!(bed.qemu_img(&["compare", "target", "disk"]).success().stdout, "Images are identical.\n");
    // A backing file whose name is its options.
    let backing = format!(
        "json:{{\"driver\":\"raw\",\"file\":{{\"driver\":\"nbd\",\"server\":{{\"type\":\"unix\",\"path\":\"{}\"}},\
         \"tls-creds\":\"t\",\"tls-hostname\":\"localhost\"}}}}",
        bed.path("u").display()
    );
    let _server = qemu_nbd(&bed, "u", &[&SERVER[..], &["-r", "-f", "qcow2", "disk"]].concat());
    let create = ["create", "-q", "--object", &object, "-f", "qcow2", "-b", &backing, "-F", "raw", "top"];
    Answer::from(bed.limosa(&create)).success();
    bed.both_say(&["compare", "--object", &object, "top", "disk"]);
}

#[test]
fn a_server_or_a_client_that_is_not_what_it_says_is_refused() {
    needs_qemu!();
    let bed = Bed::new();
    filled(&bed);
    let authority = Authority::new().unwrap();
    authority.equip(&bed.path("pki")).unwrap();
    Authority::new().unwrap().equip(&bed.path("other")).unwrap();
    std::fs::create_dir(bed.path("nameless")).unwrap();
    authority.trusted_in(&bed.path("nameless")).unwrap();
    std::fs::create_dir(bed.path("expired")).unwrap();
    authority.trusted_in(&bed.path("expired")).unwrap();
    authority.issue(&bed.path("expired"), TlsEnd::Client, &[], Validity::Over).unwrap();
    let _encrypted = qemu_nbd(&bed, "s", &[&SERVER[..], &["-r", "-f", "qcow2", "disk"]].concat());
    let _plain = qemu_nbd(&bed, "p", &["-r", "-f", "qcow2", "disk"]);
    for (folder, socket, hostname, says) in [
        ("other", "s", "localhost", "certificate"),
        ("nameless", "s", "localhost", "certificate"),
        ("pki", "s", "elsewhere.example", "elsewhere.example"),
        ("pki", "p", "localhost", "has no TLS"),
        ("expired", "s", "localhost", "expired"),
        ("absent", "s", "localhost", "absent: No such file"),
    ] {
        let (object, options) = client(folder, &bed.path(socket), hostname);
        let words = ["info", "--object", &object, "--image-opts", &options];
        assert_one_line(&Answer::from(bed.limosa(&words)), &words, says);
    }
    let plain = format!("nbd+unix:///?socket={}", bed.path("s").display());
    let refused = Answer::from(bed.limosa(&["info", &plain]));
    assert_one_line(&refused, &["info"], "requires TLS");
    assert!(refused.stderr.contains("; give --object tls-creds-x509,id=t,dir=FOLDER and --image-opts"), "{refused:?}");
    let (_, options) = client("pki", &bed.path("s"), "localhost");
    let words = ["info", "--image-opts", &options];
    assert_one_line(&Answer::from(bed.limosa(&words)), &words, "no TLS credentials \"t\"");
    let without = options.split(",tls-hostname").next().unwrap();
    let words = ["info", "--object", "tls-creds-x509,id=t,dir=pki", "--image-opts", without];
    assert_one_line(&Answer::from(bed.limosa(&words)), &words, "name");
}

#[test]
fn the_name_of_the_host_is_the_name_of_its_certificate() {
    let bed = Bed::new();
    std::fs::write(bed.path("disk"), vec![1; 1 << 20]).unwrap();
    Authority::new().unwrap().equip(&bed.path("pki")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.args(["serve", "--sandbox", "on", "-f", "raw", "disk", "--nbd", "tcp:127.0.0.1:0", "--tls-creds", "pki"]);
    command.current_dir(bed.path(""));
    let server = Server(Program::start("limosa serve", command));
    let port = |said: String| Some(said.split("127.0.0.1:").nth(1)?.split('/').next()?.to_owned());
    let port = wait_for("the server's port", || port(server.0.stderr()));
    let object = "tls-creds-x509,id=t,dir=pki";
    let export = format!("driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={port},tls-creds=t");
    let words =
        ["compare", "--object", object, "--image-opts", &export, "driver=raw,file.filename=disk,file.locking=off"];
    assert_eq!(Answer::from(bed.limosa(&words)).success().stdout, "Images are identical.\n");
}

#[test]
fn bytes_behind_the_agreement_on_tls_are_not_believed() {
    let bed = Bed::new();
    Authority::new().unwrap().equip(&bed.path("pki")).unwrap();
    let listener = UnixListener::bind(bed.path("s")).unwrap();
    let server = thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(b"NBDMAGICIHAVEOPT\0\x03").unwrap();
        let mut sent = [0; 4 + 16];
        client.read_exact(&mut sent).unwrap();
        assert_eq!(sent[4..], *b"IHAVEOPT\0\0\0\x05\0\0\0\0", "it begins TLS first");
        let reply = |option: u8, reply: u8| {
            let magic = 0x3_e889_0455_65a9_u64.to_be_bytes();
            [&magic[..], &[0, 0, 0, option, 0, 0, 0, reply, 0, 0, 0, 0]].concat()
        };
        // Acknowledged, with the answer to an option that is expected next.
        client.write_all(&[reply(5, 1), reply(11, 1)].concat()).unwrap();
        let mut rest = Vec::new();
        let _ = client.read_to_end(&mut rest);
        assert!(!rest.windows(8).any(|part| part == b"IHAVEOPT"), "nothing is said in the clear");
    });
    let (object, options) = client("pki", &bed.path("s"), "localhost");
    let words = ["info", "--object", &object, "--image-opts", &options];
    assert_one_line(&Answer::from(bed.limosa(&words)), &words, "TLS");
    server.join().unwrap();
}
