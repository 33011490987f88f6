//! Stock clients do their work.

use std::fs;

use limosa_testkit::{qemu_img, qemu_io};
use serde_json::{Value, json};

use crate::bed::{Bed, ctl, io, nbdinfo, tool};
use crate::needs_qemu;

/// Bytes that differ from block to block, with holes.
fn contents() -> Vec<u8> {
    let block =
        |number: u32| if number.is_multiple_of(3) { vec![0; 65536] } else { number.to_le_bytes().repeat(16384) };
    (0..160).flat_map(block).collect()
}

#[test]
fn nbdinfo_shows_all_properties() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "10M"]);
    let serving = bed.serve("nbd", &["disk", "--description", "a disk for tests"]);
    let info = nbdinfo(&[&serving.uri("")]);
    let export = &info["exports"][0];
    assert_eq!((&info["protocol"], &info["structured"]), (&json!("newstyle-fixed"), &json!(true)));
    assert_eq!(export["export-size"], 10 << 20);
    assert_eq!(export["description"], "a disk for tests");
    assert_eq!(export["contexts"], json!(["base:allocation", "qemu:allocation-depth"]));
    for flag in ["is_read_only", "is_rotational"] {
        assert_eq!(export[flag], false, "{flag}");
    }
    for flag in
        ["can_cache", "can_df", "can_fast_zero", "can_flush", "can_fua", "can_multi_conn", "can_trim", "can_zero"]
    {
        assert_eq!(export[flag], true, "{flag}");
    }
    let sizes = ["block_size_minimum", "block_size_preferred", "block_size_maximum"].map(|size| export[size].as_u64());
    assert_eq!(sizes, [Some(1), Some(65536), Some(32 << 20)]);
    serving.stop();
}

#[test]
fn what_stock_clients_copy_to_a_server_that_compresses_is_compressed() {
    needs_qemu!();
    let bed = Bed::new();
    let contents = contents();
    fs::write(bed.path("in.raw"), &contents).unwrap();
    let [from, out] = ["in.raw", "out.raw"].map(|name| bed.path(name).to_str().unwrap().to_owned());
    for (disk, options) in [("zlib", "compression_type=zlib"), ("zstd", "compression_type=zstd")] {
        bed.qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, &format!("@{disk}"), "10M"]);
        let serving = bed.serve(&format!("nbd-{disk}"), &["--compress", disk]);
        let uri = serving.uri("");
        bed.qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", &from, &uri]);
        tool("nbdcopy", &["--connections=4", "--requests=16", "--flush", &from, &uri]);
        // A part of a cluster: it is stored as it is.
        io(&uri, "raw", &["write -P 7 1M 4k"]);
        serving.stop();
        let image = bed.path(disk);
        let path = image.to_str().unwrap();
        let report: Value = serde_json::from_str(&qemu_img(["check", "--output=json", path]).unwrap()).unwrap();
        // A third are zeros.
        assert_eq!(
            (&report["compressed-clusters"], &report["allocated-clusters"]),
            (&json!(105), &json!(106)),
            "{report}"
        );
        assert!(fs::metadata(&image).unwrap().len() < 2 << 20);
        bed.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", path, &out]);
        let mut expected = contents.clone();
        expected[1 << 20..(1 << 20) + 4096].fill(7);
        assert!(fs::read(&out).unwrap() == expected, "{disk}");
    }
    bed.qemu_img(&["create", "-q", "-f", "raw", "@raw", "1M"]);
    for (words, reason) in [
        (&["--compress", "-f", "raw", "raw"][..], "format raw does not support compressed contents"),
        (&["--compress", "--compress-level", "10", "zlib"], "zlib takes 1 to 9"),
    ] {
        bed.refused(&[words, &["--nbd", "unix:refused"]].concat()).one_line(&[reason]);
    }
    assert!(!bed.refused(&["--compress", "--read-only", "zlib"]).status.success());
    // Its overlay, and the image below it, are compressed as they can be.
    let outside = format!("data_file={}", bed.path("outside").display());
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-o", &outside, "@base", "10M"]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base", "-F", "qcow2", "-o", "compression_type=zstd", "@top"]);
    let words = ["--compress", "--compress-level", "15", "--control", "control", "--allow-dir", ".", "top"];
    let serving = bed.serve("nbd-top", &words);
    ctl(&bed, &["snapshot", "", "over"]).success();
    tool("nbdcopy", &["--flush", &from, &serving.uri("")]);
    serving.stop();
    let info: Value = serde_json::from_str(&bed.qemu_img(&["info", "--output=json", "@over"])).unwrap();
    assert_eq!(info["format-specific"]["data"]["compression-type"], "zstd");
    assert!(fs::metadata(bed.path("over")).unwrap().len() < 2 << 20);
    let serving = bed.serve("nbd-top", &words);
    assert!(serving.said().contains("over"), "{}", serving.said());
    ctl(&bed, &["commit", ""]).success();
    ctl(&bed, &["commit", ""]).success();
    assert_eq!(fs::read(bed.path("outside")).unwrap().len(), 10 << 20);
    serving.stop();
    bed.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "@base", &out]);
    assert!(fs::read(&out).unwrap() == contents);
    // And one that is added later.
    let serving = bed.serve("nbd", &["--control", "control", "--allow-dir", "."]);
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@later", "10M"]);
    ctl(&bed, &["add", "later", "--compress", "--compress-level", "1"]).success();
    bed.qemu_img(&["convert", "-n", "-f", "raw", "-O", "raw", &from, &serving.uri("later")]);
    serving.stop();
    assert!(fs::metadata(bed.path("later")).unwrap().len() < 2 << 20);
}

