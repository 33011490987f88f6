//! Who is not let in, and in which words.

use std::io::{Read as _, Write as _};
use std::path::Path;
use std::thread;

use limosa_channel::{Channel, ChannelError, Listener, Options, Tls, TlsFailure};
use limosa_testkit::{Authority, TlsEnd, Validity};

use crate::bed::{Bed, SOON, connected, listen, look, plain, with};

/// Returns the errors of a client and of a server that is polled, one line each; empty if nothing is wrong there.
fn words(server: &Options, client: &Options) -> (String, String) {
    let listener = listen(server);
    let line = |error: ChannelError| {
        let line = error.to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            let channel = Channel::connect(listener.local_uri(), client)?;
            // A server that refuses a client says so behind the handshake (TLS 1.3).
            channel.read_exact(&mut [0])
        });
        let accepted = listener.accept(Some(SOON)).unwrap();
        let looked = thread::scope(|inner| {
            let looked = inner.spawn(|| accepted.read_exact(&mut [0]));
            // A client that has come in waits for a byte.
            if accepted.write_all(b"!").is_ok() {
                accepted.shutdown(limosa_channel::Shutdown::Read).unwrap();
            }
            looked.join().unwrap()
        });
        let looked = looked.err().filter(|error| !error.is_shut_down() && !error.is_closed());
        drop(accepted);
        let client = client.join().unwrap();
        (client.err().map(line).unwrap_or_default(), looked.map(line).unwrap_or_default())
    })
}

/// A server that verifies no client, so that it does not look whether its own certificate is of its authority.
fn unverifying(folder: &Path) -> Options {
    with(Tls::server(folder, false).unwrap())
}

#[test]
fn a_server_of_another_authority_is_refused() {
    let (bed, other) = (Bed::new(), Bed::new());
    let (client, server) = words(&unverifying(other.folder()), &bed.client());
    assert!(client.contains("its certificate is not issued by a CA in") && client.contains("ca-cert.pem"), "{client}");
    assert!(client.starts_with("cannot connect to tcp:127.0.0.1:"), "{client}");
    assert!(server.contains("TLS: it refused: it cannot verify this end's certificate"), "{server}");
}

#[test]
fn a_client_of_another_authority_is_refused() {
    let (bed, other) = (Bed::new(), Bed::new());
    // It trusts this server.
    bed.authority.trusted_in(other.folder()).unwrap();
    let certificates = other.another("client");
    bed.authority.trusted_in(&certificates).unwrap();
    Authority::new().unwrap().issue(&certificates, TlsEnd::Client, &[], Validity::Now).unwrap();
    // This end itself says that its own certificate does not fit.
    let error = Tls::client(&certificates, None).unwrap_err().to_string();
    assert!(
        error.contains("client-cert.pem: a peer would refuse it: its certificate is not issued by a CA"),
        "{error}"
    );
    // With its own authority in addition to the server's it continues, and is refused there.
    let both = format!("{}{}", std::fs::read_to_string(bed.folder().join("ca-cert.pem")).unwrap(), {
        let own = Authority::new().unwrap();
        own.issue(&certificates, TlsEnd::Client, &[], Validity::Now).unwrap();
        own.trusted_in(&certificates).unwrap();
        std::fs::read_to_string(certificates.join("ca-cert.pem")).unwrap()
    });
    std::fs::write(certificates.join("ca-cert.pem"), both).unwrap();
    let client = with(Tls::client(&certificates, None).unwrap());
    let (client, server) = words(&bed.server(), &client);
    assert!(server.contains("its certificate is not issued by a CA in"), "{server}");
    assert!(client.contains("it refused: it cannot verify this end's certificate"), "{client}");
}

#[test]
fn a_server_whose_certificate_is_not_valid_now_is_refused() {
    let bed = Bed::new();
    for (validity, said) in [
        (Validity::Over, "its certificate has expired (9"),
        (Validity::Later, "its certificate is not valid yet (in 2"),
    ] {
        let folder = bed.another(&format!("{validity:?}"));
        bed.authority.issue(&folder, TlsEnd::Server, &["127.0.0.1"], validity).unwrap();
        let own = Tls::server(&folder, true).unwrap_err().to_string();
        assert!(own.contains("server-cert.pem: a peer would refuse it: ") && own.contains(said), "{own}");
        let (client, _) = words(&unverifying(&folder), &bed.client());
        assert!(client.contains(said) && client.contains(" days"), "{client}");
    }
}

