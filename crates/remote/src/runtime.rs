//! The thread that the HTTP client runs on.
//!
//! **Law: the runtime is driven by this one thread, and nothing blocks it.** Files of the cache have threads of their
//! own (`cache/files.rs`); those of the runtime are for names of hosts, which the client looks up with calls that
//! block. Everything else sees functions that block, and futures that need no runtime.

use std::future::Future;
use std::io;
use std::thread;

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};

/// Threads that look up names of hosts.
const NAME_THREADS: usize = 4;

/// Returns the runtime; the first call starts its thread, which lasts as long as the process.
///
/// # Errors
/// The kernel's: no thread, no descriptors.
pub(crate) fn handle() -> io::Result<Handle> {
    static RUNTIME: Mutex<Option<Handle>> = Mutex::new(None);
    let mut running = RUNTIME.lock();
    if let Some(handle) = &*running {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(NAME_THREADS)
        .thread_name("remote-names")
        .build()?;
    let handle = runtime.handle().clone();
    thread::Builder::new().name("remote".into()).spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    Ok(running.insert(handle).clone())
}

/// Runs a future on the runtime, and waits for its end.
///
/// # Errors
/// As [`handle`]; the future panicked.
pub(crate) fn block_on<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    let (send, receive) = std::sync::mpsc::sync_channel(1);
    let task = async move { _ = send.send(future.await) };
    handle()?.spawn(task);
    receive.recv().map_err(|_| io::Error::other("a task of the object store's client ended early"))
}