#[test]
fn nbdcopy_copies_in_and_out_over_several_connections() {
    needs_qemu!();
    let bed = Bed::new();
    let contents = contents();
    fs::write(bed.path("in.raw"), &contents).unwrap();
    for (number, create) in
        [&["-f", "qcow2"][..], &["-f", "qcow2", "-o", "extended_l2=on"], &["-f", "raw"]].iter().enumerate()
    {
        let disk = format!("disk{number}");
        bed.qemu_img(&[&["create", "-q"], *create, &[&format!("@{disk}"), "10M"]].concat());
        let serving = bed.serve(&format!("nbd{number}"), &["-f", create[1], &disk]);
        let out = format!("out{number}.raw");
        let [from, to] = ["in.raw", &out].map(|name| bed.path(name).to_str().unwrap().to_owned());
        tool("nbdcopy", &["--connections=4", "--requests=16", "--flush", &from, &serving.uri("")]);
        tool("nbdcopy", &["--connections=4", &serving.uri(""), &to]);
        assert!(fs::read(&to).unwrap() == contents, "{create:?}");
        let ended = serving.stop();
        assert!(ended.stderr.contains("connections served"), "{}", ended.stderr);
        if create[1] == "qcow2" {
            bed.qemu_img(&["check", "-q", &format!("@{disk}")]);
        }
        bed.qemu_img(&["compare", "-q", "-F", "raw", "-f", create[1], &format!("@{disk}"), "@in.raw"]);
    }
}

#[test]
fn qemus_tools_convert_compare_and_map_over_it() {
    needs_qemu!();
    let bed = Bed::new();
    fs::write(bed.path("in.raw"), contents()).unwrap();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "10M"]);
    let serving = bed.serve("nbd", &["disk"]);
    let uri = serving.uri("");
    bed.qemu_img(&["convert", "-n", "-W", "-f", "raw", "-O", "raw", "@in.raw", &uri]);
    bed.qemu_img(&["compare", "-q", "-f", "raw", "-F", "raw", "@in.raw", &uri]);
    bed.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", &uri, "@out.qcow2"]);
    bed.qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2", "@in.raw", "@out.qcow2"]);
    let runs = |text: &str| -> Vec<_> {
        let runs: Vec<Value> = serde_json::from_str(text).unwrap();
        let mut merged: Vec<(u64, u64, bool, bool)> = Vec::new();
        for run in runs {
            let (zero, data) = (run["zero"] == true, run["data"] == true);
            let (start, length) = (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap());
            match merged.last_mut() {
                Some(last) if (last.2, last.3) == (zero, data) => last.1 += length,
                _ => merged.push((start, length, zero, data)),
            }
        }
        merged
    };
    let over_nbd = bed.qemu_img(&["map", "--output=json", "-f", "raw", &uri]);
    let depth = tool("nbdinfo", &["--map=qemu:allocation-depth", &uri]);
    assert!(depth.contains("local") && depth.contains("absent"), "{depth}");
    serving.stop();
    let direct = bed.qemu_img(&["map", "--output=json", "-f", "qcow2", "@disk"]);
    assert_eq!(runs(&over_nbd), runs(&direct));
    bed.qemu_img(&["check", "-q", "@disk"]);
}

