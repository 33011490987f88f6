//! One of the two processes: a VMM of a few hundred lines, with a guest and a control socket.
//!
//! One thread runs the guest's migration and executes orders, one after another; the control socket's threads
//! answer at any moment and pass orders on. **Law: what is undecided stays.** An end with a copy of the guest
//! that may be the only one neither runs it by itself nor ends; it waits for the operator's decision, and has printed
//! how to decide.

mod destination;
mod orders;
mod source;
mod vm;

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use limosa_channel::Tls;
use limosa_console::error_line;
use limosa_control::{ControlSocket, JobKind};
use limosa_migrate::Handle;
use limosa_migrate::control::Control;
use rustix::time::{ClockId, clock_gettime};

use crate::error::DemoError;
use crate::report::MemoryReport;
use crate::settings::Settings;
use crate::state::{Role, State, advice};
use crate::witness::Witness;
use orders::{Coordinator, Order};
use vm::Vm;

/// How long the other end may take to connect or to be reached.
const REACH: Duration = Duration::from_secs(30);

/// An end.
struct End {
    settings: Settings,
    /// The encryption of its connections, if they are encrypted.
    tls: Option<Tls>,
    coordinator: Arc<Coordinator>,
    socket: ControlSocket,
    orders: Receiver<Order>,
    vm: Vm,
}

/// The handles of one migration.
struct Migration {
    handle: Handle,
    cpu: CpuTime,
}

/// Is an end, until it is discarded or its standard input ends. The arguments are those that [`End::start`] gives.
///
/// [`End::start`]: crate::pair::End::start
///
/// # Errors
/// The guest cannot be made, or the control socket.
pub fn run(arguments: &[String]) -> Result<(), DemoError> {
    let [role, control, witness, settings] = arguments else {
        return Err(DemoError::Settings("only limosa-demo live starts an end of a demonstration".into()));
    };
    let role = match role.as_str() {
        "source" => Role::Source,
        "destination" => Role::Destination,
        other => return Err(DemoError::Settings(format!("{other:?}: unknown end; must be source or destination"))),
    };
    let settings: Settings =
        serde_json::from_str(settings).map_err(|error| DemoError::Settings(format!("settings: {error}")))?;
    let tls = match role {
        Role::Source => settings.client_tls(),
        Role::Destination => settings.server_tls(),
    };
    let tls = tls.map_err(|error| DemoError::Settings(error_line(&error)))?;
    end_with_input()?;
    let witness = Witness::open(Path::new(witness), role.name()).map_err(DemoError::system("the witness"))?;
    let (coordinator, orders) = Coordinator::new(role, control.clone());
    let vm = Vm::new(&settings, role, witness, Arc::clone(&coordinator))?;
    let commands = Arc::clone(&coordinator);
    let socket = ControlSocket::listen_without_job(Path::new(control), commands)
        .map_err(DemoError::system(format!("cannot listen at {control}")))?;
    if role == Role::Source {
        vm.run().map_err(|error| DemoError::Guest(error_line(&*error)))?;
    }
    let end = End { settings, tls, coordinator, socket, orders, vm };
    end.serve()
}

impl End {
    /// Does what is ordered.
    fn serve(&self) -> Result<(), DemoError> {
        while let Ok(order) = self.orders.recv() {
            let goes_on = match order {
                Order::Send { uri, fresh } => self.send(&uri, fresh),
                Order::Receive(uri) => self.receive(&uri),
                Order::Verify => {
                    self.verify();
                    true
                }
                Order::Discard => false,
                // Taken only while something waits for them, and there they are awaited.
                Order::Go | Order::Recover(_) => true,
            };
            if !goes_on {
                break;
            }
        }
        Ok(())
    }

    /// Looks at all of the memory, for `query-verify-memory`.
    fn verify(&self) {
        let found = match self.vm.verify(self.coordinator.is_running()) {
            Ok((found, free)) => MemoryReport {
                pages: found.pages,
                zero_pages: found.zero_pages,
                writes: found.writes,
                checksum: found.checksum,
                free_pages: free.free_pages,
                held_pages: free.held_pages,
                error: None,
            },
            Err(error) => MemoryReport { error: Some(error_line(&*error)), ..MemoryReport::default() },
        };
        self.coordinator.verified(serde_json::to_value(found).unwrap_or_default());
    }

    /// A migration begins.
    fn begin(&self) -> Migration {
        let job = Migration { handle: Handle::new(), cpu: CpuTime::now() };
        self.coordinator.begin(&job.handle.control);
        self.socket.set_job(JobKind::Live, &job.handle);
        job
    }

    /// The same migration continues over another connection.
    fn begin_again(&self, before: &Migration) -> Migration {
        let handle = Handle { control: Control::new(), progress: before.handle.progress.clone() };
        self.coordinator.begin(&handle.control);
        self.socket.set_job(JobKind::Live, &handle);
        Migration { handle, cpu: before.cpu }
    }

    /// Prints that the operator has to decide, and waits for the order.
    fn ask(&self, state: State, why: &str) -> Order {
        // Printed first: a reader of the state finds the advice already there.
        tell(&advice(self.coordinator.role(), state, self.coordinator.socket(), why));
        self.coordinator.turn(state, Some(why.to_owned()));
        // Without a socket no order can arrive any more: as if discarded.
        self.orders.recv().unwrap_or(Order::Discard)
    }
}

/// A line for people.
fn tell(line: &str) {
    // The output may be closed; the guest continues all the same.
    let _ = std::io::Write::write_fmt(&mut std::io::stderr().lock(), format_args!("{line}\n"));
}

/// Ends this process when its parent is gone.
pub(crate) fn end_with_input() -> Result<(), DemoError> {
    let watch = || {
        let mut sink = [0; 64];
        while std::io::stdin().lock().read(&mut sink).is_ok_and(|count| count > 0) {}
        std::process::exit(0);
    };
    std::thread::Builder::new()
        .name("stdin".into())
        .spawn(watch)
        .map(drop)
        .map_err(DemoError::system("cannot start a thread"))
}

/// A reading of the process's CPU clock.
#[derive(Debug, Clone, Copy)]
struct CpuTime(Duration);

impl CpuTime {
    pub(super) fn now() -> Self {
        let time = clock_gettime(ClockId::ProcessCPUTime);
        let seconds = time.tv_sec.cast_unsigned();
        Self(Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0)))
    }

    /// CPU time used since, in milliseconds.
    pub(super) fn since_ms(self) -> f64 {
        Self::now().0.saturating_sub(self.0).as_secs_f64() * 1e3
    }
}
