//! Buffers that are freed or reused: what was written has left by then, or was copied.

use std::io::IoSlice;
use std::thread;
use std::time::Duration;

use limosa_channel::ZeroCopy;
use limosa_testkit::Poisoning;

use super::*;

#[test]
fn no_buffer_is_reused_while_it_is_lent() {
    let (length, count) = (96 * 1024, 40);
    for transport in TRANSPORTS {
        for &zero_copy in methods(transport) {
            let (writer, reader) = narrow(transport, zero_copy);
            let mut received = vec![0; length * count];
            thread::scope(|scope| {
                scope.spawn(|| {
                    for _ in 0..count {
                        let buffer = pattern(length);
                        let mut lending = writer.zero_copy_writer();
                        lending.write_all(b"", &[IoSlice::new(&buffer)]).unwrap();
                        lending.finish().unwrap();
                        // It is freed here, and poisoned.
                        drop(buffer);
                    }
                });
                for part in received.chunks_mut(16 * 1024) {
                    reader.read_exact(part).unwrap();
                }
            });
            let as_put = received == pattern(length).repeat(count);
            assert!(as_put, "{zero_copy} over {transport:?}: poison, or something else, has arrived");
        }
    }
}

#[test]
fn a_buffer_that_is_freed_while_it_is_lent_shows() {
    // The counterpart of the test above: it would notice.
    for transport in [Transport::Tcp, Transport::Tcp6] {
        let (writer, reader) = narrow(transport, ZeroCopy::Msg);
        let length = 1 << 20;
        // Not made of what is freed here.
        let mut received = vec![0; length];
        let buffer = pattern(length);
        let mut lending = writer.zero_copy_writer();
        lending.write_all(b"", &[IoSlice::new(&buffer)]).unwrap();
        // Leaked, which is the only way to end the loan without waiting.
        std::mem::forget(lending);
        drop(buffer);
        reader.read_exact(&mut received).unwrap();
        assert!(received.contains(&Poisoning::POISON), "the kernel has copied what was lent when it was written");
    }
}

#[test]
fn a_header_that_is_written_anew_before_the_flush_arrives_as_it_was_written() {
    const HEADER: usize = 528;
    const PUTS: u8 = 150;
    let pages = pattern(2 * 4096);
    for transport in TRANSPORTS {
        for &zero_copy in methods(transport) {
            let (writer, reader) = narrow(transport, zero_copy);
            let mut received = vec![0; usize::from(PUTS) * (HEADER + pages.len())];
            thread::scope(|scope| {
                scope.spawn(|| {
                    let mut header = [0; HEADER];
                    let mut lending = writer.zero_copy_writer();
                    for number in 0..PUTS {
                        header.fill(number);
                        match number % 2 {
                            0 => lending.write_all(&header, &[IoSlice::new(&pages)]).unwrap(),
                            _ => write_pages(&mut lending, &[&header[..], &pages].map(IoSlice::new), 1).unwrap(),
                        }
                        header.fill(Poisoning::POISON);
                    }
                    lending.finish().unwrap();
                });
                // Most of it waits to be sent by then.
                thread::sleep(Duration::from_millis(30));
                for part in received.chunks_mut(16 * 1024) {
                    reader.read_exact(part).unwrap();
                }
            });
            for (number, packet) in (0..PUTS).zip(received.chunks(HEADER + pages.len())) {
                let (header, rest) = packet.split_at(HEADER);
                let odd = header.iter().find(|byte| **byte != number);
                assert_eq!(odd, None, "{zero_copy} over {transport:?}: header {number}");
                assert!(rest == pages, "{zero_copy} over {transport:?}: the pages behind header {number}");
            }
        }
    }
}
