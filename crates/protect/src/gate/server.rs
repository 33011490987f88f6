//! The gate: one thread between a VM, its network and the keeper of its checkpoints.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::{Duration, Instant};

use limosa_migrate::output::OutputCounters;
use limosa_page::to_u64;
use limosa_socket::{SocketAccess, SocketFile, listen_with};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use uuid::Uuid;

use super::error::GateError;
use super::fences::{ConnectedVm, Fenced, Fences};
use super::frame::PREFIX;
use super::hold::{Hold, Offered, OrderError};
use super::keeper::{Connected, KeeperPort};
use super::message::{Answer, Hello, Order, VERSION};
use super::network::{LinkChange, Network, NetworkAddress};
use super::vm::{Accepted, VmLost, VmPort, VmRead, pid_namespace};

/// Bytes of frames for the VM that it has not read.
const INBOUND_LIMIT: u64 = 1 << 20;
/// Connections that may wait at a socket.
const BACKLOG: i32 = 8;
/// The place of the first visitor among the sockets that are waited for.
const VISITORS: usize = 6;
/// The longest time that a keeper can have output held after its own end.
const LONGEST_GRACE: Duration = Duration::from_secs(3600);
/// Bytes after which the drain of a seal ends: many times what a socket holds of a VM that stands still.
const DRAIN_MAX: u64 = 64 << 20;

/// The sockets and the network of a gate.
#[derive(Debug, Clone, Copy)]
pub struct GateAddresses<'a> {
    /// The socket that the VM connects to.
    pub vm: &'a Path,
    /// The socket that the keeper connects to.
    pub keeper: &'a Path,
    /// The VM's network.
    pub network: &'a NetworkAddress,
}

/// Options of a gate.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GateOptions {
    /// Most bytes of frames that are held; small frames count 64 bytes more. At half of it a checkpoint is asked for,
    /// beyond it frames are dropped.
    pub limit: u64,
    /// How long output is still held when the keeper is gone without a word: a VM that dies with it has not been seen
    /// to be ahead of its checkpoint. After it the VM continues without protection. A keeper may ask for more, if the
    /// VM may continue elsewhere.
    pub grace: Duration,
    /// Access to the VM's socket; the keeper's is for the owner alone.
    pub access: SocketAccess,
}

impl Default for GateOptions {
    /// 64 MiB, a second, the owner alone.
    fn default() -> Self {
        Self { limit: 64 << 20, grace: Duration::from_secs(1), access: SocketAccess::default() }
    }
}

/// A gate that has ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GateReport {
    /// Frames that the VM has sent.
    pub sent_frames: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Frames that the network has sent.
    pub received_frames: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames of the network that no VM took.
    pub unreceived_frames: u64,
    /// Frames of the VM that the network did not take, while nothing was held.
    pub undelivered_frames: u64,
    /// Number of series of checkpoints.
    pub series: u64,
    /// Frames held in all series.
    pub held: OutputCounters,
}

/// A gate between a VM and its network.
#[derive(Debug)]
pub struct Gate {
    vm: VmPort,
    keeper: KeeperPort,
    network: Network,
    hold: Hold,
    fences: Fences,
    /// The keeper, until its first seal: nothing has changed until then.
    greeted: Option<Hello>,
    /// It was reported that a fenced VM has come back.
    refusal_reported: bool,
    /// How long output is held after the end of a keeper that has no wish.
    shortest_grace: Duration,
    /// How long it is held after the end of this keeper.
    grace: Duration,
    /// The keeper is gone without a word, since then.
    lost: Option<Instant>,
    /// The keeper knows that the room is nearly full.
    full_reported: bool,
    report: GateReport,
    first_error: Option<io::Error>,
    _files: [SocketFile; 2],
}

impl Gate {
    /// Opens a gate: VMs and keepers can connect from now on. A network that cannot be reached is tried again later.
    ///
    /// # Errors
    /// A socket is in use or cannot be.
    pub fn open(addresses: GateAddresses<'_>, options: &GateOptions) -> Result<Self, GateError> {
        let listen = |path: &Path, access| {
            let listening = listen_with(path, access, BACKLOG);
            listening.map_err(|source| GateError::Listen { path: path.to_owned(), source })
        };
        let (vm, vm_file) = listen(addresses.vm, options.access)?;
        let (keeper, keeper_file) = listen(addresses.keeper, SocketAccess::default())?;
        let (network, first_error) = Network::new(addresses.network.clone(), options.limit);
        Ok(Self {
            vm: VmPort::new(UnixListener::from(vm), INBOUND_LIMIT),
            keeper: KeeperPort::new(UnixListener::from(keeper)),
            network,
            hold: Hold::new(options.limit),
            fences: Fences::default(),
            greeted: None,
            refusal_reported: false,
            shortest_grace: options.grace,
            grace: options.grace,
            lost: None,
            full_reported: false,
            report: GateReport::default(),
            first_error,
            _files: [vm_file, keeper_file],
        })
    }

