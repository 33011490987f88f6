//! Descriptions of images, compared with stock tools'.

use std::path::Path;

use limosa_image::Format;
use limosa_image::Policy;
use limosa_image::chain::{ImageFile, OpenOptions};
use limosa_image::info::ImageInfo;
use limosa_image::reference::Reference;
use limosa_storage::block_on;
use limosa_testkit::{qemu_img, qemu_io, qemu_skipped, scratch};
use serde_json::Value;

fn reading(policy: Policy) -> OpenOptions {
    OpenOptions::default().read_only(true).policy(policy)
}

fn ours(reference: &Reference, format: Option<Format>) -> Value {
    let options = reading(Policy::Refuse).format(format);
    let file = block_on(ImageFile::open(reference, &options)).unwrap();
    serde_json::to_value(block_on(ImageInfo::of(&file)).unwrap()).unwrap()
}

fn theirs(arguments: &[&str]) -> Value {
    let arguments = ["info", "--output", "json"].iter().chain(arguments);
    serde_json::from_str(&qemu_img(arguments).unwrap()).unwrap()
}

fn create(path: &str, arguments: &[&str]) {
    qemu_img(
        ["create", "-q", "-f", "qcow2"]
            .iter()
            .chain(arguments.iter().take(arguments.len() - 1))
            .chain([&path, arguments.last().unwrap()]),
    )
    .unwrap();
}

#[test]
fn the_same_is_said_about_images_of_stock_tools() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let image = at("image");
    let data = format!("data_file={},data_file_raw=on", at("data"));
    let cases: [&[&str]; 7] = [
        &["-o", "compat=0.10", "1M"],
        &["-o", "extended_l2=on,refcount_bits=1,cluster_size=2M,lazy_refcounts=on,compression_type=zstd", "77777"],
        &["-o", &data, "1M"],
        &["-u", "-b", "absent", "-F", "raw", "1M"],
        &["-u", "-b", "nbd://host/disk", "-F", "raw", "1M"],
        &["-u", "-b", r#"json:{"driver":"raw","file":{"driver":"file","filename":"absent"}}"#, "-F", "raw", "1M"],
        &["-o", "preallocation=metadata", "10M"],
    ];
    for case in cases {
        create(&image, case);
        assert_eq!(ours(&Reference::file(&image), None), theirs(&[&image]), "{case:?}");
    }
    std::fs::write(at("raw"), vec![1; 12345]).unwrap();
    assert_eq!(ours(&Reference::file(at("raw")), None), theirs(&[&at("raw")]));
    let raw = theirs(&["-f", "raw", &image]);
    assert_eq!(ours(&Reference::file(&image), Some(Format::Raw)), raw);
    let options = format!("driver=raw,size=1024,file.filename={}", at("raw"));
    let part = ours(&Reference::from_options(&options).unwrap(), None);
    assert_eq!(part["virtual-size"], theirs(&["--image-opts", &options])["virtual-size"]);
}

#[test]
fn snapshots_and_bitmaps_are_listed() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let image = folder.path().join("image").to_str().unwrap().to_owned();
    create(&image, &["10M"]);
    qemu_img(["snapshot", "-c", "before the upgrade", &image]).unwrap();
    qemu_io(["-c", "write 0 1M", &image]).unwrap();
    qemu_img(["snapshot", "-c", "ä", &image]).unwrap();
    for arguments in [&["--add", &*image, "follows"][..], &["--add", "--disable", "-g", "4096", &image, "stands"]] {
        qemu_img(["bitmap"].iter().chain(arguments)).unwrap();
    }
    let info = ours(&Reference::file(&image), None);
    assert_eq!(info, theirs(&[&image]));
    assert_eq!(info["snapshots"].as_array().unwrap().len(), 2);
    assert_eq!(info["format-specific"]["data"]["bitmaps"][1]["granularity"], 4096);

    // Marked before a write, by us, and read by them.
    let storage = limosa_storage::FileStorage::open(&image, &limosa_storage::FileOptions::default()).unwrap();
    let mut header = block_on(limosa_image::qcow2::Header::read(&*storage)).unwrap();
    block_on(header.prepare_autoclear(&*storage, false)).unwrap();
    drop(storage);
    let info = ours(&Reference::file(&image), None);
    assert_eq!(info, theirs(&[&image]));
    assert_eq!(info["format-specific"]["data"]["bitmaps"][0]["flags"].as_array().unwrap().len(), 2);
    qemu_img(["check", "-q", &image]).unwrap();
}

#[test]
fn a_chain_is_listed_from_its_top_and_only_as_far_as_it_may_be_opened() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(at("base"), vec![1; 1 << 20]).unwrap();
    for (name, backing) in [("middle", ["-b", "base", "-F", "raw"]), ("top", ["-b", "middle", "-F", "qcow2"])] {
        create(&at(name), &[&backing[..], &["1M"]].concat());
    }
    let chain = |policy| block_on(ImageInfo::of_chain(&Reference::file(at("top")), &reading(policy)));
    let found = serde_json::to_value(chain(Policy::Follow).unwrap()).unwrap();
    assert_eq!(found, theirs(&["--backing-chain", &at("top")]));
    assert_eq!(found.as_array().unwrap().len(), 3);
    let said = chain(Policy::Refuse).unwrap_err().to_string();
    assert!(said.contains("middle, which is not opened: "), "{said}");
}

#[test]
fn an_encrypted_image_and_one_whose_tables_are_gone_are_told_about() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let image = folder.path().join("image");
    let path = image.to_str().unwrap();
    let luks = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
    qemu_img(["create", "-q", "-f", "qcow2", "--object", "secret,id=key,data=abc", "-o", luks, path, "1M"]).unwrap();
    let info = ours(&Reference::file(&image), None);
    assert_eq!(
        (&info["encrypted"], &info["format-specific"]["data"]["encrypt"]["format"]),
        (&true.into(), &"luks".into())
    );
    create(path, &["1M"]);
    std::fs::File::options().write(true).open(Path::new(path)).unwrap().set_len(65536).unwrap();
    assert_eq!(ours(&Reference::file(&image), None), theirs(&[path]));
}
