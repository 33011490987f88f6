//! A test for each cell of the table: what, from which series, to which.

use limosa_testkit::Series;

use crate::{steps, types};

/// A module of each pair of series with a test of each step.
macro_rules! pairs {
    ($($pair:ident: $source:ident -> $destination:ident;)*) => { $(
        mod $pair {
            use super::*;

            cells! { $source, $destination;
                saved_in_every_way: steps::saved_in_every_way;
                saved_live: steps::saved_live;
                saved_in_the_background: steps::saved_in_the_background;
                saved_with_overlays: steps::saved_with_overlays;
                restored_lazily: steps::restored_lazily;
                restored_eagerly: steps::restored_eagerly;
                restored_mapped: steps::restored_mapped;
                recovered: steps::recovered;
                run: steps::run;
                cloned: steps::cloned;
                every_common_type: types::every_common_type;
            }
        }
    )* };
}

macro_rules! cells {
    ($source:ident, $destination:ident; $($name:ident: $step:path;)*) => { $(
        #[test]
        #[ignore = "a cell of the whole table: cargo xtask test --qemu all"]
        fn $name() {
            $step(Series::$source, Series::$destination);
        }
    )* };
}

pairs! {
    oldest_to_oldest: Oldest -> Oldest;
    oldest_to_installed: Oldest -> Installed;
    oldest_to_newest: Oldest -> Newest;
    installed_to_oldest: Installed -> Oldest;
    installed_to_installed: Installed -> Installed;
    installed_to_newest: Installed -> Newest;
    newest_to_oldest: Newest -> Oldest;
    newest_to_installed: Newest -> Installed;
    newest_to_newest: Newest -> Newest;
}
