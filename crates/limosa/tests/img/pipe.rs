//! `convert` and `dd` from and to pipes.

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::bed::{Answer, Bed, assert_one_line, length, poke};
use crate::convert::images;
use crate::needs_qemu;
use crate::stage::start_command;

/// The bytes that a command wrote into a pipe, and how it ended.
struct Piped {
    status: Option<i32>,
    stdout: Vec<u8>,
    stderr: String,
}

impl Piped {
    #[track_caller]
    fn success(self) -> Vec<u8> {
        assert_eq!((self.status, self.stderr.as_str()), (Some(0), ""));
        self.stdout
    }

    /// Expects that it failed, with one line in which this is said.
    #[track_caller]
    fn failure(self, says: &str) {
        assert_eq!(self.status, Some(1), "{}", self.stderr);
        let answer = Answer { status: self.status, stdout: String::new(), stderr: self.stderr };
        assert_one_line(&answer, &[], says);
    }
}

fn command(bed: &Bed, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_limosa"));
    command.arg("img").args(words).current_dir(bed.path(""));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs `limosa img` with these bytes in a pipe at its stdin.
fn piped(bed: &Bed, words: &[&str], stdin: &[u8]) -> Piped {
    let mut child = command(bed, words).spawn().unwrap();
    let mut into = child.stdin.take().unwrap();
    let output = std::thread::scope(|scope| {
        // A command that fails does not read all of it.
        scope.spawn(move || _ = into.write_all(stdin));
        child.wait_with_output().unwrap()
    });
    let stderr = String::from_utf8(output.stderr).unwrap();
    Piped { status: output.status.code(), stdout: output.stdout, stderr }
}

/// Bytes that differ from each other, with a hole.
fn contents(length: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..length as u64 / 8 + 1).flat_map(|word| (word * 0x9e37_79b9).to_le_bytes()).collect();
    bytes.truncate(length);
    let hole = length / 3..length / 2;
    bytes[hole].fill(0);
    bytes
}

#[test]
fn raw_bytes_from_a_pipe_become_an_image_of_any_format() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("key"), "secret").unwrap();
    // None, less than a sector, within one, more than is read ahead.
    for length in [0, 100, 512, 70_001, (40 << 20) + 513] {
        let bytes = contents(length);
        std::fs::write(bed.path("source"), &bytes).unwrap();
        for (words, opened) in [
            (&["-O", "raw"][..], "driver=raw,file.filename=target"),
            (&["-O", "qcow2"], "driver=qcow2,file.filename=target"),
            (&["-O", "qcow2", "-o", "cluster_size=512"], "driver=qcow2,file.filename=target"),
            (&["-O", "qcow2", "-o", "cluster_size=2M,extended_l2=on"], "driver=qcow2,file.filename=target"),
            (&["-O", "qcow2", "-c", "-t", "writeback"], "driver=qcow2,file.filename=target"),
            (
                &["-O", "luks", "--object", "secret,id=s,file=key", "-o", "key-secret=s,iter-time=10"],
                "driver=luks,key-secret=s,file.filename=target",
            ),
        ] {
            let words = [&["convert", "-f", "raw"], words, &["-", "target"]].concat();
            let printed = piped(&bed, &words, &bytes).success();
            assert!(printed.is_empty(), "{words:?}");
            if words.contains(&"qcow2") {
                bed.qemu_img(&["check", "-q", "target"]).success();
            }
            let compare =
                ["compare", "--object", "secret,id=s,file=key", "--image-opts", "driver=raw,file.filename=source"];
            bed.qemu_img(&[&compare[..], &[opened]].concat()).success();
            let info =
                bed.qemu_img(&["info", "--object", "secret,id=s,file=key", "--output=json", "--image-opts", opened]);
            assert_eq!(info.json()["virtual-size"], length.next_multiple_of(512), "{words:?}");
            std::fs::remove_file(bed.path("target")).unwrap();
        }
    }
}

#[test]
fn an_image_that_exists_takes_what_fits_into_it() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "target", "8M"]);
    bed.qemu_io("target", &["write -P 9 0 8M"]);
    let words = ["convert", "-n", "-f", "raw", "-O", "qcow2", "/dev/stdin", "target"];
    let bytes = contents(3 << 20);
    piped(&bed, &words, &bytes).success();
    bed.qemu_img(&["convert", "-O", "raw", "target", "plain"]).success();
    let found = std::fs::read(bed.path("plain")).unwrap();
    assert!(found[..3 << 20] == bytes && found[3 << 20..].iter().all(|byte| *byte == 9));
    piped(&bed, &words, &contents(9 << 20)).failure("smaller than its new contents");
}

