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

use self::connection::{Connector, Place, Route, Settings};
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
    url: Arc<str>,
    place: Place,
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
        let connector = connector(url.scheme(), options)?;
        let place = connector.place.clone();
        let client = match url.scheme() {
            Scheme::S3 => Client::S3(Arc::new(s3(url, options, connector)?)),
            Scheme::Google => Client::Google(Arc::new(google(url, options, connector)?)),
            Scheme::Azure => Client::Azure(Arc::new(azure(url, options, connector)?)),
            Scheme::Http | Scheme::Https => {
                // The client's paths are other ones than a web server's: it gets the whole URL as its own.
                let builder = HttpBuilder::new().with_url(url.to_string());
                let client = builder.with_retry(no_retries()).with_http_connector(connector).build();
                Client::Web(Arc::new(client.map_err(|error| settings(&error))?))
            }
        };
        Ok(Self { client, path, url: url.to_string().into(), place })
    }

    /// The name of the object that no object of another store has, after the first request; `None`: before it.
    pub(crate) fn identity(&self) -> Option<String> {
        Some(format!("{}\n{}", self.url, self.place.get()?))
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

/// The remedy for missing credentials of S3.
const AWS_REMEDY: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE";

fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

fn connector(scheme: Scheme, options: &StoreOptions) -> Result<Connector, RemoteError> {
    let is_web = matches!(scheme, Scheme::Http | Scheme::Https);
    // Of AWS and what speaks its protocol: nobody else's certificates are vouched for by it.
    let bundle = options.environment.get("AWS_CA_BUNDLE").filter(|_| scheme == Scheme::S3);
    let certificates = bundle.map(|path| {
        std::fs::read(path).map_err(|error| RemoteError::Settings(format!("AWS_CA_BUNDLE: {path}: {error}")))
    });
    let certificates = certificates.transpose()?.map(Arc::from);
    let settings = Settings { connect_timeout: options.connect_timeout, certificates, is_direct: false };
    let remedy = match scheme {
        Scheme::S3 => AWS_REMEDY,
        Scheme::Google => "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
        Scheme::Azure => "set AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN",
        Scheme::Http | Scheme::Https => "none are used",
    };
    Ok(Connector::new(settings, Route { allow_redirects: options.allow_redirects, is_web }, remedy))
}

/// Checks the URL of an endpoint, which may hold a password: it is not shown.
fn check_endpoint(endpoint: Option<String>) -> Result<(), RemoteError> {
    let is_url = |endpoint: &str| {
        let url = reqwest::Url::parse(endpoint).ok().filter(|url| matches!(url.scheme(), "http" | "https"));
        url.is_some_and(|url| url.has_host())
    };
    match endpoint {
        Some(endpoint) if !is_url(&endpoint) => {
            Err(RemoteError::Settings("the endpoint must be an http(s) URL".to_owned()))
        }
        _ => Ok(()),
    }
}

/// The client of S3.
fn s3(url: &ObjectUrl, options: &StoreOptions, connector: Connector) -> Result<AmazonS3, RemoteError> {
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
            return Err(RemoteError::Credentials(AWS_REMEDY.to_owned()));
        }
    }
    if !is_given(&["AWS_REGION", "AWS_DEFAULT_REGION"])
        && let Some(region) = profile.get("region")
    {
        builder = builder.with_region(region);
    }
    let is_given = |key: &AmazonS3ConfigKey| builder.get_config_value(key).is_some();
    if !is_given(&AmazonS3ConfigKey::S3Endpoint)
        && !is_given(&AmazonS3ConfigKey::Endpoint)
        && let Some(endpoint) = profile.get("endpoint_url")
    {
        builder = builder.with_endpoint(endpoint);
    }
    check_endpoint(builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint))?;
    check_endpoint(builder.get_config_value(&AmazonS3ConfigKey::Endpoint))?;
    let builder = builder.with_bucket_name(url.bucket()).with_retry(no_retries()).with_http_connector(connector);
    builder.build().map_err(|error| settings(&error))
}

/// The client of Google Cloud Storage.
fn google(url: &ObjectUrl, options: &StoreOptions, connector: Connector) -> Result<GoogleCloudStorage, RemoteError> {
    let environment = &options.environment;
    let mut builder = GoogleCloudStorageBuilder::new();
    for (name, value) in environment.with_prefix("GOOGLE_") {
        if let Ok(key) = name.to_ascii_lowercase().parse::<GoogleConfigKey>() {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(emulator) = environment.get("STORAGE_EMULATOR_HOST") {
        let base = if emulator.contains("://") { emulator.to_owned() } else { format!("http://{emulator}") };
        builder = builder.with_base_url(base.trim_end_matches('/')).with_skip_signature(true);
    }
    check_endpoint(builder.get_config_value(&GoogleConfigKey::BaseUrl))?;
    let builder = builder.with_bucket_name(url.bucket()).with_retry(no_retries()).with_http_connector(connector);
    builder.build().map_err(|error| settings(&error))
}

/// The client of Azure.
fn azure(url: &ObjectUrl, options: &StoreOptions, connector: Connector) -> Result<MicrosoftAzure, RemoteError> {
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
    let mut set = |key, value: Option<&str>| {
        if let Some(value) = value {
            builder = std::mem::take(&mut builder).with_config(key, value);
        }
    };
    if environment.is_true("AZURE_USE_AZURE_CLI") || environment.get("AZURE_CREDENTIAL_TYPE") == Some("azure_cli") {
        // The client would wait for that program on the thread that all requests run on.
        let why = "`az` is not run: set AZURE_STORAGE_TOKEN to a token of `az account get-access-token`";
        return Err(RemoteError::Credentials(why.to_owned()));
    }
    // The names of `az storage`, which differ from those of the client.
    set(AzureConfigKey::AccountName, environment.get("AZURE_STORAGE_ACCOUNT"));
    set(AzureConfigKey::AccessKey, environment.get("AZURE_STORAGE_KEY"));
    set(AzureConfigKey::SasKey, environment.get("AZURE_STORAGE_SAS_TOKEN"));
    for part in environment.get("AZURE_STORAGE_CONNECTION_STRING").unwrap_or_default().split(';') {
        match part.split_once('=') {
            Some(("AccountName", value)) => set(AzureConfigKey::AccountName, Some(value)),
            Some(("AccountKey", value)) => set(AzureConfigKey::AccessKey, Some(value)),
            Some(("SharedAccessSignature", value)) => set(AzureConfigKey::SasKey, Some(value)),
            Some(("BlobEndpoint", value)) => set(AzureConfigKey::Endpoint, Some(value)),
            _ => {}
        }
    }
    check_endpoint(builder.get_config_value(&AzureConfigKey::Endpoint))?;
    let builder = builder.with_container_name(url.bucket()).with_retry(no_retries()).with_http_connector(connector);
    builder.build().map_err(|error| settings(&error))
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
