//! The door of a keeper: who may send checkpoints.
//!
//! Laws: **one primary at a time**; **a primary whose VM continues here is told so**; nobody who connects delays the
//! primary that is kept, and nobody takes much memory.

use std::collections::VecDeque;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use limosa_channel::{Acceptor, Channel, Listener, Shutdown};
use limosa_page::error_with_causes;
use limosa_snapshot::Manifest;
use parking_lot::{Condvar, Mutex};
use uuid::Uuid;

use super::connect::watch_peer;
use super::message::{Answer, Opening};
use super::ownership;

/// How long a greeting may take.
const GREETING_WITHIN: Duration = Duration::from_secs(5);
/// Most greetings at a time; one more ends the oldest of them.
const GREETINGS_MAX: usize = 16;
/// How long the door waits before it looks whether it is to close.
const TICK: Duration = Duration::from_millis(50);
/// The pause after a failure to accept a connection: descriptors may be short.
const AGAIN_AFTER: Duration = Duration::from_millis(200);

/// Why nobody is let in while there is a primary.
const KEEPS: &str = "it keeps the checkpoints of a VM already";

/// A primary that was let in.
#[derive(Debug)]
pub(super) struct Visitor {
    pub(super) channel: Channel,
    /// Bytes of its stream that were read.
    pub(super) first_bytes: Vec<u8>,
    pub(super) manifest: Manifest,
    /// Its protection; `None` for a bare stream.
    pub(super) protection: Option<Uuid>,
}

/// Who would be let in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Admission {
    /// Anybody.
    Anybody,
    /// Nobody, and why.
    Nobody(&'static str),
    /// The VM that may have been lost: one that does not have another name.
    Only(VmName),
}

/// The names of a VM; it may have none.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct VmName {
    uuid: Option<Uuid>,
    name: Option<String>,
}

impl VmName {
    pub(super) fn of(manifest: &Manifest) -> Self {
        Self { uuid: manifest.vm_uuid, name: manifest.vm_name.clone() }
    }

    /// Whether nothing tells the two apart.
    pub(super) fn may_be(&self, other: &Self) -> bool {
        fn differ<T: PartialEq>(one: Option<&T>, other: Option<&T>) -> bool {
            one.zip(other).is_some_and(|(one, other)| one != other)
        }
        !differ(self.uuid.as_ref(), other.uuid.as_ref()) && !differ(self.name.as_ref(), other.name.as_ref())
    }
}

/// The state that the door's threads share with the keeper.
#[derive(Debug)]
pub(super) struct Desk<'k> {
    state: Mutex<State>,
    changed: Condvar,
    /// The connections that are read from, the oldest first.
    greetings: Mutex<VecDeque<(u64, Channel)>>,
    /// The directory of the checkpoints.
    directory: &'k Path,
    lost_after: Duration,
    /// Whether VMs can be kept whose disks belong to their checkpoints.
    takes_disks: bool,
}

#[derive(Debug)]
struct State {
    admission: Admission,
    /// A primary is being told that it is let in.
    welcoming: bool,
    visitor: Option<Visitor>,
    closed: bool,
}

impl State {
    /// Whether a primary was let in that the keeper has not taken yet.
    fn is_taken(&self) -> bool {
        self.welcoming || self.visitor.is_some()
    }
}