#[test]
fn a_pipe_takes_raw_and_qcow2_images_of_every_kind_and_exactly_as_many_bytes_as_are_measured() {
    needs_qemu!();
    let bed = Bed::new();
    let mut all = images(&bed);
    bed.create(&["-f", "qcow2", "empty", "3T"]);
    bed.create(&["-f", "qcow2", "none", "0"]);
    all.extend([("empty", "qcow2"), ("none", "qcow2")]);
    for (name, format) in all {
        let mut targets = vec![
            &["-O", "qcow2"][..],
            &["-O", "qcow2", "-o", "cluster_size=512,compat=0.10"],
            &["-O", "qcow2", "-o", "extended_l2=on,cluster_size=2M,refcount_bits=1"],
            &["-O", "qcow2", "-o", "cluster_size=4k,lazy_refcounts=on,refcount_bits=64"],
            &["-O", "raw"],
        ];
        if name == "empty" {
            // A disk of 3 TiB in clusters of 512 bytes cannot be, and its zeros are too many.
            targets = vec![targets[0], targets[2]];
        }
        for target in targets {
            let words = [&["convert", "-f", format], target, &[name, "-"]].concat();
            let written = piped(&bed, &words, b"").success();
            let measure = [&["measure", "--pipe", "--output", "json", "-f", format], target, &[name]].concat();
            let measured = Answer::from(bed.limosa(&measure)).success().json();
            assert_eq!(measured["required"], written.len(), "{words:?}");
            std::fs::write(bed.path("target"), &written).unwrap();
            let of = target[1];
            if of == "qcow2" {
                bed.qemu_img(&["check", "-q", "target"]).success();
            }
            bed.qemu_img(&["compare", "-f", format, "-F", of, name, "target"]).success();
            if of == "qcow2" && name != "empty" {
                // What was written to a pipe can be read from one, by its own format or another one.
                for back in [&["-f", "qcow2", "-O", "raw"][..], &["-O", "qcow2"]] {
                    piped(&bed, &[&["convert"], back, &["-", "back"]].concat(), &written).success();
                    bed.qemu_img(&["compare", "-f", format, "-F", back[back.len() - 1], name, "back"]).success();
                }
            }
        }
    }
}

#[test]
fn an_image_of_stock_is_read_from_a_pipe_if_its_contents_are_in_order() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("source"), contents(150 << 20)).unwrap();
    let mut ends = 0;
    for more in [&[][..], &["-c"], &["-o", "cluster_size=4k"]] {
        let words = [&["convert", "-f", "raw", "-O", "qcow2"], more, &["source", "image"]].concat();
        bed.qemu_img(&words).success();
        let image = std::fs::read(bed.path("image")).unwrap();
        piped(&bed, &["convert", "-f", "qcow2", "-", "back"], &image).success();
        bed.qemu_img(&["compare", "-f", "raw", "-F", "raw", "source", "back"]).success();
        // Cut off, it is not taken for one that ends with zeros.
        std::fs::remove_file(bed.path("back")).unwrap();
        let cut = &image[..image.len() - (1 << 20)];
        let ended = piped(&bed, &["convert", "-f", "qcow2", "-", "back"], cut);
        assert_eq!((ended.status, bed.path("back").exists()), (Some(1), false), "{}", ended.stderr);
        assert!(!ended.stderr.contains("check"), "{}", ended.stderr);
        ends += usize::from(ended.stderr.contains("stdin ended at byte"));
    }
    assert!(ends > 0, "the place where the stream ended is named");
    // Cut off in its tables, which are in front: they are not taken for those of an empty disk.
    bed.qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "source", "image"]).success();
    let image = std::fs::read(bed.path("image")).unwrap();
    for length in [100, 70_000, 131_072, 200_000, 262_144, 300_000] {
        let ended = piped(&bed, &["convert", "-f", "qcow2", "-", "back"], &image[..length]);
        assert_eq!((ended.status, bed.path("back").exists()), (Some(1), false), "{length}: {}", ended.stderr);
        assert!(!ended.stderr.contains("-r all"), "{length}: {}", ended.stderr);
    }
    // Written from its end to its beginning.
    bed.create(&["-f", "qcow2", "image", "150M"]);
    let backwards: Vec<_> = (0..75).rev().map(|at| format!("write -P 1 {}M 2M", at * 2)).collect();
    bed.qemu_io("image", &backwards.iter().map(String::as_str).collect::<Vec<_>>());
    let image = std::fs::read(bed.path("image")).unwrap();
    piped(&bed, &["convert", "-f", "qcow2", "-", "back"], &image).failure("stored in a file first");
    assert!(!bed.path("back").exists());
}

