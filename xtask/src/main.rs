//! `cargo xtask setup|test|demo|bench|dist|package|fuzz|tsan|crates|api|style|imports|messages`: what a developer, and
//! the machine that checks a change, run.
//!
//! Law: every command does its own set-up, needs no input, and ends with a line that says how it went.

use std::process::ExitCode;

mod api;
mod demo;
mod dist;
mod docs;
mod fuzz;
mod imports;
mod messages;
mod package;
mod plot;
mod program;
mod published;
mod series;
mod setup;
mod shell;
mod style;
mod test;
mod tsan;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  setup              install what the tests and the demo need (QEMU, libvirt's client, XFS's tools, stores, guests);
                     LIMOSA_SKIP_LIBVIRT=1 does without libvirt, LIMOSA_SKIP_REFLINK=1 without XFS's tools,
                     LIMOSA_SKIP_UML=1 without user-mode Linux, LIMOSA_SKIP_SERIES=1 without an older and a newer QEMU,
                     LIMOSA_SKIP_STORES=1 without object stores
  test               format, style, lints, fuzz targets, documentation, public API, packages, all tests and model checks;
                     LIMOSA_SKIP_QEMU=1 leaves out what needs QEMU, LIMOSA_SKIP_KVM=1 what needs /dev/kvm, LIMOSA_SKIP_REFLINK=1 what mounts XFS
  setup --qemu oldest|newest|all
                     the same with this series of QEMU beside the installed one
  test --qemu oldest|installed|newest|all
                     saving in one series of QEMU and restoring, running and cloning in another, in every way: all
                     pairs in which this series is, or all
  test --packages    the packages: the same bytes twice, and their job in Debian 12 and 13; as root
  demo               save a running Linux guest and bring it back, beside QEMU's own restore
  demo disk          a Linux guest on a disk that limosa serves, while its server is killed
  bench NAME ...     release builds, then `limosa-bench NAME ...`
  bench --plot       pictures of the records (docs/benchmarks/*.json), beside them
  dist               release build, then target/dist/limosa, stripped, and target/dist/limosa.debug beside it
  package [PROCESSOR...]
                     packages for machines without Rust, in target/packages: for Debian, for RPM, a static program;
                     of this machine's processor, or of x86_64 and aarch64
  fuzz [--seconds N] [TARGET...]
                     every fuzz target, or those named, N seconds each (60)
  tsan [FILTER...]   tests in which threads share storages and images, under the thread sanitizer
  crates             packages of the published crates, and what is in them builds
  api [--update]     what differs from the public API that docs/api records; --update records it again
  style [RULE...]    rules that a program can check: fails if one is broken; with RULE, lists every place that breaks it
  imports [CRATE...] files that import each other in a circle
  messages [help|CRATE...]
                     every help text and message of the product in one list, for an editor";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((command, rest)) = arguments.split_first() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let result = match (command.as_str(), rest) {
        ("setup", []) => setup::run().map(|()| println!("setup: everything is here")),
        ("setup", [option, name]) if option == "--qemu" => {
            series::set_up(name).map(|()| println!("setup: everything is here"))
        }
        ("test", []) => test::run(),
        ("test", [option, name]) if option == "--qemu" => series::run(name),
        ("test", [packages]) if packages == "--packages" => package::check::run(),
        ("demo", []) => demo::run(),
        ("demo", [disk]) if disk == "disk" => demo::disk::run(),
        ("bench", [plot]) if plot == "--plot" => plot::run(),
        ("bench", names) => program::bench(names),
        ("dist", []) => dist::run(),
        ("package", processors) => package::run(processors),
        ("fuzz", rest) => fuzz::run(rest),
        ("tsan", rest) => tsan::run(rest),
        ("crates", []) => published::package(),
        ("api", []) => api::run(false),
        ("api", [update]) if update == "--update" => api::run(true),
        ("style", rest) => style::run(rest),
        ("imports", rest) => imports::run(rest),
        ("messages", rest) => messages::run(rest),
        ("help" | "--help" | "-h", _) => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("cargo xtask: not understood: {}\n\n{USAGE}", arguments.join(" "));
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cargo xtask {command}: {error:#}");
            ExitCode::FAILURE
        }
    }
}
