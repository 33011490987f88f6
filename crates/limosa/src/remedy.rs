//! What a user can do about an engine's failure. The libraries say what is wrong; which option helps is said here.

use anyhow::anyhow;
use limosa_migrate::MigrateError;
use limosa_qemu::job::JobError;
use limosa_stream::{Fault, Feature, StreamError};

/// The remedy, to be appended to the words of the error; empty if there is none.
pub(crate) fn of(error: &MigrateError) -> String {
    match error {
        MigrateError::MainEnded { channels, .. } => {
            format!("; if the source has another number of channels than {channels}, set the same")
        }
        MigrateError::SwitchedToPostcopy { .. } => {
            "; migrate with the capability postcopy-ram off, or without migrate-start-postcopy".into()
        }
        MigrateError::OneWay { .. } => {
            "; turn the source's capability return-path off, or connect both directions".into()
        }
        MigrateError::Stream(error) => of_stream(error).into(),
        MigrateError::WantsTls { .. } => "; both ends have to use TLS (--tls-creds, and tls-creds in QEMU)".into(),
        _ => String::new(),
    }
}

fn of_stream(error: &StreamError) -> &'static str {
    match error.fault() {
        Fault::Unsupported(Feature::Multifd) => {
            "; receive it with --channels, as many as the source's multifd-channels, or turn the capability multifd off at \
             the source"
        }
        _ => "",
    }
}

/// The remedy for the engine's failure that is the cause of `error`, if one is.
pub(crate) fn of_cause(error: &anyhow::Error) -> String {
    let engine = |cause: &'_ (dyn std::error::Error + 'static)| match cause.downcast_ref::<JobError>() {
        Some(JobError::Migrate(error)) => Some(of(error)),
        _ => cause
            .downcast_ref::<MigrateError>()
            .map(of)
            .or_else(|| cause.downcast_ref::<StreamError>().map(|error| of_stream(error).into())),
    };
    error.chain().find_map(engine).unwrap_or_default()
}

/// The failure of a listener that expects so many multifd channels, with a remedy where they did not come together.
pub(crate) fn with_channels(error: MigrateError, channels: u8) -> anyhow::Error {
    match error {
        MigrateError::Channels(_) if channels == 0 => anyhow!("{error}; start it at the source, to this address"),
        MigrateError::Channels(_) => {
            anyhow!("{error}; set multifd on and multifd-channels to {channels} at the source, and start its migration")
        }
        error => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_with_multifd_channels_is_to_be_received_with_them() {
        let error = StreamError::new(7, "section \"ram\"", Fault::Unsupported(Feature::Multifd));
        assert!(of(&MigrateError::Stream(error)).contains("--channels"));
    }

    #[test]
    fn the_remedy_is_found_behind_contexts_and_jobs() {
        let switched = || MigrateError::SwitchedToPostcopy { offset: 7 };
        let context = anyhow::Error::from(JobError::Migrate(switched())).context("not saved");
        for error in [anyhow::Error::from(switched()), context] {
            assert!(of_cause(&error).contains("postcopy-ram off"), "{error:?}");
        }
        assert_eq!(of_cause(&anyhow::anyhow!("something else")), "");
    }
}
