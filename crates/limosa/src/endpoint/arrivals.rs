//! Who of those that connect is the source.
//!
//! A port that is open is found by others too: scanners, monitoring, a misdirected client. The law: one that does not begin
//! as a migration stream does is sent away and costs the migration nothing; nobody is waited for alone; what waits is
//! bounded.

use std::time::{Duration, Instant};

use limosa_channel::{Channel, ChannelError, Listener};
use limosa_migrate::Control;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::voice::say;

/// How a migration stream begins.
const MAGIC: &[u8; 4] = b"QEVM";
/// How long nobody may come before it is looked whether the job goes on at all.
const TICK: Duration = Duration::from_millis(20);
/// Longest silence of one that has connected. A source says its first bytes at once.
const SILENCE: Duration = Duration::from_secs(10);
/// How long a silent one keeps its place when others want it.
const SHORT_SILENCE: Duration = Duration::from_secs(2);
/// Connections that may be looked at at the same time.
const PLACES: usize = 64;
/// Strangers that are told of; the others are only counted.
const TOLD: u64 = 3;

/// What somebody who has connected has said so far.
enum Greeting {
    Source,
    Stranger(&'static str),
    Waits,
}

/// Waits for a source, for ever or for so long. Nobody else is listened to once it is there.
pub(super) fn source(listener: &Listener, within: Option<Duration>, control: &Control) -> anyhow::Result<Channel> {
    let begun = Instant::now();
    let mut waiting: Vec<(Channel, Instant)> = Vec::new();
    let mut strangers = 0;
    loop {
        control.check()?;
        if let Some(limit) = within.filter(|limit| begun.elapsed() >= *limit) {
            anyhow::bail!("{}: no source came within {limit:?}{}", listener.local_uri(), told_of(strangers));
        }
        if waiting.len() < PLACES {
            match listener.accept(Some(TICK)) {
                Ok(channel) => waiting.push((channel, Instant::now())),
                Err(error) if error.is_timeout() => {}
                // The process or the system has no descriptor left for the moment.
                Err(error @ ChannelError::Io { .. }) if is_shortage(&error) => std::thread::sleep(TICK),
                Err(error) => return Err(error.into()),
            }
        } else {
            std::thread::sleep(TICK);
        }
        let full = waiting.len() >= PLACES;
        let mut index = 0;
        while let Some((channel, since)) = waiting.get(index) {
            let patience = if full { SHORT_SILENCE } else { SILENCE };
            let why = match greeting(channel) {
                Greeting::Source => return Ok(waiting.swap_remove(index).0),
                Greeting::Waits if since.elapsed() < patience => {
                    index += 1;
                    continue;
                }
                Greeting::Waits => "said nothing",
                Greeting::Stranger(why) => why,
            };
            strangers += 1;
            if strangers <= TOLD {
                say!("limosa: {} is no source: it {why}; waiting for another", channel.peer());
            }
            waiting.swap_remove(index);
        }
    }
}

fn told_of(strangers: u64) -> String {
    if strangers == 0 { String::new() } else { format!(" ({strangers} others that were none)") }
}

fn is_shortage(error: &ChannelError) -> bool {
    let ChannelError::Io { source, .. } = error else { return false };
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
        .into_iter()
        .any(|shortage| Errno::from_io_error(source) == Some(shortage))
}

/// Looks at the first bytes and leaves them where they are.
fn greeting(channel: &Channel) -> Greeting {
    let mut bytes = [0; MAGIC.len()];
    match recv(channel, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Greeting::Stranger("went away without a word"),
        Ok((_, got)) => match (bytes.get(..got), MAGIC.get(..got)) {
            (Some(said), Some(wanted)) if said != wanted => Greeting::Stranger("said something else"),
            _ if got >= MAGIC.len() => Greeting::Source,
            _ => Greeting::Waits,
        },
        Err(Errno::AGAIN | Errno::INTR) => Greeting::Waits,
        Err(_) => Greeting::Stranger("went away"),
    }
}