    /// Forwards frames until `stop` can be read; `notice` is called with a line for each change.
    ///
    /// # Errors
    /// The system refuses to wait for sockets or to accept connections.
    pub fn run(mut self, stop: BorrowedFd<'_>, notice: &dyn Fn(&str)) -> Result<GateReport, GateError> {
        if let Some(error) = self.first_error.take() {
            notice(&format!("{}: {error}; trying again", self.network.address()));
        }
        while !self.step(stop, notice)? {}
        self.end_series();
        self.report.unreceived_frames = self.vm.undelivered();
        Ok(self.report)
    }

    /// Waits for something to do and does it. Returns whether it was told to stop.
    fn step(&mut self, stop: BorrowedFd<'_>, notice: &dyn Fn(&str)) -> Result<bool, GateError> {
        let ready = self.wait(stop)?;
        if ready.stop {
            return Ok(true);
        }
        let failed = |what| move |source| GateError::System { what, source };
        if ready.vm_waits {
            match self.vm.accept(&self.fences).map_err(failed("accept a VM"))? {
                Accepted::Vm => notice("the VM is connected"),
                // It tries again and again.
                Accepted::Refused(pid) if !std::mem::replace(&mut self.refusal_reported, true) => {
                    notice(&format!("{} is refused: its VM was failed over", process_name(pid)));
                }
                Accepted::Unidentified if !std::mem::replace(&mut self.refusal_reported, true) => {
                    notice(
                        "a process that cannot be identified is refused: it may be that of the VM that was failed over",
                    );
                }
                Accepted::Refused(_) | Accepted::Unidentified | Accepted::None => {}
            }
        }
        if ready.vm {
            self.read_vm(notice);
        }
        if ready.keeper_waits {
            self.keeper.accept().map_err(failed("accept a keeper"))?;
        }
        let admitted = ready.visitors && self.hear_visitors(notice);
        if (ready.keeper || admitted)
            && let Err(error) = self.obey(notice)
        {
            self.lose_keeper(&error, notice);
        }
        if ready.network {
            let (vm, report) = (&mut self.vm, &mut self.report);
            let change = self.network.read(|frame| {
                report.received_frames += 1;
                report.received_bytes += to_u64(frame.len().saturating_sub(PREFIX));
                vm.push(frame);
            });
            self.note(change, notice);
        }
        self.write(notice);
        self.end_grace(notice);
        let change = self.network.retry(Instant::now());
        self.note(change, notice);
        Ok(false)
    }

