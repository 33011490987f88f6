//! A guest's state beside memory, as bytes.
//!
//! All numbers big-endian: version, seed (u32), reserved, filled, working (u64, pages), spacing (u32), rate (u64 bytes
//! per second, all ones: as fast as it can), the number of writers (u16), the counter of each (u64), the length of what
//! the kind adds (u32) and that. Comes from another host, so nothing in it is believed.

use limosa_page::PAGE_SIZE;

use super::error::GuestError;
use super::options::{GuestKind, GuestOptions, Rate};
use super::pattern::{Layout, Plan, WORDS};

/// Version of the format of a guest's state.
pub const STATE_VERSION: u8 = 1;

/// Writers that a guest has at most.
pub(super) const MAX_WRITERS: u16 = 64;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    pub(super) plan: Plan,
    pub(super) rate: Rate,
    /// Pages written by each writer.
    pub(super) writes: Vec<u64>,
    /// The state that the kind adds.
    pub(super) extra: Vec<u8>,
}

impl State {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![STATE_VERSION];
        let mut put = |number: &[u8]| bytes.extend_from_slice(number);
        put(&self.plan.seed.to_be_bytes());
        put(&self.plan.layout.reserved.to_be_bytes());
        put(&self.plan.layout.filled.to_be_bytes());
        put(&self.plan.layout.working.to_be_bytes());
        put(&u32::try_from(self.plan.spacing).unwrap_or(1).to_be_bytes());
        let rate = match self.rate {
            Rate::BytesPerSecond(bytes) => bytes.min(u64::MAX - 1),
            Rate::Max => u64::MAX,
        };
        put(&rate.to_be_bytes());
        put(&u16::try_from(self.writes.len()).unwrap_or(MAX_WRITERS).to_be_bytes());
        for writes in &self.writes {
            put(&writes.to_be_bytes());
        }
        put(&u32::try_from(self.extra.len()).unwrap_or(u32::MAX).to_be_bytes());
        put(&self.extra);
        bytes
    }

    /// Reads the state of a guest with `pages` pages of memory; its kind keeps `reserved` of them for itself.
    pub(super) fn decode(kind: GuestKind, bytes: &[u8], pages: u64, reserved: u64) -> Result<Self, GuestError> {
        let mut reader = Reader { kind, bytes, at: 0 };
        let [version] = reader.take()?;
        if version != STATE_VERSION {
            return Err(reader.wrong(format!("version {version}; this limosa reads {STATE_VERSION}")));
        }
        let seed = u32::from_be_bytes(reader.take()?);
        let [kept, filled, working] = [reader.u64()?, reader.u64()?, reader.u64()?];
        if kept != reserved {
            return Err(reader.wrong(format!("{kept} reserved pages instead of {reserved}")));
        }
        let room = pages.saturating_sub(reserved);
        if filled > room || working > room || working == 0 {
            let why = format!("{working} pages written and {filled} filled, of the {room} that there are here");
            return Err(reader.wrong(why));
        }
        let spacing = u32::from_be_bytes(reader.take()?) as usize;
        if spacing == 0 || spacing > WORDS {
            return Err(reader.wrong(format!("every {spacing}th word of a page")));
        }
        let rate = match reader.u64()? {
            u64::MAX => Rate::Max,
            bytes => Rate::BytesPerSecond(bytes),
        };
        let writers = u16::from_be_bytes(reader.take()?);
        if writers == 0 || writers > MAX_WRITERS || u64::from(writers) > working {
            return Err(reader.wrong(format!("{writers} writers")));
        }
        let writes = (0..writers).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
        let length = u32::from_be_bytes(reader.take()?) as usize;
        let extra = reader.rest();
        if extra.len() != length {
            return Err(reader.wrong(format!("expected {length} bytes more, found {}", extra.len())));
        }
        let extra = extra.to_vec();
        Ok(Self { plan: Plan::new(seed, Layout { reserved, filled, working }, spacing, writers), rate, writes, extra })
    }
}

struct Reader<'a> {
    kind: GuestKind,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], GuestError> {
        let found = self.rest().first_chunk::<N>().copied();
        let found = found.ok_or_else(|| self.wrong(format!("{N} bytes are missing")))?;
        self.at += N;
        Ok(found)
    }

    fn u64(&mut self) -> Result<u64, GuestError> {
        Ok(u64::from_be_bytes(self.take()?))
    }

    fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    fn wrong(&self, why: String) -> GuestError {
        GuestError::State { kind: self.kind, offset: self.at, why }
    }
}

/// The state of a new guest, checked against its memory.
pub(super) fn new_state(
    kind: GuestKind,
    pages: u64,
    reserved: u64,
    spacing: usize,
    options: &GuestOptions,
) -> Result<State, GuestError> {
    let room = pages.saturating_sub(reserved);
    let working = options.working_set.map_or(room, |bytes| bytes.div_ceil(PAGE_SIZE));
    let filled = options.filled.map_or(working, |bytes| bytes.div_ceil(PAGE_SIZE));
    let wrong = |why| Err(GuestError::Options { kind, why });
    if working == 0 || working > room || filled > room {
        return wrong(format!(
            "a working set of {working} pages and {filled} filled ones, of {room} that can be written"
        ));
    }
    if options.writers == 0 || options.writers > MAX_WRITERS || u64::from(options.writers) > working {
        return wrong(format!("{} writers: 1 to {MAX_WRITERS}, with a page each", options.writers));
    }
    let plan = Plan::new(options.seed, Layout { reserved, filled, working }, spacing, options.writers);
    Ok(State { plan, rate: options.rate, writes: vec![0; options.writers.into()], extra: Vec::new() })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn state() -> State {
        State {
            plan: Plan::new(7, Layout { reserved: 4, filled: 100, working: 50 }, 128, 3),
            rate: Rate::Max,
            writes: vec![1, 2, u64::MAX],
            extra: b"registers".to_vec(),
        }
    }

    #[test]
    fn a_state_comes_back() {
        let bytes = state().encode();
        assert_eq!(State::decode(GuestKind::Threads, &bytes, 104, 4).unwrap(), state());
    }

    #[test]
    fn a_state_for_other_memory_is_refused() {
        let bytes = state().encode();
        for (pages, reserved) in [(103, 4), (0, 4), (1000, 5)] {
            assert!(State::decode(GuestKind::Threads, &bytes, pages, reserved).is_err());
        }
    }

    proptest! {
        #[test]
        fn a_state_that_is_cut_off_is_refused(length in 0..state().encode().len()) {
            prop_assert!(State::decode(GuestKind::Threads, &state().encode()[..length], 104, 4).is_err());
        }

        #[test]
        fn whatever_comes_makes_a_plan_inside_the_memory_or_an_error(
            place in any::<prop::sample::Index>(), value in any::<u8>(), bytes in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let mut changed = state().encode();
            *place.get_mut(&mut changed) = value;
            for bytes in [changed, bytes] {
                if let Ok(state) = State::decode(GuestKind::Threads, &bytes, 104, 4) {
                    prop_assert!(state.plan.shares.iter().all(|share| share.first >= 4 && share.first + share.pages <= 104));
                    prop_assert_eq!(state.plan.shares.len(), state.writes.len());
                }
            }
        }
    }
}
