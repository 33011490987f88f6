//! Looks at images that another process may be writing: `info`, `check` without a repair, `map`, `snapshot -l`.
//!
//! Law: a look changes nothing, so a writer's lock does not prevent it. It says that the image is in use, and damage
//! that it finds there is not certain: the writer may be about to complete a change.

use std::thread;
use std::time::Duration;

use limosa_console::anyhow_error_line;
use limosa_image::ImageError;
use limosa_image::chain::NamedImage;
use limosa_storage::{LockHolders, LockPolicy, OpenError};

use super::open;
use super::options::Source;
use crate::program::say_named;

/// How often damage in an image that is in use is looked at again: a change takes a moment.
pub(super) const ATTEMPTS: usize = 4;
/// The time between two looks.
pub(super) const PAUSE: Duration = Duration::from_millis(50);

/// The result of a look.
#[derive(Debug)]
pub(super) struct Look<T> {
    pub(super) found: T,
    /// Whether another process has the image open for writing.
    pub(super) in_use: bool,
}

/// Looks at an image, without locks if a writer has it.
///
/// # Errors
/// Those of `look`.
pub(super) fn look<T>(source: &Source, look: impl Fn(&NamedImage) -> anyhow::Result<T>) -> anyhow::Result<Look<T>> {
    let mut image = open::resolve_file(source)?;
    let error = match look(&image) {
        Ok(found) => return Ok(Look { found, in_use: false }),
        Err(error) => error,
    };
    if let Some(ImageError::Unreplayed { .. }) = error.downcast_ref() {
        say_named!("{}; what follows is the image without them", anyhow_error_line(&error));
        image.options.unreplayed = Vec::new();
        return Ok(Look { found: look(&image)?, in_use: false });
    }
    let Some(holders) = writers(&error) else { return Err(error) };
    say_named!("{}: another process writes to it{holders}; the result may be inconsistent", source.name);
    image.options.lock = LockPolicy::None;
    for _ in 1..ATTEMPTS {
        match look(&image) {
            Err(error) if is_damage(&error) => thread::sleep(PAUSE),
            done => return in_use(done),
        }
    }
    in_use(look(&image))
}

fn in_use<T>(done: anyhow::Result<T>) -> anyhow::Result<Look<T>> {
    match done {
        Ok(found) => Ok(Look { found, in_use: true }),
        Err(error) => Err(uncertain(error)),
    }
}

/// The error of a look at an image that is in use: damage is not certain.
pub(super) fn uncertain(error: anyhow::Error) -> anyhow::Error {
    if !is_damage(&error) {
        return error;
    }
    // Without its causes: they would have a repair recommended.
    anyhow::anyhow!(
        "{}; this may be a change that its writer has not completed: look again when the image is not in use",
        anyhow_error_line(&error)
    )
}

/// The writers that prevented a look, if it was a lock of theirs that did.
fn writers(error: &anyhow::Error) -> Option<&LockHolders> {
    let locked = error.chain().find_map(|cause| match cause.downcast_ref() {
        Some(ImageError::Storage(error)) => error.open_error(),
        _ => None,
    });
    match locked {
        Some(OpenError::Locked { holders, read_only: true, .. }) if *holders != LockHolders::ThisProcess => {
            Some(holders)
        }
        _ => None,
    }
}

fn is_damage(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.downcast_ref().is_some_and(ImageError::is_damage))
}
