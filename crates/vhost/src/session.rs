//! The state of one front end: what it has set so far, and how its next message is handled. There are no sockets here,
//! so that tests and fuzzers can send any message.
//!
//! Front ends differ (QEMU 10.0, user-mode Linux 6.1):
//! - user-mode Linux unloads a driver without a reset and without `GET_VRING_BASE`: it disables the rings, or, if it
//!   has cleared vhost-user's own feature bit, only requests the features again. So `SET_FEATURES` resets the session;
//! - without that bit a ring is enabled as soon as it is started, without a message;
//! - a memory table may change under running rings (QEMU plugs memory): they continue in the new one;
//! - QEMU stops all rings (`GET_VRING_BASE`) both when its VM is paused and when its guest resets the device, and
//!   negotiates the same features in either case when they continue. The difference is where the rings continue: those
//!   of the same driver where they stopped, those of another one at the beginning ([`Session::is_another_driver`]).
//!   Some of QEMU's devices (10.0.2: its vhost-user-blk, seen on the wire) also request a reset, others (its
//!   vhost-user-base) never do. (The device status does not help: QEMU sets it to 0 whenever rings stop. So that
//!   protocol feature is not offered.)

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{FileType, MemfdFlags, fstat, ftruncate, memfd_create};
use vm_memory::{FileOffset, MmapRegion};

use crate::dirty_log::DirtyLog;
use crate::fault::{FaultKind, Faults};
use crate::inflight::{InflightRing, bytes_for_ring};
use crate::message::{
    ConfigPiece, InflightArea, LogArea, MAX_CONFIG, MessageError, Request, TableRegion, VringAddress, VringFd,
    VringState, decode_u64,
};
use crate::notifier::Notifier;
use crate::postcopy::Postcopy;
use crate::ram::{MAX_REGIONS, Ram, RamRegion};
use crate::vring::{Phase, RingAddresses, RingLog, RingSetup};
use crate::worker::Worker;
use crate::{Device, FrontEnd, RamError};

/// Refusal of a ring whose VM has private memory, which is a common mistake.
const NO_MEMORY: &str =
    "the front end has shared no memory: the VM needs memory that is shared (share=on of its memory backend in QEMU)";

const EVENT_INDEX: u64 = 1 << 29;
/// `VHOST_F_LOG_ALL`: what is written to the guest's memory is marked in the dirty log.
const LOG_ALL: u64 = 1 << 26;
/// `VHOST_USER_F_PROTOCOL_FEATURES`
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;

const REPLY_ACK: u64 = 1 << 3;
/// Several queues, a dirty log, acknowledgements, requests to the front end, configuration, inflight areas, reset, and
/// regions one by one.
const PROTOCOL: u64 = 1 | 1 << 1 | REPLY_ACK | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;
/// `VHOST_USER_PROTOCOL_F_PAGEFAULT`: memory may come by postcopy.
const PAGE_FAULT: u64 = 1 << 8;

/// The answer to a message.
#[derive(Debug)]
pub(crate) enum Answer {
    /// No contents; an acknowledgement if the message asks for one.
    Done,
    /// A body.
    Body(Vec<u8>),
    /// A body and a descriptor.
    WithDescriptor(Vec<u8>, OwnedFd),
}

