//! `cargo xtask messages`: every text that a user of limosa or its developers can read, in one list for an editor.
//!
//! The help texts are those that the built programs print. The messages are the string literals of all crates but the
//! testkit, found in the syntax tree: those of errors, of formatting macros, and any other that has several words.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use proc_macro2::{TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Lit, LitStr, Token};

use crate::shell;

/// The crate whose texts are read only where a test fails.
const LEFT_OUT: &str = "testkit";

/// The programs, which are named like their packages.
const PROGRAMS: [&str; 3] = ["limosa", "limosa-bench", "limosa-demo"];

/// Macros whose first literal is a text even if it is one word.
const MACROS: [&str; 22] = [
    "anyhow",
    "bail",
    "debug",
    "ensure",
    "eprint",
    "eprintln",
    "error",
    "expect",
    "format",
    "format_args",
    "info",
    "panic",
    "print",
    "print_out",
    "println",
    "say",
    "trace",
    "unreachable",
    "warn",
    "warning",
    "write",
    "writeln",
];

/// Methods whose literal is a text even if it is one word.
const METHODS: [&str; 3] = ["context", "expect", "with_context"];

/// `cargo xtask messages [CRATE...|help]`: the list on standard output.
pub(crate) fn run(wanted: &[String]) -> Result<()> {
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|word| word == name);
    let mut list = String::new();
    if wants("help") {
        let folder = build()?;
        for name in PROGRAMS {
            help(&folder, &mut vec![name.to_owned()], &mut list)?;
        }
    }
    for name in crates()?.iter().filter(|name| wants(name)) {
        for file in sources(&shell::workspace().join("crates").join(name).join("src"))? {
            append(&file, &mut list)?;
        }
    }
    std::io::stdout().lock().write_all(list.as_bytes()).context("cannot write the list")
}

/// Builds the programs for development; the folder that they are in.
fn build() -> Result<PathBuf> {
    let packages = PROGRAMS.into_iter().flat_map(|name| ["--package", name]);
    shell::run(Command::new("cargo").current_dir(shell::workspace()).args(["build", "--bins"]).args(packages))?;
    let own = std::env::current_exe().context("the path of xtask itself")?;
    Ok(own.parent().context("the folder of xtask itself")?.to_path_buf())
}

/// The long help of the command that `words` name, its program first, then of every command below it.
fn help(folder: &Path, words: &mut Vec<String>, list: &mut String) -> Result<()> {
    let [program, command @ ..] = words.as_slice() else { return Ok(()) };
    let text = shell::output(Command::new(folder.join(program)).args(command).arg("--help"))?;
    writeln!(list, "== {} --help\n{text}", words.join(" "))?;
    for below in commands(&text) {
        words.push(below);
        help(folder, words, list)?;
        words.pop();
    }
    Ok(())
}

