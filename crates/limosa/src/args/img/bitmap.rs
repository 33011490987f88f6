//! The arguments of `limosa img bitmap`.

use std::ffi::OsString;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use limosa_image::BitmapAction;

use super::super::bitmap_changes::action;
use super::image::ImageArgs;
use crate::img::options::BitmapOptions;
use crate::img::size;

#[derive(Debug, Args)]
pub(crate) struct ImgBitmapArgs {
    #[command(flatten)]
    actions: ActionArgs,

    /// Bytes of the disk that a bit of an added bitmap is about: a power of two; by default a cluster, at least 4k
    #[arg(short, long, value_name = "SIZE", value_parser = size::parse_size, requires = "add")]
    granularity: Option<u64>,

    /// The image that has the bitmaps that are merged, if it is another one
    #[arg(short = 'b', long, value_name = "FILE", requires = "merge")]
    source_file: Option<OsString>,

    /// The format of that image; probed by default
    #[arg(short = 'F', long, value_name = "FMT", requires = "source_file")]
    source_format: Option<String>,

    #[command(flatten)]
    pub(super) image: ImageArgs,

    /// The image
    #[arg(value_name = "FILE")]
    file: OsString,

    /// The bitmap
    #[arg(value_name = "BITMAP")]
    bitmap: String,
}

impl ImgBitmapArgs {
    /// Resolves the arguments.
    pub(crate) fn resolve(self) -> BitmapOptions {
        let merged = self.source_file.map(|name| self.image.open.source(&name, self.source_format.as_ref(), false));
        let mut actions = self.actions.0;
        for action in &mut actions {
            if let BitmapAction::Add { granularity } = action {
                *granularity = self.granularity;
            }
        }
        BitmapOptions { source: self.image.source(&self.file), bitmap: self.bitmap, actions, merged }
    }
}

/// The actions, in the order in which they are given.
#[derive(Debug)]
struct ActionArgs(Vec<BitmapAction>);

/// Options that are actions, with what they do.
const ACTIONS: [(&str, &str); 5] = [
    ("add", "Create the bitmap, empty and enabled"),
    ("remove", "Remove the bitmap"),
    ("clear", "Clear all bits of the bitmap"),
    ("enable", "Have the bitmap record writes to the disk from now on"),
    ("disable", "Have the bitmap record nothing more"),
];

impl Args for ActionArgs {
    fn augment_args(command: Command) -> Command {
        let mut command = command;
        for (name, help) in ACTIONS {
            let flag = Arg::new(name).long(name).help(help).action(ArgAction::Append).num_args(0);
            command = command.arg(flag.default_missing_value("true").value_parser(clap::value_parser!(bool)));
        }
        let merge = Arg::new("merge").long("merge").value_name("SOURCE").action(ArgAction::Append);
        let help = "Set the bits of the bitmap SOURCE in the bitmap. Actions may be repeated and combined; they are done \
                    in the order given";
        command = command.arg(merge.help(help));
        let all = ACTIONS.map(|(name, _)| name).into_iter().chain(["merge"]);
        command.group(clap::ArgGroup::new("actions").args(all).required(true).multiple(true))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for ActionArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Vec::new();
        for (name, _) in ACTIONS {
            found.extend(matches.indices_of(name).into_iter().flatten().map(|index| (index, action(name))));
        }
        let sources = matches.get_many::<String>("merge").into_iter().flatten();
        let merges = sources.map(|source| BitmapAction::Merge { source: source.clone() });
        found.extend(matches.indices_of("merge").into_iter().flatten().zip(merges));
        found.sort_by_key(|(index, _)| *index);
        Ok(Self(found.into_iter().map(|(_, action)| action).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
