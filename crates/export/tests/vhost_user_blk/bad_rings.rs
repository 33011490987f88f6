//! Chains that no honest driver sends: the ring is broken, other rings and the next driver are not, and nothing panics.

use limosa_testkit::{BlkClient, BlkCommand, BlkDescriptor, wait_for};

use crate::images::{pattern, raw};
use crate::served::Served;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn link(address: u64, length: u32, flags: u16, next: u16) -> BlkDescriptor {
    BlkDescriptor { address, length, flags, next }
}

/// Offers a chain to queue 0, and checks that it breaks that ring only.
fn breaks(descriptors: &[BlkDescriptor], tables: &[(u64, Vec<BlkDescriptor>)], why: &str) {
    let served = Served::new(raw(vec![7; 1 << 20]));
    let mut client = served.client();
    for (address, table) in tables {
        let bytes = |link: &BlkDescriptor| {
            [
                &link.address.to_le_bytes()[..],
                &link.length.to_le_bytes(),
                &link.flags.to_le_bytes(),
                &link.next.to_le_bytes(),
            ]
            .concat()
        };
        client.write(*address, &table.iter().flat_map(bytes).collect::<Vec<u8>>()).unwrap();
    }
    // One that is good before it is given back.
    let slot = client.submit(0, &BlkCommand::Read(0, 512), 0, false).unwrap();
    client.offer(0, 40, descriptors).unwrap();
    client.submit(0, &BlkCommand::Read(0, 512), 0, false).unwrap();
    client.kick(0).unwrap();
    wait_for(why, || (served.broken_rings() == 1).then_some(()));
    let reply = client.reply(0).unwrap();
    assert_eq!((reply.slot, reply.status, reply.data), (slot, 0, vec![7; 512]), "{why}");
    assert_eq!(client.run(1, &BlkCommand::Read(0, 512)).unwrap().data, [7; 512], "{why}");
    assert_eq!(client.try_reply(0).unwrap(), None, "{why}");
    drop(client);
    assert_eq!(served.client().run(0, &BlkCommand::Read(0, 512)).unwrap().status, 0, "{why}: the next driver");
}

#[test]
fn chains_that_are_no_requests_break_their_ring_alone() {
    let at = |client: &BlkClient| client.slot_address(0, 15);
    let probe = Served::new(raw(vec![0; 1 << 20]));
    let slot = at(&probe.client());
    let far = 1 << 40;
    let header = link(slot, 16, NEXT, 41);
    for (chain, why) in [
        (vec![link(slot, 16, 0, 0)], "no status"),
        (vec![link(slot, 8, NEXT, 41), link(slot + 256, 1, WRITE, 0)], "half a header"),
        (vec![link(slot, 16, WRITE, 0)], "nothing to be read"),
        (vec![header, link(slot + 256, 1, WRITE | NEXT, 40)], "a loop"),
        (vec![header, link(slot + 256, 1, WRITE | NEXT, 64)], "a next one behind the table"),
        (vec![header, link(slot + 256, 1, WRITE | NEXT, u16::MAX)], "a next one far behind the table"),
        (vec![header, link(slot + 4096, 512, WRITE | NEXT, 42), link(slot, 16, 0, 0)], "the wrong direction"),
        (vec![link(far, 16, NEXT, 41), link(slot + 256, 1, WRITE, 0)], "a header nowhere"),
        (vec![header, link(far, 1, WRITE, 0)], "a status nowhere"),
        (vec![header, link(u64::MAX - 511, 1024, WRITE | NEXT, 42), link(slot, 1, WRITE, 0)], "a wrapping address"),
        (vec![header, link(slot + 4096, u32::MAX, WRITE | NEXT, 42), link(slot, u32::MAX, WRITE, 0)], "too much"),
        (vec![link(far, 32, INDIRECT, 0)], "a table nowhere"),
        (vec![link(slot, 17, INDIRECT, 0)], "a table of odd length"),
        (vec![link(slot, 0, INDIRECT, 0)], "an empty table"),
        (vec![link(slot, u32::MAX - 15, INDIRECT, 0)], "an endless table"),
    ] {
        breaks(&chain, &[], why);
    }
    let table = |links| (slot + 512, links);
    let indirect = |length| vec![link(slot + 512, length, INDIRECT, 0)];
    breaks(&indirect(16), &[table(vec![link(slot + 512, 16, INDIRECT, 0)])], "a table in a table");
    let looping = vec![link(slot, 16, NEXT, 1), link(slot + 256, 1, WRITE | NEXT, 1)];
    breaks(&indirect(32), &[table(looping)], "a loop in a table");
    let long: Vec<_> = (1..2000).map(|next| link(slot, 16, NEXT, next)).collect();
    breaks(&indirect(16 * 1999), &[table(long)], "a long table");
}

#[test]
fn data_that_is_not_in_memory_fails_its_request_alone() {
    let bytes = pattern(1, 1 << 20);
    let served = Served::new(raw(bytes.clone()));
    let mut client = served.client();
    let slot = client.slot_address(0, 5);
    for kind in [0_u32, 1, 8] {
        client.write(slot, &[&kind.to_le_bytes()[..], &[0; 12]].concat()).unwrap();
        client.write(slot + 256, &[0xee]).unwrap();
        let flags = if kind == 1 { NEXT } else { WRITE | NEXT };
        let before = client.used_index(0).unwrap();
        // Half of the data is in memory.
        let data = [link(slot + 4096, 512, flags, 42), link(1 << 40, 512, flags, 43)];
        client
            .offer(0, 40, &[&[link(slot, 16, NEXT, 41)][..], &data, &[link(slot + 256, 1, WRITE, 0)]].concat())
            .unwrap();
        client.kick(0).unwrap();
        wait_for("the request", || (client.used_index(0).unwrap() == before.wrapping_add(1)).then_some(()));
        assert_eq!(client.read(slot + 256, 1).unwrap(), [1], "{kind}");
    }
    assert_eq!(served.broken_rings(), 0);
    assert!(client.run(1, &BlkCommand::Read(0, 65536)).unwrap().data == bytes[..65536]);
}

#[test]
fn an_index_that_jumps_breaks_the_ring() {
    let served = Served::new(raw(vec![0; 1 << 20]));
    let mut client = served.client();
    // Queue 0's available index, far ahead of its entries.
    let available = client.slot_address(0, 0) - 0x10000 + 0x1000;
    client.write(available + 2, &1000_u16.to_le_bytes()).unwrap();
    client.kick(0).unwrap();
    wait_for("the broken ring", || (served.broken_rings() == 1).then_some(()));
    assert_eq!(client.run(1, &BlkCommand::Flush).unwrap().status, 0);
}
