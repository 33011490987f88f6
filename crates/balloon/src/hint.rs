//! The handshake of free-page hinting, without any I/O.
//!
//! The device puts a command id into the configuration; the driver sends that id on the queue, then free blocks, then
//! another id (0). Buffers are in transit while ids change, so **law: a block counts only between the id of the current
//! command and the next id of any kind.** Blocks of an older command were free at a time before the new command was
//! given, which is not useful.
//!
//! An id alone does not identify the command of a buffer: Linux sends a pointer to one field, which it overwrites at
//! the next command, and a device that is behind reads the new id from the old buffer. So **law: a command is shown to
//! the driver only when every buffer that was there when it was given has been taken** ([`Handshake::announce`]). A
//! buffer that is taken after that was added after the command was given, and its block was free at a later time,
//! regardless of its id. A command may be given at any time while the queue is processed, also after the last buffer
//! was taken; so only the command that was given before processing began is announced ([`Handshake::unannounced`]), not
//! a later one.
//!
//! The driver keeps the blocks until the device sends DONE. So [`Handshake::done`] follows every end of a command.
//!
//! A driver outlives the process of its device, with the last id that it has read, and with buffers for it. So ids
//! begin at a random value: it is practically impossible that another process uses the same one.

use std::hash::{BuildHasher as _, RandomState};

/// Ids below are not commands: 0 means stop, 1 means done.
const FIRST_ID: u32 = 0x8000_0000;
/// The command of a device that wants no more blocks; the driver still holds those that it has sent.
pub(crate) const STOP: u32 = 0;
/// The command of a device that wants no blocks: the driver may use all of its pages.
pub(crate) const DONE: u32 = 1;

/// The state of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HintState {
    /// No command; the guest may still hold blocks.
    Stopped,
    /// The driver has not begun to send the list.
    Requested,
    /// Blocks are coming.
    Started,
    /// The guest has its blocks back.
    #[default]
    Done,
}

/// The meaning of an id on the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdMeaning {
    /// The blocks of the command begin.
    Begin,
    /// The list of the command is complete.
    Complete,
    /// It belongs to an older command, or to none.
    Stale,
}

/// The device's side of the handshake.
#[derive(Debug)]
pub(crate) struct Handshake {
    state: HintState,
    /// The last command that was given.
    id: u32,
    /// The id in the configuration until that command is announced; `None`: it has been announced.
    before: Option<u32>,
}

impl Default for Handshake {
    fn default() -> Self {
        let [a, b, c, d, ..] = RandomState::new().hash_one(()).to_ne_bytes();
        Self { state: HintState::Done, id: u32::from_ne_bytes([a, b, c, d]) | FIRST_ID, before: None }
    }
}

impl Handshake {
    pub(crate) fn state(&self) -> HintState {
        self.state
    }

    /// Gives a new command, which is visible when it is [announced](Self::announce); its id differs from the previous
    /// one.
    pub(crate) fn request(&mut self) -> u32 {
        self.before = Some(if self.state == HintState::Done { DONE } else { STOP });
        self.id = self.id.checked_add(1).unwrap_or(FIRST_ID);
        self.state = HintState::Requested;
        self.id
    }

    /// The command that was given and has not been announced yet.
    pub(crate) fn unannounced(&self) -> Option<u32> {
        self.before.map(|_| self.id)
    }

    /// Every buffer that was there when this command was given has been taken. Returns whether that is a change for the
    /// driver; it is not if another command was given meanwhile.
    pub(crate) fn announce(&mut self, given: u32) -> bool {
        given == self.id && self.before.take().is_some() && self.state == HintState::Requested
    }

    /// Requests no more blocks. Returns whether that is a change for the driver.
    pub(crate) fn stop(&mut self) -> bool {
        let news = matches!(self.state, HintState::Requested | HintState::Started);
        if news {
            self.state = HintState::Stopped;
        }
        news
    }

    /// Returns the guest's blocks to it. Returns whether that is a change for the driver.
    pub(crate) fn done(&mut self) -> bool {
        let news = self.state != HintState::Done;
        self.state = HintState::Done;
        news
    }

    /// The driver has sent an id.
    pub(crate) fn id(&mut self, id: u32) -> IdMeaning {
        match self.state {
            HintState::Requested if id == self.id && self.before.is_none() => {
                self.state = HintState::Started;
                IdMeaning::Begin
            }
            HintState::Started if id != self.id => {
                self.state = HintState::Stopped;
                IdMeaning::Complete
            }
            _ => IdMeaning::Stale,
        }
    }

