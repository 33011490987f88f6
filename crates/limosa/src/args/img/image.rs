//! Arguments that several commands of `limosa img` share: how an image is named and opened.

use std::ffi::OsStr;
use std::time::Duration;

use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, Args, Command, ValueEnum};
use limosa_console::{check_stdout, parse, print_out};
use limosa_storage::{CacheMode, Io};

use crate::img::limits::Limits;
use crate::img::object::{self, Object};
use crate::img::options::{Name, Source};
use crate::img::size::parse_memory;

/// Parses a definition of an object. clap's own error would print all of it, the secret included.
#[derive(Debug, Clone)]
struct ObjectParser;

impl TypedValueParser for ObjectParser {
    type Value = Object;

    fn parse_ref(&self, command: &Command, _: Option<&Arg>, value: &OsStr) -> Result<Object, clap::Error> {
        let why = match value.to_str() {
            // As in qemu-img, even if other arguments are missing.
            Some("help" | "?") => {
                print_out!("{}", object::HELP);
                std::process::exit(i32::from(check_stdout().is_err()))
            }
            Some(text) => match Object::parse(text) {
                Ok(object) => return Ok(object),
                Err(why) => why,
            },
            None => "a definition must be valid UTF-8; file=PATH reads a secret of any bytes".into(),
        };
        Err(command.clone().error(ErrorKind::InvalidValue, format!("--object: {why}")))
    }
}

#[derive(Debug, Default, Args)]
pub(crate) struct ObjectArg {
    /// A secret that encrypted images are opened with: secret,id=NAME,file=PATH or secret,id=NAME,data=TEXT; also with
    /// format=base64, keyid=NAME,iv=BASE64. Or certificates for NBD servers: tls-creds-x509,id=NAME,dir=PATH.
    /// Repeatable
    #[arg(long, value_name = "OBJDEF", value_parser = ObjectParser, action = ArgAction::Append, display_order = 901)]
    object: Vec<Object>,
}

impl ObjectArg {
    /// Returns the objects that were defined.
    pub(crate) fn all(&self) -> &[Object] {
        &self.object
    }
}

/// How images that exist are opened.
#[derive(Debug, Args)]
pub(crate) struct OpenArgs {
    /// Do not open files that an image refers to (backing file, data file) unless they are named on the command line
    #[arg(long, display_order = 900)]
    pub(crate) untrusted: bool,

    #[command(flatten)]
    pub(crate) object: ObjectArg,

    #[command(flatten)]
    pub(crate) limits: LimitArgs,
}

/// Limits of a command, for images from strangers.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Fail if more memory is needed than this: 64M, 1G; at least 1M
    #[arg(long, value_name = "SIZE", value_parser = parse_memory, display_order = 902)]
    limit_memory: Option<u64>,

    /// Fail if it takes longer than this: 500ms, 30s, 10m; a bare number is seconds
    #[arg(long, value_name = "TIME", value_parser = parse::time, display_order = 903)]
    limit_time: Option<Duration>,
}

impl LimitArgs {
    /// The limits.
    pub(crate) fn limits(&self) -> Limits {
        Limits { memory: self.limit_memory, time: self.limit_time }
    }
}

/// One image that exists, but for its name.
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// The image's format: raw, qcow2 or luks; probed by default
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,

    /// FILE is a list of options: driver=qcow2,file.driver=file,file.filename=NAME,...
    #[arg(long, conflicts_with = "format")]
    image_opts: bool,

    #[command(flatten)]
    pub(crate) open: OpenArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ShareArg {
    /// Open the image even if another process is writing to it; contents may be inconsistent
    #[arg(short = 'U', long)]
    pub(crate) force_share: bool,
}

#[derive(Debug, Args)]
pub(crate) struct QuietArg {
    /// Print errors only
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// The output of a command that takes long.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// Show progress, even without a terminal
    #[arg(short, long)]
    pub(crate) progress: bool,

    #[command(flatten)]
    pub(crate) quiet: QuietArg,

    /// Print one JSON object on stdout when done
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormArg {
    Human,
    Json,
}

#[derive(Debug, Args)]
pub(crate) struct OutputArgs {
    /// Output format
    #[arg(long, value_enum, value_name = "FORM", default_value_t = FormArg::Human)]
    output: FormArg,

    /// The same as --output json
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl OutputArgs {
    /// Whether a program is to read it.
    pub(crate) fn json(&self) -> bool {
        self.json || self.output == FormArg::Json
    }
}

impl OpenArgs {
    /// An image that exists, opened like this; shared and with the usual cache mode unless that is changed.
    pub(crate) fn source(&self, name: &OsStr, format: Option<&String>, image_opts: bool) -> Source {
        Source {
            name: Name(name.to_owned()),
            image_opts,
            format: format.cloned(),
            cache: CacheMode::Writeback,
            io: Io::Auto,
            force_share: false,
            untrusted: self.untrusted,
        }
    }
}

impl ImageArgs {
    /// Whether an option says how an image is opened.
    pub(crate) fn is_given(&self) -> bool {
        self.format.is_some() || self.image_opts
    }

    /// The image of this name.
    pub(crate) fn source(&self, name: &OsStr) -> Source {
        self.open.source(name, self.format.as_ref(), self.image_opts)
    }
}

/// A back end by QEMU's name for it.
pub(crate) fn parse_aio(text: &str) -> Result<Io, String> {
    Ok(match text {
        "threads" => Io::Threads,
        // Linux's older interface for the same; limosa has the newer one alone.
        "native" | "io_uring" => Io::Uring,
        _ => return Err(format!("{text:?} is not an I/O backend: write threads, native or io_uring")),
    })
}
