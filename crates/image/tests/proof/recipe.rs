//! Images made by stock `qemu-img`, of all sorts.

use std::fmt;
use std::path::Path;

use limosa_storage::testing::SeededRandom;
use limosa_testkit::{qemu_img, qemu_io};

/// The backing image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackingOverride {
    Nothing,
    /// As long as the image.
    Raw,
    /// A third shorter.
    Shorter,
    /// qcow2, with zeros and holes, a third longer.
    Longer,
}

/// Where the contents lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    Inside,
    /// In their own file.
    Outside,
    /// In their own file that is a raw image.
    Raw,
}

/// An image to be made.
#[derive(Clone)]
pub(crate) struct Recipe {
    pub(crate) cluster: u64,
    pub(crate) refcount_bits: u32,
    pub(crate) version2: bool,
    pub(crate) subclusters: bool,
    pub(crate) lazy: bool,
    pub(crate) below: BackingOverride,
    pub(crate) data: Data,
    /// It has contents of its own, and internal snapshots of them, and a bitmap.
    pub(crate) snapshots: u32,
    /// Its compression: `zlib` or `zstd`.
    pub(crate) compressed: Option<&'static str>,
    pub(crate) preallocation: &'static str,
    /// Its contents are encrypted with LUKS, with these options.
    pub(crate) luks: Option<&'static str>,
    pub(crate) size: u64,
}

/// The passphrase of encrypted images.
pub(crate) const PASSPHRASE: &str = "correct horse";
/// The name of its secret, and the words that define it.
pub(crate) const SECRET: &str = "s";
const SECRET_WORDS: [&str; 2] = ["--object", "secret,id=s,data=correct horse"];

impl fmt::Debug for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {:#x} bytes", self.options(), self.size)?;
        write!(f, ", below: {:?}, data: {:?}, snapshots: {}", self.below, self.data, self.snapshots)?;
        write!(f, ", compressed: {:?}", self.compressed)
    }
}

impl Recipe {
    /// A usual image with so large clusters.
    pub(crate) fn usual(cluster: u64) -> Self {
        Self {
            cluster,
            refcount_bits: 16,
            version2: false,
            subclusters: false,
            lazy: false,
            below: BackingOverride::Nothing,
            data: Data::Inside,
            snapshots: 0,
            compressed: None,
            preallocation: "off",
            luks: None,
            // Several L2 tables of small clusters, several clusters of large ones; the last one is not whole.
            size: (40 * cluster).clamp(512 << 10, 8 << 20) + 1536,
        }
    }

    /// Images that differ in every way that matters, each in several.
    pub(crate) fn matrix() -> Vec<Self> {
        let small = Self::usual(512);
        let usual = Self::usual(65536);
        let large = Self { size: (9 << 21) + 512, ..Self::usual(2 << 20) };
        let subclusters = Self { subclusters: true, ..Self::usual(65536) };
        let luks = |recipe: &Self| Self { luks: Some(""), ..recipe.clone() };
        let cbc = Some(",encrypt.cipher-mode=cbc,encrypt.ivgen-alg=essiv");
        let mut encrypted = vec![
            luks(&usual),
            Self { below: BackingOverride::Raw, snapshots: 1, lazy: true, ..luks(&usual) },
            Self { version2: true, below: BackingOverride::Longer, ..luks(&usual) },
            Self { preallocation: "falloc", refcount_bits: 1, ..luks(&usual) },
            Self { below: BackingOverride::Shorter, ..luks(&small) },
            Self { luks: cbc, below: BackingOverride::Longer, snapshots: 2, ..Self::usual(4096) },
            Self { data: Data::Outside, below: BackingOverride::Shorter, ..luks(&Self::usual(4096)) },
            Self { data: Data::Raw, ..luks(&usual) },
            Self { below: BackingOverride::Shorter, snapshots: 1, ..luks(&subclusters) },
            Self { below: BackingOverride::Raw, subclusters: true, luks: cbc, ..large },
        ];
        let mut all = vec![
            usual.clone(),
            Self { below: BackingOverride::Raw, ..usual.clone() },
            Self { below: BackingOverride::Shorter, lazy: true, ..usual.clone() },
            Self { below: BackingOverride::Longer, refcount_bits: 64, ..usual.clone() },
            Self { version2: true, ..usual.clone() },
            Self { version2: true, below: BackingOverride::Longer, snapshots: 1, ..usual.clone() },
            Self { snapshots: 2, below: BackingOverride::Raw, refcount_bits: 2, ..usual.clone() },
            Self { compressed: Some("zlib"), below: BackingOverride::Raw, ..usual.clone() },
            Self { compressed: Some("zstd"), snapshots: 1, ..usual.clone() },
            Self { data: Data::Outside, below: BackingOverride::Shorter, ..usual.clone() },
            Self { data: Data::Raw, ..usual.clone() },
            Self { preallocation: "metadata", ..usual.clone() },
            Self { preallocation: "falloc", refcount_bits: 1, ..usual },
            small.clone(),
            Self { below: BackingOverride::Raw, refcount_bits: 1, ..small.clone() },
            Self { below: BackingOverride::Longer, snapshots: 2, refcount_bits: 64, ..small.clone() },
            Self { compressed: Some("zlib"), lazy: true, snapshots: 1, refcount_bits: 8, ..small },
            Self { below: BackingOverride::Shorter, refcount_bits: 4, ..Self::usual(4096) },
            Self { data: Data::Outside, refcount_bits: 8, ..Self::usual(4096) },
            Self { compressed: Some("zstd"), below: BackingOverride::Shorter, refcount_bits: 32, ..Self::usual(4096) },
            subclusters.clone(),
            Self { below: BackingOverride::Shorter, snapshots: 1, ..subclusters.clone() },
            Self { below: BackingOverride::Longer, lazy: true, compressed: Some("zlib"), ..subclusters.clone() },
            Self { below: BackingOverride::Raw, data: Data::Outside, ..subclusters.clone() },
            Self { cluster: 16384, refcount_bits: 4, below: BackingOverride::Raw, ..subclusters },
            large.clone(),
            Self { below: BackingOverride::Raw, subclusters: true, snapshots: 1, ..large },
        ];
        all.append(&mut encrypted);
        all
    }

