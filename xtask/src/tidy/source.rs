//! A Rust file prepared for the rules: lines, syntax tree, tokens, and which lines are tests.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::ops::RangeInclusive;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, File, ItemMod};

/// A parsed file.
pub struct Source {
    /// Path from the root of the repository, with `/`.
    pub place: String,
    pub text: String,
    pub tree: File,
    /// All tokens in order, including those in groups and macro calls.
    pub tokens: Vec<Token>,
    tests: Vec<RangeInclusive<usize>>,
    all_tests: bool,
    /// Paths of modules that this file declares for tests only.
    test_modules: Vec<String>,
}

/// A token; a group is its two brackets.
pub struct Token {
    pub text: String,
    /// Line, counted from 1.
    pub line: usize,
}

impl Token {
    fn new(text: &str, line: usize) -> Self {
        let text = text.to_owned();
        Self { text, line }
    }
}

impl Source {
    /// Parses the file. [`mark_test_files`] later marks files of test modules.
    pub fn parse(place: &str, text: String) -> syn::Result<Self> {
        let tree = syn::parse_file(&text)?;
        let mut tokens = Vec::new();
        flatten(text.parse()?, &mut tokens);
        let mut finder = TestFinder {
            folder: folder_of_modules(place),
            tests: Vec::new(),
            modules: Vec::new(),
        };
        finder.visit_file(&tree);
        let all_tests = tree.attrs.iter().any(is_for_tests) || in_test_folder(place);
        Ok(Self {
            place: place.to_owned(),
            text,
            tree,
            tokens,
            tests: finder.tests,
            all_tests,
            test_modules: finder.modules,
        })
    }

    /// Whether the line is compiled for tests only.
    pub fn is_test(&self, line: usize) -> bool {
        self.all_tests || self.tests.iter().any(|range| range.contains(&line))
    }

    /// The line with this number, counted from 1, without surrounding white space; empty outside the file.
    pub fn line(&self, number: usize) -> &str {
        let index = number.checked_sub(1);
        let line = index.and_then(|index| self.text.lines().nth(index));
        line.unwrap_or_default().trim()
    }
}

/// Marks the files of modules that are declared `#[cfg(test)] mod name;` elsewhere.
pub fn mark_test_files(sources: &mut [Source]) {
    let modules: Vec<String> = sources
        .iter()
        .flat_map(|source| source.test_modules.clone())
        .collect();
    for source in sources {
        let path = source.place.trim_end_matches(".rs");
        source.all_tests |= modules.iter().any(|module| {
            path.strip_prefix(module.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        });
    }
}

/// Folders that cargo compiles for tests and benchmarks only.
fn in_test_folder(place: &str) -> bool {
    place.contains("/tests/") || place.contains("/benches/")
}

/// The folder of the modules that this file declares.
fn folder_of_modules(place: &str) -> String {
    let (folder, name) = place.rsplit_once('/').unwrap_or(("", place));
    match name {
        "lib.rs" | "main.rs" | "mod.rs" => folder.to_owned(),
        _ => place.trim_end_matches(".rs").to_owned(),
    }
}

/// Appends all tokens, including those of groups, to one list.
pub fn flatten(stream: TokenStream, into: &mut Vec<Token>) {
    for tree in stream {
        let line = tree.span().start().line;
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                into.push(Token::new(open, line));
                flatten(group.stream(), into);
                into.push(Token::new(close, group.span_close().end().line));
            }
            // The content of a string is not code.
            TokenTree::Literal(_) => into.push(Token::new("", line)),
            other => into.push(Token::new(&other.to_string(), line)),
        }
    }
}

/// Whether this is `#[test]` or a `#[cfg(...)]` that requires `test`.
fn is_for_tests(attribute: &Attribute) -> bool {
    if attribute.path().is_ident("test") {
        return true;
    }
    let Ok(list) = attribute.meta.require_list() else {
        return false;
    };
    let mut tokens = Vec::new();
    flatten(list.tokens.clone(), &mut tokens);
    let has = |word: &str| tokens.iter().any(|token| token.text == word);
    list.path.is_ident("cfg") && has("test") && !has("not")
}

struct TestFinder {
    folder: String,
    tests: Vec<RangeInclusive<usize>>,
    modules: Vec<String>,
}

impl TestFinder {
    fn note(&mut self, attributes: &[Attribute], item: &impl Spanned) -> bool {
        let tests = attributes.iter().any(is_for_tests);
        if tests {
            let span = item.span();
            self.tests.push(span.start().line..=span.end().line);
        }
        tests
    }
}

impl<'ast> Visit<'ast> for TestFinder {
    fn visit_item_mod(&mut self, item: &'ast ItemMod) {
        if self.note(&item.attrs, item) && item.content.is_none() {
            self.modules.push(format!("{}/{}", self.folder, item.ident));
        }
        visit::visit_item_mod(self, item);
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.note(&item.attrs, item);
        visit::visit_item_fn(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.note(&item.attrs, item);
        visit::visit_item_impl(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.note(&item.attrs, item);
        visit::visit_impl_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(place: &str, text: &str) -> Source {
        Source::parse(place, text.to_owned()).unwrap()
    }

    #[test]
    fn lines_of_tests_are_found() {
        let text = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n\
                    #[cfg(not(test))]\nfn c() {}\n#[test]\nfn d() {}\n";
        let source = source("crates/a/src/lib.rs", text);
        let tests: Vec<usize> = (1..=9).filter(|line| source.is_test(*line)).collect();
        assert_eq!(tests, [2, 3, 4, 5, 8, 9]);
    }

    #[test]
    fn files_of_a_test_module_and_of_its_submodules_are_tests() {
        let mut sources = [
            source("crates/a/src/x.rs", "#[cfg(test)]\nmod proof;\nmod real;\n"),
            source("crates/a/src/x/proof.rs", "fn f() {}"),
            source("crates/a/src/x/proof/deep.rs", "fn f() {}"),
            source("crates/a/src/x/proofs.rs", "fn f() {}"),
            source("crates/a/src/x/real.rs", "fn f() {}"),
        ];
        mark_test_files(&mut sources);
        let tests = sources.map(|source| source.is_test(1));
        assert_eq!(tests, [true, true, true, false, false]);
    }

    #[test]
    fn all_files_in_test_folders_are_tests() {
        assert!(source("tests/e2e/tests/host/main.rs", "fn f() {}").is_test(1));
        assert!(!source("tests/harness/src/lib.rs", "fn f() {}").is_test(1));
        assert!(source("crates/a/tests/b.rs", "fn f() {}").is_test(1));
        assert!(!source("crates/a/src/contests.rs", "fn f() {}").is_test(1));
    }
}
