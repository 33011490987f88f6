//! LUKS headers of stock tools, and those of limosa as stock tools find them.

use std::fs;
use std::path::Path;
use std::time::Duration;

use limosa_image::luks::{
    CipherMode, HashAlgorithm, Header, KEY_SLOTS, Layout, Limits, LuksError, NewHeader, Unlocked,
};
use limosa_testkit::{cryptsetup, qemu_img, qemu_io, qemu_skipped, scratch};

fn parsed(file: &[u8]) -> Header {
    Header::parse(file, Layout::File(file.len() as u64), Limits::default()).unwrap()
}

fn unlock(file: &[u8], passphrase: &str) -> Result<Unlocked, LuksError> {
    let header = parsed(file);
    let material = header.slots.iter().map(|slot| {
        let place = header.key_material(slot);
        file[usize::try_from(place.start).unwrap()..usize::try_from(place.end).unwrap()].to_vec()
    });
    header.unlock(&material.collect::<Vec<_>>(), passphrase.as_bytes())
}

/// The first sectors of the disk.
fn decrypted(file: &[u8], passphrase: &str) -> Vec<u8> {
    let header = parsed(file);
    let cipher = header.sector_cipher(&unlock(file, passphrase).unwrap().key).unwrap();
    let mut disk = file[usize::try_from(header.payload_offset()).unwrap()..].to_vec();
    cipher.decrypt(0, &mut disk);
    disk
}

#[test]
fn disks_that_stock_tools_encrypt_are_decrypted_with_all_ciphers() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("disk.luks");
    let name = path.to_str().unwrap();
    for options in [
        "cipher-alg=aes-256,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha256",
        "cipher-alg=aes-128,cipher-mode=xts,ivgen-alg=plain,hash-alg=sha1",
        "cipher-alg=aes-256,cipher-mode=cbc,ivgen-alg=essiv,ivgen-hash-alg=sha256,hash-alg=sha512",
        "cipher-alg=aes-128,cipher-mode=ecb,ivgen-alg=plain64,hash-alg=sha224",
        "cipher-alg=serpent-256,cipher-mode=cbc,ivgen-alg=plain,hash-alg=sha384",
        "cipher-alg=serpent-128,cipher-mode=xts,ivgen-alg=plain64,hash-alg=ripemd160",
        "cipher-alg=twofish-256,cipher-mode=xts,ivgen-alg=plain64,hash-alg=sha256",
        "cipher-alg=twofish-128,cipher-mode=cbc,ivgen-alg=plain64,hash-alg=sha256",
    ] {
        let options = format!("key-secret=s,iter-time=10,{options}");
        let secret = "secret,id=s,data=correct horse";
        qemu_img(["create", "-q", "-f", "luks", "--object", secret, "-o", &options, name, "64k"]).unwrap();
        let image = format!("driver=luks,key-secret=s,file.filename={name}");
        qemu_io(["--object", secret, "-c", "write -P 7 0 60k", "-c", "write -P 9 60k 4k", "--image-opts", &image])
            .unwrap();
        let file = fs::read(&path).unwrap();
        assert_eq!(parsed(&file).to_bytes(), file[..592], "{options}");
        assert_eq!(decrypted(&file, "correct horse"), [vec![7; 60 << 10], vec![9; 4 << 10]].concat(), "{options}");
        assert_eq!(unlock(&file, "incorrect").unwrap_err(), LuksError::Passphrase);
    }
}

/// Whether `cryptsetup` opens a slot of the image with this passphrase.
fn opens(folder: &Path, slot: usize, passphrase: &str) -> bool {
    let key = folder.join("key");
    fs::write(&key, passphrase).unwrap();
    let slot = slot.to_string();
    cryptsetup([
        "luksOpen".as_ref(),
        "--test-passphrase".as_ref(),
        "--key-slot".as_ref(),
        slot.as_ref(),
        "--key-file".as_ref(),
        key.as_os_str(),
        folder.join("disk.luks").as_os_str(),
    ])
    .is_ok()
}

#[test]
fn headers_that_cryptsetup_makes_are_unlocked_with_each_of_their_passphrases() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let (path, one, two) = (folder.path().join("disk.luks"), folder.path().join("one"), folder.path().join("two"));
    fs::write(&one, "the first one").unwrap();
    fs::write(&two, "the second one").unwrap();
    let [path_text, one, two] = [&path, &one, &two].map(|path| path.to_str().unwrap());
    // Others than AES it leaves to the kernel, which needs the device mapper.
    for (cipher, bits, hash) in [
        ("aes-xts-plain64", "256", "sha256"),
        ("aes-xts-plain64", "512", "ripemd160"),
        ("aes-cbc-essiv:sha256", "256", "sha1"),
        ("aes-cbc-plain", "192", "sha512"),
    ] {
        fs::File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let quick = ["--batch-mode", "--pbkdf-force-iterations", "1000"];
        let format = ["luksFormat", "--type", "luks1", "-c", cipher, "-s", bits, "-h", hash, path_text, one];
        cryptsetup(quick.iter().chain(&format)).unwrap();
        cryptsetup(quick.iter().chain(&["luksAddKey", "--key-slot", "5", "--key-file", one, path_text, two])).unwrap();
        let file = fs::read(&path).unwrap();
        assert_eq!(unlock(&file, "the first one").unwrap().slots, [0], "{cipher}");
        assert_eq!(unlock(&file, "the second one").unwrap().slots, [5], "{cipher}");
        assert_eq!(unlock(&file, "the third one").unwrap_err(), LuksError::Passphrase, "{cipher}");
        assert_eq!(parsed(&file).to_bytes(), file[..592]);
    }
}

#[test]
fn cryptsetup_and_qemu_open_headers_that_are_made_here() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let path = folder.path().join("disk.luks");
    let usual = NewHeader::default().iter_time(Duration::from_millis(1));
    for options in [usual, usual.mode(CipherMode::Cbc).hash(HashAlgorithm::Ripemd160), usual.hash(HashAlgorithm::Sha1)]
    {
        let (mut header, key) = options.make().unwrap();
        let mut file = vec![0; usize::try_from(options.length()).unwrap() + 4096];
        for slot in [0, KEY_SLOTS - 1] {
            let material = header.set_slot(slot, &key, format!("slot {slot}").as_bytes(), Duration::ZERO).unwrap();
            let start = usize::try_from(header.key_material(&header.slots[slot]).start).unwrap();
            file[start..start + material.len()].copy_from_slice(&material);
        }
        file[..592].copy_from_slice(&header.to_bytes());
        let disk = file.len() - 4096;
        file[disk..].fill(5);
        header.sector_cipher(&key).unwrap().encrypt(0, &mut file[disk..]);
        fs::write(&path, &file).unwrap();
        assert!(opens(folder.path(), 0, "slot 0") && opens(folder.path(), 7, "slot 7"));
        assert!(!opens(folder.path(), 0, "slot 7") && !opens(folder.path(), 1, "slot 0"));
        let image = format!("driver=luks,key-secret=s,file.filename={}", path.display());
        qemu_io(["--object", "secret,id=s,data=slot 7", "-c", "read -P 5 0 4k", "--image-opts", &image]).unwrap();
    }
}