    /// The words with which stock tools name the `image` of a folder.
    pub(crate) fn image(&self, folder: &Path) -> Vec<String> {
        let path = folder.join("image").to_str().unwrap().to_owned();
        match self.luks {
            None => ["-f", "qcow2", &path].map(str::to_owned).to_vec(),
            Some(_) => {
                let options = format!("driver=qcow2,encrypt.key-secret={SECRET},file.filename={path}");
                let [object, secret] = SECRET_WORDS.map(str::to_owned);
                vec![object, secret, "--image-opts".to_owned(), options]
            }
        }
    }

    fn options(&self) -> String {
        let mut options = format!("cluster_size={}", self.cluster);
        options += if self.version2 { ",compat=0.10" } else { ",compat=1.1" };
        if !self.version2 {
            options += &format!(",refcount_bits={}", self.refcount_bits);
            options += if self.lazy { ",lazy_refcounts=on" } else { "" };
            options += if self.subclusters { ",extended_l2=on" } else { "" };
            options += &self.compressed.map(|kind| format!(",compression_type={kind}")).unwrap_or_default();
        }
        if let Some(luks) = self.luks {
            options += &format!(",encrypt.format=luks,encrypt.key-secret={SECRET},encrypt.iter-time=10{luks}");
        }
        if self.preallocation != "off" {
            options += &format!(",preallocation={}", self.preallocation);
        }
        options
    }

