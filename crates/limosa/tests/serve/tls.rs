//! Connections that are encrypted, or must be.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;

use limosa_testkit::{Authority, NbdClient, TlsEnd, Validity, nbd_tool, qemu_img_output, wait_for};

use crate::bed::{Bed, Serving};
use crate::needs_qemu;

/// A server over TCP of a disk full of ones, its credentials, and its port.
struct Encrypted {
    bed: Bed,
    serving: Serving,
    port: u16,
}

impl Encrypted {
    fn new(more: &[&str]) -> Self {
        let bed = Bed::new();
        Authority::new().unwrap().equip(&bed.path("pki")).unwrap();
        fs::write(bed.path("disk"), vec![1; 1 << 20]).unwrap();
        let words = [&["-f", "raw", "disk", "--nbd", "tcp:127.0.0.1:0", "--tls-creds", "pki"], more].concat();
        let serving = bed.serve("nbd", &words);
        let port = serving.port();
        Self { bed, serving, port }
    }

    fn pki(&self) -> PathBuf {
        self.bed.path("pki")
    }

    /// `nbdinfo` over TLS with the credentials of a folder.
    fn nbdinfo(&self, folder: &str) -> anyhow::Result<String> {
        let folder = self.bed.path(folder);
        let uri = format!("nbds://127.0.0.1:{}/?tls-certificates={}", self.port, folder.display());
        nbd_tool("nbdinfo", ["--size", &uri])
    }

    /// `qemu-img compare` of the disk with itself, over TLS.
    fn compare(&self, folder: &str) -> bool {
        let object = format!("tls-creds-x509,id=t,endpoint=client,dir={}", self.bed.path(folder).display());
        let export = format!("driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={},tls-creds=t", self.port);
        let disk =
            format!("driver=raw,file.driver=file,file.locking=off,file.filename={}", self.bed.path("disk").display());
        let words = ["compare", "-q", "-U", "--object", &object, "--image-opts", &export, &disk];
        qemu_img_output(words).unwrap().status.success()
    }
}

#[test]
fn stock_clients_are_served_over_tls_and_nobody_without_it() {
    needs_qemu!();
    let encrypted = Encrypted::new(&[]);
    assert_eq!(encrypted.nbdinfo("pki").unwrap().trim(), "1048576");
    assert!(encrypted.compare("pki"));
    assert!(encrypted.serving.said().contains("nbds://127.0.0.1:"));
    // Without TLS a client learns nothing, over either socket.
    for mut client in [NbdClient::tcp(encrypted.port).unwrap(), NbdClient::unix(&encrypted.bed.path("nbd")).unwrap()] {
        for option in [3, 7, 8, 10, 11] {
            assert_eq!(client.option(option, &[0; 6]).unwrap(), [(0x8000_0005, Vec::new())]);
        }
        client.send_option(1, b"").unwrap();
        client.wait_closed().unwrap();
    }
    encrypted.serving.stop();
}

#[test]
fn a_client_without_a_good_certificate_is_refused() {
    needs_qemu!();
    let encrypted = Encrypted::new(&[]);
    let bed = &encrypted.bed;
    // Of another authority; without any; over.
    Authority::new().unwrap().equip(&bed.path("stranger")).unwrap();
    fs::copy(bed.path("pki/ca-cert.pem"), bed.path("stranger/ca-cert.pem")).unwrap();
    fs::create_dir(bed.path("none")).unwrap();
    fs::copy(bed.path("pki/ca-cert.pem"), bed.path("none/ca-cert.pem")).unwrap();
    for folder in ["stranger", "none"] {
        assert!(encrypted.nbdinfo(folder).is_err() && !encrypted.compare(folder), "{folder}");
    }
    assert_eq!(encrypted.nbdinfo("pki").unwrap().trim(), "1048576");
    // One line for both: a stranger must not be able to fill the log.
    let said = encrypted.serving.said();
    assert_eq!(said.matches("a client was refused by TLS").count(), 1, "{said}");
    encrypted.serving.stop();
    let unverified = Encrypted::new(&["--tls-verify-peer", "off"]);
    fs::create_dir(unverified.bed.path("none")).unwrap();
    fs::copy(unverified.pki().join("ca-cert.pem"), unverified.bed.path("none/ca-cert.pem")).unwrap();
    assert!(unverified.nbdinfo("none").is_ok() && unverified.compare("none"));
    unverified.serving.stop();
}

