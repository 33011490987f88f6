//! The connection below a store's client: redirects, limits of what is kept in memory, and what is noted of failures.
//!
//! **Law: a server names no other place.** A redirect to another host is refused unless it is allowed, and one from an
//! encrypted connection to a plain one always.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use parking_lot::Mutex;

use super::exchange::{Exchange, Seen, Status};
use crate::error::RemoteError;
use crate::printable::printable;

/// Redirects that are followed for one request.
const REDIRECTS: u32 = 5;

/// The longest answer that is no part of an object, in bytes.
const ANSWER_MAX: usize = 1 << 20;

/// The part of an error's text that is looked at, in bytes.
const ERROR_MAX: usize = 16 << 10;

/// The longest attempt to connect to a service of this machine or its host, which is there at once or not at all.
const NEAR: Duration = Duration::from_secs(1);

/// Makes the connections of one store's client: to the store, and to services that give credentials for it.
///
/// The client says of none which it is. But it asks for that to the store last: `build` of each client makes its
/// credentials before itself (`object_store` 0.14, `aws/builder.rs`, `gcp/builder.rs`, `azure/builder.rs`).
#[derive(Debug, Clone)]
pub(super) struct Connector {
    pub(super) settings: Settings,
    pub(super) route: Route,
    /// The remedy for missing credentials.
    pub(super) remedy: &'static str,
    pub(super) place: Place,
    made: Arc<AtomicUsize>,
}

/// Settings of connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Settings {
    pub(super) connect_timeout: Duration,
    /// Certificates in PEM that are trusted beside the system's.
    pub(super) certificates: Option<Arc<[u8]>>,
    /// Whether proxies of the environment are passed by.
    pub(super) is_direct: bool,
}

/// The URL of the object at its store, without a query. It is known after the first request: two stores may have
/// buckets of the same name, and only the client knows all the settings that choose one.
#[derive(Debug, Clone, Default)]
pub(super) struct Place(Arc<OnceLock<String>>);

impl Place {
    pub(super) fn get(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    fn note(&self, uri: &Uri) {
        let scheme = uri.scheme_str().unwrap_or_default().to_owned();
        self.0.get_or_init(|| format!("{scheme}://{}{}", shown(uri).to_ascii_lowercase(), uri.path()));
    }
}

/// Where the requests of a store may go.
#[derive(Debug, Clone)]
pub(super) struct Route {
    /// Whether the server may name other hosts.
    pub(super) allow_redirects: bool,
    /// Whether it may redirect at all: a store of S3 does so for buckets of another region, and a signature for one
    /// host is of no use at another.
    pub(super) is_web: bool,
}

impl Connector {
    pub(super) fn new(settings: Settings, route: Route, remedy: &'static str) -> Self {
        Self { settings, route, remedy, place: Place::default(), made: Arc::default() }
    }
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let failed = |error: reqwest::Error| object_store::Error::Generic { store: "http", source: Box::new(error) };
        let client = client(&self.settings).map_err(failed)?;
        let number = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        let is_true = |value: String| value == "true";
        let may_be_plain = options.get_config_value(&ClientConfigKey::AllowHttp).is_some_and(is_true);
        let had_credentials = AtomicBool::new(false);
        Ok(HttpClient::new(Connection { client, connector: self.clone(), number, may_be_plain, had_credentials }))
    }
}

/// Returns a client. Those with the same settings are one, so that all objects of a host share its connections.
fn client(settings: &Settings) -> reqwest::Result<reqwest::Client> {
    static CLIENTS: Mutex<Option<HashMap<Settings, reqwest::Client>>> = Mutex::new(None);
    let mut clients = CLIENTS.lock();
    let clients = clients.get_or_insert_default();
    if let Some(client) = clients.get(settings) {
        return Ok(client.clone());
    }
    // The client has no cryptography of its own. If the program has installed some, that is used.
    _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("limosa/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(settings.connect_timeout)
        // One connection for each request in flight carries more than all of them over one.
        .http1_only();
    if let Some(pem) = &settings.certificates {
        builder = builder.tls_certs_merge(reqwest::Certificate::from_pem_bundle(pem)?);
    }
    if settings.is_direct {
        builder = builder.no_proxy();
    }
    let client = builder.build()?;
    clients.insert(settings.clone(), client.clone());
    Ok(client)
}

/// A connection of a store's client.
#[derive(Debug)]
struct Connection {
    client: reqwest::Client,
    connector: Connector,
    number: usize,
    /// Whether requests for credentials may be unencrypted.
    may_be_plain: bool,
    /// Whether it has brought credentials.
    had_credentials: AtomicBool,
}

#[async_trait]
impl HttpService for Connection {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let exchange = Exchange::current().unwrap_or_default();
        if self.number == self.connector.made.load(Ordering::Relaxed) {
            self.call_store(request, &exchange).await
        } else {
            self.call_for_credentials(request, &exchange).await
        }
    }
}

