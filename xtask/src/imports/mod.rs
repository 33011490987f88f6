//! `cargo xtask imports [CRATE...]`: files of a crate that import each other in a circle.
//!
//! Law: a module imports what is below it. A circle of two or three files is one thing in several files; a larger one
//! means that no part of it can be understood, or used, without all others, and `cargo xtask style` fails on it.
//!
//! `pub use` imports nothing here: a re-export is followed to the file that has the item.

mod graph;
mod paths;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::shell;
use graph::Graph;
use paths::{Mentioned, ModulePath};

/// Files in a circle that are still one thing.
const ONE_THING: usize = 3;

/// `cargo xtask imports [CRATE...]`: every circle of more than one file, with its imports.
pub(crate) fn run(wanted: &[String]) -> Result<()> {
    let mut found = 0;
    for folder in crates()? {
        let name = name(&folder);
        if !wanted.is_empty() && !wanted.contains(&name) {
            continue;
        }
        let graph = graph_of(&folder.join("src"))?;
        for circle in graph.circles() {
            found += 1;
            println!("{name}: {} files", circle.len());
            for from in &circle {
                let imported: Vec<&str> = graph.imported(from).filter(|to| circle.contains(*to)).collect();
                println!("  {from}: {}", imported.join(", "));
            }
        }
    }
    println!("imports: {found} circles");
    Ok(())
}

/// Finds the circles that are more than one thing, of all crates: a line for each.
pub(crate) fn large_circles() -> Result<Vec<String>> {
    let mut found = Vec::new();
    for folder in crates()? {
        let circles = large(&graph_of(&folder.join("src"))?);
        found.extend(circles.into_iter().map(|circle| format!("crates/{}/src: {circle}", name(&folder))));
    }
    Ok(found)
}

/// Describes the circles of more than three files.
fn large(graph: &Graph) -> Vec<String> {
    let circles = graph.circles().into_iter().filter(|circle| circle.len() > ONE_THING);
    circles.map(|circle| format!("{} files: {}", circle.len(), Vec::from_iter(circle).join(", "))).collect()
}

/// The folders of all crates, in order.
fn crates() -> Result<Vec<PathBuf>> {
    let folder = shell::workspace().join("crates");
    let entries = fs::read_dir(&folder).with_context(|| folder.display().to_string())?;
    let mut folders: Vec<PathBuf> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    folders.retain(|folder| folder.join("src").is_dir());
    folders.sort();
    Ok(folders)
}

fn name(folder: &Path) -> String {
    folder.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The imports between the files below `src`. Programs in `src/bin` are crates of their own and are left out.
fn graph_of(src: &Path) -> Result<Graph> {
    let mut files = BTreeMap::new();
    read(src, src, &mut files)?;
    Ok(graph_of_files(&files))
}

/// Reads all Rust files below `folder` by their paths from `src`.
fn read(folder: &Path, src: &Path, files: &mut BTreeMap<String, String>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.is_dir() {
            if path != src.join("bin") {
                read(&path, src, files)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            files.insert(path.strip_prefix(src).unwrap_or(&path).display().to_string(), text);
        }
    }
    Ok(())
}

/// The imports between files with these texts, by their paths from `src`.
fn graph_of_files(files: &BTreeMap<String, String>) -> Graph {
    let mut modules: BTreeMap<ModulePath, (&str, Mentioned)> = files
        .iter()
        .map(|(file, text)| {
            let module = module_of(file);
            let mentioned = Mentioned::in_file(text, &module);
            (module, (file.as_str(), mentioned))
        })
        .collect();
    // Modules of tests, and what is below them.
    let tests: BTreeSet<ModulePath> = modules.values().flat_map(|(_, found)| found.test_modules.clone()).collect();
    modules.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
    let resolver = Resolver { modules: &modules };
    let mut graph = Graph::default();
    for (file, mentioned) in modules.values() {
        for path in &mentioned.paths {
            if let Some(to) = resolver.file_of(path, 0)
                && to != *file
            {
                graph.add(file, to);
            }
        }
    }
    graph
}

/// The module that a file is: `a/b.rs` and `a/b/mod.rs` are `a::b`; `lib.rs` and `main.rs` are the root.
fn module_of(file: &str) -> ModulePath {
    let mut module: ModulePath = file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
    if module.last().is_some_and(|last| last == "mod") || matches!(file, "lib.rs" | "main.rs") {
        module.pop();
    }
    module
}

/// Finds the file that has an item.
struct Resolver<'a> {
    modules: &'a BTreeMap<ModulePath, (&'a str, Mentioned)>,
}