/// The names under `Commands:` in a help text.
fn commands(help: &str) -> Vec<String> {
    help.lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ").filter(|rest| !rest.starts_with(' ')))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

/// The crates that are read, by the names of their folders, in order.
fn crates() -> Result<Vec<String>> {
    let folder = shell::workspace().join("crates");
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if folder.join(&name).join("src").is_dir() && name != LEFT_OUT {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// The Rust files below `folder`, in order. Modules of unit tests in separate files are left out.
fn sources(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
            let path = entry?.path();
            if is_test_file(&path) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Whether a file, or a folder, is a module of unit tests.
pub(crate) fn is_test_file(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == "tests")
}

/// Appends the texts of one file under a line with its path, if it has any.
fn append(file: &Path, list: &mut String) -> Result<()> {
    let source = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let texts = texts(&source).with_context(|| format!("cannot parse {}", file.display()))?;
    if texts.is_empty() {
        return Ok(());
    }
    let shown = file.strip_prefix(shell::workspace()).unwrap_or(file).display();
    for ((line, _), text) in texts {
        writeln!(list, "{shown}:{line}: {:<12} {}", text.kind, text.words.replace('\n', "\\n"))?;
    }
    list.push('\n');
    Ok(())
}

/// The purpose of a literal, and its words.
pub(crate) struct Text {
    pub(crate) kind: String,
    pub(crate) words: String,
}

/// The texts of a source file by line and column.
pub(crate) fn texts(source: &str) -> syn::Result<BTreeMap<(usize, usize), Text>> {
    let mut scanner = Scanner::default();
    scanner.visit_file(&syn::parse_file(source)?);
    Ok(scanner.texts)
}

#[derive(Default)]
struct Scanner {
    texts: BTreeMap<(usize, usize), Text>,
    /// The call whose arguments are being visited.
    method: Option<String>,
}

impl Scanner {
    fn keep(&mut self, kind: &str, literal: &LitStr) {
        let start = literal.span().start();
        self.texts.insert((start.line, start.column), Text { kind: kind.to_owned(), words: literal.value() });
    }

    /// The literals of `tokens`: the first one if `certain`, and all that have several words.
    fn tokens(&mut self, kind: &str, tokens: TokenStream, certain: &mut bool) {
        for token in tokens {
            match token {
                TokenTree::Group(group) => self.tokens(kind, group.stream(), certain),
                TokenTree::Literal(literal) => {
                    if let Lit::Str(literal) = Lit::new(literal) {
                        if has_letters(&literal.value()) && (*certain || has_words(&literal.value())) {
                            self.keep(kind, &literal);
                        }
                        *certain = false;
                    }
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Scanner {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Use(_) => return,
            _ => &Vec::new(),
        };
        if !for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !for_tests(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_attribute(&mut self, attribute: &'ast Attribute) {
        // Of clap's attributes the program prints what they say.
        if attribute.path().is_ident("error")
            && let syn::Meta::List(list) = &attribute.meta
        {
            self.tokens("error", list.tokens.clone(), &mut true);
        }
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        let Some(name) = called.path.segments.last().map(|segment| segment.ident.to_string()) else { return };
        if name.contains("assert") {
            return;
        }
        if MACROS.contains(&name.as_str()) {
            self.tokens(&name, called.tokens.clone(), &mut true);
        } else if let Ok(arguments) = called.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated) {
            arguments.iter().for_each(|argument| self.visit_expr(argument));
        } else {
            self.tokens(&name, called.tokens.clone(), &mut false);
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.visit_expr(&call.receiver);
        let outer = self.method.replace(call.method.to_string());
        call.args.iter().for_each(|argument| self.visit_expr(argument));
        self.method = outer;
    }

    fn visit_lit_str(&mut self, literal: &'ast LitStr) {
        let kind = self.method.clone().unwrap_or_else(|| "literal".to_owned());
        if has_words(&literal.value()) || METHODS.contains(&kind.as_str()) {
            self.keep(&kind, literal);
        }
    }
}

/// Whether what these attributes belong to is compiled for tests alone.
fn for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::Path(path) => path.is_ident("test"),
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        syn::Meta::NameValue(_) => false,
    })
}

fn has_letters(text: &str) -> bool {
    text.chars().any(char::is_alphabetic)
}

/// Whether a space has a letter on one side or more.
fn has_words(text: &str) -> bool {
    text.trim().contains(' ') && has_letters(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(source: &str) -> Vec<(usize, String, String)> {
        texts(source).unwrap().into_iter().map(|((line, _), text)| (line, text.kind, text.words)).collect()
    }

    #[test]
    fn texts_of_errors_macros_and_calls_are_found_where_they_are() {
        let source = "
            enum Error {
                #[error(\"{0}: short\")]
                Short(String),
            }
            fn f() -> Result<()> {
                g().context(\"one\")?;
                bail!(\"no {}\", name(\"two words\", \"word\"));
            }";
        let texts = found(source);
        let expected =
            [(3, "error", "{0}: short"), (7, "context", "one"), (8, "bail", "no {}"), (8, "bail", "two words")];
        assert_eq!(texts.len(), expected.len(), "{texts:?}");
        for (text, (line, kind, words)) in texts.iter().zip(expected) {
            assert_eq!((text.0, text.1.as_str(), text.2.as_str()), (line, kind, words));
        }
    }

    #[test]
    fn tests_assertions_and_single_words_are_left_out() {
        let source = "
            /// Several words.
            fn f() { debug_assert!(true, \"never so\"); g(\"word\"); }
            #[cfg(test)]
            mod tests { fn h() { panic!(\"not this\"); } }";
        assert!(found(source).is_empty());
    }

    #[test]
    fn commands_are_read_from_a_help_text() {
        let help =
            "What\n\nCommands:\n  save    Save\n          more\n  img     Images\n  help    Print\n\nOptions:\n  -h\n";
        assert_eq!(commands(help), ["save", "img"]);
    }
}
