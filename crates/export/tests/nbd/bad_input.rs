//! Bytes that no honest client sends. After each of them another client is served as before.

use limosa_testkit::{NbdClient, NbdCommand, wait_for};

use crate::bed::{Bed, raw};

const SIZE: u64 = 1 << 20;
const INVALID: u32 = 22;

fn bed() -> Bed {
    Bed::new(raw(vec![7; 1 << 20]))
}

/// Has a client do something after which the server must close its connection, while another one is served.
#[track_caller]
fn closed_after(act: impl FnOnce(&mut NbdClient)) {
    let bed = bed();
    let mut other = bed.client();
    let mut client = NbdClient::unix(&bed.socket()).unwrap();
    act(&mut client);
    client.wait_closed().unwrap();
    assert_eq!(other.read(0, 4096).unwrap(), vec![7; 4096]);
    assert_eq!(bed.client().read(SIZE - 1, 1).unwrap(), [7]);
    drop(other);
    assert_eq!(bed.stop().protocol_errors, 1);
}

#[test]
fn an_option_that_does_not_begin_as_one_ends_the_connection() {
    closed_after(|client| client.raw(&[0; 16]).unwrap());
}

#[test]
fn a_client_with_unknown_flags_is_cut_off() {
    use std::io::{Read as _, Write as _};
    let bed = bed();
    let mut stream = std::os::unix::net::UnixStream::connect(bed.socket()).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&0x100_u32.to_be_bytes()).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(bed.client().read(0, 1).unwrap(), [7]);
}

#[test]
fn an_option_with_gigabytes_of_data_ends_the_connection_before_they_come() {
    closed_after(|client| client.raw(&[&b"IHAVEOPT"[..], &[0, 0, 0, 7], &[0xff; 4]].concat()).unwrap());
}

#[test]
fn an_option_that_is_too_long_is_skipped_and_answered() {
    let bed = bed();
    let mut client = NbdClient::unix(&bed.socket()).unwrap();
    for option in [3, 6, 7, 10, 99] {
        let replies = client.option(option, &vec![0; 1 << 20]).unwrap();
        assert_eq!(replies, [(0x8000_0009, Vec::new())], "{option}");
    }
    client.go("").unwrap();
    assert_eq!(client.read(0, 1).unwrap(), [7]);
}

#[test]
fn a_name_of_an_export_that_is_too_long_ends_an_old_handshake() {
    closed_after(|client| {
        client.send_option(1, &vec![b'x'; 1 << 20]).unwrap();
    });
}

#[test]
fn options_with_wrong_data_are_answered() {
    let bed = bed();
    let mut client = NbdClient::unix(&bed.socket()).unwrap();
    client.use_structured().unwrap();
    let string = |text: &[u8]| [&u32::try_from(text.len()).unwrap().to_be_bytes(), text].concat();
    let absurd = [&string(b"")[..], &u32::MAX.to_be_bytes(), &string(b"base:allocation")].concat();
    let many = [&string(b"")[..], &10_000_u32.to_be_bytes(), &string(b"").repeat(10_000)].concat();
    for (option, data, kind) in [
        (7, vec![], 0x8000_0003),
        (7, vec![0xff; 6], 0x8000_0003),
        (7, [&string(b"")[..], &[0, 2, 0, 1]].concat(), 0x8000_0003),
        (7, [&string(b"no such export")[..], &[0, 0]].concat(), 0x8000_0006),
        (7, [&string(&[b'x'; 5000])[..], &[0, 0]].concat(), 0x8000_0003),
        (7, [&string(b"\xff\xfe")[..], &[0, 0]].concat(), 0x8000_0003),
        (3, vec![0], 0x8000_0003),
        (5, vec![0], 0x8000_0003),
        (5, vec![], 0x8000_0002),
        (8, vec![], 0x8000_0003),
        (11, vec![0], 0x8000_0003),
        (9, absurd.clone(), 0x8000_0003),
        (10, absurd, 0x8000_0003),
        (10, vec![0; 3], 0x8000_0003),
        // As many queries as an option has room for are looked through.
        (10, many, 1),
        (4, vec![1, 2, 3], 0x8000_0001),
        (0, vec![], 0x8000_0001),
        (u32::MAX, vec![], 0x8000_0001),
    ] {
        let replies = client.option(option, &data).unwrap();
        assert_eq!(replies.last().map(|(kind, _)| *kind), Some(kind), "{option}: {} bytes", data.len());
    }
    client.go("").unwrap();
    assert_eq!(client.read(0, 1).unwrap(), [7]);
    assert_eq!(client.simple(NbdCommand::BlockStatus, 0, 0, 512).unwrap(), INVALID, "no context was chosen");
}

#[test]
fn options_without_end_are_cut_off() {
    closed_after(|client| while client.option(3, b"").is_ok() {});
}