#[test]
fn qemu_io_writes_zeroes_and_discards_of_every_kind() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "10M"]);
    let serving = bed.serve("nbd", &["disk"]);
    let uri = serving.uri("");
    let commands = [
        "write -P 1 0 4M",
        "write -P 2 -f 1000 3000",
        "write -z 1M 64k",
        "write -z -u 2M 64k",
        "write -z -n 3M 64k",
        "discard 3584k 64k",
        "flush",
        "aio_write -P 3 5M 1M",
        "aio_write -P 4 6M 1M",
        "aio_flush",
        "read -P 1 0 1000",
        "read -P 2 1000 3000",
        "read -P 0 1M 64k",
        "read -P 0 2M 64k",
        "read -P 0 3M 64k",
        "read -P 0 3584k 64k",
        "read -P 3 5M 1M",
        "read -P 4 6M 1M",
        "read -P 0 7M 1M",
    ];
    let words = commands.iter().flat_map(|command| ["-c", command]);
    let said = qemu_io(["-f", "raw", "-d", "unmap"].into_iter().chain(words).chain([uri.as_str()])).unwrap();
    assert!(!said.contains("failed"), "{said}");
    serving.stop();
    let path = bed.path("disk");
    bed.qemu_img(&["check", "-q", "@disk"]);
    let words = commands[10..].iter().flat_map(|command| ["-c", command]);
    let said = qemu_io(["-r", "-f", "qcow2"].into_iter().chain(words).chain([path.to_str().unwrap()])).unwrap();
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn an_encrypted_disk_is_served_in_the_clear_and_stays_encrypted() {
    needs_qemu!();
    let secret = "secret,id=s,data=correct horse";
    for (format, prefix, options) in [
        ("luks", "", "key-secret=s,iter-time=10"),
        ("qcow2", "encrypt.", "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10"),
    ] {
        let bed = Bed::new();
        bed.qemu_img(&["create", "-q", "-f", format, "--object", secret, "-o", options, "@disk", "4M"]);
        let image = format!("driver={format},{prefix}key-secret=s,file.filename={}", bed.path("disk").display());
        let serving = bed.serve("nbd", &["--object", secret, "--image-opts", &image]);
        let uri = serving.uri("");
        let words = ["-f", "raw", "-c", "write -P 7 0 1M", "-c", "write -P 8 1000 100", "-c", "read -P 8 1000 100"];
        let said = qemu_io(words.into_iter().chain([uri.as_str()])).unwrap();
        assert!(!said.contains("failed"), "{said}");
        serving.stop();
        let words = ["--object", secret, "--image-opts", "-c", "read -P 7 0 1000", "-c", "read -P 8 1000 100", &image];
        let said = qemu_io(words).unwrap();
        assert!(!said.contains("failed"), "{said}");
        assert!(!fs::read(bed.path("disk")).unwrap().windows(64).any(|bytes| bytes == [7; 64]));
        bed.refused(&["--nbd", "unix:other", "--image-opts", &image]).one_line(&["there is no secret \"s\""]);
    }
}

#[test]
fn a_script_over_libnbd_uses_what_other_clients_do_not() {
    needs_qemu!();
    let bed = Bed::new();
    bed.qemu_img(&["create", "-q", "-f", "qcow2", "@disk", "10M"]);
    let serving = bed.serve("nbd", &["disk"]);
    let script = "
import nbd
h = nbd.NBD()
h.add_meta_context('base:allocation')
h.add_meta_context('qemu:allocation-depth')
h.connect_uri(uri)
assert h.get_structured_replies_negotiated()
assert h.can_meta_context('qemu:allocation-depth')
h.pwrite(b'x' * 65536, 1 << 20, nbd.CMD_FLAG_FUA)
chunks = []
def chunk(buf, offset, status, error):
    chunks.append((offset, len(buf), status))
buf = h.pread_structured(3 << 20, 0, chunk)
assert bytes(buf) == bytes(1 << 20) + b'x' * 65536 + bytes((2 << 20) - 65536)
assert [c[2] for c in sorted(chunks)] == [nbd.READ_HOLE, nbd.READ_DATA, nbd.READ_HOLE], chunks
chunks.clear()
h.pread_structured(3 << 20, 0, chunk, nbd.CMD_FLAG_DF)
assert len(chunks) == 1
extents = {}
def extent(context, offset, entries, error):
    extents[context] = list(entries)
h.block_status(10 << 20, 0, extent)
assert extents['base:allocation'][:4] == [1 << 20, 3, 65536, 0], extents
assert extents['qemu:allocation-depth'][:4] == [1 << 20, 0, 65536, 1], extents
h.zero(65536, 1 << 20, nbd.CMD_FLAG_FAST_ZERO)
try:
    h.zero(100, (1 << 20) + 7, nbd.CMD_FLAG_FAST_ZERO)
    assert False
except nbd.Error as error:
    assert error.errno == 'ENOTSUP', error
h.cache(1 << 20, 0)
h.trim(1 << 20, 0, nbd.CMD_FLAG_FUA)
h.flush()
h.set_strict_mode(0)
for call, expected in [
    (lambda: h.pread(512, (10 << 20) - 511), 'EINVAL'),
    (lambda: h.pwrite(bytes(512), (10 << 20) - 511), 'ENOSPC'),
    (lambda: h.zero(512, 10 << 20), 'ENOSPC'),
    (lambda: h.trim(512, 10 << 20), 'EINVAL'),
]:
    try:
        call()
        assert False
    except nbd.Error as error:
        assert error.errno == expected, error
h.shutdown()
";
    let script = format!("uri = {:?}\n{script}", serving.uri(""));
    // The distribution's Python, which has the library.
    tool("/usr/bin/python3", &["-c", &script]);
    serving.stop();
    bed.qemu_img(&["check", "-q", "@disk"]);
}
