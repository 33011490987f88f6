//! New encrypted images: what a cut leaves of them, and what stock tools find.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use limosa_image::luks::{self, NewHeader, Passphrase};
use limosa_image::qcow2::{self, CheckOptions, CreateOptions, Header, NewEncryption, Qcow2Options, check, create};
use limosa_image::{Format, Preallocation, probe};
use limosa_storage::testing::{Loss, PowerCut, SparseMemory};
use limosa_storage::{MemoryStorage, Storage, block_on};
use limosa_testkit::image::{TestImage, read_all};
use limosa_testkit::{qemu_img, qemu_io, qemu_skipped, scratch};

fn passphrase() -> Passphrase {
    Passphrase::new(b"correct horse".to_vec())
}

/// A header that is quickly unlocked.
fn quick() -> NewHeader {
    NewHeader::default().iter_time(Duration::from_millis(1))
}

fn encrypted() -> CreateOptions {
    CreateOptions::default().size(1 << 20).encryption(Some(NewEncryption::new(passphrase()).header(quick())))
}

/// Cuts the power at every moment of a creation, and counts the cuts after which there is an image. `whole` panics if
/// it is there in part.
fn cuts(before: &[u8], make: impl Fn(&dyn Storage), whole: impl Fn(Vec<u8>) -> bool) -> usize {
    let power = PowerCut::new();
    let storage = power.add_storage("image", before.to_vec(), 64 << 20);
    make(&*storage);
    let mut found = 0;
    for moment in 0..=power.moments() {
        // Contents that were there are kept by what is not ordered: of those, only kills are certain.
        let losses = (0..12).map(Loss::Some).filter(|_| before.is_empty());
        for loss in losses.chain([Loss::None, Loss::All]) {
            let mut bytes = power.cut(moment, loss).remove(0);
            bytes.resize(bytes.len().max(512), 0);
            found += usize::from(bytes != before && whole(bytes));
        }
    }
    assert!(found > 0, "the last moments leave an image");
    found
}

/// Opens an encrypted qcow2 image.
fn opened(bytes: Vec<u8>) -> Option<TestImage> {
    let file: Arc<dyn Storage> = Arc::new(SparseMemory::file_with("image", bytes, 64 << 20));
    let header = block_on(Header::read(&*file)).ok()?;
    let cipher = block_on(qcow2::cipher(&*file, &header, &passphrase())).unwrap();
    Some(TestImage { file, data_file: None, cipher: Some(cipher) })
}

#[test]
fn a_cut_leaves_no_encrypted_qcow2_image_or_a_whole_one() {
    let plain = MemoryStorage::growing_to(64 << 20);
    block_on(create(&plain, None, &CreateOptions::default().size(1 << 20))).unwrap();
    for before in [Vec::new(), plain.contents()] {
        cuts(
            &before,
            |storage| drop(block_on(create(storage, None, &encrypted())).unwrap()),
            |bytes| {
                let Some(image) = opened(bytes) else { return false };
                assert!(block_on(check(&*image.file, CheckOptions::default())).unwrap().is_clean());
                assert!(read_all(&*image.open_read_only()).iter().all(|byte| *byte == 0));
                true
            },
        );
    }
}

#[test]
fn a_cut_leaves_no_luks_image_or_a_whole_one() {
    let options = luks::CreateOptions::new(passphrase()).size(1 << 20).header(quick());
    cuts(
        &[],
        |storage| block_on(luks::create(storage, &options)).unwrap(),
        |bytes| {
            let file: Arc<dyn Storage> = Arc::new(MemoryStorage::with_contents(bytes, 64 << 20));
            if block_on(probe(&*file)).unwrap() != Format::Luks {
                return false;
            }
            let disk = block_on(luks::open(file, &passphrase())).unwrap();
            assert_eq!(disk.length().unwrap(), 1 << 20);
            true
        },
    );
}

#[test]
fn stock_tools_find_zeros_in_new_images_with_every_preallocation() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("image");
    let image = format!("driver=qcow2,encrypt.key-secret=s,file.filename={}", path.display());
    let secret = ["--object", "secret,id=s,data=correct horse"];
    for (version, cluster, extended, preallocation) in [
        (3, 64 << 10, false, Preallocation::Off),
        (3, 512, false, Preallocation::Off),
        (3, 64 << 10, false, Preallocation::Metadata),
        (3, 64 << 10, true, Preallocation::Falloc),
        (3, 2 << 20, false, Preallocation::Full),
        (2, 64 << 10, false, Preallocation::Off),
        (2, 4096, false, Preallocation::Metadata),
    ] {
        let options = encrypted().version(version).cluster_size(cluster).extended_l2(extended);
        let options = options.preallocation(preallocation);
        let storage = MemoryStorage::growing_to(64 << 20);
        block_on(create(&storage, None, &options)).unwrap();
        fs::write(&path, storage.contents()).unwrap();
        let commands = ["-c", "read -P 0 0 1M", "-c", "write -P 7 1000 70k", "-c", "read -P 7 1000 70k"];
        let said = qemu_io([&secret[..], &commands, &["--image-opts", &image]].concat()).unwrap();
        assert!(!said.contains("failed"), "{options:?}: {said}");
        qemu_img([&["check"], &secret[..], &["--image-opts", &image]].concat()).unwrap();
        let disk = opened(fs::read(&path).unwrap()).unwrap().open_with(Qcow2Options::default());
        let found = read_all(&*disk);
        assert!(found[1000..1000 + (70 << 10)].iter().all(|byte| *byte == 7), "{options:?}");
        assert!(found[..1000].iter().chain(&found[1000 + (70 << 10)..]).all(|byte| *byte == 0), "{options:?}");
    }
}
