//! The store of an object: its client, with the settings and credentials of the environment.

mod connection;
mod environment;
mod exchange;
mod profile;

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorage, GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::{HttpBuilder, HttpStore};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, RetryConfig};

use self::connection::{Connector, Route};
use self::profile::Profile;
use crate::error::RemoteError;
use crate::url::{ObjectUrl, Scheme};

pub use self::environment::Environment;
pub(crate) use self::exchange::{exchange, of_client};

/// How a store is reached.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoreOptions {
    /// Settings and credentials.
    pub environment: Environment,
    /// Limit for one attempt to connect.
    pub connect_timeout: Duration,
    /// How long a store may be silent before a request is made again.
    pub silence: Duration,
    /// The time for all attempts of a request: it restarts when a block or part has passed.
    pub budget: Duration,
    /// Whether a web server may redirect to other hosts.
    pub allow_redirects: bool,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            environment: Environment::of_process(),
            connect_timeout: Duration::from_secs(5),
            silence: Duration::from_secs(15),
            budget: Duration::from_secs(120),
            allow_redirects: false,
        }
    }
}

/// The client of a store, and an object in it.
#[derive(Clone)]
pub(crate) struct Store {
    client: Client,
    pub(crate) path: Path,
    /// Its endpoint: other stores may have buckets of the same names.
    pub(crate) endpoint: Arc<str>,
}

#[derive(Clone)]
enum Client {
    S3(Arc<AmazonS3>),
    Google(Arc<GoogleCloudStorage>),
    Azure(Arc<MicrosoftAzure>),
    Web(Arc<HttpStore>),
}

impl Store {
    /// Prepares a client. No request is made.
    ///
    /// # Errors
    /// Settings that are missing or wrong.
    pub(crate) fn new(url: &ObjectUrl, options: &StoreOptions) -> Result<Self, RemoteError> {
        let web = url.is_web();
        let path = if web { Ok(Path::ROOT) } else { Path::parse(url.key()) };
        let path = path.map_err(|_| RemoteError::Settings("the key is not supported".to_owned()))?;
        let (client, endpoint) = match url.scheme() {
            Scheme::S3 => s3(url, options).map(|(client, endpoint)| (Client::S3(Arc::new(client)), endpoint)),
            Scheme::Google => {
                google(url, options).map(|(client, endpoint)| (Client::Google(Arc::new(client)), endpoint))
            }
            Scheme::Azure => azure(url, options).map(|(client, endpoint)| (Client::Azure(Arc::new(client)), endpoint)),
            Scheme::Http | Scheme::Https => {
                // The client's paths are other ones than a web server's: it gets the whole URL as its own.
                let host = url.bucket().rsplit_once(':').filter(|(_, port)| !port.contains(']'));
                let host = host.map_or(url.bucket(), |(host, _)| host);
                let builder = HttpBuilder::new()
                    .with_url(url.to_string())
                    .with_retry(no_retries())
                    .with_http_connector(connector(options, host, true)?);
                builder
                    .build()
                    .map(|client| (Client::Web(Arc::new(client)), String::new()))
                    .map_err(|error| settings(&error))
            }
        }?;
        Ok(Self { client, path, endpoint: endpoint.into() })
    }

    pub(crate) fn objects(&self) -> &dyn ObjectStore {
        match &self.client {
            Client::S3(client) => client.as_ref(),
            Client::Google(client) => client.as_ref(),
            Client::Azure(client) => client.as_ref(),
            Client::Web(client) => client.as_ref(),
        }
    }

    /// The store's uploads in parts.
    pub(crate) fn parts(&self) -> Option<&dyn MultipartStore> {
        match &self.client {
            Client::S3(client) => Some(client.as_ref()),
            Client::Google(client) => Some(client.as_ref()),
            Client::Azure(client) => Some(client.as_ref()),
            Client::Web(_) => None,
        }
    }

    /// Whether an upload in parts can be completed under a condition.
    pub(crate) fn has_conditional_completion(&self) -> bool {
        matches!(self.client, Client::S3(_))
    }
}

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