    /// Whether a block that is received now counts.
    pub(crate) fn takes_blocks(&self) -> bool {
        self.state == HintState::Started
    }

    /// The id in the configuration.
    pub(crate) fn command(&self) -> u32 {
        match self.state {
            HintState::Stopped => STOP,
            HintState::Requested | HintState::Started => self.before.unwrap_or(self.id),
            HintState::Done => DONE,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_command_begins_with_its_id_and_ends_with_another() {
        let mut handshake = Handshake { id: u32::MAX, ..Handshake::default() };
        assert_eq!((handshake.command(), handshake.takes_blocks()), (DONE, false));
        let id = handshake.request();
        // The old buffers come first, and the field that they point to may already have the new id.
        assert_eq!((id, handshake.command(), handshake.id(id)), (FIRST_ID, DONE, IdMeaning::Stale));
        assert_eq!(handshake.unannounced(), Some(id));
        assert!(handshake.announce(id) && !handshake.announce(id));
        assert_eq!(handshake.unannounced(), None);
        assert_eq!(handshake.command(), id);
        assert!(!handshake.takes_blocks());
        // The rest of an earlier command.
        assert_eq!(handshake.id(0), IdMeaning::Stale);
        assert_eq!(handshake.id(id), IdMeaning::Begin);
        assert!(handshake.takes_blocks());
        assert_eq!(handshake.command(), id);
        assert_eq!(handshake.id(0), IdMeaning::Complete);
        assert_eq!((handshake.command(), handshake.takes_blocks()), (STOP, false));
        assert!(handshake.done());
        assert_eq!(handshake.command(), DONE);
        assert!(!handshake.done());
    }

    #[test]
    fn blocks_of_a_stopped_command_do_not_count_for_the_next() {
        let mut handshake = Handshake::default();
        let first = handshake.request();
        assert!(handshake.announce(first));
        handshake.id(first);
        let second = handshake.request();
        assert_ne!(first, second);
        assert_eq!((handshake.command(), handshake.id(second)), (STOP, IdMeaning::Stale));
        assert!(!handshake.announce(first), "that was another command");
        assert!(handshake.announce(second));
        assert!(!handshake.takes_blocks());
        assert_eq!(handshake.id(first), IdMeaning::Stale);
        assert!(!handshake.takes_blocks());
        assert_eq!(handshake.id(second), IdMeaning::Begin);
    }

    #[test]
    fn ids_wrap_to_the_first_that_is_a_command() {
        let mut handshake = Handshake { id: u32::MAX - 1, ..Handshake::default() };
        assert_eq!(handshake.request(), u32::MAX);
        assert_eq!(handshake.request(), FIRST_ID);
    }

    #[test]
    fn ids_of_another_device_differ() {
        let mut first: Vec<u32> = (0..8).map(|_| Handshake::default().request()).collect();
        assert!(first.iter().all(|id| *id >= FIRST_ID));
        first.sort_unstable();
        first.dedup();
        assert_eq!(first.len(), 8);
    }

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Request,
        Stop,
        Done,
        Id(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            Just(Step::Request),
            Just(Step::Stop),
            Just(Step::Done),
            prop_oneof![Just(0u32), Just(1), FIRST_ID..FIRST_ID + 4, any::<u32>()].prop_map(Step::Id),
        ]
    }

    proptest! {
        #[test]
        fn blocks_count_only_right_behind_the_id_that_the_configuration_shows(steps in proptest::collection::vec(step(), 0..60)) {
            let mut handshake = Handshake::default();
            for step in steps {
                let mut shown = None;
                match step {
                    Step::Request => {
                        let before = handshake.command();
                        let id = handshake.request();
                        prop_assert_ne!(id, before);
                        prop_assert!(handshake.command() < FIRST_ID);
                        prop_assert_eq!(handshake.id(id), IdMeaning::Stale);
                        prop_assert!(handshake.announce(id));
                        prop_assert!(handshake.command() >= FIRST_ID);
                    }
                    Step::Stop => {
                        handshake.stop();
                    }
                    Step::Done => {
                        handshake.done();
                        prop_assert_eq!(handshake.command(), DONE);
                    }
                    Step::Id(id) => {
                        let wanted = handshake.command();
                        handshake.id(id);
                        shown = (wanted >= FIRST_ID && id == wanted).then_some(id);
                    }
                }
                prop_assert_eq!(handshake.takes_blocks(), shown.is_some());
            }
        }
    }
}