    /// Waits until a socket is ready, or for the next deadline.
    fn wait(&self, stop: BorrowedFd<'_>) -> Result<Ready, GateError> {
        let both = |read, write| {
            let read = if read { PollFlags::IN } else { PollFlags::empty() };
            if write { read | PollFlags::OUT } else { read }
        };
        let visitors = self.keeper.visitor_fds().map(|fd| (Some(fd), PollFlags::IN));
        let wanted: [(Option<BorrowedFd<'_>>, PollFlags); VISITORS] = [
            (Some(stop), PollFlags::IN),
            (self.vm.listener_fd(), PollFlags::IN),
            (self.vm.vm_fd(), both(true, self.vm.has_frames())),
            (Some(self.keeper.listener_fd()), PollFlags::IN),
            (self.keeper.keeper_fd(), both(true, self.keeper.has_answers())),
            // One whose frames are not wanted is left out, as its end would be reported all the time.
            (self.network.link_fd(), both(!self.vm.is_full(), self.network.has_frames())),
        ];
        let now = Instant::now();
        let deadlines = [self.lost.map(|lost| lost + self.grace), self.network.retry_at()];
        let time = deadlines.into_iter().flatten().min().map(|at| at.saturating_duration_since(now));
        let time = time.and_then(|time| Timespec::try_from(time).ok());
        let used: Vec<(usize, BorrowedFd<'_>, PollFlags)> = (0..)
            .zip(wanted.into_iter().chain(visitors))
            .filter_map(|(index, (fd, flags))| fd.filter(|_| !flags.is_empty()).map(|fd| (index, fd, flags)))
            .collect();
        let mut fds: Vec<PollFd<'_>> =
            used.iter().map(|(_, fd, flags)| PollFd::from_borrowed_fd(*fd, *flags)).collect();
        match poll(&mut fds, time.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(errno) => return Err(GateError::System { what: "wait for sockets", source: errno.into() }),
        }
        // An end or an error is found by reading.
        let is_any_ready = |is_wanted: &dyn Fn(usize) -> bool| {
            let mut all = used.iter().zip(&fds);
            let write_alone = PollFlags::OUT;
            all.any(|((index, ..), fd)| is_wanted(*index) && !(fd.revents() - write_alone).is_empty())
        };
        let is_ready = |wanted: usize| is_any_ready(&|index| index == wanted);
        Ok(Ready {
            stop: is_ready(0),
            vm_waits: is_ready(1),
            vm: is_ready(2),
            keeper_waits: is_ready(3),
            keeper: is_ready(4),
            network: is_ready(5) && !self.vm.is_full(),
            visitors: is_any_ready(&|index| index >= VISITORS),
        })
    }

    /// Reads frames that the VM has sent. Returns whether more may be there.
    fn read_vm(&mut self, notice: &dyn Fn(&str)) -> bool {
        let now = Instant::now();
        let Self { vm, keeper, network, hold, full_reported, report, .. } = self;
        let read = vm.read(|frame| {
            report.sent_frames += 1;
            report.sent_bytes += to_u64(frame.len().saturating_sub(PREFIX));
            match hold.offer(frame, now) {
                Offered::Passed => network.push(frame),
                Offered::First => keeper.answer(Answer::Output),
                Offered::Held | Offered::Dropped => {}
            }
            if hold.is_nearly_full() && !std::mem::replace(full_reported, true) {
                keeper.answer(Answer::Full);
            }
        });
        match read {
            VmRead::Empty => false,
            VmRead::More => true,
            VmRead::Lost(VmLost(error)) => {
                notice(&format!("the VM is not connected any more{}", reason(&error)));
                false
            }
        }
    }

    /// Hears who has connected, and does what they want. Returns whether one has become the keeper.
    fn hear_visitors(&mut self, notice: &dyn Fn(&str)) -> bool {
        let mut admitted = false;
        while let Some((visitor, order)) = self.keeper.next_visitor() {
            match order {
                Order::Hello(hello) => match self.refusal(&hello) {
                    Some(refusal) => visitor.dismiss(refusal),
                    None => {
                        self.welcome(visitor, hello, notice);
                        admitted = true;
                    }
                },
                Order::Fence { epoch, protection } => visitor.dismiss(self.fence(protection, epoch, notice)),
                Order::Query { protection } => visitor.dismiss(match self.fences.query(protection) {
                    Fenced::Now(vm) | Fenced::Before(vm) => fenced_answer(vm.as_ref()),
                    Fenced::Unknown => Answer::Unknown,
                }),
                // A keeper begins with a hello.
                Order::Seal(_) | Order::Commit(_) | Order::Abort(_) | Order::HoldWhenLost(_) => {}
            }
        }
        admitted
    }

    /// The answer to a keeper that does not get the gate.
    fn refusal(&self, hello: &Hello) -> Option<Answer> {
        if self.keeper.has_keeper() {
            return Some(Answer::Busy);
        }
        if !self.fences.admits(hello.protection, hello.vm) {
            return Some(Answer::Refused);
        }
        self.other_vm(hello).map(Answer::OtherVm)
    }

    /// Returns the process that is connected if it is another one than that of a keeper's VM.
    fn other_vm(&self, hello: &Hello) -> Option<u32> {
        // Numbers of processes can be compared in one namespace alone.
        let is_comparable = hello.namespace != 0 && hello.namespace == pid_namespace();
        let vm = hello.vm.filter(|_| is_comparable)?;
        self.vm.pid().filter(|connected| *connected != vm)
    }

    /// Takes a keeper. Until its first seal it changes nothing: what is held of the last series stays held for the
    /// grace, and that can be fenced.
    fn welcome(&mut self, keeper: Connected, hello: Hello, notice: &dyn Fn(&str)) {
        self.keeper.admit(keeper);
        self.keeper.answer(Answer::Welcome { version: VERSION, has_vm: self.vm.is_connected() });
        self.greeted = Some(hello);
        if hello.version != VERSION {
            let _ = self.keeper.write();
            let version = hello.version;
            self.lose_keeper(&io::Error::other(format!("it speaks version {version}, this is {VERSION}")), notice);
        }
    }

    /// Fences the VM of a protection, which continues elsewhere from a checkpoint: cuts it and its keeper off, lets the
    /// frames of the checkpoint out and drops later ones.
    fn fence(&mut self, protection: Uuid, epoch: u64, notice: &dyn Fn(&str)) -> Answer {
        let (vm, is_new) = match self.fences.fence(protection) {
            Fenced::Now(vm) => (vm, true),
            Fenced::Before(vm) => (vm, false),
            Fenced::Unknown => return Answer::Unknown,
        };
        let process = vm.as_ref().and_then(|vm| vm.process.as_ref());
        let answer = fenced_answer(vm.as_ref());
        if !is_new {
            return answer;
        }
        let network = &mut self.network;
        // If it is not sealed, nothing of it is held.
        let _ = self.hold.commit(epoch, Instant::now(), |frames| network.push_all(frames));
        let change = self.network.write();
        self.note(change, notice);
        if let Some(vm) = &vm {
            self.vm.cut(vm);
        }
        // The survivor may be connected already, and has a hold of its own when it is protected.
        let is_other = |hello: &Hello| hello.vm.is_some() && self.fences.admits(hello.protection, hello.vm);
        if !self.greeted.as_ref().is_some_and(is_other) {
            self.keeper.refuse();
            self.greeted = None;
        }
        self.refusal_reported = false;
        notice(&format!(
            "the VM was failed over{}",
            process.map(|process| format!("; {} is refused", process_name(process.pid()))).unwrap_or_default()
        ));
        self.release(notice);
        answer
    }

    /// Reads the keeper's orders and follows them.
    fn obey(&mut self, notice: &dyn Fn(&str)) -> io::Result<()> {
        let read = self.keeper.read();
        // Orders that came before its end count.
        while let Some(order) = self.keeper.next_order()? {
            let refused = |error| io::Error::new(io::ErrorKind::InvalidData, error);
            match order {
                Order::Hello(_) | Order::Fence { .. } | Order::Query { .. } => {
                    return Err(io::Error::other("it begins twice on one connection"));
                }
                Order::Seal(epoch) => {
                    self.drain(notice);
                    self.begin_greeted(notice)?;
                    let begun = !self.hold.is_holding();
                    self.count_undelivered();
                    self.hold.seal(epoch).map_err(refused)?;
                    self.keeper.answer(Answer::Sealed(epoch));
                    if begun {
                        notice("output waits for checkpoints");
                    }
                }
                // What is held is another series'.
                Order::Commit(epoch) if self.greeted.is_some() => return Err(refused(OrderError::Unsealed { epoch })),
                Order::Abort(epoch) if self.greeted.is_some() => {
                    self.keeper.answer(Answer::Counters(OutputCounters::default()));
                    self.keeper.answer(Answer::Aborted(epoch));
                }
                Order::Commit(epoch) => {
                    let network = &mut self.network;
                    self.hold.commit(epoch, Instant::now(), |frames| network.push_all(frames)).map_err(refused)?;
                    let change = self.network.write();
                    self.note(change, notice);
                    self.count_undelivered();
                    self.full_reported = self.hold.is_nearly_full();
                    if self.full_reported {
                        self.keeper.answer(Answer::Full);
                    }
                    self.keeper.answer(Answer::Counters(self.hold.counters()));
                }
                Order::HoldWhenLost(millis) if self.greeted.is_none() => {
                    self.grace = self.grace.max(Duration::from_millis(millis).min(LONGEST_GRACE));
                }
                Order::HoldWhenLost(_) => {}
                Order::Abort(epoch) => {
                    // A VM that has died may have left frames in its socket that no checkpoint knows of.
                    self.drain(notice);
                    self.release(notice);
                    self.keeper.answer(Answer::Counters(self.hold.counters()));
                    self.keeper.answer(Answer::Aborted(epoch));
                }
            }
        }
        read
    }

    /// Reads everything that a VM has sent that stands still. What it has not read belongs to the next epoch, and
    /// leaves later.
    fn drain(&mut self, notice: &dyn Fn(&str)) {
        let from = self.report.sent_bytes;
        while self.read_vm(notice) && self.report.sent_bytes - from < DRAIN_MAX {}
    }

    /// Begins the series of a keeper that seals for the first time.
    fn begin_greeted(&mut self, notice: &dyn Fn(&str)) -> io::Result<()> {
        let Some(hello) = self.greeted else { return Ok(()) };
        if let Some(process) = self.other_vm(&hello) {
            self.keeper.answer(Answer::OtherVm(process));
            let _ = self.keeper.write();
            return Err(io::Error::other(format!("its VM is not process {process}, which is connected")));
        }
        self.begin_series();
        let vm = self.vm.connected();
        if vm.is_none() {
            notice("no VM is connected: nothing of it is held until one is");
        }
        self.fences.begin(hello.protection, vm);
        self.greeted = None;
        Ok(())
    }

    /// Holds nothing any more.
    fn release(&mut self, notice: &dyn Fn(&str)) {
        let held = self.hold.is_holding();
        self.hold.abort();
        if held {
            notice("output leaves at once: no protection");
        }
        (self.lost, self.full_reported, self.grace) = (None, false, self.shortest_grace);
    }

    fn begin_series(&mut self) {
        self.end_series();
        self.hold.begin();
        self.report.series += 1;
        (self.lost, self.full_reported, self.grace) = (None, false, self.shortest_grace);
    }

    /// Adds the counters of a series to the report.
    fn end_series(&mut self) {
        self.count_undelivered();
        self.hold.abort();
        self.report.held.add(&self.hold.counters());
    }

    fn count_undelivered(&mut self) {
        let undelivered = self.network.take_undelivered();
        if self.hold.is_holding() {
            self.hold.undelivered(undelivered);
        } else {
            self.report.undelivered_frames = self.report.undelivered_frames.saturating_add(undelivered);
        }
    }

    fn lose_keeper(&mut self, error: &io::Error, notice: &dyn Fn(&str)) {
        self.keeper.close();
        self.full_reported = false;
        let has_begun = self.greeted.take().is_none();
        if has_begun && self.hold.is_holding() {
            notice(&format!("the keeper is gone{}", reason(error)));
            self.lost = Some(Instant::now());
        }
    }

    /// Ends the hold of a keeper that is gone, when its time is over. If the VM is gone too, a failover may have the
    /// checkpoint of the frames that are sealed: they wait for that, and nothing else does.
    fn end_grace(&mut self, notice: &dyn Fn(&str)) {
        let Some(lost) = self.lost else { return };
        if lost.elapsed() >= self.grace {
            self.release(notice);
        } else if !self.vm.is_connected() && self.hold.is_holding() {
            self.hold.detach();
            notice("output leaves at once: no protection");
        }
    }

    /// Writes what waits for the VM, the network and the keeper.
    fn write(&mut self, notice: &dyn Fn(&str)) {
        let change = self.network.write();
        self.note(change, notice);
        if let Some(VmLost(error)) = self.vm.write() {
            notice(&format!("the VM is not connected any more{}", reason(&error)));
        }
        if let Err(error) = self.keeper.write() {
            self.lose_keeper(&error, notice);
        }
    }

    fn note(&self, change: Option<LinkChange>, notice: &dyn Fn(&str)) {
        let address = self.network.address();
        match change {
            Some(LinkChange::Connected) => notice(&format!("{address}: connected")),
            Some(LinkChange::Lost(error)) => notice(&format!("{address}: lost ({error}); trying again")),
            None => {}
        }
    }
}

/// The reason of a connection's end, unless it was closed.
fn reason(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => String::new(),
        _ => format!(" ({error})"),
    }
}

/// The answer to a fence, or to a query about one, of a protection that the gate has.
fn fenced_answer(vm: Option<&ConnectedVm>) -> Answer {
    let process = vm.and_then(|vm| vm.process.as_ref());
    process.map_or(Answer::Unidentified, |process| Answer::Fenced(process.pid().unwrap_or(0).into()))
}

/// The name of a VM's process for people.
fn process_name(pid: Option<u32>) -> String {
    pid.map_or_else(|| "its process".into(), |pid| format!("process {pid}"))
}

/// The sockets that something can be read from.
#[derive(Debug, Clone, Copy, Default)]
struct Ready {
    stop: bool,
    vm_waits: bool,
    vm: bool,
    keeper_waits: bool,
    keeper: bool,
    network: bool,
    visitors: bool,
}
