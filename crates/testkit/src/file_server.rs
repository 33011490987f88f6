//! A web server for the files of a folder: ranges and `ETag`s, and nothing else. It stands for a store where its own
//! time must not count: the object servers compute a digest of all of an object for each request.

use std::fs::File;
use std::io::{BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};

use crate::http_proxy::{HttpRequest, parse, read_head};

/// Bytes that are sent at once.
const PIECE: u64 = 256 << 10;

/// The server. Dropping it closes its port.
#[derive(Debug)]
pub struct FileServer {
    address: SocketAddr,
    is_closed: Arc<AtomicBool>,
}

impl FileServer {
    /// Serves the files of a folder at a port of this machine.
    ///
    /// # Errors
    /// There is no port.
    pub fn start(folder: &Path) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let is_closed = Arc::new(AtomicBool::new(false));
        let (folder, closed) = (folder.to_path_buf(), Arc::clone(&is_closed));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if closed.load(Ordering::Acquire) {
                    break;
                }
                let (Ok(stream), folder) = (stream, folder.clone()) else { continue };
                // Clients may break off.
                std::thread::spawn(move || _ = serve(stream, &folder));
            }
        });
        Ok(Self { address, is_closed })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Release);
        // The thread that accepts looks at it after the next connection.
        _ = TcpStream::connect(self.address);
    }
}

/// Answers one request.
fn serve(mut client: TcpStream, folder: &Path) -> Result<()> {
    client.set_nodelay(true)?;
    let Some(head) = read_head(&mut BufReader::new(client.try_clone()?))? else { return Ok(()) };
    let request = parse(&head).context("no request")?;
    let Some(file) = path(folder, &request.target).and_then(|path| File::open(path).ok()) else {
        return Ok(client.write_all(&head_of("404 Not Found", 0, ""))?);
    };
    let metadata = file.metadata()?;
    let tag = format!("\"file-{}-{}-{}\"", metadata.ino(), metadata.len(), metadata.mtime_nsec());
    if request.header("if-match").is_some_and(|wanted| wanted != tag) {
        return Ok(client.write_all(&head_of("412 Precondition Failed", 0, ""))?);
    }
    let length = metadata.len();
    let range = range(&request, length);
    let more = format!("ETag: {tag}\r\nAccept-Ranges: bytes\r\nLast-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\n");
    let (status, part, more) = match range {
        Some(part) if part.start < part.end => {
            let line = format!("Content-Range: bytes {}-{}/{length}\r\n{more}", part.start, part.end - 1);
            ("206 Partial Content", part, line)
        }
        Some(_) => {
            let line = format!("Content-Range: bytes */{length}\r\n{more}");
            return Ok(client.write_all(&head_of("416 Range Not Satisfiable", 0, &line))?);
        }
        None => ("200 OK", 0..length, more),
    };
    client.write_all(&head_of(status, part.end - part.start, &more))?;
    if request.method != "HEAD" {
        send(&file, part, &mut client)?;
    }
    Ok(())
}

fn send(file: &File, part: Range<u64>, client: &mut TcpStream) -> Result<()> {
    let mut piece = vec![0; limosa_page::to_usize(PIECE)];
    let mut at = part.start;
    while at < part.end {
        let bytes = piece.get_mut(..limosa_page::to_usize(PIECE.min(part.end - at))).unwrap_or_default();
        file.read_exact_at(bytes, at)?;
        client.write_all(bytes)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

/// The file of a target: one of the folder itself.
fn path(folder: &Path, target: &str) -> Option<PathBuf> {
    let name = target.strip_prefix('/').filter(|name| !name.is_empty() && !name.contains('/') && *name != "..")?;
    Some(folder.join(name))
}

/// The bytes that a request asks for; `None`: all.
fn range(request: &HttpRequest, length: u64) -> Option<Range<u64>> {
    let (start, end) = request.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
    let start: u64 = start.parse().ok()?;
    let end = end.parse::<u64>().map_or(length, |end| end.saturating_add(1).min(length));
    Some(start..end)
}

fn head_of(status: &str, length: u64, more: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{more}\r\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn parts_of_files_are_sent_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("f"), "0123456789").unwrap();
        let server = FileServer::start(folder.path()).unwrap();
        let answer = |head: &str| {
            let mut stream = TcpStream::connect(server.address()).unwrap();
            write!(stream, "{head}\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            answer
        };
        let part = answer("GET /f HTTP/1.1\r\nRange: bytes=2-4");
        assert!(part.starts_with("HTTP/1.1 206") && part.ends_with("\r\n\r\n234"), "{part}");
        assert!(part.contains("Content-Range: bytes 2-4/10\r\n"), "{part}");
        assert!(answer("GET /f HTTP/1.1\r\nRange: bytes=8-100").ends_with("\r\n\r\n89"));
        assert!(answer("GET /f HTTP/1.1\r\nRange: bytes=10-11").starts_with("HTTP/1.1 416"));
        assert!(answer("GET /f HTTP/1.1").ends_with("\r\n\r\n0123456789"));
        assert!(answer("HEAD /f HTTP/1.1").ends_with("\r\n\r\n"));
        assert!(answer("GET /f HTTP/1.1\r\nIf-Match: \"other\"").starts_with("HTTP/1.1 412"));
        for target in ["/none", "/", "/..", "/../f", "f"] {
            assert!(answer(&format!("GET {target} HTTP/1.1")).starts_with("HTTP/1.1 404"), "{target}");
        }
    }
}
