//! `limosa balloon`: a virtio-balloon over vhost-user.
//!
//! Law: however it ends, the guest gets the message that it may have its pages back, and both sockets are gone.
//! Jobs run on its own clock ([`job`]), so a program that ordered one and was killed leaves nothing unfinished.

mod commands;
mod ctl;
mod ending;
mod job;
mod line;

use limosa_console::quantity;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use limosa_balloon::{Balloon, Options, Strategy, VhostUserBalloon};
use limosa_control::ControlSocket;
use limosa_memory::ReleaseMethod;
use limosa_vhost::Server;
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{BalloonArgs, BalloonCommand, BalloonServeArgs};
use crate::remedy;
use crate::usage::misused;
use commands::BalloonCommands;
use ending::{EndOnDrop, Ending};
use job::Jobs;
use limosa_console::{print_out, say};
use line::StatusLine;

/// How often jobs continue, and changes are reported.
const TICK: Duration = Duration::from_millis(20);
/// A balloon that is being filled changes a thousand times a second; events report it this often, and the last change.
const CHANGES: Duration = Duration::from_millis(200);

pub(crate) fn run(args: &BalloonArgs) -> anyhow::Result<ExitCode> {
    match (&args.command, &args.serve) {
        (Some(BalloonCommand::Ctl(args)), _) => ctl::run(args),
        (None, Some(args)) => serve(args),
        // Refused while the arguments are parsed.
        (None, None) => anyhow::bail!("the socket for the front end is missing: give --vhost-user SOCK"),
    }
}

fn serve(args: &BalloonServeArgs) -> anyhow::Result<ExitCode> {
    if let Some(name) =
        [(Strategy::Method(ReleaseMethod::DontNeed), "dontneed"), (Strategy::Method(ReleaseMethod::Free), "free")]
            .into_iter()
            .find_map(|(discard, name)| (discard == args.discard).then_some(name))
    {
        misused(format_args!(
            "--discard {name} does not free memory that a front end shares: use auto, punch-hole, remove or none"
        ));
    }
    if args.control.as_ref() == Some(&args.vhost_user) {
        misused("--vhost-user and --control must be different paths");
    }
    let balloon = Arc::new(Balloon::new(Options { reporting_off: !args.reporting, ..Options::default() }));
    if let Some(target) = args.target {
        balloon.set_target(target)?;
    }
    let ending = Arc::new(Ending::default());
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("cannot handle signals")?;
    let device = VhostUserBalloon::new(Arc::clone(&balloon), args.discard);
    let server = Arc::new(Server::bind(&args.vhost_user, Arc::new(device)).context("--vhost-user")?);
    let jobs = Arc::new(Jobs::default());
    let commands = BalloonCommands::new(Arc::clone(&balloon), Arc::clone(&jobs), Arc::clone(&ending));
    let socket = args.control.as_deref().map(|path| {
        ControlSocket::listen_without_job(path, Arc::new(commands))
            .map_err(|error| remedy::without_control(path, &error))
    });
    let socket = socket.transpose()?;
    say!("limosa: serving a balloon at {} (--vhost-user)", args.vhost_user.display());

    let handle = signals.handle();
    let at_signal_ending = Arc::clone(&ending);
    let signals = thread::Builder::new().name("signals".into()).spawn(move || {
        for _signal in signals.forever() {
            at_signal_ending.end();
        }
    });
    let signals = signals.context("cannot start a thread for signals")?;
    let serving = serving(&server, &ending)?;
    let end_on_drop = EndOnDrop { stopper: server.stopper(), jobs: Arc::clone(&jobs), balloon: Arc::clone(&balloon) };
    let begun = Instant::now();
    let line = StatusLine::show();
    let (mut announced, mut reported) = (Instant::now(), 0);
    while !ending.wait(TICK) {
        jobs.go_on(&balloon, Instant::now());
        line.update(&balloon, server.connection_count());
        let changes = balloon.actual_change_count();
        if announced.elapsed() >= CHANGES && changes != reported {
            (announced, reported) = (Instant::now(), changes);
            if let Some(socket) = &socket {
                socket.emit("BALLOON_CHANGE", &json!({ "actual": balloon.size().actual }));
            }
        }
    }
    // First the control socket, so that no client orders more.
    drop((line, socket));
    drop(end_on_drop);
    let end = serving.join();
    handle.close();
    let _ = signals.join();
    match end {
        Ok(end) => end?,
        Err(_) => anyhow::bail!("the server for {} failed; this is a bug in limosa", args.vhost_user.display()),
    }
    tell(args, &balloon, &server, begun);
    Ok(ExitCode::SUCCESS)
}

/// Serves front ends on its own thread, and ends everything when that fails.
fn serving(
    server: &Arc<Server>,
    ending: &Arc<Ending>,
) -> anyhow::Result<thread::JoinHandle<Result<(), limosa_vhost::ServerError>>> {
    let (server, ending) = (Arc::clone(server), Arc::clone(ending));
    let thread = thread::Builder::new().name("vhost-user".into()).spawn(move || {
        let end = server.serve();
        ending.end();
        end
    });
    thread.context("cannot start a thread for the front end")
}

fn tell(args: &BalloonServeArgs, balloon: &Balloon, server: &Server, begun: Instant) {
    let counters = balloon.counters();
    say!(
        "limosa: {} front ends served in {}; {} returned to the host in {} calls, {} free pages hinted in {} lists",
        quantity::count(server.connection_count()),
        quantity::time(begun.elapsed()),
        quantity::bytes(counters.discarded_bytes),
        quantity::count(counters.discards),
        quantity::bytes(counters.hinted_bytes),
        quantity::count(counters.hint_lists),
    );
    if args.json {
        print_out!("{}", json!({ "front-ends": server.connection_count(), "counters": commands::counters(balloon) }));
    }
}
