//! Packets of a multifd channel: a packet that is decoded keeps its own counts, and encodes to one that means the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use limosa_stream::multifd::{INITIAL_LEN, InitialPacket, PACKET_LEN, PACKET_PAGES, PAYLOAD_LIMIT, Packet};

fuzz_target!(|data: &[u8]| {
    if let Some(packet) = data.first_chunk::<INITIAL_LEN>().and_then(|bytes| InitialPacket::decode(bytes).ok()) {
        assert_eq!(InitialPacket::decode(&packet.encode()), Ok(packet));
    }
    let (mut offsets, mut again) = ([0; PACKET_PAGES], [0; PACKET_PAGES]);
    if let Ok(Some(packet)) = Packet::decode(data, 0, &mut offsets) {
        assert!(data.len() >= PACKET_LEN && packet.payload_len <= PAYLOAD_LIMIT);
        assert!(packet.normal.len() + packet.zero.len() <= PACKET_PAGES);
        assert_eq!(packet.normal.is_empty(), packet.payload_len == 0);
        let mut bytes = [0; PACKET_LEN];
        packet.encode(&mut bytes).expect("what was decoded can be encoded");
        assert_eq!(Packet::decode(&bytes, 0, &mut again), Ok(Some(packet)));
        // A packet that comes in pieces is awaited.
        assert_eq!(Packet::decode(&bytes[..PACKET_LEN - 1], 0, &mut [0; PACKET_PAGES]), Ok(None));
    }
});
