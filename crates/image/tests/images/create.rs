//! Images that limosa makes, as stock tools find them.

use std::fs;
use std::path::Path;

use limosa_image::Preallocation;
use limosa_image::qcow2::{Compression, CreateOptions, Header, create};
use limosa_storage::{MemoryStorage, Storage, block_on};
use limosa_testkit::{qemu_img, qemu_skipped, scratch};
use serde_json::Value;

/// Makes the image in memory and puts it, and its data file, into `folder`.
fn make(folder: &Path, options: &CreateOptions) -> Header {
    let storage = MemoryStorage::growing_to(256 << 20);
    let data = MemoryStorage::growing_to(256 << 20);
    let data_file = options.data_file.as_ref().map(|_| &data as &dyn Storage);
    let header = block_on(create(&storage, data_file, options)).unwrap();
    fs::write(folder.join("ours"), storage.contents()).unwrap();
    if let Some(name) = &options.data_file {
        fs::write(folder.join(name), data.contents()).unwrap();
    }
    header
}

fn said(folder: &Path, command: &[&str], image: &str) -> Value {
    let image = folder.join(image);
    let arguments = command.iter().copied().chain(["--output", "json", image.to_str().unwrap()]);
    serde_json::from_str(&qemu_img(arguments).unwrap()).unwrap()
}

/// The part of `qemu-img info` that has to be alike for two images that were made with the same options.
fn described(folder: &Path, image: &str) -> Value {
    let mut info = said(folder, &["info"], image);
    let object = info.as_object_mut().unwrap();
    for differs in ["children", "filename", "actual-size"] {
        object.remove(differs);
    }
    info
}

/// The `-o` of these options, without the data file, which has another name.
fn words(options: &CreateOptions) -> String {
    let on = |set| if set { "on" } else { "off" };
    let mut words = format!(
        "compat={},cluster_size={},refcount_bits={},lazy_refcounts={},extended_l2={},preallocation={}",
        if options.version == 2 { "0.10" } else { "1.1" },
        options.cluster_size,
        options.refcount_bits,
        on(options.lazy_refcounts),
        on(options.extended_l2),
        options.preallocation,
    );
    if options.version > 2 {
        words += &format!(",compression_type={}", options.compression.name());
    }
    words
}

fn matrix() -> Vec<CreateOptions> {
    let usual = CreateOptions::default().size((9 << 20) + 512);
    let mut all = Vec::new();
    for preallocation in Preallocation::ALL {
        for bits in [9, 11, 14, 16, 19, 21] {
            let cluster_size = 1 << bits;
            // Widths take their turns.
            let refcount_bits = 1 << ((bits + preallocation as u32) % 7);
            let options =
                usual.clone().cluster_size(cluster_size).refcount_bits(refcount_bits).preallocation(preallocation);
            if bits >= 14 {
                all.push(options.clone().extended_l2(true));
            }
            all.push(options.clone().version(2).refcount_bits(16));
            all.push(options.compression(Compression::Zstd).lazy_refcounts(bits % 2 == 0));
        }
    }
    all.push(usual.clone().size(0));
    all.push(usual.clone().size(1));
    all.push(usual.size(2 << 30).cluster_size(512));
    all
}

#[test]
fn stock_tools_find_nothing_wrong_and_the_same_as_in_their_own_images() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let folder = folder.path();
    for options in matrix() {
        make(folder, &options);
        let words = words(&options);
        let theirs = folder.join("theirs");
        let size = options.size.to_string();
        qemu_img(["create", "-q", "-f", "qcow2", "-o", &words, theirs.to_str().unwrap(), &size]).unwrap();
        assert_eq!(described(folder, "ours"), described(folder, "theirs"), "{words}");
        let check = said(folder, &["check"], "ours");
        for wrong in ["check-errors", "leaks", "corruptions"] {
            assert_eq!(check.get(wrong).and_then(Value::as_u64).unwrap_or(0), 0, "{words}: {check}");
        }
        let expected = said(folder, &["check"], "theirs");
        for figure in ["total-clusters", "allocated-clusters", "compressed-clusters"] {
            assert_eq!(check.get(figure), expected.get(figure), "{words}: {check}");
        }
        let ours = folder.join("ours");
        let compared = qemu_img(["compare", ours.to_str().unwrap(), theirs.to_str().unwrap()]).unwrap();
        assert_eq!(compared, "Images are identical.\n");
    }
}

#[test]
fn an_external_data_file_is_found_and_read() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let folder = folder.path();
    for (data_file_raw, extended_l2, preallocation) in [
        (false, false, Preallocation::Off),
        (false, false, Preallocation::Metadata),
        (true, false, Preallocation::Off),
        (true, true, Preallocation::Full),
        (false, true, Preallocation::Falloc),
    ] {
        let options = CreateOptions::default()
            .size(3 << 20)
            // Stock tools look for a name without a folder where they were started.
            .data_file(Some(folder.join("contents.raw").into()))
            .data_file_raw(data_file_raw)
            .extended_l2(extended_l2)
            .preallocation(preallocation);
        make(folder, &options);
        let theirs = folder.join("theirs");
        let data = folder.join("theirs.raw");
        let raw = if data_file_raw { "on" } else { "off" };
        let words = format!("{},data_file={},data_file_raw={raw}", words(&options), data.display());
        qemu_img(["create", "-q", "-f", "qcow2", "-o", &words, theirs.to_str().unwrap(), "3M"]).unwrap();
        let [ours, expected] = ["ours", "theirs"].map(|image| {
            let mut info = described(folder, image);
            info["format-specific"]["data"].as_object_mut().unwrap().remove("data-file").unwrap();
            (info, said(folder, &["map"], image), said(folder, &["check"], image)["allocated-clusters"].clone())
        });
        assert_eq!(ours, expected, "{words}");
    }
}

#[test]
fn a_backing_file_shows_through_clusters_that_are_allocated_ahead() {
    if qemu_skipped() {
        return;
    }
    let folder = scratch().unwrap();
    let folder = folder.path();
    fs::write(folder.join("base"), vec![7; 1 << 20]).unwrap();
    for extended_l2 in [false, true] {
        make(
            folder,
            &CreateOptions::default()
                .size(1 << 20)
                .backing_file(Some("base".into()))
                .backing_format(Some("raw".into()))
                .extended_l2(extended_l2)
                .preallocation(if extended_l2 { Preallocation::Metadata } else { Preallocation::Off }),
        );
        let [ours, base] = ["ours", "base"].map(|name| folder.join(name).to_str().unwrap().to_owned());
        assert_eq!(qemu_img(["compare", "-F", "raw", &ours, &base]).unwrap(), "Images are identical.\n");
        qemu_img(["check", "-q", &ours]).unwrap();
    }
}