#[test]
fn an_image_from_a_pipe_is_read_to_its_end() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "qcow2", "image", "4M"]);
    bed.qemu_io("image", &["write -P 1 0 1M"]);
    bed.qemu_img(&["snapshot", "-c", "before", "image"]).success();
    bed.qemu_io("image", &["write -P 2 0 1M"]);
    bed.qemu_img(&["bitmap", "--add", "image", "b"]).success();
    bed.qemu_img(&["convert", "-f", "qcow2", "-O", "raw", "image", "disk"]).success();
    let mut image = std::fs::read(bed.path("image")).unwrap();
    // Who writes it is not ended by a signal: `piped` expects that all of it is taken.
    image.resize(image.len() + (9 << 20), 0);
    piped(&bed, &["convert", "-f", "qcow2", "-O", "raw", "-", "back"], &image).success();
    assert!(std::fs::read(bed.path("back")).unwrap() == std::fs::read(bed.path("disk")).unwrap());
    // The bitmap directory is the last thing that was written.
    std::fs::remove_file(bed.path("back")).unwrap();
    image.truncate(image.len() - (9 << 20) - (64 << 10));
    piped(&bed, &["convert", "-f", "qcow2", "-O", "raw", "-", "back"], &image).failure("not in the file of");
    assert!(!bed.path("back").exists());
}

#[test]
fn what_cannot_be_done_in_one_pass_is_refused_by_name() {
    needs_qemu!();
    let bed = Bed::new();
    images(&bed);
    std::fs::write(bed.path("key"), "secret").unwrap();
    let luks = ["--object", "secret,id=s,file=key", "-o", "key-secret=s"];
    for (words, says) in [
        (&["convert", "-c", "-O", "qcow2", "base", "-"][..], "-c: stdout gets the tables first"),
        (&["convert", "-O", "qcow2", "-B", "base", "-F", "qcow2", "overlay", "-"], "backing file"),
        (&["convert", "-O", "qcow2", "-o", "data_file=d", "base", "-"], "data file"),
        (&["convert", "-O", "raw", "-S", "0", "base", "-"], "-S 0"),
        (&[&["convert", "-O", "luks"], &luks[..], &["base", "-"]].concat(), "LUKS"),
        (&["convert", "-f", "raw", "-O", "qcow2", "-", "-"], "begins with tables that describe its contents"),
        (&["convert", "-f", "raw", "-O", "qcow2", "-o", "preallocation=full", "-", "t"], "preallocated"),
        (&["convert", "-f", "raw", "-O", "qcow2", "-B", "base", "-F", "qcow2", "-", "t"], "-B: - is a pipe"),
        (&["convert", "-f", "raw", "base", "-", "t"], "only source"),
        (&["convert", "-f", "luks", "-", "t"], "store it in a file first"),
        (&["convert", "-", "t"], "it looks like vmdk"),
    ] {
        piped(&bed, words, b"KDMV").failure(says);
        assert!(!bed.path("t").exists(), "{words:?}");
    }
    for (name, says) in [("overlay", "backing file"), ("base", "")] {
        let mut image = std::fs::read(bed.path(name)).unwrap();
        if says.is_empty() {
            // A header that lies: an L1 table far away.
            image[40..48].copy_from_slice(&(1_u64 << 40).to_be_bytes());
        }
        piped(&bed, &["convert", "-f", "qcow2", "-", "t"], &image).failure(says);
        assert!(!bed.path("t").exists());
    }
}

#[test]
fn progress_and_messages_are_on_stderr_if_the_image_is_on_stdout() {
    needs_qemu!();
    let bed = Bed::new();
    let bytes = contents(3 << 20);
    std::fs::write(bed.path("source"), &bytes).unwrap();
    let ended = piped(&bed, &["convert", "-p", "-f", "raw", "source", "-"], b"");
    assert!(ended.stdout == bytes && ended.stderr.ends_with("(100.00/100%)\r\n"), "{}", ended.stderr);
    let ended = piped(&bed, &["convert", "--json", "-f", "raw", "-", "/dev/stdout"], &bytes);
    assert!(ended.stdout == bytes && ended.stderr.contains("\"bytes-read\":3145728"), "{}", ended.stderr);
    let ended = piped(&bed, &["convert", "-p", "-f", "raw", "-", "target"], &bytes);
    assert!(ended.stderr.is_empty() && ended.stdout.ends_with(b"(100.00/100%)\r\n"), "{}", ended.stderr);
    // Appended to a file, and from within one.
    let script = "printf abc > out && \"$0\" img convert -f raw source - >> out && \
                  (head -c 512 > /dev/null; \"$0\" img convert -f raw - rest) < source";
    let shell = ["-c", script, env!("CARGO_BIN_EXE_limosa")];
    let done = Command::new("bash").args(shell).current_dir(bed.path("")).output().unwrap();
    assert!(done.status.success(), "{done:?}");
    let out = std::fs::read(bed.path("out")).unwrap();
    assert!(out.starts_with(b"abc") && out[3..] == bytes);
}

