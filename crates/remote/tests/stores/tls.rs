use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use limosa_remote::{RemoteObject, RemoteOptions, UploadOptions, upload};
use limosa_storage::StorageError;
use limosa_testkit::{Authority, ObjectServerKind, TlsEnd, Validity, own_test, stores_skipped};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::{Bed, memory, pattern, read, said, store, url};

/// Listens for TLS with the server's certificate of a folder, and passes requests on to a proxy. Each connection has
/// one request, as the proxy's have.
fn tls_before(proxy: SocketAddr, folder: &Path) -> SocketAddr {
    let certificates = CertificateDer::pem_file_iter(folder.join("server-cert.pem")).unwrap();
    let certificates = certificates.collect::<Result<Vec<_>, _>>().unwrap();
    let key = PrivateKeyDer::from_pem_file(folder.join("server-key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let config = Arc::new(config.with_single_cert(certificates, key).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, config) = (client.unwrap(), Arc::clone(&config));
            // A client that trusts nobody here breaks off.
            std::thread::spawn(move || _ = pass_on(client, config, proxy));
        }
    });
    address
}

fn pass_on(client: TcpStream, config: Arc<ServerConfig>, proxy: SocketAddr) -> anyhow::Result<()> {
    let mut client = BufReader::new(StreamOwned::new(ServerConnection::new(config)?, client));
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if client.read_line(&mut head)? == 0 {
            return Ok(());
        }
    }
    let mut headers = head.lines().filter_map(|line| line.split_once(": "));
    let length = headers.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let length = length.map_or(Ok(0), |(_, length)| length.parse())?;
    let mut server = TcpStream::connect(proxy)?;
    server.write_all(head.as_bytes())?;
    std::io::copy(&mut (&mut client).take(length), &mut server)?;
    let mut client = client.into_inner();
    std::io::copy(&mut server, &mut client)?;
    client.conn.send_close_notify();
    client.flush()?;
    Ok(())
}

#[test]
fn a_store_whose_certificate_the_bundle_vouches_for_is_used_and_no_other_one() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(60, (6 << 20) + 7);
    let authority = Authority::new().unwrap();
    let other = Authority::named("somebody else", Validity::Now).unwrap();
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    authority.equip(folder.path()).unwrap();
    other.trusted_in(elsewhere.path()).unwrap();
    let address = tls_before(bed.proxy.address(), folder.path());
    let trusting = |address: SocketAddr, folder: Option<&Path>| {
        let mut store = bed.store();
        store.environment = store.environment.with("AWS_ENDPOINT_URL", format!("https://{address}"));
        if let Some(folder) = folder {
            let bundle = folder.join("ca-cert.pem").to_str().unwrap().to_owned();
            store.environment = store.environment.with("AWS_CA_BUNDLE", bundle);
        }
        store
    };
    let mut options = UploadOptions::default().store(trusting(address, Some(folder.path())));
    options.part_size = 5 << 20;
    upload(&memory(&bytes), &url("k"), &options).unwrap();
    let options = RemoteOptions::default().store(trusting(address, Some(folder.path())));
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    assert!(read(&*object, 0, bytes.len()).unwrap() == bytes);

    // Its certificate is for another host, or is not valid any more.
    let (named, expired) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    authority.issue(named.path(), TlsEnd::Server, &["store.example"], Validity::Now).unwrap();
    authority.issue(expired.path(), TlsEnd::Server, &["127.0.0.1"], Validity::Over).unwrap();
    let (named, expired) =
        (tls_before(bed.proxy.address(), named.path()), tls_before(bed.proxy.address(), expired.path()));
    bed.proxy.take_requests();
    let trusted = Some(folder.path());
    for (address, folder, expected) in [
        (address, None, "UnknownIssuer"),
        (address, Some(elsewhere.path()), "UnknownIssuer"),
        (named, trusted, "certificate not valid for"),
        (expired, trusted, "certificate expired"),
    ] {
        // At once: no attempt would help.
        let begun = Instant::now();
        let store = trusting(address, folder);
        let error = RemoteObject::open(&url("k"), &RemoteOptions::default().store(store)).unwrap_err();
        let said = said(&error);
        let expected = format!("the certificate of {address} is not trusted: invalid peer certificate: {expected}");
        assert!(said.contains(&expected) && begun.elapsed() < Duration::from_secs(30), "{said}");
    }
    // The bundle vouches for stores of S3 only.
    let mut store = trusting(address, trusted);
    store.budget = Duration::from_millis(200);
    let name = format!("https://{address}/bucket/k").parse().unwrap();
    let error = RemoteObject::open(&name, &RemoteOptions::default().store(store)).unwrap_err();
    assert!(said(&error).contains("UnknownIssuer"), "{}", said(&error));
    assert_eq!(bed.proxy.take_requests(), [], "a request was sent to a store that nobody vouches for");
}

fn read_web(address: SocketAddr) -> Result<Vec<u8>, StorageError> {
    let mut store = store(address);
    store.budget = Duration::from_millis(200);
    let name = format!("https://{address}/bucket/k").parse().unwrap();
    let object = RemoteObject::open(&name, &RemoteOptions::default().store(store))?;
    read(&*object, 0, 1000)
}

/// Run by the next test, in a process whose system trusts an authority.
#[test]
#[ignore = "a part of another test"]
fn reads_a_file_of_a_web_server_over_tls() {
    let Some(address) = std::env::var_os("LIMOSA_TEST_STORE") else { return };
    let address = address.to_str().unwrap().parse().unwrap();
    assert_eq!(read_web(address).unwrap(), pattern(61, 1000));
}

#[test]
fn a_web_server_whose_certificate_the_system_trusts_is_read_over_tls() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::Open);
    std::fs::write(bed.server.folder().join("k"), pattern(61, 1000)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    Authority::new().unwrap().equip(folder.path()).unwrap();
    let address = tls_before(bed.proxy.address(), folder.path());
    let error = read_web(address).unwrap_err();
    assert!(said(&error).contains("UnknownIssuer"), "{}", said(&error));
    assert_eq!(bed.proxy.take_requests(), []);
    let mut command = own_test!(reads_a_file_of_a_web_server_over_tls);
    command.env("LIMOSA_TEST_STORE", address.to_string()).env("SSL_CERT_FILE", folder.path().join("ca-cert.pem"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!bed.proxy.take_requests().is_empty());
}
