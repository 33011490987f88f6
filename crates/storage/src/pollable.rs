//! Waiting for a descriptor, such as a socket, beside requests to storages.
//!
//! A wait is registered with the thread that polls it first, in [`block_on`](crate::block_on); [`watch`](crate::watch)
//! has the law.

use std::future::Future;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use rustix::event::PollFlags;

use crate::drive;
use crate::watch::Watch;

/// A descriptor whose readiness futures can wait for, on a thread in [`block_on`](crate::block_on).
#[derive(Debug, Clone)]
pub struct Pollable(Arc<OwnedFd>);

impl Pollable {
    /// Takes a descriptor: a socket, a pipe, an event. It stays open as long as waits for it.
    #[must_use]
    pub fn new(fd: OwnedFd) -> Self {
        Self(Arc::new(fd))
    }

    /// Waits until it can be read, or has failed or been closed by its peer.
    pub fn readable(&self) -> Ready {
        self.ready(PollFlags::IN)
    }

    /// Waits until it can be written, or has failed or been closed by its peer.
    pub fn writable(&self) -> Ready {
        self.ready(PollFlags::OUT)
    }

    fn ready(&self, events: PollFlags) -> Ready {
        Ready(Arc::new(Watch::new(Arc::clone(&self.0), events)))
    }
}

impl From<Arc<OwnedFd>> for Pollable {
    fn from(fd: Arc<OwnedFd>) -> Self {
        Self(fd)
    }
}

impl AsFd for Pollable {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A wait for a descriptor. It may end early: the caller tries, and waits again.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] if it is polled first by a thread that is not in [`block_on`](crate::block_on).
#[derive(Debug)]
#[must_use = "a wait begins when it is polled"]
pub struct Ready(Arc<Watch>);

impl Future for Ready {
    type Output = io::Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll(context, || drive::watch(&self.0))
    }
}

impl Drop for Ready {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::future::poll_fn;
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;
    use std::pin::pin;
    use std::task::Waker;
    use std::thread;

    use super::*;
    use crate::{Buffer, FileOptions, FileStorage, Io, Storage, block_on};

    fn pair() -> (UnixStream, UnixStream, Pollable) {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let pollable = Pollable::new(near.try_clone().unwrap().into());
        (near, far, pollable)
    }

    #[test]
    fn a_thread_without_requests_waits_for_a_descriptor() {
        let (mut near, mut far, pollable) = pair();
        let writer = thread::spawn(move || {
            far.write_all(b"x").unwrap();
            far
        });
        block_on(pollable.readable()).unwrap();
        assert_eq!(near.read(&mut [0; 2]).unwrap(), 1);
        drop(writer.join().unwrap());
        // The end of the data counts, too.
        block_on(pollable.readable()).unwrap();
        assert_eq!(near.read(&mut [0; 2]).unwrap(), 0);
    }

    #[test]
    fn a_descriptor_is_waited_for_beside_requests_of_every_kind() {
        for io in [Io::Auto, Io::Threads] {
            let options = FileOptions { io, ..FileOptions::default() };
            let storage = FileStorage::from_fd(tempfile::tempfile().unwrap().into(), "disk", &options).unwrap();
            let (mut near, mut far, pollable) = pair();
            let echo = thread::spawn(move || {
                let mut byte = [0];
                while far.read(&mut byte).unwrap() == 1 {
                    far.write_all(&byte).unwrap();
                }
            });
            block_on(async {
                let mut readable = pin!(None::<Ready>);
                for round in 0..200u8 {
                    near.write_all(&[round]).unwrap();
                    let mut write = storage.write(u64::from(round) * 512, Buffer::from_slice(&[round; 512]).into());
                    let (mut written, mut answered) = (false, false);
                    poll_fn(|context| {
                        written = written || write.as_mut().poll(context).map(Result::unwrap).is_ready();
                        while !answered {
                            let mut byte = [0];
                            match near.read_exact(&mut byte) {
                                Ok(()) => (answered, _) = (byte[0] == round, readable.set(None)),
                                Err(_) => {
                                    if readable.is_none() {
                                        readable.set(Some(pollable.readable()));
                                    }
                                    match readable.as_mut().as_pin_mut().unwrap().poll(context) {
                                        Poll::Pending => break,
                                        Poll::Ready(ready) => (_, ()) = (ready.unwrap(), readable.set(None)),
                                    }
                                }
                            }
                        }
                        if written && answered { Poll::Ready(()) } else { Poll::Pending }
                    })
                    .await;
                }
            });
            near.shutdown(std::net::Shutdown::Both).unwrap();
            echo.join().unwrap();
        }
    }

    #[test]
    fn a_dropped_wait_keeps_neither_its_thread_nor_its_descriptor() {
        let storage =
            FileStorage::from_fd(tempfile::tempfile().unwrap().into(), "disk", &FileOptions::default()).unwrap();
        let (near, mut far, pollable) = pair();
        block_on(async {
            let mut readable = Some(pollable.readable());
            let mut write = storage.write(0, Buffer::from_slice(&[1; 512]).into());
            poll_fn(|context| {
                if let Some(wait) = &mut readable {
                    assert!(pin!(wait).poll(context).is_pending());
                }
                // Polled by the ring when the thread sleeps for the write, and dropped with it.
                let done = write.as_mut().poll(context);
                if done.is_ready() {
                    readable = None;
                }
                done
            })
            .await
            .unwrap();
        });
        drop((near, pollable));
        assert_eq!(far.read(&mut [0; 1]).unwrap(), 0);
    }

    #[test]
    fn a_wait_outside_of_block_on_fails() {
        let (_near, _far, pollable) = pair();
        let mut ready = pollable.readable();
        match Pin::new(&mut ready).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(error)) => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
            other => panic!("{other:?}"),
        }
    }
}
