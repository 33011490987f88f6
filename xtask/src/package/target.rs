//! The targets that packages are made for, and the program's build for each: the same bytes wherever it is built.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::shell;

/// A processor with a C library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) triple: &'static str,
    /// The processor, as Rust and RPM name it.
    pub(super) processor: &'static str,
    /// The same, as Debian names it.
    pub(super) debian: &'static str,
    /// The program needs no library.
    pub(super) is_static: bool,
    /// The C compiler.
    compiler: &'static str,
    /// Links the program. musl's compiler cannot link one that is static and lies anywhere: it would need a loader.
    linker: &'static str,
    /// The Debian package that has it.
    compiler_package: &'static str,
    /// Takes its programs apart.
    pub(super) objcopy: &'static str,
}

/// All of them, the machine's own first.
pub(super) const ALL: [Target; 4] = [
    Target {
        triple: "x86_64-unknown-linux-gnu",
        processor: "x86_64",
        debian: "amd64",
        is_static: false,
        compiler: "gcc",
        linker: "gcc",
        compiler_package: "gcc",
        objcopy: "objcopy",
    },
    Target {
        triple: "x86_64-unknown-linux-musl",
        processor: "x86_64",
        debian: "amd64",
        is_static: true,
        compiler: "musl-gcc",
        linker: "gcc",
        compiler_package: "musl-tools",
        objcopy: "objcopy",
    },
    Target {
        triple: "aarch64-unknown-linux-gnu",
        processor: "aarch64",
        debian: "arm64",
        is_static: false,
        compiler: "aarch64-linux-gnu-gcc",
        linker: "aarch64-linux-gnu-gcc",
        compiler_package: "gcc-aarch64-linux-gnu",
        objcopy: "aarch64-linux-gnu-objcopy",
    },
    Target {
        triple: "aarch64-unknown-linux-musl",
        processor: "aarch64",
        debian: "arm64",
        is_static: true,
        // Rust brings musl itself; the C code of crates needs no more of a library than its headers.
        compiler: "aarch64-linux-gnu-gcc",
        linker: "aarch64-linux-gnu-gcc",
        compiler_package: "gcc-aarch64-linux-gnu",
        objcopy: "aarch64-linux-gnu-objcopy",
    },
];

impl Target {
    /// Builds the program, not stripped, into a folder of builds. Returns where it is.
    pub(super) fn build(self, builds: &Path) -> Result<PathBuf> {
        let mut cargo = self.ready(builds)?;
        cargo.args(["build", "--release", "--locked", "--package", "limosa", "--bin", "limosa"]);
        shell::run(cargo.args(["--target", self.triple]))?;
        let program = builds.join(self.triple).join("release/limosa");
        if !program.is_file() {
            bail!("cargo has built no {}", program.display());
        }
        Ok(program)
    }

    /// cargo, for this target, which has all that it needs.
    pub(super) fn ready(self, builds: &Path) -> Result<Command> {
        self.check_compiler()?;
        self.add_to_toolchain()?;
        self.cargo(builds)
    }

    /// cargo, for this target.
    fn cargo(self, builds: &Path) -> Result<Command> {
        let flags = self.flags()?;
        let underscored = self.triple.replace('-', "_");
        let mut cargo = Command::new("cargo");
        cargo.current_dir(shell::workspace());
        cargo.env("CARGO_TARGET_DIR", builds).env("CARGO_PROFILE_RELEASE_STRIP", "none");
        cargo.env(format!("CARGO_TARGET_{}_LINKER", underscored.to_uppercase()), self.linker);
        cargo.env(format!("CC_{underscored}"), self.compiler);
        cargo.env(format!("CFLAGS_{underscored}"), flags.c).env("CARGO_ENCODED_RUSTFLAGS", flags.rust);
        Ok(cargo)
    }

    /// Folders of this machine have the same names in every build.
    fn flags(self) -> Result<Flags> {
        let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
        let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
        let folders = [(shell::workspace(), "/limosa"), (home.context("no CARGO_HOME and no HOME")?, "/cargo")];
        let mut flags = Flags { rust: OsString::new(), c: OsString::new() };
        for (folder, name) in &folders {
            flags.rust.push("--remap-path-prefix=");
            flags.c.push("-ffile-prefix-map=");
            for flags in [&mut flags.rust, &mut flags.c] {
                flags.push(folder);
                flags.push(format!("={name}"));
            }
            flags.rust.push("\x1f");
            flags.c.push(" ");
        }
        flags.rust.push(if self.is_static { "-Ctarget-feature=+crt-static" } else { "-Ctarget-feature=-crt-static" });
        Ok(flags)
    }

    fn check_compiler(self) -> Result<()> {
        for program in [self.compiler, self.linker] {
            if shell::find_program(program).is_none() {
                bail!("no {program}, which {} needs: run `apt-get install {}`", self.triple, self.compiler_package);
            }
        }
        Ok(())
    }

    /// Has rustup fetch Rust's library for it, where rustup is and has not done so.
    fn add_to_toolchain(self) -> Result<()> {
        let root = shell::output(Command::new("rustc").args(["--print", "sysroot"]))?;
        if Path::new(root.trim()).join("lib/rustlib").join(self.triple).join("lib").is_dir() {
            return Ok(());
        }
        shell::run(Command::new("rustup").args(["target", "add", self.triple]))
            .with_context(|| format!("this toolchain has no library for {}", self.triple))
    }
}

/// Words for compilers.
struct Flags {
    /// For cargo: separated by the unit separator.
    rust: OsString,
    c: OsString,
}