#[test]
fn only_clients_with_an_allowed_name_are_served() {
    needs_qemu!();
    let bed = Bed::new();
    let authority = Authority::new().unwrap();
    fs::write(bed.path("disk"), vec![1; 1 << 20]).unwrap();
    authority.equip(&bed.path("pki")).unwrap();
    for (folder, name) in [("one", "host1.example"), ("two", "host2.example")] {
        fs::create_dir(bed.path(folder)).unwrap();
        authority.trusted_in(&bed.path(folder)).unwrap();
        authority.issue(&bed.path(folder), TlsEnd::Client, &[name], Validity::Now).unwrap();
    }
    let served = |allow: &str| {
        let words = ["-f", "raw", "disk", "--nbd", "tcp:127.0.0.1:0", "--tls-creds", "pki", "--tls-allow", allow];
        let serving = bed.serve("nbd", &words);
        let port = serving.port();
        let found = ["one", "two", "pki"].map(|folder| {
            let folder = bed.path(folder);
            let uri = format!("nbds://127.0.0.1:{port}/?tls-certificates={}", folder.display());
            nbd_tool("nbdinfo", ["--size", &uri]).is_ok()
        });
        serving.stop();
        found
    };
    assert_eq!(served("host1.example"), [true, false, false]);
    assert_eq!(served("HOST1.example"), [false; 3]);
    // The common name that the testkit gives to all clients.
    assert_eq!(served("a client"), [true; 3]);
    let words = ["disk", "--nbd", "unix:x", "--tls-creds", "pki", "--tls-allow", "a", "--tls", "allow"];
    bed.refused(&words).misused(&["--tls-allow"]);
    bed.refused(&["disk", "--nbd", "unix:x", "--tls-allow", "a"]).misused(&["--tls-creds"]);
    bed.refused(&["-f", "raw", "disk", "--nbd", "unix:x", "--tls-creds", "absent"]).one_line(&["absent"]);
}

#[test]
fn a_client_may_choose_where_tls_is_allowed() {
    needs_qemu!();
    let encrypted = Encrypted::new(&["--tls", "allow"]);
    assert_eq!(encrypted.nbdinfo("pki").unwrap().trim(), "1048576");
    let mut plain = NbdClient::open(&encrypted.bed.path("nbd"), "", &[]).unwrap();
    assert_eq!(plain.read(0, 512).unwrap(), vec![1; 512]);
    drop(plain);
    encrypted.serving.stop();
}

#[test]
fn bytes_behind_the_request_for_tls_do_not_count_after_it() {
    needs_qemu!();
    let encrypted = Encrypted::new(&["--tls", "allow"]);
    // In one segment: STARTTLS, and an option that an attacker on the path has put behind it.
    let mut client = NbdClient::over(TcpStream::connect(("127.0.0.1", encrypted.port)).unwrap()).unwrap();
    let option = |option: u32| [&b"IHAVEOPT"[..], &option.to_be_bytes(), &[0; 4]].concat();
    client.raw(&[option(5), option(3)].concat()).unwrap();
    assert_eq!(client.option_reply(5).unwrap(), (1, Vec::new()));
    // It is no TLS, so the handshake fails: an alert, and no answer to the option.
    let rest = client.wait_closed().unwrap();
    assert!(rest.len() <= 7 && !rest.windows(8).any(|window| window == b"IHAVEOPT"), "{rest:?}");
    // A handshake of TLS that stops midway delays no other client.
    let mut stuck = NbdClient::over(TcpStream::connect(("127.0.0.1", encrypted.port)).unwrap()).unwrap();
    stuck.send_option(5, b"").unwrap();
    assert_eq!(stuck.option_reply(5).unwrap().0, 1);
    wait_for("another client", || encrypted.nbdinfo("pki").ok());
    drop(stuck);
    encrypted.serving.stop();
}
