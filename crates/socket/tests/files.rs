//! The files of sockets: created, replaced, removed.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Barrier;
use std::thread;

use limosa_socket::listen;

#[test]
fn a_socket_is_its_owners_alone_and_goes_with_its_listener() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (socket, file) = listen(&path, 1).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let _peer = UnixStream::connect(&path).unwrap();
    let listener = UnixListener::from(socket);
    listener.accept().unwrap();
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    drop(file);
    assert!(!path.exists());
}

#[test]
fn what_is_in_use_or_no_socket_is_left_alone_and_a_stale_socket_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (socket, file) = listen(&path, 1).unwrap();
    assert_eq!(listen(&path, 1).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    let listener = UnixListener::from(socket);
    assert_eq!(listener.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "who asks is no connection");
    // As if its process had been killed.
    drop(listener);
    std::mem::forget(file);
    let (_socket, file) = listen(&path, 1).unwrap();
    drop(file);
    std::fs::write(&path, "no socket").unwrap();
    assert!(listen(&path, 1).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"no socket");
}

#[test]
fn a_file_that_took_its_place_is_not_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (_first, mine) = listen(&path, 1).unwrap();
    std::fs::rename(&path, folder.path().join("away")).unwrap();
    let (_second, _its) = listen(&path, 1).unwrap();
    let inode = std::fs::metadata(&path).unwrap().ino();
    drop(mine);
    assert_eq!(std::fs::metadata(&path).unwrap().ino(), inode);
}

#[test]
fn of_many_that_start_at_once_on_a_stale_path_exactly_one_gets_it_and_can_be_connected_to() {
    const STARTERS: usize = 4;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    for round in 0..500 {
        drop(UnixListener::bind(&path).unwrap());
        let start = Barrier::new(STARTERS);
        let starter = || {
            start.wait();
            listen(&path, 1)
        };
        let ends: Vec<_> = thread::scope(|scope| {
            let starters: Vec<_> = (0..STARTERS).map(|_| scope.spawn(starter)).collect();
            starters.into_iter().map(|starter| starter.join().unwrap()).collect()
        });
        let (one, others): (Vec<_>, Vec<_>) = ends.into_iter().partition(Result::is_ok);
        assert_eq!(one.len(), 1, "round {round}");
        for error in others.into_iter().filter_map(Result::err) {
            assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse, "round {round}: {error}");
        }
        let (socket, file) = one.into_iter().next().unwrap().unwrap();
        let _peer = UnixStream::connect(&path).unwrap();
        UnixListener::from(socket).accept().unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "nothing but the socket stays");
        drop(file);
    }
}