#[test]
fn a_pipe_that_nobody_reads_any_more_and_a_disk_that_is_full_are_one_line() {
    needs_qemu!();
    let bed = Bed::new();
    std::fs::write(bed.path("source"), contents(30 << 20)).unwrap();
    for format in ["raw", "qcow2"] {
        let mut child = command(&bed, &["convert", "-f", "raw", "-O", format, "source", "-"]).spawn().unwrap();
        drop(child.stdout.take());
        let ended = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(ended.stderr).unwrap();
        Piped { status: ended.status.code(), stdout: Vec::new(), stderr }.failure("roken pipe");
    }
    // A pipe that has no end, into a file that may not be longer.
    let script = "ulimit -f 20000; trap '' XFSZ; yes | exec \"$0\" img convert -f raw -O \"$1\" - target";
    for format in ["raw", "qcow2"] {
        let mut endless = Command::new("bash");
        endless.args(["-c", script, env!("CARGO_BIN_EXE_limosa"), format]).current_dir(bed.path(""));
        let answer = Answer::from(start_command(endless).wait());
        assert_eq!((answer.status, bed.path("target").exists()), (Some(1), false), "{answer:?}");
        assert!(answer.stderr.lines().any(|line| line.contains("File too large")), "{answer:?}");
    }
    // Memory is bounded.
    let script = "head -c 1G /dev/zero | \"$0\" img convert --limit-memory 128M -f raw -O qcow2 - target";
    let mut long = Command::new("bash");
    long.args(["-c", script, env!("CARGO_BIN_EXE_limosa")]).current_dir(bed.path(""));
    Answer::from(start_command(long).wait()).success();
    assert!(length(&bed.path("target")) < 4 << 20);
}

#[test]
fn fifos_are_read_and_written_by_their_names() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "source", "5M"]);
    poke(&bed.path("source"), 3 << 20, b"contents");
    let script = "mkfifo f && \"$0\" img convert -f raw -O qcow2 source f & \
                  while ! test -p f; do sleep 0.01; done; \"$0\" img convert -f qcow2 f target && wait $! && \
                  \"$0\" img convert -f raw <(cat source) again";
    let mut shell = Command::new("bash");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_limosa")]).current_dir(bed.path(""));
    Answer::from(start_command(shell).wait()).success();
    for target in ["target", "again"] {
        bed.qemu_img(&["compare", "-f", "raw", "-F", "raw", "source", target]).success();
    }
}

#[test]
fn dd_reads_stdin_and_writes_stdout() {
    needs_qemu!();
    let bed = Bed::new();
    let bytes = contents(10_000);
    std::fs::write(bed.path("source"), &bytes).unwrap();
    for (operands, expected) in [
        (&["bs=1k"][..], 0..10_000),
        (&["bs=1k", "count=3"], 0..3072),
        (&["bs=1000", "skip=2", "count=7"], 2000..7000),
        (&["bs=1k", "skip=8"], 8192..10_000),
    ] {
        let mut expected = bytes[expected].to_vec();
        expected.resize(expected.len().next_multiple_of(512), 0);
        for from in ["if=-", "if=source"] {
            for to in ["of=-", "of=/dev/stdout"] {
                let words = [&["dd", "-f", "raw", from, to], operands].concat();
                assert!(piped(&bed, &words, &bytes).success() == expected, "{words:?}");
            }
        }
    }
    let past = piped(&bed, &["dd", "-f", "raw", "if=-", "of=out", "bs=1k", "skip=11"], &bytes);
    assert!(past.status == Some(0) && past.stderr.contains("skip=11 begins past the end"), "{}", past.stderr);
    assert_eq!(length(&bed.path("out")), 0);
}

#[test]
fn a_stream_that_is_closed_is_refused() {
    needs_qemu!();
    let bed = Bed::new();
    bed.create(&["-f", "raw", "disk", "1M"]);
    std::fs::write(bed.path("target"), "mine").unwrap();
    let shell = |words: &str| {
        let line = format!("exec {} img {words}", env!("CARGO_BIN_EXE_limosa"));
        let output = Command::new("sh").args(["-c", &line]).current_dir(bed.path("")).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for redirected in ["<&-", "</dev/null", "</dev/zero"] {
        let (status, said) = shell(&format!("convert -f raw -O raw - target {redirected}"));
        assert!(status == Some(1) && said.contains("stdin is closed, or a device"), "{redirected}: {said}");
    }
    assert_eq!(std::fs::read(bed.path("target")).unwrap(), b"mine");
    let (status, said) = shell("convert -f raw -O raw disk - >&-");
    assert!(status == Some(1) && said.contains("stdout is closed"), "{said}");
    assert_eq!(shell("convert -f raw -O raw disk - >/dev/null").0, Some(0));
}
