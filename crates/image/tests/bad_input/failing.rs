//! Storages that fail or are full: at each request in turn.

use std::sync::Arc;

use limosa_image::qcow2::{CheckOptions, CreateOptions, Qcow2Options, check};
use limosa_image::{Disk, GuestOffset, ImageError};
use limosa_storage::testing::{Failing, Fault};
use limosa_storage::{Buffer, Storage, block_on};
use limosa_testkit::image::filled;

use crate::{made, opened};

/// Sends some requests of every kind; returns the failures.
fn session(file: Arc<dyn Storage>) -> Vec<ImageError> {
    let disk = match opened(&file, Qcow2Options::default().allocate_ahead(64 << 10)) {
        Ok(disk) => disk,
        Err(error) => return vec![error],
    };
    let found = Buffer::zeroed(20 << 10);
    let requests = [
        disk.read(GuestOffset(0), found.into()),
        disk.write(GuestOffset(3000), filled(2, 40 << 10).into()),
        disk.write_zeroes(GuestOffset(8 << 10), 20 << 10, true),
        disk.flush(),
        disk.discard(GuestOffset(0), 8 << 10),
        disk.write(GuestOffset(20 << 20), filled(3, 100).into()),
        disk.flush(),
        disk.grow(80 << 20),
        disk.write(GuestOffset(70 << 20), filled(4, 4096).into()),
        disk.close(),
    ];
    requests.into_iter().filter_map(|request| block_on(request).err()).collect()
}

#[test]
fn whatever_request_fails_it_is_named_and_the_image_stays_sound() {
    for extended_l2 in [false, true] {
        let options = CreateOptions::default()
            .size(64 << 20)
            .cluster_size(if extended_l2 { 16 << 10 } else { 4096 })
            .extended_l2(extended_l2);
        for fault in Fault::ALL {
            let mut number = 0;
            loop {
                let file = made(&options, &[1; 64 << 10]);
                let failing = Failing::new();
                failing.fail(number, 1, fault);
                let errors = session(failing.wrap(Arc::clone(&file)));
                if failing.seen().1 == 0 {
                    assert!(errors.is_empty() && number > 20, "{number}: {errors:?}");
                    break;
                }
                let what = format!("extended: {extended_l2}, {fault:?} at request {number}");
                for error in &errors {
                    let said = error.to_string();
                    let named = said.starts_with("cannot ") && said.contains(" image") || said.starts_with("image");
                    assert!(named, "{what}: {said}");
                }
                let report = block_on(check(&*file, CheckOptions::default()));
                let report = report.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what}: {errors:?}, {report:#?}");
                number += 1;
            }
        }
    }
}