#[test]
fn a_server_of_another_name_is_refused_unless_that_name_is_expected() {
    let bed = Bed::new();
    let folder = bed.another("named");
    bed.authority.issue(&folder, TlsEnd::Server, &["limosa.example", "10.1.2.3"], Validity::Now).unwrap();
    let server = unverifying(&folder);
    let (client, _) = words(&server, &bed.client());
    assert!(client.contains("its certificate is for limosa.example, 10.1.2.3, not for 127.0.0.1"), "{client}");
    for name in ["limosa.example", "10.1.2.3"] {
        let expecting = with(Tls::client(bed.folder(), Some(name)).unwrap());
        connected(&server, &expecting).unwrap();
    }
    let error = Tls::client(bed.folder(), Some("not a name")).unwrap_err().to_string();
    assert!(error.contains("\"not a name\" is neither"), "{error}");
}

#[test]
fn a_client_without_a_certificate_is_refused_by_a_server_that_verifies() {
    let bed = Bed::new();
    let client = with(Tls::client(bed.another("anonymous"), None).unwrap());
    let (said, server) = words(&bed.server(), &client);
    assert!(server.contains("it presented no certificate"), "{server}");
    assert!(said.contains("it requires a certificate, and this end has none"), "{said}");
    connected(&unverifying(bed.folder()), &client).unwrap();
}

#[test]
fn what_was_taken_back_is_refused_at_either_end() {
    let bed = Bed::new();
    for (end, revoked_at) in [(TlsEnd::Server, "client"), (TlsEnd::Client, "server")] {
        let folder = bed.folder();
        let (client, server) = (bed.client(), bed.server());
        bed.authority.revoke(folder, end).unwrap();
        let (said, heard) = match end {
            TlsEnd::Server => words(&server, &bed.client()),
            TlsEnd::Client => words(&bed.server(), &client),
        };
        let line = if revoked_at == "client" { said } else { heard };
        assert!(line.contains("its certificate has been revoked"), "{line}");
        std::fs::remove_file(folder.join("ca-crl.pem")).unwrap();
    }
}

#[test]
fn a_peer_that_speaks_no_tls_is_recognized() {
    let bed = Bed::new();
    for hello in
        [&b"QEVM\0\0\0\x03"[..], &[0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1], b"GET / HTTP/1.1\r\n\r\n", &[22, 9, 9, 9, 9]]
    {
        let (mut near, far) = plain();
        near.write_all(hello).unwrap();
        let server = Channel::from_fd_with(far.into(), &bed.server()).unwrap();
        let error = look(&server).unwrap_err();
        assert_eq!(error.tls_failure(), Some(&TlsFailure::NotTls), "{error}");
        assert!(error.to_string().ends_with("TLS: its data is not TLS"), "{error}");
        // And again, asked by either end.
        assert!(server.read_exact(&mut [0]).is_err() && server.write_all(b"?").is_err());
    }
}

#[test]
fn a_server_that_hangs_up_on_the_handshake_is_named() {
    let bed = Bed::new();
    let (near, mut far) = plain();
    let named = with(Tls::client(bed.folder(), Some("localhost")).unwrap());
    let reads = thread::spawn(move || far.read(&mut [0; 2000]).map(drop));
    let error = Channel::from_fd_with(near.into(), &named).unwrap_err();
    assert_eq!(error.tls_failure(), Some(&TlsFailure::HandshakeClosed), "{error}");
    assert!(error.is_closed());
    reads.join().unwrap().unwrap();
}