#[test]
fn a_handshake_may_be_aborted_or_left_at_every_byte() {
    let bed = bed();
    let mut client = NbdClient::unix(&bed.socket()).unwrap();
    assert_eq!(client.option(2, b"ignored").unwrap(), [(1, Vec::new())]);
    client.wait_closed().unwrap();
    let whole = [&b"IHAVEOPT"[..], &[0, 0, 0, 7, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0]].concat();
    for length in 0..whole.len() {
        let mut client = NbdClient::unix(&bed.socket()).unwrap();
        client.raw(&whole[..length]).unwrap();
    }
    assert_eq!(bed.client().read(0, 1).unwrap(), [7]);
}

#[test]
fn a_request_that_does_not_begin_as_one_ends_the_connection() {
    for header in [[0; 28], [0xff; 28]] {
        closed_after(|client| {
            client.go("").unwrap();
            client.raw(&header).unwrap();
        });
    }
    // A compact request where extended ones were agreed on.
    closed_after(|client| {
        let compact = client.header(0, 0, 1, (0, 512));
        client.use_extended().unwrap();
        client.go("").unwrap();
        client.raw(&[&compact[..], &[0; 4]].concat()).unwrap();
    });
}

#[test]
fn a_payload_that_is_too_long_ends_the_connection_before_it_comes() {
    for length in [(32 << 20) + 1, u64::from(u32::MAX)] {
        closed_after(|client| {
            client.go("").unwrap();
            client.send(NbdCommand::Write, 0, 0, length).unwrap();
        });
    }
    for (command, length) in [(NbdCommand::Write, u64::MAX), (NbdCommand::Read, 1 << 40), (NbdCommand::Flush, 1 << 30)]
    {
        closed_after(|client| {
            client.use_extended().unwrap();
            client.go("").unwrap();
            client.send(command, 1 << 5, 0, length).unwrap();
        });
    }
}

#[test]
fn gigantic_lengths_without_a_payload_fail_and_the_connection_continues() {
    let bed = bed();
    let mut client = bed.client();
    for (at, length) in [(0, u64::MAX), (u64::MAX, u64::MAX), (1, u64::MAX), (SIZE, 1 << 63), (u64::MAX - 511, 1024)] {
        for command in [NbdCommand::Read, NbdCommand::Trim, NbdCommand::Cache, NbdCommand::BlockStatus] {
            assert_eq!(client.simple(command, 0, at, length).unwrap(), INVALID, "{command:?} {at} {length}");
        }
        assert_eq!(client.simple(NbdCommand::WriteZeroes, 0, at, length).unwrap(), 28);
    }
    assert_eq!(client.read(0, 4096).unwrap(), vec![7; 4096]);
}

#[test]
fn unknown_commands_and_flags_fail_and_the_connection_continues() {
    let bed = bed();
    for mut client in bed.clients() {
        for flags in [1 << 6, 1 << 15, 1 << 3, 1 << 4] {
            assert_eq!(client.simple(NbdCommand::Read, flags, 0, 512).unwrap(), INVALID, "{flags:x}");
        }
        assert_eq!(client.write(1 << 8, 0, &[1; 4096]).unwrap(), INVALID);
        assert_eq!(client.read(0, 4096).unwrap(), vec![7; 4096], "its payload was not taken for a request");
    }
    // Commands that no client of the testkit has.
    let mut client = NbdClient::unix(&bed.socket()).unwrap();
    client.go("").unwrap();
    for (cookie, command) in (1_u64..).zip([8_u16, 9, 255, u16::MAX]) {
        let header = client.header(0, command, cookie, (0, 512));
        client.raw(&header).unwrap();
        let expected = [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 22][..], &cookie.to_be_bytes()].concat();
        assert_eq!(client.raw_read(16).unwrap(), expected);
    }
    assert_eq!(client.read(0, 1).unwrap(), [7]);
}

#[test]
fn a_client_that_is_gone_in_the_middle_of_a_request_harms_nobody() {
    let bed = bed();
    let mut other = bed.client();
    for length in [1, 31, 32, 40, 4096] {
        let mut client = bed.client();
        let header = client.header(1 << 5, 1, 1, (0, 8192));
        let whole = [&header[..], &[1; 8192]].concat();
        client.raw(&whole[..length]).unwrap();
        drop(client);
        assert_eq!(other.read(0, 8192).unwrap(), vec![7; 8192]);
    }
    // Nor does one that takes no replies. There is room for its requests: else it would wait until they are taken.
    let mut client = bed.client();
    for number in 0..24 {
        client.send_write(0, number * 4096, &[9; 4096]).unwrap();
        client.send(NbdCommand::Read, 0, 0, 1 << 20).unwrap();
    }
    drop(client);
    wait_for("the end of its connection", || (bed.server.counters().active == 1).then_some(()));
    assert_eq!(other.read(1 << 19, 4096).unwrap(), vec![7; 4096]);
    drop(other);
    assert_eq!(bed.stop().active, 0);
}
