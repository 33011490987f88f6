use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use limosa_remote::{Environment, RemoteObject, RemoteOptions, StoreOptions};
use limosa_testkit::{CREDENTIALS, HttpFault, HttpProxy, HttpRequest, ObjectServer, ObjectServerKind, stores_skipped};

use crate::{Bed, pattern, read, said, url};

/// Credentials from a metadata service at this address.
fn store(bed: &Bed, service: std::net::SocketAddr) -> StoreOptions {
    let mut environment = Environment::empty().with("AWS_METADATA_ENDPOINT", format!("http://{service}"));
    for (name, value) in ObjectServer::environment(bed.proxy.address()) {
        if matches!(name, "AWS_ENDPOINT_URL" | "AWS_REGION") {
            environment = environment.with(name, value);
        }
    }
    let mut store = StoreOptions::default();
    store.environment = environment;
    store.budget = Duration::from_secs(30);
    store
}

/// The answer of a metadata service.
fn metadata(request: &HttpRequest) -> HttpFault {
    let answer = |text: String| HttpFault::Answer("200 OK".into(), text.into_bytes());
    match request.target.as_str() {
        "/latest/api/token" => answer("token".into()),
        "/latest/meta-data/iam/security-credentials/" => answer("role".into()),
        _ => {
            let (id, secret) = CREDENTIALS;
            let (keys, rest) =
                (format!(r#""AccessKeyId":"{id}","SecretAccessKey":"{secret}""#), r#""Token":"t","Code":"Success""#);
            // Soon over: it is asked for again with each request.
            answer(format!(r#"{{{keys},{rest},"Expiration":"2000-01-01T00:00:00Z"}}"#))
        }
    }
}

#[test]
fn a_hiccup_of_the_service_that_gives_credentials_is_waited_for() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let bytes = pattern(70, 2 << 20);
    bed.put("k", &bytes);
    // A server of its own: nothing is passed on.
    let service = HttpProxy::start(bed.server.address()).unwrap();
    let asked = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&asked);
    service.set_faults(move |request| match count.fetch_add(1, Ordering::Relaxed) % 11 {
        2 => HttpFault::Status(503, "Busy"),
        5 => HttpFault::Drop,
        _ => metadata(request),
    });
    let options = RemoteOptions::default().store(store(&bed, service.address()));
    let object = RemoteObject::open(&url("k"), &options).unwrap();
    assert!(read(&*object, 0, bytes.len()).unwrap() == bytes);
    assert!(object.counters().retries > 0 && asked.load(Ordering::Relaxed) > 5);
    // Its requests are none to the store.
    assert!(object.counters().requests < asked.load(Ordering::Relaxed));
    service.set_faults(|_| HttpFault::Status(503, "Busy"));
    let mut brief = options.clone();
    brief.store.budget = Duration::from_millis(300);
    let error = RemoteObject::open(&url("k"), &brief).unwrap_err();
    let expected = "no credentials from their service: the store is overloaded (503 Busy): try again later, or with fewer requests";
    assert!(said(&error).contains(expected) && said(&error).ends_with("(retried for 300ms)"), "{}", said(&error));
    service.set_faults(|_| HttpFault::Status(404, "NoRole"));
    let error = RemoteObject::open(&url("k"), &options).unwrap_err();
    assert!(said(&error).ends_with("no credentials: the service that gives them answered 404"), "{}", said(&error));
}

#[test]
fn a_token_is_sent_to_no_service_without_encryption() {
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "a token").unwrap();
    let mut store = StoreOptions::default();
    store.environment = Environment::empty()
        .with("AWS_WEB_IDENTITY_TOKEN_FILE", token.to_str().unwrap())
        .with("AWS_ROLE_ARN", "arn:aws:iam::1:role/r")
        .with("AWS_ENDPOINT_URL_STS", "http://user:secret@127.0.0.1:1")
        .with("AWS_ALLOW_HTTP", "true");
    let error = RemoteObject::open(&url("k"), &RemoteOptions::default().store(store)).unwrap_err();
    assert!(said(&error).ends_with("no credentials: 127.0.0.1:1 would send them unencrypted"), "{}", said(&error));
}

#[test]
fn without_a_service_the_remedy_is_said_at_once() {
    if stores_skipped() {
        return;
    }
    let bed = Bed::new(ObjectServerKind::S3s);
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let began = Instant::now();
    let options = RemoteOptions::default().store(store(&bed, closed));
    let error = RemoteObject::open(&url("k"), &options).unwrap_err();
    let expected = format!(
        "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE (nobody gives any at {closed})"
    );
    assert!(said(&error).ends_with(&expected), "{}", said(&error));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    // What it answers is not quoted.
    let service = HttpProxy::start(bed.server.address()).unwrap();
    service.set_faults(|request| match metadata(request) {
        HttpFault::Answer(head, body) if body.starts_with(b"{") => {
            HttpFault::Answer(head, br#"{"AccessKeyId":"a","SecretAccessKey":424242}"#.to_vec())
        }
        answer => answer,
    });
    let options = RemoteOptions::default().store(store(&bed, service.address()));
    let error = format!("{:?}", RemoteObject::open(&url("k"), &options).unwrap_err());
    assert!(error.contains("not the expected JSON") && !error.contains("424242"), "{error}");
}