impl<'k> Desk<'k> {
    pub(super) fn new(directory: &'k Path, lost_after: Duration, takes_disks: bool) -> Self {
        let state = State { admission: Admission::Anybody, welcoming: false, visitor: None, closed: false };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            greetings: Mutex::new(VecDeque::new()),
            directory,
            lost_after,
            takes_disks,
        }
    }

    /// Changes who is let in.
    pub(super) fn admit(&self, admission: Admission) {
        self.state.lock().admission = admission;
    }

    /// Ends the door's threads.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Lets nobody in any more, and says why; unless somebody has just been let in.
    pub(super) fn shut(&self, why: &'static str) -> bool {
        let mut state = self.state.lock();
        let is_free = !state.is_taken();
        if is_free {
            state.admission = Admission::Nobody(why);
        }
        is_free
    }

    /// Waits for a primary, for at most `timeout`. From then on nobody else is let in.
    pub(super) fn wait(&self, timeout: Duration) -> Option<Visitor> {
        let until = Instant::now() + timeout;
        let mut state = self.state.lock();
        while state.visitor.is_none() {
            if self.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let visitor = state.visitor.take();
        if visitor.is_some() {
            state.admission = Admission::Nobody(KEEPS);
        }
        visitor
    }

    /// Accepts connections until the desk is closed. `report` gets a line for each reason to refuse one.
    pub(super) fn serve<'s>(
        &'s self,
        scope: &'s thread::Scope<'s, '_>,
        listener: &'s Listener,
        report: &'s (dyn Fn(&str) + Sync),
    ) {
        let mut acceptor = Acceptor::new(listener).on_refusal(|why| report(&format!("connection rejected: {why}")));
        let mut number = 0;
        while !self.state.lock().closed {
            match acceptor.poll(TICK) {
                Ok(Some(channel)) => {
                    number += 1;
                    // Without a descriptor or a thread for it, its peer tries again.
                    if let Ok(kept) = channel.try_clone() {
                        self.expect(number, kept);
                        let greet = move || self.greet(channel, number, report);
                        let started = thread::Builder::new().name("greeting".into()).spawn_scoped(scope, greet);
                        if started.is_err() {
                            self.expected(number);
                        }
                    }
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!("{}", error_with_causes(&error));
                    thread::sleep(AGAIN_AFTER);
                }
            }
        }
    }

    /// Notes a connection that will be read from. Who is silent makes room for others.
    fn expect(&self, number: u64, channel: Channel) {
        let mut greetings = self.greetings.lock();
        greetings.push_back((number, channel));
        if greetings.len() > GREETINGS_MAX
            && let Some((_, oldest)) = greetings.pop_front()
        {
            let _ = oldest.shutdown(Shutdown::Both);
        }
    }

    /// Nothing more is read from it here; false if it has been closed.
    fn expected(&self, number: u64) -> bool {
        let mut greetings = self.greetings.lock();
        let before = greetings.len();
        greetings.retain(|(other, _)| *other != number);
        greetings.len() < before
    }

    /// Reads a greeting, and lets the primary in or refuses it.
    fn greet(&self, channel: Channel, number: u64, report: &(dyn Fn(&str) + Sync)) {
        let peer = channel.peer().to_owned();
        let opening = Opening::read(&channel, GREETING_WITHIN);
        if !self.expected(number) {
            return;
        }
        let opening = match opening {
            Ok(opening) => opening,
            Err(error) => {
                tracing::info!("{peer}: {}", error_with_causes(&error));
                return;
            }
        };
        let (protection, first_bytes, manifest) = match opening {
            Opening::Limosa(hello) => (Some(hello.protection), Vec::new(), hello.manifest),
            Opening::Bare(first_bytes) => (None, first_bytes, Manifest::new()),
        };
        watch_peer(&channel, self.lost_after);
        let answer = {
            let mut state = self.state.lock();
            let answer = self.answer(&state, protection, &manifest);
            state.welcoming |= matches!(answer, Answer::Welcome(_));
            answer
        };
        let said = protection.map_or(Ok(()), |_| answer.write(&channel));
        match (&answer, said) {
            (Answer::Welcome(_), said) => {
                let mut state = self.state.lock();
                state.welcoming = false;
                match said {
                    Ok(()) => state.visitor = Some(Visitor { channel, first_bytes, manifest, protection }),
                    Err(error) => tracing::info!("{peer}: {}", error_with_causes(&error)),
                }
                drop(state);
                self.changed.notify_all();
            }
            (Answer::Busy(why) | Answer::TakenOver(why) | Answer::Refused(why), _) => {
                report(&format!("{peer}: not kept: {why}"));
            }
        }
    }

    fn welcome(&self, manifest: &Manifest) -> Answer {
        match ownership::refuse_other_vm(self.directory, manifest) {
            Ok(()) => Answer::Welcome(self.directory.display().to_string()),
            Err(why) => Answer::Refused(why),
        }
    }

    fn answer(&self, state: &State, protection: Option<Uuid>, manifest: &Manifest) -> Answer {
        match protection.map(|protection| ownership::is_taken_over(self.directory, protection)) {
            Some(Ok(true)) => return Answer::TakenOver("the VM continues from its checkpoints there".into()),
            Some(Err(error)) => return Answer::Busy(format!("its directory cannot be read: {error}")),
            Some(Ok(false)) | None => {}
        }
        // One that came without a name is back without one.
        let is_named = |lost: &VmName| protection.is_some() || *lost == VmName::default();
        match &state.admission {
            _ if state.closed => Answer::Busy("it ends".into()),
            _ if state.is_taken() => Answer::Busy(KEEPS.into()),
            _ if !self.takes_disks && !manifest.protected_disks.is_empty() => {
                Answer::Refused("it has to continue the VM, and knows no server of its disks".into())
            }
            // Their paths are those of another host.
            _ if !manifest.overlaid_disks.is_empty() => {
                Answer::Refused("overlays belong to checkpoints that are kept on their own host".into())
            }
            Admission::Anybody => self.welcome(manifest),
            Admission::Only(lost) if is_named(lost) && lost.may_be(&VmName::of(manifest)) => self.welcome(manifest),
            Admission::Only(_) => Answer::Busy("it waits for another VM that may be lost".into()),
            Admission::Nobody(why) => Answer::Busy((*why).into()),
        }
    }
}
