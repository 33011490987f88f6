//! A proxy before a server of objects: it adds latency, limits the rate, and answers requests in ways that no test can
//! ask a server for.
//!
//! Each request has a connection of its own, so a fault is that of one request.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use parking_lot::Mutex;

/// The longest head of a request or an answer, in bytes.
const HEAD_MAX: u64 = 64 << 10;

/// Bytes that are passed at once.
const PIECE: usize = 64 << 10;

/// A request as the proxy has seen it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpRequest {
    /// Its number, from 0.
    pub number: u64,
    /// Its method.
    pub method: String,
    /// Its path and query.
    pub target: String,
    /// Its headers; names are in lower case.
    pub headers: Vec<(String, String)>,
}

impl HttpRequest {
    /// The value of a header.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// The treatment of a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum HttpFault {
    /// It is passed on.
    #[default]
    None,
    /// It gets this status, with the error's code in its text, and is not passed on.
    Status(u16, &'static str),
    /// It gets these headers after this status line, and this body.
    Answer(String, Vec<u8>),
    /// Its connection is closed without an answer. The server does not see it.
    Drop,
    /// It is passed on, and the answer is lost.
    LoseAnswer,
    /// The body of the answer ends after this many bytes.
    Cut(u64),
    /// It waits before it is passed on: later requests are answered earlier.
    Delay(Duration),
    /// The answer's body is longer by this number of bytes, and its head says so.
    Append(u64),
}

type Faults = dyn FnMut(&HttpRequest) -> HttpFault + Send;

struct Shared {
    target: SocketAddr,
    latency: Mutex<Duration>,
    /// Bytes of bodies per second, and when the next byte may pass.
    rate: Mutex<Option<(u64, Instant)>>,
    faults: Mutex<Box<Faults>>,
    requests: Mutex<Vec<HttpRequest>>,
    slowest: Mutex<Duration>,
    is_closed: AtomicBool,
}

/// The proxy. Dropping it closes its port.
pub struct HttpProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

impl HttpProxy {
    /// Listens at a port of this machine for requests to `target`.
    ///
    /// # Errors
    /// There is no port.
    pub fn start(target: SocketAddr) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            latency: Mutex::default(),
            rate: Mutex::default(),
            faults: Mutex::new(Box::new(|_| HttpFault::None)),
            requests: Mutex::default(),
            slowest: Mutex::default(),
            is_closed: AtomicBool::new(false),
        });
        let accepting = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if accepting.is_closed.load(Ordering::Acquire) {
                    break;
                }
                let Ok(stream) = stream else { continue };
                let shared = Arc::clone(&accepting);
                // What breaks off is what the tests are about.
                std::thread::spawn(move || _ = shared.serve(stream));
            }
        });
        Ok(Self { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Delays each answer.
    pub fn set_latency(&self, latency: Duration) {
        *self.shared.latency.lock() = latency;
    }

    /// Limits the bytes of bodies per second, of all connections together.
    pub fn set_rate(&self, rate: Option<u64>) {
        *self.shared.rate.lock() = rate.map(|rate| (rate, Instant::now()));
    }

    /// Decides about each request from now on.
    pub fn set_faults(&self, faults: impl FnMut(&HttpRequest) -> HttpFault + Send + 'static) {
        *self.shared.faults.lock() = Box::new(faults);
    }

    /// Returns the requests until now, and forgets them.
    pub fn take_requests(&self) -> Vec<HttpRequest> {
        std::mem::take(&mut self.shared.requests.lock())
    }

    /// Returns the longest time until now that the server took for an answer to a request that it had in full, and
    /// forgets it.
    pub fn take_slowest_answer(&self) -> Duration {
        std::mem::take(&mut self.shared.slowest.lock())
    }
}

impl Drop for HttpProxy {
    fn drop(&mut self) {
        self.shared.is_closed.store(true, Ordering::Release);
        // The thread that accepts looks at it after the next connection.
        _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn serve(&self, client: TcpStream) -> Result<()> {
        client.set_nodelay(true)?;
        let mut from_client = BufReader::new(client.try_clone()?);
        let Some(head) = read_head(&mut from_client)? else { return Ok(()) };
        let mut request = parse(&head).context("no request")?;
        request.number = {
            let mut requests = self.requests.lock();
            request.number = requests.len() as u64;
            requests.push(request.clone());
            request.number
        };
        let length = request.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        let fault = (self.faults.lock())(&request);
        let latency = *self.latency.lock();
        let mut to_client = client;
        match &fault {
            HttpFault::Status(status, code) => {
                self.skip(&mut from_client, length)?;
                std::thread::sleep(latency);
                let body = format!("<Error><Code>{code}</Code><Message>a fault</Message></Error>");
                let length = body.len();
                write!(
                    to_client,
                    "HTTP/1.1 {status} Fault\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
                )?;
                return Ok(());
            }
            HttpFault::Answer(head, body) => {
                self.skip(&mut from_client, length)?;
                write!(to_client, "HTTP/1.1 {head}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n", body.len())?;
                to_client.write_all(body)?;
                return Ok(());
            }
            HttpFault::Drop => return Ok(to_client.shutdown(Shutdown::Both)?),
            HttpFault::Delay(time) => std::thread::sleep(*time),
            HttpFault::None | HttpFault::LoseAnswer | HttpFault::Cut(_) | HttpFault::Append(_) => {}
        }
        let mut server = TcpStream::connect(self.target)?;
        server.set_nodelay(true)?;
        server.write_all(&closing(&head, 0))?;
        self.pass(&mut from_client, &mut server, Some(length))?;
        let asked = Instant::now();
        let mut from_server = BufReader::new(server);
        let Some(head) = read_head(&mut from_server)? else { return Ok(()) };
        {
            let mut slowest = self.slowest.lock();
            *slowest = (*slowest).max(asked.elapsed());
        }
        std::thread::sleep(latency);
        match fault {
            HttpFault::LoseAnswer => {
                std::io::copy(&mut from_server, &mut std::io::sink())?;
                to_client.shutdown(Shutdown::Both)?;
            }
            HttpFault::Cut(most) => {
                to_client.write_all(&closing(&head, 0))?;
                self.pass(&mut from_server, &mut to_client, Some(most))?;
                to_client.shutdown(Shutdown::Both)?;
            }
            HttpFault::Append(more) => {
                to_client.write_all(&closing(&head, more))?;
                self.pass(&mut from_server, &mut to_client, None)?;
                to_client.write_all(&vec![0xee; limosa_page::to_usize(more)])?;
            }
            _ => {
                to_client.write_all(&closing(&head, 0))?;
                self.pass(&mut from_server, &mut to_client, None)?;
            }
        }
        Ok(())
    }

    /// Passes a body on, at the rate that is allowed.
    fn pass(&self, from: &mut impl Read, to: &mut TcpStream, length: Option<u64>) -> Result<()> {
        let mut from = from.take(length.unwrap_or(u64::MAX));
        let mut piece = vec![0; PIECE];
        loop {
            let read = from.read(&mut piece)?;
            let Some(bytes) = piece.get(..read).filter(|bytes| !bytes.is_empty()) else { return Ok(()) };
            let wait = self.rate.lock().as_mut().map(|(rate, next)| {
                let now = Instant::now();
                let begin = (*next).max(now);
                *next = begin + Duration::from_secs_f64(bytes.len() as f64 / *rate as f64);
                begin - now
            });
            std::thread::sleep(wait.unwrap_or_default());
            to.write_all(bytes)?;
        }
    }

    fn skip(&self, from: &mut impl Read, length: u64) -> Result<()> {
        std::io::copy(&mut from.take(length), &mut std::io::sink())?;
        Ok(())
    }
}

/// Reads a head up to the empty line; `None`: the connection has ended before it.
pub(crate) fn read_head(from: &mut impl std::io::BufRead) -> Result<Option<String>> {
    let mut head = String::new();
    let mut limited = from.take(HEAD_MAX);
    loop {
        if limited.read_line(&mut head)? == 0 {
            return Ok(None);
        }
        if head.ends_with("\r\n\r\n") {
            return Ok(Some(head));
        }
    }
}

pub(crate) fn parse(head: &str) -> Option<HttpRequest> {
    let mut lines = head.lines();
    let mut first = lines.next()?.split(' ');
    let (method, target) = (first.next()?.to_owned(), first.next()?.to_owned());
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    Some(HttpRequest { number: 0, method, target, headers })
}

/// The head with which a connection ends after one message, whose body is said to be longer by `more` bytes.
fn closing(head: &str, more: u64) -> Vec<u8> {
    let mut changed = String::new();
    for line in head.trim_end().lines() {
        let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
        match name.as_str() {
            "connection" => continue,
            "content-length" if more > 0 => {
                let length = line.split(": ").nth(1).and_then(|length| length.parse::<u64>().ok()).unwrap_or(0);
                changed += &format!("Content-Length: {}\r\n", length + more);
                continue;
            }
            _ => {}
        }
        changed += line;
        changed += "\r\n";
    }
    changed += "Connection: close\r\n\r\n";
    changed.into_bytes()
}