impl Connection {
    async fn call_store(&self, mut request: HttpRequest, exchange: &Exchange) -> Result<HttpResponse, HttpError> {
        if let Some((name, value)) = &exchange.condition
            && *request.method() == Method::POST
            && request.uri().query().is_some_and(|query| query.contains("uploadId="))
        {
            // A signature covers the headers that it names; others may be added.
            request.headers_mut().insert(name.clone(), value.clone());
        }
        self.connector.place.note(request.uri());
        let route = &self.connector.route;
        for _ in 0..=REDIRECTS {
            exchange.requests.add(1);
            let (method, uri) = (request.method().clone(), request.uri().clone());
            let is_part = method == Method::GET && request.headers().contains_key(header::RANGE);
            let response = self.client.call(request.clone()).await;
            let response = response.inspect_err(|error| exchange.note(Seen::Error(of_connection(error, &uri))))?;
            if route.is_web && response.status().is_redirection() && response.headers().contains_key(header::LOCATION) {
                match route.redirected(&uri, response.headers()) {
                    Ok(next) => *request.uri_mut() = next,
                    Err(to) => return Err(refused(exchange, RemoteError::Redirect(to))),
                }
                continue;
            }
            if route.is_web && is_part && is_encoded(response.headers()) {
                let why = "it sends a part of the file in another encoding (`Content-Encoding`)";
                return Err(refused(exchange, RemoteError::Protocol(why.to_owned())));
            }
            return answer(exchange, response, is_part, Seen::Status).await;
        }
        Err(refused(exchange, RemoteError::Redirect("one place after the other".to_owned())))
    }

    /// Asks a service for credentials. Its hiccups are no reason to fail reads: they are repeated as the store's.
    async fn call_for_credentials(&self, request: HttpRequest, exchange: &Exchange) -> Result<HttpResponse, HttpError> {
        let uri = request.uri().clone();
        let is_plain = uri.scheme_str() != Some("https");
        if is_plain && !self.may_be_plain {
            let why = format!("{} would send them unencrypted", shown(&uri));
            return Err(refused(exchange, RemoteError::Credentials(why)));
        }
        let called = if is_plain {
            // A service of this machine or its host: a proxy must not see what it answers.
            let settings = &self.connector.settings;
            let near = settings.connect_timeout.min(NEAR);
            let settings = Settings { connect_timeout: near, is_direct: true, ..settings.clone() };
            let failed = |error| HttpError::new(HttpErrorKind::Unknown, error);
            client(&settings).map_err(failed)?.call(request).await
        } else {
            self.client.call(request).await
        };
        let response = match called {
            Ok(response) => response,
            Err(error) => {
                let is_absent = is_plain && !self.had_credentials.load(Ordering::Relaxed);
                exchange.note(Seen::Error(match of_connection(&error, &uri) {
                    // No cloud's machine, which has such a service. To repeat it would only take time.
                    RemoteError::Connect { host, .. } if is_absent => {
                        RemoteError::Credentials(format!("{} (nobody gives any at {host})", self.connector.remedy))
                    }
                    error => RemoteError::CredentialService(Box::new(error)),
                }));
                return Err(error);
            }
        };
        let failed = |status: Status| {
            let number = status.status;
            let error = status.into_error();
            Seen::Error(if error.is_transient() {
                RemoteError::CredentialService(Box::new(error))
            } else {
                RemoteError::Credentials(format!("the service that gives them answered {number}"))
            })
        };
        let answered = answer(exchange, response, false, failed).await?;
        if answered.status().is_success() {
            self.had_credentials.store(true, Ordering::Relaxed);
        }
        Ok(answered)
    }
}

