//! Another implementation of the protocol at the other end: rust-vmm's `vhost`.

use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use crate::peer::{Guest, SIZE, Served, USER, until};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserProtocolFeatures, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend as _};
use vhost::{VhostBackend as _, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

#[test]
fn rust_vmms_front_end_sets_everything_up_and_stops_it() {
    let served = Served::new();
    let mut guest = Guest::new(1);
    let mut peer = Frontend::connect(&served.path, 2).unwrap();
    let features = peer.get_features().unwrap();
    assert_eq!(features & 0b11, 0b10);
    assert_ne!(features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits(), 0);
    let protocol = peer.get_protocol_features().unwrap();
    let wanted = VhostUserProtocolFeatures::MQ
        | VhostUserProtocolFeatures::REPLY_ACK
        | VhostUserProtocolFeatures::CONFIG
        | VhostUserProtocolFeatures::BACKEND_REQ
        | VhostUserProtocolFeatures::INFLIGHT_SHMFD
        | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
    assert!(protocol.contains(wanted));
    peer.set_protocol_features(wanted).unwrap();
    peer.set_hdr_flags(vhost::vhost_user::message::VhostUserHeaderFlag::NEED_REPLY);
    peer.set_owner().unwrap();
    peer.set_features(features).unwrap();
    assert_eq!(peer.get_queue_num().unwrap(), 2);
    assert_eq!(peer.get_max_mem_slots().unwrap(), 64);

    let (_, piece) = peer.get_config(4, 8, VhostUserConfigFlags::empty(), &[0; 8]).unwrap();
    assert_eq!(piece, [4, 5, 6, 7, 8, 9, 10, 11]);
    peer.set_config(0, VhostUserConfigFlags::WRITABLE, &[1, 2]).unwrap();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    peer.set_backend_request_fd(&theirs).unwrap();
    assert!(served.device.front_end().config_changed());

    let wanted = VhostUserInflight { num_queues: 2, queue_size: SIZE, ..Default::default() };
    let (area, file) = peer.get_inflight_fd(&wanted).unwrap();
    peer.set_inflight_fd(&area, file.as_raw_fd()).unwrap();

    let [guest_phys_addr, memory_size, userspace_addr, mmap_offset] = guest.region();
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr,
        memory_size,
        userspace_addr,
        mmap_offset,
        mmap_handle: guest.file.as_raw_fd(),
    };
    peer.set_mem_table(&[region]).unwrap();
    let (kick, call) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
    peer.set_vring_num(1, SIZE).unwrap();
    peer.set_vring_base(1, 0).unwrap();
    let place = VringConfigData {
        queue_max_size: SIZE,
        queue_size: SIZE,
        flags: 0,
        desc_table_addr: USER + 0x1000,
        used_ring_addr: USER + 0x3000,
        avail_ring_addr: USER + 0x2000,
        log_addr: None,
    };
    peer.set_vring_addr(1, &place).unwrap();
    peer.set_vring_call(1, &call).unwrap();
    peer.set_vring_kick(1, &kick).unwrap();
    peer.set_vring_enable(1, true).unwrap();
    guest.offer(4, [1, 2, 3, 4]);
    kick.write(1).unwrap();
    until("the buffer is given back", || guest.used() == 1);
    assert_eq!(guest.buffer(4), [2, 3, 4, 5]);
    until("the driver is called", || call.read().is_ok());

    served.device.holds.store(true, Ordering::SeqCst);
    guest.offer(0, [0; 4]);
    kick.write(1).unwrap();
    until("the device holds it", || served.device.held.lock().len() == 1);
    assert_eq!(peer.get_vring_base(1).unwrap(), 1);
    peer.reset_owner().unwrap();
}