fn connector(options: &StoreOptions, host: &str, is_web: bool) -> Result<Connector, RemoteError> {
    let certificates = options.environment.get("AWS_CA_BUNDLE").map(|path| {
        std::fs::read(path).map_err(|error| RemoteError::Settings(format!("AWS_CA_BUNDLE: {path}: {error}")))
    });
    Ok(Connector {
        connect_timeout: options.connect_timeout,
        certificates: certificates.transpose()?.map(Arc::from),
        route: Route { host: host.into(), allow_redirects: options.allow_redirects, is_web },
    })
}

/// The host of an endpoint.
fn host_of(endpoint: &str) -> Result<String, RemoteError> {
    let url = reqwest::Url::parse(endpoint).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
    let host = url.as_ref().and_then(reqwest::Url::host_str).map(str::to_owned);
    // The endpoint may hold a password: it is not shown.
    host.ok_or_else(|| RemoteError::Settings("the endpoint must be an http(s) URL".to_owned()))
}

/// The client of S3, and its endpoint.
fn s3(url: &ObjectUrl, options: &StoreOptions) -> Result<(AmazonS3, String), RemoteError> {
    let environment = &options.environment;
    let profile = Profile::read(environment)?;
    let mut builder = AmazonS3Builder::new();
    for (name, value) in environment.with_prefix("AWS_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let is_given = |names: &[&str]| names.iter().any(|name| environment.get(name).is_some());
    let sources = [
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    ];
    if !is_given(&sources) && !environment.is_true("AWS_SKIP_SIGNATURE") {
        if let Some(source) = profile.foreign_source() {
            let why = format!("the profile has them from {source}, which is not supported");
            return Err(RemoteError::Credentials(format!("{why} (`aws configure export-credentials` prints them)")));
        }
        let names = [
            ("aws_access_key_id", AmazonS3ConfigKey::AccessKeyId),
            ("aws_secret_access_key", AmazonS3ConfigKey::SecretAccessKey),
            ("aws_session_token", AmazonS3ConfigKey::Token),
        ];
        let mut found = false;
        for (name, key) in names {
            if let Some(value) = profile.get(name) {
                builder = builder.with_config(key, value);
                found = true;
            }
        }
        if !found && environment.is_true("AWS_EC2_METADATA_DISABLED") {
            let why = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE";
            return Err(RemoteError::Credentials(why.to_owned()));
        }
    }
    if !is_given(&["AWS_REGION", "AWS_DEFAULT_REGION"])
        && let Some(region) = profile.get("region")
    {
        builder = builder.with_region(region);
    }
    let names = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
    let mut endpoint = names.iter().find_map(|name| environment.get(name));
    if endpoint.is_none() {
        endpoint = profile.get("endpoint_url");
        if let Some(endpoint) = endpoint {
            builder = builder.with_endpoint(endpoint);
        }
    }
    let host = endpoint.map_or_else(|| Ok("amazonaws.com".to_owned()), host_of)?;
    let builder = builder
        .with_bucket_name(url.bucket())
        .with_retry(no_retries())
        .with_http_connector(connector(options, &host, false)?);
    Ok((builder.build().map_err(|error| settings(&error))?, endpoint.unwrap_or_default().to_owned()))
}

/// The client of Google Cloud Storage, and its endpoint.
fn google(url: &ObjectUrl, options: &StoreOptions) -> Result<(GoogleCloudStorage, String), RemoteError> {
    let environment = &options.environment;
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in environment.with_prefix("GOOGLE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    let mut host = "googleapis.com".to_owned();
    if let Some(emulator) = environment.get("STORAGE_EMULATOR_HOST") {
        let base = if emulator.contains("://") { emulator.to_owned() } else { format!("http://{emulator}") };
        host = host_of(&base)?;
        builder = builder.with_base_url(base.trim_end_matches('/')).with_skip_signature(true);
    }
    let builder = builder
        .with_bucket_name(url.bucket())
        .with_retry(no_retries())
        .with_http_connector(connector(options, &host, false)?);
    let endpoint = environment.get("STORAGE_EMULATOR_HOST").unwrap_or_default().to_owned();
    Ok((builder.build().map_err(|error| settings(&error))?, endpoint))
}

/// The client of Azure, and what tells its account from others.
fn azure(url: &ObjectUrl, options: &StoreOptions) -> Result<(MicrosoftAzure, String), RemoteError> {
    let environment = &options.environment;
    let mut builder = MicrosoftAzureBuilder::new();
    for (name, value) in environment.with_prefix("AZURE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<AzureConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(endpoint) = environment.get("MSI_ENDPOINT").or_else(|| environment.get("IDENTITY_ENDPOINT")) {
        builder = builder.with_msi_endpoint(endpoint);
    }
    let mut endpoint = environment.get("AZURE_STORAGE_ENDPOINT").map(str::to_owned);
    // The names of `az storage`, which differ from those of the client.
    let mut account = environment.get("AZURE_STORAGE_ACCOUNT_NAME").unwrap_or_default().to_owned();
    let mut set = |key, value: Option<&str>| {
        if let Some(value) = value {
            if matches!(key, AzureConfigKey::AccountName) {
                value.clone_into(&mut account);
            }
            builder = std::mem::take(&mut builder).with_config(key, value);
        }
    };
    set(AzureConfigKey::AccountName, environment.get("AZURE_STORAGE_ACCOUNT"));
    set(AzureConfigKey::AccessKey, environment.get("AZURE_STORAGE_KEY"));
    set(AzureConfigKey::SasKey, environment.get("AZURE_STORAGE_SAS_TOKEN"));
    for part in environment.get("AZURE_STORAGE_CONNECTION_STRING").unwrap_or_default().split(';') {
        match part.split_once('=') {
            Some(("AccountName", value)) => set(AzureConfigKey::AccountName, Some(value)),
            Some(("AccountKey", value)) => set(AzureConfigKey::AccessKey, Some(value)),
            Some(("SharedAccessSignature", value)) => set(AzureConfigKey::SasKey, Some(value)),
            Some(("BlobEndpoint", value)) => endpoint = Some(value.to_owned()),
            _ => {}
        }
    }
    let host = match &endpoint {
        Some(endpoint) => {
            builder = builder.with_endpoint(endpoint.clone());
            host_of(endpoint)?
        }
        None => "windows.net".to_owned(),
    };
    let builder = builder
        .with_container_name(url.bucket())
        .with_retry(no_retries())
        .with_http_connector(connector(options, &host, false)?);
    let client = builder.build().map_err(|error| settings(&error))?;
    Ok((client, format!("{}\n{account}", endpoint.unwrap_or_default())))
}

/// An error of a builder. Its text may quote a setting, but a credential only if that is malformed: it is left out.
fn settings(error: &object_store::Error) -> RemoteError {
    match of_client(error) {
        RemoteError::Protocol(why) => RemoteError::Settings(why),
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(url: &str, environment: Environment) -> Result<Store, RemoteError> {
        Store::new(&url.parse().unwrap(), &StoreOptions { environment, ..StoreOptions::default() })
    }

    #[test]
    fn settings_that_cannot_be_are_named() {
        let none = Environment::empty().with("AWS_EC2_METADATA_DISABLED", "true");
        let error = open("s3://b/k", none).err().unwrap();
        assert_eq!(
            error.to_string(),
            "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        );
        let half = Environment::empty().with("AWS_ACCESS_KEY_ID", "a");
        assert!(matches!(open("s3://b/k", half), Err(RemoteError::Settings(_))));
        let endpoint = Environment::empty().with("AWS_ACCESS_KEY_ID", "a").with("AWS_SECRET_ACCESS_KEY", "b");
        let error = open("s3://b/k", endpoint.with("AWS_ENDPOINT_URL", "user:secret@x")).err().unwrap();
        assert_eq!(error.to_string(), "the store's settings are wrong: the endpoint must be an http(s) URL");
    }

    #[test]
    fn every_store_has_a_client() {
        let aws = Environment::empty().with("AWS_ACCESS_KEY_ID", "a").with("AWS_SECRET_ACCESS_KEY", "b");
        assert!(open("s3://b/k", aws).unwrap().has_conditional_completion());
        let google = Environment::empty().with("STORAGE_EMULATOR_HOST", "localhost:1");
        assert!(open("gs://b/k", google).unwrap().parts().is_some());
        let text = "AccountName=x;AccountKey=Zm9v;BlobEndpoint=http://127.0.0.1:10000/x";
        let azure = Environment::empty().with("AZURE_STORAGE_CONNECTION_STRING", text);
        assert!(open("az://b/k", azure).unwrap().parts().is_some());
        assert!(open("http://h:1/k", Environment::empty()).unwrap().parts().is_none());
    }
}
