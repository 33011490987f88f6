//! The rules, each on the text of one file.

use anyhow::Result;

use crate::messages;

/// Turns of phrase that plain English does without, in lower case. Short on purpose: what is right in some places is
/// not here.
const TURNS: [&str; 16] = [
    "anew",
    "are to be",
    "as far as",
    "be told",
    "for which",
    "goes on",
    "had by",
    "has it that",
    "is none",
    "is to be",
    "lies at",
    "lies in",
    "none lies",
    "of which",
    "so many",
    "whatever",
];

/// Columns of a line of documentation.
const COLUMNS: usize = 120;

/// A Rust source file.
pub(super) struct Source<'a> {
    pub(super) path: &'a str,
    pub(super) text: &'a str,
    /// Its messages may name options.
    pub(super) program: bool,
}

/// A page of documentation.
pub(super) struct Page<'a> {
    pub(super) path: &'a str,
    pub(super) text: &'a str,
}

/// A rule, with the places that break it.
pub(super) struct Rule {
    pub(super) name: &'static str,
    /// Where it is broken, one line each; empty if it is kept.
    pub(super) places: Vec<String>,
}

/// The places that break the rules on texts.
#[derive(Debug, Default)]
pub(super) struct Found {
    turns: Vec<String>,
    questions: Vec<String>,
    string_errors: Vec<String>,
    options: Vec<String>,
    sources: Vec<String>,
    long_comments: Vec<String>,
    long_pages: Vec<String>,
}

impl Found {
    pub(super) fn by_rule(self) -> Vec<Rule> {
        let rules = [
            ("turns of phrase", self.turns),
            ("doc comments that begin with What or Which", self.questions),
            ("Result<_, String> in docs/api", self.string_errors),
            ("options in errors of libraries", self.options),
            ("{source} in a Display", self.sources),
            ("doc comments over 120 columns", self.long_comments),
            ("pages over 120 columns", self.long_pages),
        ];
        rules.into_iter().map(|(name, places)| Rule { name, places }).collect()
    }

    /// Checks a source file: its comments, and the messages of a library or a program.
    pub(super) fn source(&mut self, source: &Source<'_>) -> Result<()> {
        let mut in_doc = false;
        for (number, line) in (1..).zip(source.text.lines()) {
            let place = || format!("{}:{number}: {}", source.path, line.trim());
            let code = line.trim_start();
            let doc = code.strip_prefix("///").or_else(|| code.strip_prefix("//!"));
            let comment = doc.or_else(|| code.strip_prefix("//")).or_else(|| Some(line.split_once("; // ")?.1));
            self.turns.extend(comment.into_iter().flat_map(turns_in).map(|turn| format!("{} ({turn})", place())));
            if let Some(doc) = doc {
                let first = doc.split_whitespace().next().unwrap_or_default();
                if !in_doc && matches!(first.trim_end_matches([',', ':', '?']), "What" | "Which") {
                    self.questions.push(place());
                }
                let table = doc.trim_start().starts_with('|');
                if !table && line.chars().count() > COLUMNS && !is_unbreakable(doc) {
                    self.long_comments.push(place());
                }
            }
            in_doc = doc.is_some();
        }
        if source.path.starts_with("crates/testkit/") || messages::is_test_file(source.path.as_ref()) {
            return Ok(());
        }
        for ((line, _), text) in messages::texts(source.text)? {
            let place = || format!("{}:{line}: {}", source.path, text.words.replace('\n', "\\n"));
            if source.path.contains("/src/") {
                // The list above is not prose.
                let turns = turns_in(&text.words).filter(|turn| *turn != text.words);
                self.turns.extend(turns.map(|turn| format!("{} ({turn})", place())));
            }
            if !source.program && names_option(&text.words) {
                self.options.push(place());
            }
            if text.kind == "error" && (text.words.contains("{source}") || text.words.contains("{source:")) {
                self.sources.push(place());
            }
        }
        Ok(())
    }

    /// Checks a page: code and tables may be as wide as they have to.
    pub(super) fn page(&mut self, page: &Page<'_>) {
        let mut fenced = false;
        for (number, line) in (1..).zip(page.text.lines()) {
            let place = || format!("{}:{number}: {line}", page.path);
            if line.trim_start().starts_with("```") {
                fenced = !fenced;
            }
            if fenced || line.starts_with("    ") {
                continue;
            }
            self.turns.extend(turns_in(line).map(|turn| format!("{} ({turn})", place())));
            let table = line.starts_with('|');
            if !table && line.chars().count() > COLUMNS && !is_unbreakable(line) {
                self.long_pages.push(place());
            }
        }
    }