impl Resolver<'_> {
    /// The file with the item at `path`: that of the innermost module on it, or where that module has it from.
    fn file_of(&self, path: &[String], depth: usize) -> Option<&str> {
        let length = (0..=path.len()).rev().find(|&length| self.modules.contains_key(&path[..length]))?;
        let (module, rest) = path.split_at(length);
        let (file, mentioned) = self.modules.get(module)?;
        let Some((name, rest)) = rest.split_first() else { return Some(file) };
        // Re-exports that lead to each other do not compile; the limit is for those that this reader takes for such.
        match mentioned.names.get(name) {
            Some(target) if depth < 16 && target.as_slice() != path => {
                let target: ModulePath = target.iter().chain(rest).cloned().collect();
                self.file_of(&target, depth + 1)
            }
            _ => Some(file),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(files: &[(&str, &str)]) -> Graph {
        graph_of_files(&files.iter().map(|(file, text)| ((*file).to_owned(), (*text).to_owned())).collect())
    }

    #[test]
    fn a_re_export_leads_to_the_file_that_has_the_item() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b; pub use a::inner::Thing;"),
            ("a/mod.rs", "mod inner; pub(crate) use inner::Other;"),
            ("a/inner.rs", "use crate::b::f; pub struct Thing; pub struct Other;"),
            ("b.rs", "use crate::Thing; use crate::a::Other; pub fn f(_: crate::a::inner::Thing) {}"),
        ]);
        assert_eq!(graph.imported("b.rs").collect::<Vec<_>>(), ["a/inner.rs"]);
        assert_eq!(graph.circles(), [["a/inner.rs", "b.rs"].map(str::to_owned).into()]);
    }

    #[test]
    fn a_door_that_calls_its_modules_imports_them_and_one_that_re_exports_does_not() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b; pub use b::B; fn f() { a::g() }"),
            ("a.rs", "pub fn g() -> super::B {}"),
            ("b.rs", "pub struct B;"),
        ]);
        assert_eq!(graph.imported("lib.rs").collect::<Vec<_>>(), ["a.rs"]);
        assert_eq!(graph.imported("a.rs").collect::<Vec<_>>(), ["b.rs"]);
        assert!(graph.circles().is_empty());
    }

    #[test]
    fn a_module_that_was_imported_by_name_is_looked_into() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "mod inner; pub(crate) use inner::Thing;"),
            ("a/inner.rs", "pub struct Thing;"),
            ("b.rs", "use crate::a; fn f(_: a::Thing) {}"),
        ]);
        assert_eq!(graph.imported("b.rs").collect::<Vec<_>>(), ["a/inner.rs", "a/mod.rs"]);
    }

    #[test]
    fn modules_of_tests_are_left_out() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod checks;"),
            ("a.rs", "use crate::b::B; #[cfg(all(test, loom))] mod models { use crate::checks::C; }"),
            ("b.rs", "pub struct B; #[cfg(test)] mod tests;"),
            ("b/tests.rs", "use crate::a::A;"),
            ("checks.rs", "use crate::a::A;"),
        ]);
        assert_eq!(graph.imported("a.rs").collect::<Vec<_>>(), ["b.rs"]);
        assert!(graph.circles().is_empty());
        assert_eq!(graph.imported("checks.rs").count(), 0);
    }

    #[test]
    fn a_circle_of_three_files_is_one_thing_and_one_of_four_is_not() {
        let graph = graph(&[
            ("lib.rs", "mod a; mod b; mod c; mod d; mod e; mod f; mod g;"),
            ("a.rs", "use crate::b::B; pub struct A;"),
            ("b.rs", "use crate::c::C; pub struct B;"),
            ("c.rs", "use crate::a::A; pub struct C;"),
            ("d.rs", "use crate::e::E; pub struct D;"),
            ("e.rs", "use crate::f::F; pub struct E;"),
            ("f.rs", "use crate::g::G; pub struct F;"),
            ("g.rs", "use crate::d::D; pub struct G;"),
        ]);
        assert_eq!(graph.circles().len(), 2);
        assert_eq!(large(&graph), ["4 files: d.rs, e.rs, f.rs, g.rs"]);
    }

    #[test]
    fn the_imports_of_this_repository_are_found() {
        // Not all that there are: a check that the files were read.
        for (name, from, to) in [
            ("qemu", "save/mod.rs", "job.rs"),
            ("qemu", "save/by_socket.rs", "save/watcher.rs"),
            ("image", "qcow2/engine/writer/mod.rs", "qcow2/engine/writer/copier.rs"),
            ("image", "qcow2/engine/flusher.rs", "qcow2/engine/tables.rs"),
            ("image", "chain/mod.rs", "qcow2/engine/image.rs"),
        ] {
            let graph = graph_of(&shell::workspace().join("crates").join(name).join("src")).unwrap();
            let found: Vec<_> = graph.imported(from).collect();
            assert!(found.contains(&to), "{name}: {from}: {found:?}");
        }
    }
}