impl Route {
    /// The place that a redirect names, if it may be followed; else its name.
    fn redirected(&self, from: &Uri, headers: &HeaderMap) -> Result<Uri, String> {
        let location = headers.get(header::LOCATION).and_then(|value| value.to_str().ok()).unwrap_or_default();
        let base = reqwest::Url::parse(&from.to_string()).map_err(|_| String::new())?;
        let next = base.join(location).map_err(|_| printable(location, 100))?;
        let is_same =
            next.host_str() == base.host_str() && next.port_or_known_default() == base.port_or_known_default();
        let is_plain = next.scheme() != "https" && (base.scheme() == "https" || next.scheme() != "http");
        // A query may hold a signature.
        let shown = format!("{}://{}", next.scheme(), next.host_str().unwrap_or_default());
        if is_plain || !(is_same || self.allow_redirects) {
            return Err(printable(&shown, 100));
        }
        next.as_str().parse().map_err(|_| printable(&shown, 100))
    }
}

/// Takes an answer: a part of an object is passed on as it comes, everything else is read here, up to a limit.
///
/// `failed`: what is noted of an error.
async fn answer(
    exchange: &Exchange,
    response: HttpResponse,
    is_part: bool,
    failed: impl FnOnce(Status) -> Seen,
) -> Result<HttpResponse, HttpError> {
    let (parts, body) = response.into_parts();
    let is_success = parts.status.is_success();
    if is_success && is_part {
        if parts.status != StatusCode::PARTIAL_CONTENT {
            return Err(refused(exchange, RemoteError::NoRanges));
        }
        if !has_sound_range(&parts.headers) {
            return Err(refused(exchange, RemoteError::Protocol("`Content-Range` is missing or wrong".to_owned())));
        }
        return Ok(HttpResponse::from_parts(parts, body));
    }
    let most = if is_success { ANSWER_MAX } else { ERROR_MAX };
    let (mut stream, mut text) = (body.bytes_stream(), BytesMut::new());
    while let Some(piece) = stream.next().await {
        // The status is what counts: an error's text may break off.
        let Ok(piece) = piece.inspect_err(|error| exchange.note(Seen::Error(RemoteError::Broken(innermost(error)))))
        else {
            if is_success {
                return Err(refused(exchange, RemoteError::Broken("an answer ended early".to_owned())));
            }
            break;
        };
        if text.len() + piece.len() > most {
            if is_success {
                return Err(refused(exchange, RemoteError::Protocol("an answer is too long".to_owned())));
            }
            break;
        }
        text.extend_from_slice(&piece);
    }
    let text: Bytes = text.freeze();
    // A completed upload may say in a successful answer that it failed.
    let code = code_of(&text);
    if !is_success || code == "InternalError" || code == "SlowDown" {
        let status = parts.status.as_u16();
        let header = |name| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        exchange.note(failed(Status {
            status,
            code,
            retry_after: header(header::RETRY_AFTER).parse().ok().map(Duration::from_secs),
            date: printable(header(header::DATE), 40),
        }));
    }
    Ok(HttpResponse::from_parts(parts, text.into()))
}

/// Whether a web server has encoded what it sends: the bytes are other ones than the file's. A store sends what was
/// stored, and the header is one of its object.
fn is_encoded(headers: &HeaderMap) -> bool {
    let encoding = headers.get(header::CONTENT_ENCODING).map(HeaderValue::as_bytes);
    encoding.is_some_and(|encoding| !encoding.eq_ignore_ascii_case(b"identity"))
}

/// Whether the range of a part is one that the client can take.
fn has_sound_range(headers: &HeaderMap) -> bool {
    let range = headers.get(header::CONTENT_RANGE).and_then(|value| value.to_str().ok());
    let parsed = range.and_then(|text| text.trim().strip_prefix("bytes ")).and_then(|text| {
        let (range, size) = text.split_once('/')?;
        let (first, last) = range.split_once('-')?;
        Some((first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, size.parse::<u64>().ok()?))
    });
    parsed.is_some_and(|(first, last, size)| first <= last && last < size)
}

