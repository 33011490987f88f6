//! Sources and targets of `convert` and `dd` that are pipes.
//!
//! Law: `-` is stdin or stdout. A name is a pipe's if it leads to a FIFO, a pipe or a socket. Everything else is a
//! file, stdin included if it is read from its beginning: an image in a file can have any layout.

use std::fs::{self, File, FileType};
use std::io::{IsTerminal as _, Seek as _, stdin, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::Context as _;
use limosa_image::Format;
use limosa_image::convert::{InputStream, OutputStream};
use limosa_image::reference::Reference;

use super::options::{Name, Source};

/// Names of stdin, but for `-`.
const STDIN: [&str; 3] = ["/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"];
/// Names of stdout, but for `-`.
const STDOUT: [&str; 3] = ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"];

/// A target that is a pipe.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) stream: OutputStream,
    /// Whether it is stdout: nothing else is printed there.
    pub(super) is_stdout: bool,
}

/// Returns the stream of a source that is a pipe; `None`: it is a file. A source `-` that is one gets its name.
///
/// # Errors
/// It cannot be opened, or is a terminal.
pub(super) fn input(source: &mut Source) -> anyhow::Result<Option<InputStream>> {
    let Some(name) = plain(&source.name, source.image_opts) else { return Ok(None) };
    let format = source.format.as_deref().map(str::parse::<Format>).transpose()?;
    let is_dash = name == "-";
    if is_dash || STDIN.contains(&name) {
        let stdin = own(&stdin(), "stdin")?;
        let is_file = stdin.metadata().is_ok_and(|metadata| !is_stream(metadata.file_type()));
        if is_file && (!is_dash || (&stdin).stream_position().is_ok_and(|at| at == 0)) {
            source.name = Name(STDIN[0].into());
            return Ok(None);
        }
        anyhow::ensure!(!stdin.is_terminal(), "{name}: stdin is a terminal; connect it to a pipe");
        // A closed stdin is the null device, too: an empty disk would replace the target.
        anyhow::ensure!(!is_device(&stdin), "{name}: stdin is closed, or a device; connect it to a pipe");
        return Ok(Some(InputStream::new("stdin", format, stdin)));
    }
    let Some(kind) = kind(name) else { return Ok(None) };
    let open = || format!("cannot open {name}");
    Ok(Some(if kind.is_socket() {
        InputStream::new(name, format, UnixStream::connect(name).with_context(open)?)
    } else {
        InputStream::new(name, format, File::open(name).with_context(open)?)
    }))
}

/// Returns the stream of a target that is a pipe; `None`: it is a file, or will be.
///
/// # Errors
/// It cannot be opened, or is a terminal.
pub(super) fn output(name: &Name) -> anyhow::Result<Option<Output>> {
    let Some(name) = plain(name, false) else { return Ok(None) };
    let is_dash = name == "-";
    if is_dash || STDOUT.contains(&name) {
        let stdout = own(&stdout(), "stdout")?;
        if !is_dash && stdout.metadata().is_ok_and(|metadata| !is_stream(metadata.file_type())) {
            return Ok(None);
        }
        anyhow::ensure!(!stdout.is_terminal(), "{name}: stdout is a terminal; connect it to a pipe or a file");
        anyhow::ensure!(!was_closed(&stdout), "{name}: stdout is closed; connect it to a pipe or a file");
        return Ok(Some(Output { stream: OutputStream::new("stdout", stdout), is_stdout: true }));
    }
    let Some(kind) = kind(name) else { return Ok(None) };
    let open = || format!("cannot open {name}");
    let stream = if kind.is_socket() {
        OutputStream::new(name, UnixStream::connect(name).with_context(open)?)
    } else {
        OutputStream::new(name, File::options().write(true).open(name).with_context(open)?)
    };
    Ok(Some(Output { stream, is_stdout: false }))
}

/// Whether a source may be a pipe. Nothing is opened.
pub(super) fn may_be_input(source: &Source) -> bool {
    plain(&source.name, source.image_opts)
        .is_some_and(|name| name == "-" || STDIN.contains(&name) || kind(name).is_some())
}

/// The name, if it is nothing but a path.
fn plain(name: &Name, image_opts: bool) -> Option<&str> {
    let text = name.0.to_str().filter(|_| !image_opts)?;
    let is_path = || Reference::from_name(text).is_ok_and(|reference| reference == Reference::file(text));
    (text == "-" || is_path()).then_some(text)
}

/// The kind of a file that is a stream, by its path.
fn kind(name: &str) -> Option<FileType> {
    let kind = fs::metadata(Path::new(name)).ok()?.file_type();
    (kind.is_fifo() || kind.is_socket()).then_some(kind)
}

/// Whether a descriptor of this kind has no offsets.
fn is_stream(kind: FileType) -> bool {
    kind.is_fifo() || kind.is_socket() || kind.is_char_device()
}

/// Whether a descriptor is of a character device.
fn is_device(stream: &File) -> bool {
    stream.metadata().is_ok_and(|metadata| metadata.file_type().is_char_device())
}

/// Whether a stream was closed when the process was started: the runtime opens the null device in its place, for
/// reading and writing. One that is redirected there is opened for one of them.
fn was_closed(stream: &File) -> bool {
    is_device(stream) && rustix::fs::fcntl_getfl(stream).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::RDWR))
}

/// A descriptor of our own for a stream of the process.
fn own(stream: &impl AsFd, name: &str) -> anyhow::Result<File> {
    let copy = stream.as_fd().try_clone_to_owned().with_context(|| format!("cannot use {name}"))?;
    Ok(File::from(copy))
}
