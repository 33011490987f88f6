//! Steps of the tests of both guests.

use limosa_demo::guest::Guest;
use limosa_memory::GuestMemory;
use limosa_memory::dirty::DirtyPages;
use limosa_page::PAGE_LEN;

/// Lets a guest run until it has written this number of pages.
pub(crate) fn let_it_write(guest: &dyn Guest, pages: u64) {
    let until = guest.writes() + pages;
    guest.run().unwrap();
    while guest.writes() < until {
        std::thread::sleep(std::time::Duration::from_micros(100));
    }
    guest.pause().unwrap();
}

/// Copies the dirty pages, as a migration would.
pub(crate) fn copy(from: &GuestMemory, to: &GuestMemory, dirty: &DirtyPages) {
    let mut page = [0; PAGE_LEN];
    for (index, (from, to)) in from.blocks().iter().zip(to.blocks()).enumerate() {
        for number in dirty.block(index).unwrap().runs().flat_map(|run| run.iter()) {
            from.read(number.offset(), &mut page).unwrap();
            to.write(number.offset(), &page).unwrap();
        }
    }
}
