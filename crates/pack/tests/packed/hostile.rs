//! Bad input gets one line, and never wrong memory.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use limosa_image::luks::Passphrase;
use limosa_pack::{Access, PackError, open_snapshot};
use limosa_page::error_with_causes;
use limosa_testkit::{qemu_img, qemu_io};
use proptest::prelude::*;

use crate::fixture::{self, QUICK, small};
use crate::{access, encrypted, options, pack_file};

fn line(path: &Path, key: Option<&Passphrase>) -> String {
    let line = error_with_causes(&open_snapshot(path, &access(key)).unwrap_err());
    assert!(!line.contains('\n') && line.contains(path.file_name().unwrap().to_str().unwrap()), "{line}");
    line
}

#[test]
fn a_disk_image_is_no_snapshot() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "10M"]).unwrap();
    assert!(line(&path, None).contains("neither a snapshot nor"));
    // An image that claims more than there can be.
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M", path.to_str().unwrap(), "1P"]).unwrap();
    assert!(line(&path, None).contains("bytes"));
    qemu_img(["create", "-q", "-f", "qcow2", path.to_str().unwrap(), "0"]).unwrap();
    assert!(line(&path, None).contains("empty"));
    let data = directory.path().join("data");
    let option = format!("data_file={}", data.display());
    qemu_img(["create", "-q", "-f", "qcow2", "-o", &option, path.to_str().unwrap(), "10M"]).unwrap();
    assert!(line(&path, None).contains("a file of their own"));
    let backing = ["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "/etc/passwd", path.to_str().unwrap(), "1M"];
    qemu_img(backing).unwrap();
    assert!(line(&path, None).contains("does not say which one"));
}

#[test]
fn a_wrong_key_and_a_missing_one_are_two_errors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vm.qcow2");
    pack_file(&small(directory.path(), "vm", QUICK), &path, None, &encrypted());
    assert!(line(&path, None).contains("no passphrase was given"));
    assert!(matches!(open_snapshot(&path, &Access::default()), Err(error) if error.is_about_passphrase()));
    let wrong = Passphrase::new(b"guess".to_vec());
    assert!(line(&path, Some(&wrong)).contains("does not open any key slot"));
    assert!(matches!(open_snapshot(&path, &access(Some(&wrong))), Err(error) if error.is_about_passphrase()));
}

/// A packed snapshot, and where a page of it is compressed.
fn packed(directory: &Path) -> (std::path::PathBuf, Vec<u8>) {
    let path = directory.join("vm.qcow2");
    pack_file(&small(directory, "vm", QUICK), &path, None, &options());
    let bytes = std::fs::read(&path).unwrap();
    (path, bytes)
}

#[test]
fn a_file_that_is_written_to_while_it_is_open_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    let (path, bytes) = packed(directory.path());
    let snapshot = open_snapshot(&path, &Access::default()).unwrap();
    let mut page = [0; 4096];
    snapshot.read_pages(0, fixture::range(300, 301), &mut page).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    let error = snapshot.read_pages(0, fixture::range(301, 302), &mut page).unwrap_err();
    assert!(error.to_string().contains("changed while it was open"), "{error}");
}

#[test]
fn a_file_that_is_cut_short_is_refused_also_within_its_last_cluster() {
    let directory = tempfile::tempdir().unwrap();
    let (path, bytes) = packed(directory.path());
    for cut in [1, 511, 4096, bytes.len() / 2] {
        std::fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
        let line = line(&path, None);
        assert!(["cut short", "ends at", "not in the file"].iter().any(|word| line.contains(word)), "{cut}: {line}");
    }
}

#[test]
fn an_image_that_another_program_writes_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (path, _) = packed(directory.path());
    let _writer = limosa_storage::FileStorage::open(&path, &limosa_storage::FileOptions::default()).unwrap();
    assert!(matches!(open_snapshot(&path, &Access::default()), Err(PackError::Image(_))));
}

#[test]
fn clusters_that_are_all_the_same_bomb_cost_time_only_for_what_is_read() {
    let directory = tempfile::tempdir().unwrap();
    // A stock image whose every cluster is the same compressed 2 MiB: 64 GiB in a file of a few hundred KiB.
    let path = directory.path().join("bomb.qcow2");
    let name = path.to_str().unwrap();
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M,compression_type=zstd", name, "512G"]).unwrap();
    qemu_io(["-f", "qcow2", "-c", "write -c -P 0x51 0 2M", name]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let mut l1 = [0; 8];
    file.read_exact_at(&mut l1, 40).unwrap();
    let mut table = [0; 8];
    file.read_exact_at(&mut table, u64::from_be_bytes(l1)).unwrap();
    let table = u64::from_be_bytes(table) & 0x00ff_ffff_ffff_fe00;
    let mut entry = [0; 8];
    file.read_exact_at(&mut entry, table).unwrap();
    file.write_all_at(&entry.repeat(1 << 18), table).unwrap();
    let begun = std::time::Instant::now();
    assert!(line(&path, None).contains("neither a snapshot nor"));
    assert!(begun.elapsed().as_secs() < 20);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn any_damage_is_an_error_or_changes_nothing_that_is_known_by_a_checksum(
        place in 0.0..1.0_f64,
        bytes in prop::collection::vec(any::<u8>(), 1..16),
        cut: bool,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let source = small(directory.path(), "vm", fixture::CHECKED);
        let path = directory.path().join("vm.qcow2");
        pack_file(&source, &path, None, &options());
        let mut image = std::fs::read(&path).unwrap();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a place")]
        let at = (place * image.len() as f64) as usize;
        if cut {
            image.truncate(at);
        } else {
            let end = image.len().min(at + bytes.len());
            image[at..end].copy_from_slice(&bytes[..end - at]);
        }
        std::fs::write(&path, image).unwrap();
        let Ok(snapshot) = open_snapshot(&path, &Access::default()) else { return Ok(()) };
        let mut page = [0; 4096];
        for number in 300..310 {
            if snapshot.has_checksums()
                && snapshot.layout().blocks.first().is_some_and(|block| block.pages == 600)
                && snapshot.read_pages(0, fixture::range(number, number + 1), &mut page).is_ok()
            {
                prop_assert!(page == fixture::page(number - 299));
            }
        }
    }
}
