//! The connection below a store's client: redirects, limits of what is kept in memory, and what is noted of failures.
//!
//! **Law: a server names no other place.** A redirect to another host is refused unless it is allowed, and one from an
//! encrypted connection to a plain one always.

use std::collections::HashMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures_util::StreamExt as _;
use http::{HeaderMap, Method, StatusCode, Uri, header};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
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

/// Makes connections for the clients of one store.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    pub(super) connect_timeout: Duration,
    /// Certificates in PEM that are trusted beside the system's.
    pub(super) certificates: Option<Arc<[u8]>>,
    pub(super) route: Route,
}

/// Where the requests of a store may go.
#[derive(Debug, Clone)]
pub(super) struct Route {
    /// The host of the store, or the end of its hosts' names.
    pub(super) host: Arc<str>,
    /// Whether the server may name other hosts.
    pub(super) allow_redirects: bool,
    /// Whether it may redirect at all: a store of S3 does so for buckets of another region, and a signature for one
    /// host is of no use at another.
    pub(super) is_web: bool,
}

impl Route {
    /// Whether a host is the store's: others give credentials.
    fn is_store(&self, uri: &Uri) -> bool {
        let Some(host) = uri.host() else { return false };
        let is_sts = host.starts_with("sts.");
        host == &*self.host || (!is_sts && host.strip_suffix(&*self.host).is_some_and(|rest| rest.ends_with('.')))
    }
}

impl HttpConnector for Connector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let failed = |error: reqwest::Error| object_store::Error::Generic { store: "http", source: Box::new(error) };
        let client = client(self.connect_timeout, self.certificates.as_ref()).map_err(failed)?;
        Ok(HttpClient::new(Connection { client, route: self.route.clone() }))
    }
}

/// Returns a client. Those with the same settings are one, so that all objects of a host share its connections.
fn client(connect_timeout: Duration, certificates: Option<&Arc<[u8]>>) -> reqwest::Result<reqwest::Client> {
    type Settings = (Duration, Option<Arc<[u8]>>);
    static CLIENTS: Mutex<Option<HashMap<Settings, reqwest::Client>>> = Mutex::new(None);
    let mut clients = CLIENTS.lock();
    let clients = clients.get_or_insert_default();
    let settings = (connect_timeout, certificates.map(Arc::clone));
    if let Some(client) = clients.get(&settings) {
        return Ok(client.clone());
    }
    // The client has no cryptography of its own. If the program has installed some, that is used.
    _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = reqwest::Client::builder()
        .user_agent(concat!("limosa/", env!("CARGO_PKG_VERSION")))
        .redirect(reqwest::redirect::Policy::none())
        .connect_timeout(connect_timeout)
        // One connection for each request in flight carries more than all of them over one.
        .http1_only();
    if let Some(pem) = certificates {
        builder = builder.tls_certs_merge(reqwest::Certificate::from_pem_bundle(pem)?);
    }
    let client = builder.build()?;
    clients.insert(settings, client.clone());
    Ok(client)
}

/// A connection of a store's client.
#[derive(Debug)]
struct Connection {
    client: reqwest::Client,
    route: Route,
}

#[async_trait]
impl HttpService for Connection {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let exchange = Exchange::current().unwrap_or_default();
        if let Some((name, value)) = &exchange.condition
            && *request.method() == Method::POST
            && request.uri().query().is_some_and(|query| query.contains("uploadId="))
        {
            // A signature covers the headers that it names; others may be added.
            request.headers_mut().insert(name.clone(), value.clone());
        }
        let is_store = self.route.is_store(request.uri());
        for _ in 0..=REDIRECTS {
            if is_store {
                exchange.requests.add(1);
            }
            let (method, uri) = (request.method().clone(), request.uri().clone());
            let is_part = method == Method::GET && request.headers().contains_key(header::RANGE);
            let response = match self.client.call(request.clone()).await {
                Ok(response) => response,
                Err(error) => {
                    exchange.note(Seen::Error(if is_store {
                        of_connection(&error, &uri)
                    } else {
                        RemoteError::Credentials(of_connection(&error, &uri).to_string())
                    }));
                    return Err(error);
                }
            };
            if self.route.is_web
                && response.status().is_redirection()
                && response.headers().contains_key(header::LOCATION)
            {
                match self.route.redirected(&uri, response.headers()) {
                    Ok(next) => *request.uri_mut() = next,
                    Err(to) => return Err(refused(&exchange, RemoteError::Redirect(to))),
                }
                continue;
            }
            return answer(&exchange, response, is_store, is_part).await;
        }
        Err(refused(&exchange, RemoteError::Redirect("one place after the other".to_owned())))
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

/// Takes an answer: a part of an object is passed on as it comes, everything else is read here, up to a
/// limit.
async fn answer(
    exchange: &Exchange,
    response: HttpResponse,
    is_store: bool,
    is_part: bool,
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
        let seen = Status {
            status,
            code,
            retry_after: header(header::RETRY_AFTER).parse().ok().map(Duration::from_secs),
            date: printable(header(header::DATE), 40),
        };
        exchange.note(if is_store {
            Seen::Status(seen)
        } else {
            Seen::Error(RemoteError::Credentials(format!("the service that gives them answered {status}")))
        });
    }
    Ok(HttpResponse::from_parts(parts, text.into()))
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
    let host = printable(uri.authority().map_or("the store", |authority| authority.as_str()), 200);
    match error.kind() {
        HttpErrorKind::Connect => RemoteError::Connect { host, why: innermost(error) },
        _ => RemoteError::Broken(innermost(error)),
    }
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
        let route = Route { host: "h".into(), allow_redirects, is_web: true };
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
    fn services_that_give_credentials_are_not_the_store() {
        let route = Route { host: "amazonaws.com".into(), allow_redirects: false, is_web: false };
        let is_store = |uri: &str| route.is_store(&uri.parse().unwrap());
        assert!(is_store("https://s3.eu-west-1.amazonaws.com/b/k") && is_store("https://b.s3.x.amazonaws.com/k"));
        assert!(!is_store("https://sts.eu-west-1.amazonaws.com/") && !is_store("http://169.254.169.254/latest"));
        assert!(!is_store("https://notamazonaws.com/"));
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
