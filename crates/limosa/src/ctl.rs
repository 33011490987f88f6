//! Failures of commands that talk to a running server of limosa.

use anyhow::anyhow;
use limosa_qemu::qmp::QmpError;

/// A kind of server.
pub(crate) struct Server {
    /// The command that starts it.
    pub(crate) command: &'static str,
    /// Its description for people, as in "a balloon of limosa".
    pub(crate) what: &'static str,
    /// The other kind of socket that answers the same commands, with a comma before it; or nothing.
    pub(crate) or: &'static str,
}

/// Explains the failure of a command: the server's own words, or the remedy.
pub(crate) fn explained(server: &Server, error: QmpError) -> anyhow::Error {
    let Server { command, what, or } = server;
    match &error {
        QmpError::Connect { monitor, source } => {
            return anyhow!(
                "{monitor}: cannot connect: {source}; give the --control socket of a running `{command}`{or}"
            );
        }
        QmpError::Closed { monitor, .. } => return anyhow!("{monitor}: the server has ended"),
        QmpError::Busy { monitor, .. } => {
            return anyhow!(
                "{monitor}: no answer; give the --control socket of a running `{command}`{or}, and end another client \
                 that holds it"
            );
        }
        _ => {}
    }
    if error.is_unknown_command() {
        return anyhow!("not {what} (give the --control socket of `{command}`): {error}");
    }
    match error.desc() {
        // The server's own words say what to do.
        Some(desc) => anyhow!("{desc}"),
        None => error.into(),
    }
}
