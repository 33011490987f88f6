//! As much of HTTP/1.1 as a collector of metrics needs (RFC 9112), without I/O.

/// Most bytes of a request's head.
pub(super) const HEAD_MAX: usize = 8 << 10;

/// The decision about what has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// The end of the head is missing.
    Incomplete,
    /// The metrics are asked for; with `body` false, their length alone (`HEAD`).
    Metrics { body: bool },
    /// Something else.
    Refused(Status),
}

/// A status of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    BadRequest,
    NotFound,
    MethodNotAllowed,
    HeadTooLarge,
    VersionNotSupported,
}

impl Status {
    const fn line(self) -> &'static str {
        match self {
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::MethodNotAllowed => "405 Method Not Allowed\r\nAllow: GET, HEAD",
            Self::HeadTooLarge => "431 Request Header Fields Too Large",
            Self::VersionNotSupported => "505 HTTP Version Not Supported",
        }
    }
}

/// Decides about the bytes that have arrived.
pub(super) fn decide(bytes: &[u8]) -> Decision {
    let ended = bytes.windows(2).any(|pair| pair == b"\n\n") || bytes.windows(3).any(|end| end == b"\n\r\n");
    if !ended {
        return if bytes.len() < HEAD_MAX { Decision::Incomplete } else { Decision::Refused(Status::HeadTooLarge) };
    }
    let line = bytes.split(|byte| *byte == b'\n').next().unwrap_or(bytes);
    let line = std::str::from_utf8(line.strip_suffix(b"\r").unwrap_or(line));
    let mut words = line.unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Decision::Refused(Status::BadRequest);
    };
    match version.strip_prefix("HTTP/") {
        Some("1.0" | "1.1") => {}
        Some(_) => return Decision::Refused(Status::VersionNotSupported),
        None => return Decision::Refused(Status::BadRequest),
    }
    if path(target) != Some("/metrics") {
        return Decision::Refused(Status::NotFound);
    }
    match method {
        "GET" => Decision::Metrics { body: true },
        "HEAD" => Decision::Metrics { body: false },
        _ => Decision::Refused(Status::MethodNotAllowed),
    }
}

/// The path of a target, without its query. A proxy's form has the host before it (RFC 9112, 3.2.2).
fn path(target: &str) -> Option<&str> {
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.get(rest.find('/')?..)?,
        None => target,
    };
    path.split('?').next()
}

/// The answer with the metrics.
pub(super) fn metrics(page: &str, body: bool) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: \
         close\r\n\r\n",
        page.len()
    );
    [head.as_bytes(), if body { page.as_bytes() } else { b"" }].concat()
}

/// The answer to a request that is refused.
pub(super) fn refusal(status: Status) -> Vec<u8> {
    format!("HTTP/1.1 {}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", status.line()).into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str, status: Status) {
        assert_eq!(decide(text.as_bytes()), Decision::Refused(status), "{text:?}");
    }

    #[test]
    fn the_metrics_are_asked_for_in_several_forms() {
        let whole = "GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: */*\r\n\r\n";
        for end in 0..whole.len() {
            assert_eq!(decide(&whole.as_bytes()[..end]), Decision::Incomplete, "{end}");
        }
        for text in
            [whole, "GET /metrics?x=1 HTTP/1.0\n\n", "GET http://a:9/metrics HTTP/1.1\r\nHost: a\r\n\r\nmore behind it"]
        {
            assert_eq!(decide(text.as_bytes()), Decision::Metrics { body: true }, "{text:?}");
        }
        assert_eq!(decide(b"HEAD /metrics HTTP/1.1\r\n\r\n"), Decision::Metrics { body: false });
    }

    #[test]
    fn everything_else_is_refused_by_its_status() {
        refused("GET / HTTP/1.1\r\n\r\n", Status::NotFound);
        refused("GET http://a HTTP/1.1\r\n\r\n", Status::NotFound);
        refused("GET /metrics/../etc HTTP/1.1\r\n\r\n", Status::NotFound);
        refused("POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", Status::MethodNotAllowed);
        refused("GET /metrics HTTP/2.0\r\n\r\n", Status::VersionNotSupported);
        for text in
            ["\r\n\r\n", "GET /metrics\r\n\r\n", "GET  /metrics HTTP/1.1\r\n\r\n", "a b c d\r\n\r\n", "a b c\n\n"]
        {
            refused(text, Status::BadRequest);
        }
        assert_eq!(decide(b"GET /\xff\xff HTTP/1.1\r\n\r\n"), Decision::Refused(Status::BadRequest));
    }

    #[test]
    fn a_head_without_end_is_refused_at_its_limit() {
        let long = vec![b'a'; HEAD_MAX];
        assert_eq!(decide(&long[..HEAD_MAX - 1]), Decision::Incomplete);
        assert_eq!(decide(&long), Decision::Refused(Status::HeadTooLarge));
    }

    #[test]
    fn whatever_arrives_is_decided_at_the_limit_at_last() {
        let words: [&[u8]; 12] = [
            b"GET",
            b"HEAD",
            b" ",
            b"/metrics",
            b"HTTP/1.1",
            b"\r",
            b"\n",
            b"\r\n\r\n",
            b"\0",
            b"\xff",
            b"http://",
            b"?",
        ];
        for seed in 0..2000 {
            let mut chance = limosa_storage::testing::SeededRandom::new(seed);
            let mut bytes = Vec::new();
            let mut ended = false;
            while bytes.len() < HEAD_MAX {
                bytes.extend_from_slice(words[usize::try_from(chance.below(words.len() as u64)).unwrap()]);
                let decision = decide(&bytes);
                // A head that has ended stays so: what follows is its body.
                assert!(!ended || decision != Decision::Incomplete, "seed {seed}");
                ended = decision != Decision::Incomplete;
                if ended && bytes.len() > 100 {
                    break;
                }
            }
            assert!(ended, "seed {seed}");
        }
    }

    #[test]
    fn answers_have_their_length() {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        assert!(text(metrics("ab\n", true)).ends_with("Content-Length: 3\r\nConnection: close\r\n\r\nab\n"));
        assert!(text(metrics("ab\n", false)).ends_with("Content-Length: 3\r\nConnection: close\r\n\r\n"));
        assert!(text(refusal(Status::MethodNotAllowed)).contains("405 Method Not Allowed\r\nAllow: GET, HEAD\r\n"));
    }
}