    /// Makes it in a folder: `image`, and as it has them `data` and `below`. What the guest sees.
    pub(crate) fn make(&self, folder: &Path, seed: u64) -> Vec<u8> {
        let mut chance = SeededRandom::new(seed);
        let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
        let (below, content) = (path("below"), path("content"));
        let mut create = vec!["create", "-q", "-f", "qcow2"];
        create.extend(self.luks.map(|_| SECRET_WORDS).iter().flatten());
        match self.below {
            BackingOverride::Nothing => {}
            BackingOverride::Raw | BackingOverride::Shorter => {
                let size = if self.below == BackingOverride::Raw { self.size } else { self.size / 3 * 2 / 512 * 512 };
                std::fs::write(&below, patchwork(&mut chance, size)).unwrap();
                create.extend(["-b", "below", "-F", "raw"]);
            }
            BackingOverride::Longer => {
                std::fs::write(&content, patchwork(&mut chance, self.size / 3 * 4 / 512 * 512)).unwrap();
                qemu_img(["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=4096", &content, &below]).unwrap();
                create.extend(["-b", "below", "-F", "qcow2"]);
            }
        }
        let mut options = self.options();
        match self.data {
            Data::Inside => {}
            // A relative name would be one in the folder that a program runs in.
            Data::Outside => options += &format!(",data_file={}", path("data")),
            Data::Raw => options += &format!(",data_file={},data_file_raw=on", path("data")),
        }
        let size = self.size.to_string();
        create.extend(["-o", &options, "image", &size]);
        in_folder(folder, &create);
        if self.snapshots > 0 || self.compressed.is_some() {
            let commands = self.contents(&mut chance);
            self.qemu_io(folder, &commands);
        }
        for number in 0..self.snapshots {
            let image = self.image(folder);
            let words = ["snapshot", "-c", &format!("s{number}")].map(str::to_owned).into_iter();
            // This command knows the format by itself, and takes no option for it.
            qemu_img(words.chain(image.into_iter().filter(|word| word != "-f" && word != "qcow2"))).unwrap();
            let at = chance.below(self.size / 2) / 512 * 512;
            self.qemu_io(folder, &[format!("write -q -P {} {at} 5000", 0x50 + number)]);
        }
        if self.snapshots > 0 && !self.version2 {
            let image = self.image(folder);
            let words = ["bitmap", "--add"].map(str::to_owned).into_iter().chain(image);
            qemu_img(words.chain(std::iter::once("dirty".to_owned()))).unwrap();
        }
        self.seen(folder, &[])
    }

    /// Runs commands of `qemu-io` on the `image` of a folder.
    fn qemu_io(&self, folder: &Path, commands: &[String]) {
        let commands = commands.iter().flat_map(|command| ["-c", command]).map(str::to_owned);
        qemu_io(commands.chain(self.image(folder))).unwrap();
    }

    /// The contents of the `image` of a folder as stock QEMU reads it; `more`: arguments that choose other contents.
    pub(crate) fn seen(&self, folder: &Path, more: &[&str]) -> Vec<u8> {
        let raw = folder.join("seen");
        let words = ["convert", "-O", "raw"].into_iter().chain(more.iter().copied()).map(str::to_owned);
        let raw_name = raw.to_str().unwrap().to_owned();
        qemu_img(words.chain(self.image(folder)).chain(std::iter::once(raw_name))).unwrap();
        std::fs::read(&raw).unwrap()
    }

    /// Contents of its own, for `qemu-io`: compressed clusters have to be whole ones.
    fn contents(&self, chance: &mut SeededRandom) -> Vec<String> {
        let clusters = self.size / self.cluster;
        let mut commands = Vec::new();
        // Each once: a cluster that is there already is not compressed.
        let mut compressed: Vec<u64> = if self.compressed.is_some() { (0..clusters).collect() } else { Vec::new() };
        compressed.retain(|_| chance.one_in(3));
        for cluster in compressed.into_iter().take(40) {
            let pattern = 1 + chance.below(255);
            commands.push(format!("write -q -c -P {pattern} {} {}", cluster * self.cluster, self.cluster));
        }
        for _ in 0..clusters.clamp(4, 40) / 2 {
            let (cluster, pattern) = (chance.below(clusters), 1 + chance.below(255));
            if !self.version2 && chance.one_in(6) {
                commands.push(format!("write -q -z {} {}", cluster * self.cluster, self.cluster));
            } else {
                let at = cluster * self.cluster + chance.below(self.cluster) / 512 * 512;
                commands.push(format!("write -q -P {pattern} {at} {}", self.cluster.min(self.size - at)));
            }
        }
        commands
    }
}

/// Runs `qemu-img` where the names of other files are relative to.
fn in_folder(folder: &Path, words: &[&str]) {
    let mut command = std::process::Command::new("qemu-img");
    let output = command.args(words).current_dir(folder).output().expect("run `cargo xtask setup`");
    assert!(output.status.success(), "qemu-img {words:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Random bytes with parts that are zero.
pub(crate) fn patchwork(chance: &mut SeededRandom, size: u64) -> Vec<u8> {
    let size = usize::try_from(size).unwrap();
    let mut bytes = Vec::with_capacity(size);
    while bytes.len() < size {
        let len = usize::try_from(512 + chance.below(100 << 10) / 512 * 512).unwrap();
        match chance.below(3) {
            0 => bytes.resize(bytes.len() + len, 0),
            _ => bytes.extend(chance.bytes(len)),
        }
    }
    bytes.truncate(size);
    bytes
}
