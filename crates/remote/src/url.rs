//! The name of an object.
//!
//! Law: a name prints as it is parsed, and holds no secret: what could be one is refused.

use std::fmt;
use std::str::FromStr;

use object_store::path::Path;

/// The longest key that the stores accept, in bytes.
const KEY_MAX: usize = 1024;

/// How an object is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, strum::Display)]
#[non_exhaustive]
pub enum Scheme {
    /// Amazon S3, or a store that speaks its protocol.
    #[strum(to_string = "s3")]
    S3,
    /// Google Cloud Storage.
    #[strum(to_string = "gs")]
    Google,
    /// Azure Blob Storage.
    #[strum(to_string = "az")]
    Azure,
    /// A web server, unencrypted. It is only read.
    #[strum(to_string = "http")]
    Http,
    /// A web server. It is only read.
    #[strum(to_string = "https")]
    Https,
}

/// An object of a store.
///
/// | form | meaning |
/// |---|---|
/// | `s3://BUCKET/KEY` | S3; the key is taken literally, as `aws s3` does |
/// | `gs://BUCKET/KEY` | Google Cloud Storage |
/// | `az://CONTAINER/KEY` | Azure Blob Storage; the account is in the environment |
/// | `http://HOST[:PORT]/PATH`, `https:...` | a file of a web server; it is only read |
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ObjectUrl {
    scheme: Scheme,
    /// The bucket or container; of a web server its authority.
    bucket: String,
    key: String,
}

/// Why a string is no name of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UrlError {
    /// The form is another one.
    #[error("expected s3://BUCKET/KEY, gs://BUCKET/KEY, az://CONTAINER/KEY or http(s)://HOST/PATH")]
    Form,
    /// The bucket is missing, or no name of one.
    #[error("the bucket must be a name of letters, digits, `.`, `-` and `_`")]
    Bucket,
    /// The key is missing, too long, or has parts that stores take for something else.
    #[error(
        "the key must have 1 to 1024 bytes, no control characters, no `/` at its ends, and no empty part, `.` or `..`"
    )]
    Key,
    /// The host of a web server is missing, or the rest is no URL.
    #[error("the URL of a web server must be http(s)://HOST[:PORT]/PATH, with special characters as %XX")]
    Web,
    /// It has a user name or a password.
    #[error("a URL with a user name or password is refused: every user of the machine can see it")]
    UserInfo,
    /// It has a query or a fragment.
    #[error("a URL with `?` or `#` is refused: it may hold a signature, and every user of the machine can see it")]
    Query,
}

impl ObjectUrl {
    /// Returns whether a text is meant as the name of an object: it begins with a scheme of one.
    #[must_use]
    pub fn is_one(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| scheme_of(scheme).is_some())
    }

    /// How it is reached.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The bucket or container; of a web server its host and port.
    #[must_use]
    pub fn bucket(&self) -> &str {
        &self.bucket
    }

    /// The key; of a web server the path, without the slash at its beginning.
    #[must_use]
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Whether its store can be written.
    #[must_use]
    pub fn is_writable(&self) -> bool {
        !self.is_web()
    }

    pub(crate) fn is_web(&self) -> bool {
        matches!(self.scheme, Scheme::Http | Scheme::Https)
    }

    fn web(scheme: Scheme, text: &str, rest: &str) -> Result<Self, UrlError> {
        if rest.contains(['?', '#']) {
            return Err(UrlError::Query);
        }
        let (authority, path) = rest.split_once('/').ok_or(UrlError::Web)?;
        if authority.contains('@') {
            return Err(UrlError::UserInfo);
        }
        let parsed = reqwest::Url::parse(text).map_err(|_| UrlError::Web)?;
        // A text that the client would change names something else than it says: `..`, `\`, spaces, another host.
        if path.is_empty() || parsed.as_str() != text || parsed.host_str().is_none_or(str::is_empty) {
            return Err(UrlError::Web);
        }
        Ok(Self { scheme, bucket: authority.to_owned(), key: path.to_owned() })
    }
}