/// The store's code in the text of an error, which is XML.
fn code_of(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let code = text.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>")).map(|(code, _)| code);
    code.filter(|code| code.len() <= 64 && code.bytes().all(|byte| byte.is_ascii_alphanumeric()))
        .unwrap_or_default()
        .to_owned()
}

fn refused(exchange: &Exchange, error: RemoteError) -> HttpError {
    exchange.note(Seen::Error(error.clone()));
    HttpError::new(HttpErrorKind::Unknown, error)
}

/// The cause of a failed request.
fn of_connection(error: &HttpError, uri: &Uri) -> RemoteError {
    let host = printable(&shown(uri), 200);
    match error.kind() {
        HttpErrorKind::Connect if is_untrusted(error) => RemoteError::Untrusted { host, why: innermost(error) },
        HttpErrorKind::Connect => RemoteError::Connect { host, why: innermost(error) },
        _ => RemoteError::Broken(innermost(error)),
    }
}

/// Whether a connection was given up because of the certificate of the other side.
fn is_untrusted(error: &(dyn Error + 'static)) -> bool {
    if let Some(error) = error.downcast_ref() {
        return matches!(error, rustls::Error::InvalidCertificate(_));
    }
    // An error of the standard library is not the source of what it holds.
    let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    held.is_some_and(|held| is_untrusted(held)) || error.source().is_some_and(is_untrusted)
}

/// The host and port. An authority may hold a password as well.
fn shown(uri: &Uri) -> String {
    let host = uri.host().unwrap_or("the store");
    uri.port_u16().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}"))
}

/// The text of the innermost cause.
pub(super) fn innermost(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    printable(&cause.to_string(), 200)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirected(allow_redirects: bool, from: &str, to: &str) -> Result<String, String> {
        let route = Route { allow_redirects, is_web: true };
        let headers = HeaderMap::from_iter([(header::LOCATION, to.parse().unwrap())]);
        route.redirected(&from.parse().unwrap(), &headers).map(|uri| uri.to_string())
    }

    #[test]
    fn a_redirect_to_another_host_is_refused_unless_allowed() {
        assert_eq!(redirected(false, "http://h/a/b", "c"), Ok("http://h/a/c".into()));
        assert_eq!(redirected(false, "http://h/a", "https://h:80/c"), Ok("https://h:80/c".into()));
        assert_eq!(redirected(false, "http://h/a", "http://other/c?secret"), Err("http://other".into()));
        assert_eq!(redirected(false, "http://h/a", "//other/c"), Err("http://other".into()));
        assert_eq!(redirected(false, "http://h/a", "http://h:81/c"), Err("http://h".into()));
        assert_eq!(redirected(true, "http://h/a", "http://other/c?x"), Ok("http://other/c?x".into()));
        assert_eq!(redirected(true, "https://h/a", "http://h/c"), Err("http://h".into()));
        assert_eq!(redirected(true, "http://h/a", "file:///etc/passwd"), Err("file://".into()));
    }

    #[test]
    fn a_place_has_no_query_and_no_password() {
        let place = Place::default();
        assert_eq!(place.get(), None);
        place.note(&"http://user:secret@Host:9000/bucket/k?X-Amz-Signature=1".parse().unwrap());
        place.note(&"http://other/".parse().unwrap());
        assert_eq!(place.get(), Some("http://host:9000/bucket/k"));
    }

    #[test]
    fn ranges_that_would_overflow_are_refused() {
        let sound =
            |value: &str| has_sound_range(&HeaderMap::from_iter([(header::CONTENT_RANGE, value.parse().unwrap())]));
        assert!(sound("bytes 0-9/10"));
        for range in ["bytes 0-18446744073709551615/18446744073709551615", "bytes 5-4/10", "bytes 0-10/10", "0-9/10"] {
            assert!(!sound(range), "{range}");
        }
        assert!(!has_sound_range(&HeaderMap::new()));
    }

    #[test]
    fn only_a_code_is_taken_out_of_an_errors_text() {
        assert_eq!(code_of(b"<Error><Code>SlowDown</Code><Message>x</Message></Error>"), "SlowDown");
        for text in ["", "<Code>", "<Code>a b</Code>", "<Code></Code>", "\u{fffd}"] {
            assert_eq!(code_of(text.as_bytes()), "");
        }
    }
}
