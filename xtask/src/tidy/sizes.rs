//! Limits the length of files and functions.

use super::Problem;
use super::source::Source;
use proc_macro2::Span;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, ImplItemFn, ItemFn, Signature, TraitItemFn};

/// A file with more lines is reported: it may contain a second module.
const FILE_LINES_WARN: usize = 600;
const FILE_LINES_MAX: usize = 1000;
/// Upper bound on the lines of a function, from the signature to the closing brace.
const FUNCTION_LINES_MAX: usize = 70;

/// Checks the lengths of the file and of each function in it, including tests.
pub fn check(source: &Source) -> Vec<Problem> {
    let mut problems = Vec::new();
    let lines = source.text.lines().count();
    let message = format!("{lines} lines: split it");
    if lines > FILE_LINES_MAX {
        problems.push(Problem::error(&source.place, 0, message));
    } else if lines > FILE_LINES_WARN {
        problems.push(Problem::warning(&source.place, 0, message));
    }
    let mut functions = Functions {
        place: &source.place,
        problems,
    };
    functions.visit_file(&source.tree);
    functions.problems
}

struct Functions<'a> {
    place: &'a str,
    problems: Vec<Problem>,
}

impl Functions<'_> {
    fn measure(&mut self, signature: &Signature, body: &Block) {
        let start = first_line(signature.span());
        let lines = body.brace_token.span.close().end().line + 1 - start;
        if lines > FUNCTION_LINES_MAX {
            let message = format!(
                "{} has {lines} lines, at most {FUNCTION_LINES_MAX} are allowed",
                signature.ident
            );
            self.problems
                .push(Problem::error(self.place, start, message));
        }
    }
}

fn first_line(span: Span) -> usize {
    span.start().line
}

impl<'ast> Visit<'ast> for Functions<'_> {
    fn visit_item_fn(&mut self, item: &'ast ItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_item_fn(self, item);
    }

    fn visit_impl_item_fn(&mut self, item: &'ast ImplItemFn) {
        self.measure(&item.sig, &item.block);
        visit::visit_impl_item_fn(self, item);
    }

    fn visit_trait_item_fn(&mut self, item: &'ast TraitItemFn) {
        if let Some(body) = &item.default {
            self.measure(&item.sig, body);
        }
        visit::visit_trait_item_fn(self, item);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<Problem> {
        check(&Source::parse("crates/a/src/b.rs", text.to_owned()).unwrap())
    }

    fn function(lines: usize) -> String {
        format!("fn f()\n{{\n{}}}\n", "    g();\n".repeat(lines - 3))
    }

    #[test]
    fn a_function_at_the_limit_passes_and_a_longer_one_fails() {
        assert_eq!(problems(&function(70)), []);
        for text in [
            function(71),
            format!("impl X {{ {} }}", function(71)),
            format!("trait X {{ {} }}", function(71)),
            format!("fn outer() {{ {} }}", function(71)),
        ] {
            assert!(!problems(&text).is_empty(), "{text}");
        }
        let found = problems(&format!("\n{}", function(71)));
        assert_eq!(
            found[0].to_string(),
            "error: crates/a/src/b.rs:2: f has 71 lines, at most 70 are allowed"
        );
    }

    #[test]
    fn a_long_file_is_a_warning_and_a_longer_one_an_error() {
        assert_eq!(problems(&"const A: u8 = 0;\n".repeat(600)), []);
        let severity = |lines| problems(&"const A: u8 = 0;\n".repeat(lines))[0].severity;
        assert_eq!(severity(601), super::super::Severity::Warning);
        assert_eq!(severity(1000), super::super::Severity::Warning);
        assert_eq!(severity(1001), super::super::Severity::Error);
    }
}
