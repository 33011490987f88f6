//! The files in which the tools of AWS keep credentials: `~/.aws/credentials` and `~/.aws/config`
//! (AWS SDKs and Tools Reference Guide, "Shared config and credentials files").

use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use super::environment::Environment;
use crate::error::RemoteError;
use crate::printable::printable;

/// The longest file that is read, in bytes.
const FILE_MAX: u64 = 1 << 20;

/// The settings of one profile.
#[derive(Default)]
pub(super) struct Profile(BTreeMap<String, String>);

impl Profile {
    /// Reads the profile that the environment names, or the default one. Files that do not exist are empty.
    pub(super) fn read(environment: &Environment) -> Result<Self, RemoteError> {
        let named = environment.get("AWS_PROFILE");
        let name = named.unwrap_or("default");
        let place = |variable: &str, file: &str| match environment.get(variable) {
            Some(path) => Some(PathBuf::from(path)),
            None => environment.get("HOME").map(|home| Path::new(home).join(".aws").join(file)),
        };
        let mut settings = BTreeMap::new();
        let mut is_known = false;
        // What both have the credentials file decides.
        for (variable, file, prefix) in
            [("AWS_CONFIG_FILE", "config", "profile "), ("AWS_SHARED_CREDENTIALS_FILE", "credentials", "")]
        {
            let Some(text) = place(variable, file).map(|path| read(&path)).transpose()?.flatten() else { continue };
            let found = section(&text, |title| {
                let title = title.trim();
                title == name && (prefix.is_empty() || name == "default")
                    || (!prefix.is_empty() && title.strip_prefix(prefix).map(str::trim) == Some(name))
            });
            if let Some(found) = found {
                is_known = true;
                settings.extend(found);
            }
        }
        match named {
            Some(name) if !is_known => {
                Err(RemoteError::Settings(format!("AWS_PROFILE: there is no profile {:?}", printable(name, 64))))
            }
            _ => Ok(Self(settings)),
        }
    }

    /// Returns a setting.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// The name of a way to get credentials that is not supported, if the profile has only that.
    pub(super) fn foreign_source(&self) -> Option<&'static str> {
        if self.get("aws_access_key_id").is_some() {
            return None;
        }
        ["credential_process", "sso_session", "sso_start_url", "source_profile"]
            .into_iter()
            .find(|name| self.get(name).is_some())
    }
}

fn read(path: &Path) -> Result<Option<String>, RemoteError> {
    let failed = |error: std::io::Error| RemoteError::Settings(format!("{}: {error}", path.display()));
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let mut text = String::new();
    file.take(FILE_MAX).read_to_string(&mut text).map_err(failed)?;
    Ok(Some(text))
}

/// Returns the settings of the section whose title is wanted. Nested settings are left out.
fn section(text: &str, is_wanted: impl Fn(&str) -> bool) -> Option<BTreeMap<String, String>> {
    let mut found: Option<BTreeMap<String, String>> = None;
    let mut is_inside = false;
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some(title) = trimmed.strip_prefix('[').and_then(|rest| rest.split_once(']')).map(|(title, _)| title) {
            is_inside = is_wanted(title);
            if is_inside {
                found.get_or_insert_default();
            }
        } else if is_inside
            && !line.starts_with([' ', '\t', '#', ';'])
            && let (Some((name, value)), Some(found)) = (trimmed.split_once('='), &mut found)
        {
            found.insert(name.trim().to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn with_files(credentials: &str, config: &str, profile: Option<&str>) -> Result<Profile, RemoteError> {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        std::fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
        std::fs::write(home.path().join(".aws/config"), config).unwrap();
        let environment = Environment::empty().with("HOME", home.path().to_str().unwrap());
        Profile::read(&match profile {
            Some(profile) => environment.with("AWS_PROFILE", profile),
            None => environment,
        })
    }

    #[test]
    fn a_profile_is_read_from_both_files() {
        let credentials =
            "# comment\n[default]\naws_access_key_id = A\naws_secret_access_key=B=\n\n[x]\naws_access_key_id=C\n";
        let config =
            "[default]\nregion = r1\ns3 =\n  endpoint_url = nested\n[profile x]\nregion=r2\nendpoint_url = http://e\n";
        let profile = with_files(credentials, config, None).unwrap();
        assert_eq!((profile.get("aws_access_key_id"), profile.get("aws_secret_access_key")), (Some("A"), Some("B=")));
        assert_eq!((profile.get("region"), profile.get("endpoint_url")), (Some("r1"), None));
        let profile = with_files(credentials, config, Some("x")).unwrap();
        assert_eq!((profile.get("aws_access_key_id"), profile.get("region")), (Some("C"), Some("r2")));
        assert_eq!(profile.get("endpoint_url"), Some("http://e"));
        let missing = with_files(credentials, config, Some("y")).err().unwrap();
        assert_eq!(missing.to_string(), r#"the store's settings are wrong: AWS_PROFILE: there is no profile "y""#);
        let foreign = with_files("", "[default]\nsso_session = s\n", None).unwrap();
        assert_eq!(foreign.foreign_source(), Some("sso_session"));
    }

    #[test]
    fn without_files_there_are_no_settings() {
        let empty = Profile::read(&Environment::empty()).unwrap();
        assert!(empty.get("region").is_none() && empty.foreign_source().is_none());
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text: String) {
            let _ = section(&text, |title| title.len() < 3);
        }
    }
}
