//! Rings that stop while requests are in flight, and drivers that come and go.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use limosa_storage::testing::RequestHolder;
use limosa_storage::{MemoryStorage, Operation};
use limosa_testkit::{BLK_SLOTS, BlkCommand, wait_for};

use crate::images::raw;
use crate::served::Served;

/// A disk whose writes wait until they are released.
fn held() -> (RequestHolder, Served) {
    let holder = RequestHolder::only(&[Operation::Write]);
    let served = Served::storage(holder.wrap(Arc::new(MemoryStorage::with_contents(vec![0; 1 << 20], 1 << 20))));
    (holder, served)
}

/// Long enough for a thread that does not wait to go on.
const MOMENT: Duration = Duration::from_millis(50);

#[test]
fn a_ring_that_stops_gives_back_what_is_in_flight_first() {
    let (holder, served) = held();
    let mut client = served.client();
    for number in 0..4 {
        client.submit(0, &BlkCommand::Write(number * 8, vec![1; 4096]), 0, false).unwrap();
    }
    client.kick(0).unwrap();
    wait_for("the writes", || (holder.waiting().len() == 4).then_some(()));
    // The other queue is not disturbed.
    assert_eq!(client.run(1, &BlkCommand::Read(0, 512)).unwrap().status, 0);
    let releasing = thread::spawn(move || {
        thread::sleep(MOMENT);
        holder.release_all();
    });
    assert_eq!(client.used_index(0).unwrap(), 0);
    assert_eq!(client.stop_queue(0).unwrap(), 4, "it continues behind the four");
    assert_eq!(client.used_index(0).unwrap(), 4, "all were given back before");
    releasing.join().unwrap();
    // What is offered while the ring stands still waits.
    let mut slots: Vec<_> = (0..4).map(|_| client.try_reply(0).unwrap().unwrap().slot).collect();
    slots.sort_unstable();
    assert_eq!(slots, [0, 1, 2, 3]);
    client.submit(0, &BlkCommand::Read(0, 4096), 0, true).unwrap();
    client.kick(0).unwrap();
    thread::sleep(MOMENT);
    assert_eq!(client.try_reply(0).unwrap(), None);
    client.start_queue(0, 4).unwrap();
    let reply = client.reply(0).unwrap();
    assert_eq!((reply.status, reply.data), (0, vec![1; 4096]));
}

#[test]
fn a_change_of_memory_waits_for_requests_in_flight_and_rings_continue() {
    let (holder, served) = held();
    let mut client = served.client();
    client.submit(1, &BlkCommand::Write(0, vec![3; 512]), 0, false).unwrap();
    client.kick(1).unwrap();
    wait_for("the write", || (holder.waiting().len() == 1).then_some(()));
    let releasing = thread::spawn(move || {
        thread::sleep(MOMENT);
        holder.release_all();
    });
    client.share_again().unwrap();
    assert_eq!(client.used_index(1).unwrap(), 1);
    releasing.join().unwrap();
    assert_eq!(client.reply(1).unwrap().status, 0);
    assert_eq!(client.run(0, &BlkCommand::Read(0, 512)).unwrap().data, [3; 512]);
}

#[test]
fn a_front_end_that_leaves_in_the_middle_makes_room_for_the_next() {
    let (holder, served) = held();
    let mut client = served.client();
    client.submit(0, &BlkCommand::Write(0, vec![5; 512]), 0, false).unwrap();
    client.kick(0).unwrap();
    wait_for("the write", || (holder.waiting().len() == 1).then_some(()));
    drop(client);
    thread::sleep(MOMENT);
    holder.release_all();
    let mut client = served.client();
    assert_eq!(client.run(0, &BlkCommand::Read(0, 512)).unwrap().data, [5; 512]);
    assert_eq!(served.server.connection_count(), 2);
    drop(client);
    served.stop();
}

#[test]
fn stopping_the_server_completes_what_is_in_flight() {
    let (holder, served) = held();
    let mut client = served.client();
    client.submit(0, &BlkCommand::Write(8, vec![6; 512]), 0, false).unwrap();
    client.kick(0).unwrap();
    wait_for("the write", || (holder.waiting().len() == 1).then_some(()));
    let releasing = thread::spawn(move || {
        thread::sleep(MOMENT);
        holder.release_all();
    });
    served.stop();
    releasing.join().unwrap();
    assert_eq!(client.reply(0).unwrap().status, 0);
}

#[test]
fn a_full_ring_is_processed_to_its_end() {
    let served = Served::new(raw(vec![0; 1 << 20]));
    let mut client = served.client();
    for round in 0..50_u64 {
        for queue in 0..2 {
            while client.has_room(queue) {
                client.submit(queue, &BlkCommand::Read(round, 512), 0, round % 2 == 0).unwrap();
            }
            client.kick(queue).unwrap();
        }
        for queue in 0..2 {
            for _ in 0..BLK_SLOTS {
                assert_eq!(client.reply(queue).unwrap().status, 0);
            }
        }
    }
    assert_eq!(served.export.counters().reads, 100 * u64::from(BLK_SLOTS));
}

#[test]
fn requests_of_a_quiesced_export_stay_in_their_rings_until_it_is_resumed() {
    let (holder, served) = held();
    let mut client = served.client();
    client.submit(0, &BlkCommand::Write(0, vec![1; 4096]), 0, true).unwrap();
    client.kick(0).unwrap();
    wait_for("the write", || (holder.waiting().len() == 1).then_some(()));
    served.export.quiesce(MOMENT).unwrap_err();
    holder.release_all();
    assert_eq!(client.reply(0).unwrap().status, 0);
    served.export.quiesce(Duration::from_secs(60)).unwrap();
    for queue in 0..2 {
        client.submit(queue, &BlkCommand::Read(0, 4096), 0, true).unwrap();
        client.kick(queue).unwrap();
    }
    thread::sleep(MOMENT);
    assert_eq!((client.try_reply(0).unwrap(), client.try_reply(1).unwrap()), (None, None));
    served.export.resume().unwrap();
    for queue in 0..2 {
        let reply = client.reply(queue).unwrap();
        assert_eq!((reply.status, reply.data), (0, vec![1; 4096]));
    }
    drop(client);
    served.stop();
}