/// Why a message is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error(transparent)]
    Memory(#[from] RamError),
    #[error(transparent)]
    Ring(#[from] crate::QueueError),
    #[error("{0}")]
    Other(String),
}

/// The settings of a ring by the front end.
#[derive(Debug, Default)]
struct VringSettings {
    size: u16,
    base: u16,
    address: Option<VringAddress>,
    /// It is started: from `SET_VRING_KICK` to `GET_VRING_BASE`.
    started: bool,
    enabled: bool,
    /// The index at which it was stopped, until it is started again.
    stopped_at: Option<u16>,
    /// It was started before, by the same driver.
    known: bool,
    /// It was enabled before, by the same driver.
    ran: bool,
}

/// The state of one front end.
pub(crate) struct Session {
    device: Arc<dyn Device>,
    worker: Arc<Worker>,
    front_end: FrontEnd,
    faults: Arc<Faults>,
    features: u64,
    /// The device has the features that its current driver has acknowledged.
    acked: bool,
    protocol: u64,
    regions: Vec<RamRegion>,
    ram: Option<Arc<Ram>>,
    rings: Vec<VringSettings>,
    inflight: Option<(Arc<MmapRegion>, InflightArea)>,
    log: Option<Arc<DirtyLog>>,
    postcopy: Postcopy,
    /// The device may have state of the driver.
    touched: bool,
    /// All rings were stopped, and the driver that continues may be the same.
    paused: bool,
    /// The device was notified that the driver was active before.
    driver_resumed: bool,
}

impl Session {
    pub(crate) fn new(
        device: Arc<dyn Device>,
        worker: Arc<Worker>,
        (front_end, faults): (FrontEnd, Arc<Faults>),
        postcopy: Postcopy,
    ) -> Self {
        let rings = worker.rings().iter().map(|_| VringSettings::default()).collect();
        Self {
            device,
            worker,
            front_end,
            faults,
            features: 0,
            acked: false,
            protocol: 0,
            regions: Vec::new(),
            ram: None,
            rings,
            inflight: None,
            log: None,
            postcopy,
            touched: false,
            paused: false,
            driver_resumed: false,
        }
    }

    /// Whether the front end may ask for acknowledgements.
    pub(crate) fn acknowledges(&self) -> bool {
        self.protocol & REPLY_ACK != 0
    }

    /// Handles a message.
    pub(crate) fn handle(
        &mut self,
        request: Request,
        body: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<Answer, Refusal> {
        let answer = |value: u64| Ok(Answer::Body(value.to_le_bytes().to_vec()));
        match request {
            Request::GetFeatures => {
                // See above: user-mode Linux no longer uses the rings, and sends no other sign of it.
                if self.features & PROTOCOL_FEATURES == 0 && self.protocol != 0 {
                    self.reset();
                }
                return answer(self.offered());
            }
            Request::SetFeatures => self.set_features(decode_u64(body)?)?,
            Request::SetOwner => {}
            Request::ResetOwner | Request::ResetDevice => self.reset(),
            Request::GetProtocolFeatures => return answer(self.offered_protocol()),
            Request::SetProtocolFeatures => {
                let protocol = decode_u64(body)?;
                let others = protocol & !self.offered_protocol();
                refuse_if(others != 0, || format!("protocol features {others:#x} were not offered"))?;
                self.protocol = protocol;
            }
            Request::GetQueueNum => return answer(self.rings.len() as u64),
            Request::GetMaxMemSlots => return answer(MAX_REGIONS as u64),
            Request::SetMemTable | Request::AddMemReg | Request::RemMemReg
                if self.postcopy.is_acknowledgement(body) => {}
            Request::SetMemTable => return self.set_table(body, descriptors),
            Request::AddMemReg => return self.add_region(body, descriptors),
            Request::RemMemReg => self.remove_region(TableRegion::decode(body)?)?,
            Request::SetLogBase => {
                let LogArea { length, offset } = LogArea::decode(body)?;
                self.log = Some(Arc::new(DirtyLog::map(only(descriptors)?, offset, length)?));
                self.apply_log();
                return answer(0);
            }
            // A descriptor that would be notified of changes of the log; no front end uses it.
            Request::SetLogFd => {}
            Request::SetVringNum => {
                let state = VringState::decode(body)?;
                let size = u16::try_from(state.value).ok().filter(|size| size.is_power_of_two() && *size <= 32768);
                let settings = self.ring(state.index)?.1;
                settings.size =
                    size.ok_or_else(|| Refusal::Other(format!("a ring cannot have {} descriptors", state.value)))?;
            }
            Request::SetVringBase => {
                let state = VringState::decode(body)?;
                let base = u16::try_from(state.value);
                self.ring(state.index)?.1.base =
                    base.map_err(|_| Refusal::Other(format!("{:#x} is no index of a split ring", state.value)))?;
            }
            Request::SetVringAddr => {
                let address = VringAddress::decode(body)?;
                self.ring(address.index)?.1.address = Some(address);
                self.move_ring(address.index)?;
                self.apply_log();
            }
            Request::GetVringBase => {
                let state = VringState::decode(body)?;
                let base = self.stop(state.index)?;
                return Ok(Answer::Body(VringState { index: state.index, value: u32::from(base) }.encode()));
            }
            Request::SetVringEnable => {
                let state = VringState::decode(body)?;
                let (index, settings) = self.ring(state.index)?;
                settings.enabled = state.value != 0;
                self.apply_enabled(index);
            }
            Request::SetVringKick => {
                let (index, descriptor) = self.ring_descriptor(body, descriptors)?;
                refuse_if(descriptor.is_none(), || format!("queue {index} cannot be polled, it has to be kicked"))?;
                let kick = descriptor.map(Notifier::new);
                self.worker.set_kick(index, kick).map_err(|e| Refusal::Other(format!("a kick descriptor: {e}")))?;
                self.start(index)?;
            }
            Request::SetVringCall => {
                let (index, descriptor) = self.ring_descriptor(body, descriptors)?;
                if let Some(ring) = self.worker.rings().get(index) {
                    ring.vring.set_call(descriptor.map(Notifier::new));
                }
            }
            Request::SetVringErr => {
                let (index, descriptor) = self.ring_descriptor(body, descriptors)?;
                self.worker.set_error(index, descriptor.map(Notifier::new));
            }
            Request::SetBackendReqFd => {
                let socket = only(descriptors)?;
                let kind = fstat(&socket).map(|status| FileType::from_raw_mode(status.st_mode));
                refuse_if(!matches!(kind, Ok(FileType::Socket)), || {
                    "the channel to the front end is no socket".into()
                })?;
                self.front_end.set_channel(socket);
            }
            Request::GetConfig => return Ok(Answer::Body(self.read_config(body))),
            Request::SetConfig => {
                let piece = ConfigPiece::decode(body)?;
                self.device.write_config(piece.offset, piece.bytes);
            }
            Request::PostcopyAdvise => match self.postcopy.advise() {
                Ok(descriptor) => return Ok(Answer::WithDescriptor(Vec::new(), descriptor)),
                Err(error) => {
                    self.faults.note(FaultKind::Refused, &format_args!("PostcopyAdvise: {error}"));
                    return Ok(Answer::Body(Vec::new()));
                }
            },
            Request::PostcopyListen => {
                let listening = self.postcopy.listen(&self.regions);
                listening.map_err(|error| Refusal::Other(format!("memory that comes by postcopy: {error}")))?;
            }
            Request::PostcopyEnd => self.postcopy.end(),
            Request::GetInflightFd => {
                let (area, memfd) = self.new_area(InflightArea::decode(body)?)?;
                return Ok(Answer::WithDescriptor(area.encode(body.len()), memfd));
            }
            Request::SetInflightFd => self.set_area(InflightArea::decode(body)?, descriptors)?,
        }
        Ok(Answer::Done)
    }

    /// The connection has ended.
    pub(crate) fn end(&mut self) {
        self.front_end.disconnect();
        // Nobody brings the memory that requests in flight wait for.
        self.postcopy.end();
        self.reset();
        // A device that waits for the next guest must not keep the memory of this one.
        if let Some(Ok(none)) = self.ram.take().map(|_| Ram::new(Vec::new())) {
            self.device.set_memory(Arc::new(none));
        }
    }

    const fn offered_protocol(&self) -> u64 {
        PROTOCOL | if self.postcopy.is_possible() { PAGE_FAULT } else { 0 }
    }

    fn offered(&self) -> u64 {
        let log = if self.device.marks_written_memory() { LOG_ALL } else { 0 };
        self.device.features() | VERSION_1 | EVENT_INDEX | PROTOCOL_FEATURES | log
    }

    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        refuse_if(features & !self.offered() != 0, || format!("features {features:#x} were not offered"))?;
        let (others, log) = ((features ^ self.features) & !LOG_ALL, (features ^ self.features) & LOG_ALL);
        if self.paused && others == 0 {
            // Rings begin disabled, of either driver.
            self.rings.iter_mut().for_each(|settings| settings.enabled = false);
            self.features = features;
            self.apply_log();
            return Ok(());
        }
        if self.acked && others == 0 && log != 0 {
            // A migration begins or ends: the rings run on.
            self.features = features;
            self.apply_log();
            return Ok(());
        }
        self.reset();
        self.features = features;
        self.apply_log();
        self.ack_features();
        Ok(())
    }

    /// Gives the device the acknowledged features, also of a driver that begins with features negotiated before.
    fn ack_features(&mut self) {
        if !std::mem::replace(&mut self.acked, true) {
            self.device.ack_features(self.features & self.device.features());
            self.touched = true;
        }
    }

    /// Has the rings mark what is written, or not.
    fn apply_log(&self) {
        let log = self.log.as_ref().filter(|_| self.features & LOG_ALL != 0);
        for (settings, ring) in self.rings.iter().zip(self.worker.rings()) {
            let used = settings.address.filter(|address| address.flags & 1 != 0).map(|address| address.log);
            ring.vring.set_log(log.map(|log| RingLog { log: log.clone(), used }));
        }
    }

    /// Stops every ring; the device forgets the driver.
    fn reset(&mut self) {
        self.halt_all();
        for index in 0..self.rings.len() {
            self.tear_down(index);
        }
        self.rings.fill_with(VringSettings::default);
        (0..self.rings.len()).for_each(|index| self.front_end.set_idle(index, false));
        (self.paused, self.driver_resumed, self.acked) = (false, false, false);
        if std::mem::take(&mut self.touched) {
            self.device.reset();
        }
    }

    /// The reply is as long as the request; an empty one reports a failure.
    fn read_config(&self, body: &[u8]) -> Vec<u8> {
        match ConfigPiece::decode(body) {
            Ok(piece) => {
                let mut bytes = [0; MAX_CONFIG];
                let (bytes, _) = bytes.split_at_mut(piece.bytes.len());
                self.device.read_config(piece.offset, bytes);
                ConfigPiece { bytes, ..piece }.encode()
            }
            Err(error) => {
                self.faults.note(FaultKind::Refused, &format_args!("GetConfig: {error}"));
                Vec::new()
            }
        }
    }

    // ---- memory

    fn set_table(&mut self, body: &[u8], descriptors: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let table = TableRegion::decode_table(body)?;
        refuse_if(table.len() != descriptors.len(), || {
            format!("{} memory regions with {} descriptors", table.len(), descriptors.len())
        })?;
        let regions: Result<Vec<_>, _> =
            table.into_iter().zip(descriptors).map(|(region, fd)| self.map(region, fd)).collect();
        let regions = regions?;
        let answer = self.postcopy.addresses(body, &regions).map_or(Answer::Done, Answer::Body);
        self.set_memory(regions)?;
        Ok(answer)
    }

    fn add_region(&mut self, body: &[u8], descriptors: Vec<OwnedFd>) -> Result<Answer, Refusal> {
        let region = TableRegion::decode(body)?;
        // Before it is mapped: the number of regions is bounded.
        if self.regions.len() >= MAX_REGIONS {
            return Err(RamError::TooMany { got: self.regions.len() + 1, most: MAX_REGIONS }.into());
        }
        let region = self.map(region, only(descriptors)?)?;
        let answer = self.postcopy.addresses(body, std::slice::from_ref(&region)).map_or(Answer::Done, Answer::Body);
        let mut regions = self.regions.clone();
        regions.push(region);
        self.set_memory(regions)?;
        Ok(answer)
    }

    /// Maps a region, and has its faults reported if its memory may not have come.
    fn map(&mut self, region: TableRegion, descriptor: OwnedFd) -> Result<RamRegion, Refusal> {
        let TableRegion { guest_address, length, user_address, file_offset } = region;
        let mapped = RamRegion::map(guest_address, length, user_address, descriptor, file_offset)?;
        let kernel = |source| RamError::Kernel { guest_address, length, operation: "userfaultfd", source };
        self.postcopy.register(&mapped).map_err(kernel)?;
        Ok(mapped)
    }

    fn remove_region(&mut self, gone: TableRegion) -> Result<(), Refusal> {
        let mut regions = self.regions.clone();
        let same = |region: &RamRegion| {
            (region.guest_address, region.length, region.user_address)
                == (gone.guest_address, gone.length, gone.user_address)
        };
        regions.retain(|region| !same(region));
        refuse_if(regions.len() == self.regions.len(), || {
            format!("there is no memory region at guest address {:#x} to remove", gone.guest_address)
        })?;
        self.set_memory(regions)
    }

    /// The device does not work while the memory is exchanged; rings that run continue in the new one.
    fn set_memory(&mut self, regions: Vec<RamRegion>) -> Result<(), Refusal> {
        let ram = Arc::new(Ram::new(regions.clone())?);
        self.halt_all();
        self.regions = regions;
        self.ram = Some(ram.clone());
        self.touched = true;
        self.device.set_memory(ram.clone());
        for index in 0..self.rings.len() {
            let (Some(settings), Some(ring)) = (self.rings.get(index), self.worker.rings().get(index)) else {
                continue;
            };
            if settings.started {
                let addresses = settings.address.as_ref().and_then(|address| addresses(&ram, address));
                let moved = addresses.ok_or_else(|| "it is not in the new memory".to_owned());
                let moved =
                    moved.and_then(|addresses| ring.vring.remap(addresses, &ram).map_err(|error| error.to_string()));
                if let Err(why) = moved {
                    self.faults.note(FaultKind::Ring, &format_args!("queue {index}: {why}; it stops"));
                    let next = self.tear_down(index);
                    if let Some(settings) = self.rings.get_mut(index) {
                        (settings.started, settings.address) = (false, None);
                        settings.base = next.unwrap_or(settings.base);
                    }
                    self.device.queue_stopped(index);
                }
            }
            self.apply_enabled(index);
        }
        Ok(())
    }

    // ---- rings

    fn ring(&mut self, index: u32) -> Result<(usize, &mut VringSettings), Refusal> {
        let rings = self.rings.len();
        let unknown = || Refusal::Other(format!("there is no queue {index}, the device has {rings}"));
        let index = usize::try_from(index).map_err(|_| unknown())?;
        Ok((index, self.rings.get_mut(index).ok_or_else(unknown)?))
    }

    fn ring_descriptor(&mut self, body: &[u8], descriptors: Vec<OwnedFd>) -> Result<(usize, Option<OwnedFd>), Refusal> {
        let which = VringFd::decode(body)?;
        let (index, _) = self.ring(u32::from(which.index))?;
        if which.no_fd {
            refuse_if(!descriptors.is_empty(), || "a descriptor with a message that announces no descriptor".into())?;
            return Ok((index, None));
        }
        Ok((index, Some(only(descriptors)?)))
    }

    /// A ring that gets a kick descriptor is started, or continues with the new descriptor.
    fn start(&mut self, index: usize) -> Result<(), Refusal> {
        if self.rings.get(index).is_some_and(|settings| !settings.started) {
            if self.is_another_driver(index) {
                self.change_driver();
            }
            self.set_up(index)?;
        }
        self.apply_enabled(index);
        // The driver sends no kick for buffers that it made available before the first one.
        self.front_end.kick(index);
        Ok(())
    }

    /// Whether a ring that is about to start shows that the driver is not the one from before all rings were stopped.
    /// (A driver whose rings all stopped at the beginning cannot be distinguished from the next one, and has left no
    /// state.)
    fn is_another_driver(&mut self, index: usize) -> bool {
        let paused = self.paused;
        let Some(settings) = self.rings.get_mut(index) else { return false };
        let stopped_at = settings.stopped_at.take();
        let base = settings.base;
        self.paused = paused && self.rings.iter().any(|settings| settings.stopped_at.is_some());
        paused && stopped_at.is_some_and(|at| at != base)
    }

    /// The device forgets the driver; rings that the next driver has already started begin again.
    fn change_driver(&mut self) {
        (self.paused, self.driver_resumed, self.acked) = (false, false, false);
        self.rings.iter_mut().for_each(|settings| settings.known = false);
        let started: Vec<usize> =
            (0..).zip(&self.rings).filter_map(|(index, settings)| settings.started.then_some(index)).collect();
        for &index in &started {
            self.halt(index);
            let next = self.worker.rings().get(index).and_then(|ring| ring.vring.tear_down());
            if let Some(settings) = self.rings.get_mut(index) {
                settings.started = false;
                settings.base = next.unwrap_or(settings.base);
            }
        }
        self.device.reset();
        for index in started {
            // It has just succeeded for this ring.
            if let Err(error) = self.set_up(index) {
                self.faults.note(FaultKind::Ring, &format_args!("queue {index}: {error}; it stops"));
            }
            self.apply_enabled(index);
        }
    }

    /// Sets a ring up as the front end has set it.
    fn set_up(&mut self, index: usize) -> Result<(), Refusal> {
        self.ack_features();
        if let (Some(settings), Some(ring)) = (self.rings.get_mut(index), self.worker.rings().get(index)) {
            let address =
                settings.address.ok_or_else(|| Refusal::Other(format!("queue {index} has no address yet")))?;
            let ram = self.ram.as_ref().ok_or_else(|| Refusal::Other(NO_MEMORY.into()))?;
            let addresses = addresses(ram, &address)
                .ok_or_else(|| Refusal::Other(format!("queue {index} is outside of the memory table")))?;
            let size = settings.size;
            // A ring without an in-flight area is not tracked.
            let tracked = self.inflight.as_ref().filter(|(_, about)| index < usize::from(about.queues));
            let inflight = tracked.map(|(area, about)| {
                InflightRing::of(area, index, about.queue_size, size).ok_or_else(|| {
                    let room = about.queue_size;
                    Refusal::Other(format!("queue {index} has {size} descriptors, its inflight area is for {room}"))
                })
            });
            let inflight = inflight.transpose()?;
            let setup = RingSetup {
                size,
                addresses,
                base: settings.base,
                event_index: self.features & EVENT_INDEX != 0,
                inflight,
            };
            let has_history = ring.vring.set_up(setup, ram)?;
            ring.broken.store(false, Ordering::SeqCst);
            settings.started = true;
            self.touched = true;
            let known = std::mem::replace(&mut settings.known, true);
            if has_history && !known && !std::mem::replace(&mut self.driver_resumed, true) {
                self.device.driver_resumed();
            }
        }
        Ok(())
    }

    /// The address of a ring that is started already has changed.
    fn move_ring(&mut self, index: u32) -> Result<(), Refusal> {
        let (index, settings) = self.ring(index)?;
        if !settings.started {
            return Ok(());
        }
        let (Some(address), Some(ram)) = (settings.address, self.ram.clone()) else { return Ok(()) };
        let addresses = addresses(&ram, &address)
            .ok_or_else(|| Refusal::Other(format!("queue {index} is outside of the memory table")))?;
        self.halt(index);
        if let Some(ring) = self.worker.rings().get(index) {
            ring.vring.remap(addresses, &ram)?;
            self.apply_enabled(index);
        }
        Ok(())
    }

    fn apply_enabled(&mut self, index: usize) {
        let (Some(settings), Some(ring)) = (self.rings.get_mut(index), self.worker.rings().get(index)) else { return };
        let enabled = settings.started && (settings.enabled || self.features & PROTOCOL_FEATURES == 0);
        settings.ran |= enabled;
        self.front_end.set_idle(index, settings.ran && !enabled);
        // The worker that finds it invalid sets both in the other order.
        if ring.broken.load(Ordering::SeqCst) {
            self.front_end.set_idle(index, true);
        }
        if enabled {
            ring.vring.set_phase(Phase::Running);
            self.front_end.kick(index);
        } else {
            self.halt(index);
        }
    }

    /// Returns when the device has left the ring and has no requests of it in flight; it does not return to it.
    fn halt(&self, index: usize) {
        if let Some(ring) = self.worker.rings().get(index) {
            ring.vring.set_phase(Phase::Draining);
            self.worker.wait_until_idle(index);
            ring.vring.set_phase(Phase::Stopped);
        }
    }

    /// Halts all rings.
    fn halt_all(&self) {
        // First all of them, so that they are drained at the same time.
        self.worker.rings().iter().for_each(|ring| ring.vring.set_phase(Phase::Draining));
        (0..self.rings.len()).for_each(|index| self.halt(index));
    }

    fn tear_down(&self, index: usize) -> Option<u16> {
        self.halt(index);
        let ring = self.worker.rings().get(index)?;
        // It only fails where there is something to add.
        let _ = self.worker.set_kick(index, None);
        ring.vring.tear_down()
    }

    /// Stops a ring and returns the index at which it continues.
    fn stop(&mut self, index: u32) -> Result<u16, Refusal> {
        let (index, settings) = self.ring(index)?;
        (settings.started, settings.address) = (false, None);
        let next = self.tear_down(index);
        let Some(settings) = self.rings.get_mut(index) else { return Ok(0) };
        settings.base = next.unwrap_or(settings.base);
        let base = settings.base;
        if next.is_some() {
            settings.stopped_at = next;
            self.paused = !self.rings.iter().any(|settings| settings.started);
            self.apply_enabled(index);
            self.device.queue_stopped(index);
        }
        Ok(base)
    }

    // ---- inflight areas

    fn new_area(&self, wanted: InflightArea) -> Result<(InflightArea, OwnedFd), Refusal> {
        let queues = usize::from(wanted.queues);
        let possible = queues <= self.rings.len() && wanted.queue_size.is_power_of_two();
        refuse_if(!possible, || format!("no inflight area for {queues} queues of {} descriptors", wanted.queue_size))?;
        let length = (queues * bytes_for_ring(wanted.queue_size)) as u64;
        let failed = |errno: rustix::io::Errno| Refusal::Other(format!("an inflight area of {length} bytes: {errno}"));
        let memfd = memfd_create("limosa-inflight", MemfdFlags::CLOEXEC).map_err(failed)?;
        ftruncate(&memfd, length).map_err(failed)?;
        Ok((InflightArea { length, offset: 0, ..wanted }, memfd))
    }

    fn set_area(&mut self, area: InflightArea, descriptors: Vec<OwnedFd>) -> Result<(), Refusal> {
        let memfd = only(descriptors)?;
        let status = fstat(&memfd).map_err(|errno| Refusal::Other(format!("an inflight area: {errno}")))?;
        let end = area.offset.checked_add(area.length).and_then(|end| i64::try_from(end).ok());
        let needed = u64::from(area.queues) * bytes_for_ring(area.queue_size) as u64;
        let possible = FileType::from_raw_mode(status.st_mode) == FileType::RegularFile
            && end.is_some_and(|end| end <= status.st_size)
            && area.offset.is_multiple_of(4096)
            && usize::from(area.queues) <= self.rings.len()
            && area.queues > 0
            && area.queue_size.is_power_of_two()
            && (needed..=2 * needed + 4096).contains(&area.length);
        refuse_if(!possible, || format!("{area:?} does not fit the device or its file of {} bytes", status.st_size))?;
        let file = FileOffset::from_arc(Arc::new(File::from(memfd)), area.offset);
        let length = usize::try_from(area.length).map_err(|_| Refusal::Other("a huge inflight area".into()))?;
        let mapped = MmapRegion::from_file(file, length);
        let mapped = mapped.map_err(|error| Refusal::Other(format!("mapping the inflight area: {error}")))?;
        self.inflight = Some((Arc::new(mapped), area));
        Ok(())
    }
}

fn addresses(ram: &Ram, address: &VringAddress) -> Option<RingAddresses> {
    Some(RingAddresses {
        descriptors: ram.to_guest_address(address.descriptors)?,
        available: ram.to_guest_address(address.available)?,
        used: ram.to_guest_address(address.used)?,
    })
}

fn only(mut descriptors: Vec<OwnedFd>) -> Result<OwnedFd, Refusal> {
    let got = descriptors.len();
    match (descriptors.pop(), got) {
        (Some(descriptor), 1) => Ok(descriptor),
        _ => Err(Refusal::Other(format!("{got} descriptors where one is wanted"))),
    }
}

fn refuse_if(wrong: bool, why: impl FnOnce() -> String) -> Result<(), Refusal> {
    if wrong { Err(Refusal::Other(why())) } else { Ok(()) }
}
