//! Options that change dirty bitmaps of a disk in use, in the order in which they are given.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use limosa_image::BitmapAction;

/// Changes of bitmaps, each with the bitmap's name.
#[derive(Debug)]
pub(crate) struct BitmapChanges(pub(crate) Vec<(String, BitmapAction)>);

/// Options with a name, and what they do.
const OPTIONS: [(&str, &str); 5] = [
    ("add", "Create this bitmap, empty and enabled"),
    ("remove", "Remove this bitmap"),
    ("clear", "Clear all bits of this bitmap"),
    ("enable", "Have this bitmap record writes from now on"),
    ("disable", "Have this bitmap record nothing more"),
];

/// Returns what the option of this name does.
pub(super) fn action(option: &str) -> BitmapAction {
    match option {
        "add" => BitmapAction::Add { granularity: None },
        "remove" => BitmapAction::Remove,
        "clear" => BitmapAction::Clear,
        "enable" => BitmapAction::Enable,
        _ => BitmapAction::Disable,
    }
}

impl Args for BitmapChanges {
    fn augment_args(command: Command) -> Command {
        let mut command = command;
        for (name, help) in OPTIONS {
            let option = Arg::new(name).long(name).value_name("BITMAP").help(help).action(ArgAction::Append);
            command = command.arg(option);
        }
        let merge = Arg::new("merge").long("merge").value_names(["SOURCE", "BITMAP"]).num_args(2);
        let help = "Set the bits of the bitmap SOURCE in BITMAP. Options may be repeated and combined; they are carried \
                    out in the order given";
        command.arg(merge.action(ArgAction::Append).help(help))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for BitmapChanges {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let values = |name: &str| matches.get_many::<String>(name).into_iter().flatten().cloned().collect::<Vec<_>>();
        let mut found = Vec::new();
        for (option, _) in OPTIONS {
            let indices = matches.indices_of(option).into_iter().flatten();
            found.extend(indices.zip(values(option)).map(|(index, name)| (index, (name, action(option)))));
        }
        let indices = matches.indices_of("merge").into_iter().flatten().step_by(2);
        let merged = values("merge");
        let merges = merged.chunks_exact(2).filter_map(|pair| match pair {
            [source, name] => Some((name.clone(), BitmapAction::Merge { source: source.clone() })),
            _ => None,
        });
        found.extend(indices.zip(merges));
        found.sort_by_key(|(index, _)| *index);
        Ok(Self(found.into_iter().map(|(_, change)| change).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
