//! Images of every kind that the stock tools make, small enough to be broken thousands of times.

use std::path::{Path, PathBuf};

use limosa_testkit::{qemu_img, qemu_io};

/// An image in its own folder.
pub(crate) struct Animal {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

/// Options of `qemu-img create`, and what is done to the image.
const KINDS: &[(&str, &str, &str)] = &[
    ("usual", "cluster_size=64k", "snapshot"),
    ("old", "compat=0.10,cluster_size=4k", "snapshot"),
    ("tiny", "cluster_size=512", "snapshot"),
    ("large", "cluster_size=2M", ""),
    ("width1", "cluster_size=4k,refcount_bits=1", ""),
    ("width2", "cluster_size=1k,refcount_bits=2", "snapshot"),
    ("width4", "cluster_size=4k,refcount_bits=4", "snapshot"),
    ("width8", "cluster_size=4k,refcount_bits=8", "snapshot"),
    ("width32", "cluster_size=512,refcount_bits=32", "snapshot"),
    ("width64", "cluster_size=512,refcount_bits=64", "snapshot"),
    ("subclusters", "cluster_size=16k,extended_l2=on", "snapshot"),
    ("bitmaps", "cluster_size=4k", "bitmaps"),
    ("zlib", "cluster_size=4k", "compressed"),
    ("zstd", "cluster_size=64k,compression_type=zstd", "compressed"),
    ("fine-zlib", "cluster_size=16k,extended_l2=on", "compressed"),
    ("data-file", "cluster_size=64k,data_file=DATA", ""),
    ("metadata", "cluster_size=4k,preallocation=metadata", "snapshot"),
    ("lazy", "cluster_size=4k,lazy_refcounts=on", ""),
];

/// Makes all of them.
pub(crate) fn all(folder: &Path) -> Vec<Animal> {
    KINDS.iter().map(|(name, options, what)| make(folder, name, options, what)).collect()
}

/// Makes one of them.
pub(crate) fn one(folder: &Path, wanted: &str) -> Animal {
    let (name, options, what) = KINDS.iter().find(|(name, ..)| *name == wanted).unwrap();
    make(folder, name, options, what)
}

/// Makes one with these options.
pub(crate) fn plain(folder: &Path, options: &str) -> Animal {
    make(folder, "plain", options, "")
}

fn make(folder: &Path, name: &str, options: &str, what: &str) -> Animal {
    let path = folder.join(format!("{name}.qcow2"));
    let image = path.to_str().unwrap();
    let data = folder.join(format!("{name}.data"));
    let options = options.replace("DATA", data.to_str().unwrap());
    qemu_img(["create", "-q", "-f", "qcow2", "-o", &options, image, "8M"]).unwrap();
    let write = |commands: &[&str]| {
        let commands = commands.iter().flat_map(|command| ["-c", command]);
        qemu_io(commands.chain(["-f", "qcow2", image])).unwrap();
    };
    write(&["write -P 1 0 200k", "write -P 2 3M 5k", "write -P 3 7M 64k", "write -z 4M 64k", "write -z 1M 3k"]);
    match what {
        "snapshot" => {
            qemu_img(["snapshot", "-c", "first", image]).unwrap();
            write(&["write -P 4 64k 20k", "write -P 5 5M 100k"]);
            qemu_img(["snapshot", "-c", "a longer name", image]).unwrap();
            write(&["write -P 6 3M 1k", "discard 7M 64k"]);
        }
        "bitmaps" => {
            qemu_img(["bitmap", "--add", "-g", "4k", image, "one"]).unwrap();
            qemu_img(["bitmap", "--add", image, "another"]).unwrap();
            write(&["write -P 9 1M 100k", "write -P 8 6M 1k"]);
        }
        "compressed" => {
            write(&["write -c -P 7 2M 64k", "write -c -P 8 2176k 64k", "write -c -P 8 6M 64k"]);
            qemu_img(["snapshot", "-c", "first", image]).unwrap();
            write(&["write -P 4 2M 1k"]);
        }
        _ => {}
    }
    Animal { name: name.into(), path }
}