#[test]
fn credentials_that_are_missing_or_damaged_are_named_by_their_file() {
    let bed = Bed::new();
    let empty = bed.folder().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let said = |tls: Result<Tls, ChannelError>| tls.unwrap_err().to_string();
    for end in [Tls::client(&empty, None), Tls::server(&empty, true)] {
        assert!(said(end).contains("empty/ca-cert.pem: must contain a CA certificate: No such file or directory"));
    }
    for (contents, cause) in [("", "the file is empty"), ("not PEM", "the file has none in PEM format")] {
        std::fs::write(empty.join("ca-cert.pem"), contents).unwrap();
        assert!(said(Tls::client(&empty, None)).contains(&format!("must contain a CA certificate: {cause}")));
    }
    assert!(
        said(Tls::server(bed.another("bare"), true)).contains("bare/server-cert.pem: must contain the certificate of")
    );
    assert!(said(Tls::server(bed.folder().join("none"), false)).contains("none: No such file or directory"));
    assert!(said(Tls::server(empty.join("ca-cert.pem"), false)).ends_with("ca-cert.pem: must be a directory"));
    for side in ["client", "server"] {
        let (bed, other) = (Bed::new(), Bed::new());
        let key = format!("{side}-key.pem");
        std::fs::copy(other.folder().join(&key), bed.folder().join(&key)).unwrap();
        let end = if side == "client" { Tls::client(bed.folder(), None) } else { Tls::server(bed.folder(), true) };
        assert!(said(end).ends_with(&format!("{key}: not the key of {side}-cert.pem")));
    }
    for (file, damage, wanted) in [
        ("client-cert.pem", "", "client-cert.pem: must contain the certificate of client-key.pem: the file is empty"),
        ("client-key.pem", "", "client-key.pem: must contain the key of client-cert.pem, unencrypted"),
        ("client-key.pem", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", "client-key.pem: "),
        ("ca-cert.pem", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n", "ca-cert.pem: damaged"),
        ("ca-cert.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "ca-cert.pem: "),
        ("ca-crl.pem", "-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "ca-crl.pem: "),
        ("ca-crl.pem", "", "ca-crl.pem: contains no list of revoked certificates"),
        ("ca-crl.pem", "\u{30}\u{2}not PEM", "ca-crl.pem: contains no list of revoked certificates"),
        ("ca-crl.pem", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "ca-crl.pem: contains no list"),
    ] {
        let bed = Bed::new();
        std::fs::write(bed.folder().join(file), damage).unwrap();
        let line = said(Tls::client(bed.folder(), None));
        assert!(line.contains(wanted) && !line.contains('\n'), "{file}: {line}");
    }
    let bed_with_nowhere = Bed::new();
    std::os::unix::fs::symlink("nowhere", bed_with_nowhere.folder().join("ca-crl.pem")).unwrap();
    assert!(said(Tls::server(bed_with_nowhere.folder(), true)).contains("ca-crl.pem: contains no list"));
    // Another one's key.
    let other = Bed::new();
    std::fs::copy(other.folder().join("server-key.pem"), bed.folder().join("server-key.pem")).unwrap();
    assert!(said(Tls::server(bed.folder(), true)).contains("server-key.pem: "));
}

#[test]
fn a_list_of_another_authority_is_refused_unless_one_of_its_own_is_with_it() {
    let bed = Bed::new();
    let list = bed.folder().join("ca-crl.pem");
    Authority::named("another", Validity::Now).unwrap().revoke(bed.folder(), TlsEnd::Client).unwrap();
    let foreign = std::fs::read_to_string(&list).unwrap();
    for end in [Tls::client(bed.folder(), None), Tls::server(bed.folder(), true)] {
        let error = end.unwrap_err().to_string();
        assert!(error.contains("ca-crl.pem: not issued by a CA in ca-cert.pem"), "{error}");
    }
    bed.authority.revoke(bed.folder(), TlsEnd::Client).unwrap();
    std::fs::write(&list, foreign + &std::fs::read_to_string(&list).unwrap()).unwrap();
    Tls::server(bed.folder(), true).unwrap();
}

#[test]
fn authorities_that_have_all_expired_or_are_none_are_refused_before_anybody_is_reached() {
    for (validity, said) in [(Validity::Over, "has expired (9"), (Validity::Later, "is not valid yet (in 2")] {
        let (bed, authority) = (Bed::new(), Authority::named("limosa's tests", validity).unwrap());
        let file = bed.folder().join("ca-cert.pem");
        let good = std::fs::read_to_string(&file).unwrap();
        authority.trusted_in(bed.folder()).unwrap();
        for end in [Tls::client(bed.folder(), None), Tls::server(bed.folder(), true)] {
            let error = end.unwrap_err().to_string();
            assert!(error.contains("ca-cert.pem: cannot verify any peer: ") && error.contains(said), "{error}");
        }
        // An old one in the same file that is not needed.
        std::fs::write(&file, good + &std::fs::read_to_string(&file).unwrap()).unwrap();
        Tls::client(bed.folder(), None).unwrap();
    }
    let bed = Bed::new();
    std::fs::copy(bed.folder().join("server-cert.pem"), bed.folder().join("ca-cert.pem")).unwrap();
    let error = Tls::client(bed.folder(), None).unwrap_err().to_string();
    assert!(error.contains("ca-cert.pem: contains a certificate that is not a CA certificate"), "{error}");
}

#[test]
fn credentials_of_the_other_end_are_refused_before_anybody_is_reached() {
    let bed = Bed::new();
    // No process listens there, which would be reported otherwise.
    let error = Channel::connect(&"tcp:127.0.0.1:1".parse().unwrap(), &bed.server()).unwrap_err();
    assert!(error.to_string().contains("a connecting end needs TLS credentials of a client"), "{error}");
    let error = Listener::bind(&"tcp:127.0.0.1:0".parse().unwrap(), &bed.client()).unwrap_err();
    assert!(error.to_string().contains("a listening end needs TLS credentials of a server"), "{error}");
}

#[test]
fn a_key_does_not_show_in_what_is_printed() {
    let bed = Bed::new();
    let shown = format!("{:?} {:?}", bed.client(), bed.server());
    assert!(shown.contains("Tls { endpoint: \"client\"") && !shown.contains("BEGIN"), "{shown}");
}
