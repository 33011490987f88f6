//! Tests that are run in their own process: this program, started again for one of its tests.

use std::process::Command;

/// The name by which a test harness knows a function of the module that this is written in. A function that is not
/// there does not compile: a harness that is given a name of no test runs none and reports success.
#[macro_export]
macro_rules! own_test_name {
    ($test:ident) => {{
        let _: fn() = $test;
        $crate::without_crate(concat!(module_path!(), "::", stringify!($test)))
    }};
}

/// This program, about to run that one test of the module that this is written in, whether it is ignored or not.
#[macro_export]
macro_rules! own_test {
    ($test:ident) => {
        $crate::own_test_command($crate::own_test_name!($test))
    };
}

/// A path without its crate, as harnesses name tests.
#[must_use]
pub fn without_crate(path: &'static str) -> &'static str {
    path.split_once("::").map_or(path, |(_, name)| name)
}

/// The body of [`own_test!`].
#[must_use]
pub fn own_test_command(name: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--include-ignored", "--nocapture"]);
    command
}

#[cfg(test)]
mod tests {
    #[test]
    fn tells_that_it_runs() {
        println!("it runs");
    }

    #[test]
    fn a_test_is_run_in_its_own_process() {
        let output = crate::own_test!(tells_that_it_runs).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains("it runs") && said.contains("1 passed"), "{said}");
    }
}