fn scheme_of(text: &str) -> Option<Scheme> {
    Some(match text {
        "s3" => Scheme::S3,
        "gs" => Scheme::Google,
        "az" => Scheme::Azure,
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        _ => return None,
    })
}

impl FromStr for ObjectUrl {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::Form)?;
        let scheme = scheme_of(scheme).ok_or(UrlError::Form)?;
        if matches!(scheme, Scheme::Http | Scheme::Https) {
            return Self::web(scheme, text, rest);
        }
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.contains('@') {
            return Err(UrlError::UserInfo);
        }
        let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
        if bucket.is_empty() || bucket.len() > 255 || bucket.starts_with('.') || !bucket.bytes().all(is_name) {
            return Err(UrlError::Bucket);
        }
        let is_whole = Path::parse(key).is_ok_and(|path| path.as_ref() == key);
        if key.is_empty() || key.len() > KEY_MAX || !is_whole {
            return Err(UrlError::Key);
        }
        Ok(Self { scheme, bucket: bucket.to_owned(), key: key.to_owned() })
    }
}

impl fmt::Display for ObjectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}/{}", self.scheme, self.bucket, self.key)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_form_is_understood() {
        for (text, scheme, bucket, key) in [
            ("s3://b/k", Scheme::S3, "b", "k"),
            ("s3://my.bucket-1/a/b c?d#e%20", Scheme::S3, "my.bucket-1", "a/b c?d#e%20"),
            ("gs://b_x/a", Scheme::Google, "b_x", "a"),
            ("az://c/a@b", Scheme::Azure, "c", "a@b"),
            ("http://h/x", Scheme::Http, "h", "x"),
            ("https://h:8443/a//b%20c/", Scheme::Https, "h:8443", "a//b%20c/"),
            ("http://[::1]:1/x", Scheme::Http, "[::1]:1", "x"),
        ] {
            let url: ObjectUrl = text.parse().unwrap();
            assert_eq!((url.scheme(), url.bucket(), url.key(), url.to_string()), (scheme, bucket, key, text.into()));
        }
    }

    #[test]
    fn what_is_no_name_or_may_hold_a_secret_is_refused() {
        for (text, error) in [
            ("disk.img", UrlError::Form),
            ("ftp://h/x", UrlError::Form),
            ("s3:/b/k", UrlError::Form),
            ("s3:///k", UrlError::Bucket),
            ("s3://key:secret@b/k", UrlError::UserInfo),
            ("s3://b:1/k", UrlError::Bucket),
            ("s3://../k", UrlError::Bucket),
            ("s3://b", UrlError::Key),
            ("s3://b/", UrlError::Key),
            ("s3://b//k", UrlError::Key),
            ("s3://b/k/", UrlError::Key),
            ("s3://b/a/../k", UrlError::Key),
            ("s3://b/a\nk", UrlError::Key),
            ("http://h", UrlError::Web),
            ("http://h/", UrlError::Web),
            ("http:///x", UrlError::Web),
            ("http://h/a/../b", UrlError::Web),
            ("http://h/a b", UrlError::Web),
            ("http://H/a", UrlError::Web),
            ("https://user:password@h/x", UrlError::UserInfo),
            ("https://h/x?X-Amz-Signature=1", UrlError::Query),
            ("https://h/x#y", UrlError::Query),
        ] {
            assert_eq!(text.parse::<ObjectUrl>(), Err(error), "{text}");
        }
        assert!(ObjectUrl::is_one("s3://x") && !ObjectUrl::is_one("nbd://x") && !ObjectUrl::is_one("s3:x"));
    }

    proptest! {
        #[test]
        fn a_name_prints_as_it_is_parsed(scheme in "s3|gs|az|https?", rest in "[a-z.]{1,5}(:[0-9]{1,3})?(/[a-z%.@é ]{0,4}){0,4}") {
            let text = format!("{scheme}://{rest}");
            if let Ok(url) = text.parse::<ObjectUrl>() {
                prop_assert_eq!(url.to_string(), text);
            }
        }

        #[test]
        fn no_text_makes_it_panic(scheme in "s3|gs|https?", rest: String) {
            let _ = format!("{scheme}://{rest}").parse::<ObjectUrl>();
        }
    }
}