    /// Checks the record of a public API.
    pub(super) fn api(&mut self, page: &Page<'_>) {
        for (number, line) in (1..).zip(page.text.lines()) {
            if line.contains("Result<") && line.contains(", alloc::string::String>") {
                self.string_errors.push(format!("{}:{number}: {line}", page.path));
            }
        }
    }
}

/// The turns of phrase in a text.
fn turns_in(text: &str) -> impl Iterator<Item = &'static str> + use<> {
    let text = text.to_lowercase();
    let whole = move |turn: &str| {
        text.match_indices(turn).any(|(at, _)| {
            let before = text.get(..at).and_then(|before| before.chars().next_back());
            let after = text.get(at + turn.len()..).and_then(|after| after.chars().next());
            [before, after].into_iter().flatten().all(|c| !c.is_alphanumeric() && c != '_')
        })
    };
    TURNS.into_iter().filter(move |turn| whole(turn))
}

/// Whether a message names an option of a command line, as in `use --force`.
fn names_option(text: &str) -> bool {
    let begins = |word: &str| {
        let word = word.trim_start_matches(['(', '`', '\'', '"']);
        word.strip_prefix("--").is_some_and(|name| name.starts_with(|c: char| c.is_ascii_lowercase()))
    };
    text.split_whitespace().count() > 1 && text.split_whitespace().any(begins)
}

/// Whether a line is one word, as a link may be.
fn is_unbreakable(line: &str) -> bool {
    line.split_whitespace().filter(|word| !matches!(*word, "-" | "*" | "///" | "//!")).count() < 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Found {
        let mut found = Found::default();
        found.source(&Source { path: "crates/page/src/lib.rs", text, program: false }).unwrap();
        found
    }

    #[test]
    fn turns_of_phrase_are_found_in_comments_and_messages_and_not_inside_words() {
        let text = "//! What is read anew.\n// so many, Whatever\nfn f() -> R { let renew = anew(); g(); #it goes on\n bail!(\"it is to be done\") }";
        let found = found(&text.replace('#', "// "));
        assert_eq!(found.turns.len(), 5, "{:#?}", found.turns);
        assert!(found.turns.iter().any(|place| place.ends_with("(is to be)")));
        assert_eq!(turns_in("renewed, whatever-like").collect::<Vec<_>>(), ["whatever"]);
        assert_eq!(turns_in("sinew and lanew").count(), 0);
    }

    #[test]
    fn only_the_beginning_of_a_doc_comment_is_asked_for_a_question() {
        let text = "/// What it is.\nfn a() {}\n/// Says\n/// Which one.\nfn b() {}\n/// Which: one.\n// What a line.\nfn c() {}";
        let found = found(text);
        assert_eq!(found.questions.len(), 2, "{:?}", found.questions);
    }

    #[test]
    fn advice_and_sources_in_errors_of_libraries_are_found() {
        let text = "#[error(\"{path}: {source}\")] struct A; fn f() -> R { bail!(\"locked; use `--force`\") }
            fn g() { h(\"--force\"); i(\"a -- b --Ab\"); }
            #[cfg(test)] mod tests { fn t() { panic!(\"use --this\") } }";
        let found = found(text);
        assert_eq!((found.sources.len(), found.options.len()), (1, 1), "{found:?}");
        let mut program = Found::default();
        program.source(&Source { path: "crates/limosa/src/a.rs", text, program: true }).unwrap();
        assert_eq!((program.sources.len(), program.options.len()), (1, 0));
    }

    #[test]
    fn wide_lines_are_found_where_they_could_be_broken() {
        let wide = format!("a {}", "b".repeat(120));
        let text = format!("/// {wide}\n/// {}\nfn f() {{}}", "c".repeat(130));
        assert_eq!(found(&text).long_comments.len(), 1);
        let mut page = Found::default();
        let text = format!("{wide}\n| {wide} |\n    {wide}\n```\n{wide}\n```\n- {}\n", "d".repeat(130));
        page.page(&Page { path: "README.md", text: &text });
        assert_eq!(page.long_pages.len(), 1, "{:?}", page.long_pages);
    }

    #[test]
    fn functions_that_fail_with_a_text_are_found_in_the_record_of_the_api() {
        let mut found = Found::default();
        let text =
            "pub fn a() -> core::result::Result<u64, alloc::string::String>\npub fn b() -> alloc::string::String\n";
        found.api(&Page { path: "docs/api/limosa-page.txt", text });
        assert_eq!(found.string_errors.len(), 1);
    }
}
