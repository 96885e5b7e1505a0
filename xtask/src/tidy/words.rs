//! Checks the first line of a file, and finds forbidden words.

use super::Problem;
use super::source::Source;

/// Concatenated, so that this file does not contain them.
const LATER_MARKS: [&str; 2] = [concat!("TO", "DO"), concat!("FIX", "ME")];

/// Checks the first line, marks of later work, and `unwrap` outside tests.
pub fn check(source: &Source) -> Vec<Problem> {
    let place = &source.place;
    let mut problems = Vec::new();
    if !source.text.starts_with("//! ") {
        let message = "does not begin with `//!` and the purpose of the file";
        problems.push(Problem::error(place, 1, message));
    }
    for (index, line) in source.text.lines().enumerate() {
        for mark in LATER_MARKS.iter().filter(|mark| has_word(line, mark)) {
            let message = format!("{mark}: do it now, or record it where work is planned");
            problems.push(Problem::error(place, index + 1, message));
        }
    }
    for (index, token) in source.tokens.iter().enumerate() {
        let follows = |words: &[&str]| {
            let rest = source.tokens[index + 1..]
                .iter()
                .map(|token| token.text.as_str());
            rest.take(words.len()).eq(words.iter().copied())
        };
        // With an argument it is another method of the same name.
        if token.text == "." && follows(&["unwrap", "(", ")"]) && !source.is_test(token.line) {
            let message = "unwrap outside a test: return an error, or use expect and explain in a comment why it holds";
            problems.push(Problem::error(place, token.line, message));
        }
        if ["todo", "unimplemented"].contains(&token.text.as_str()) && follows(&["!"]) {
            let message = format!("{}!: a stub", token.text);
            problems.push(Problem::error(place, token.line, message));
        }
    }
    problems
}

fn has_word(line: &str, word: &str) -> bool {
    line.split(|letter: char| !letter.is_alphanumeric() && letter != '_')
        .any(|part| part == word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(text: &str) -> Vec<String> {
        let source = Source::parse("crates/a/src/b.rs", text.to_owned()).unwrap();
        check(&source).iter().map(Problem::to_string).collect()
    }

    #[test]
    fn a_good_file_passes() {
        let text = "//! A module.\nfn a() { x.unwrap_or(1); key.unwrap(password); \"x.unwrap()\"; }\n\
                    #[cfg(test)]\nmod tests { fn b() { x.unwrap(); } }\n";
        assert_eq!(messages(text), [""; 0]);
    }

    #[test]
    fn a_file_without_its_purpose_fails() {
        for text in [
            "fn a() {}\n",
            "\n//! Late.\n",
            "// A module.\n",
            "//!\n//! Late.\n",
            "",
        ] {
            assert_eq!(messages(text).len(), 1, "{text:?}");
        }
    }

    #[test]
    fn unwrap_fails_also_inside_a_macro_call() {
        let text =
            "//! A module.\nfn a() {\n    x.unwrap( );\n    println!(\"{}\", x.unwrap());\n}\n";
        let found = messages(text);
        assert_eq!(found.len(), 2);
        assert!(
            found[0].starts_with("error: crates/a/src/b.rs:3: unwrap"),
            "{found:?}"
        );
        assert!(
            found[1].starts_with("error: crates/a/src/b.rs:4: unwrap"),
            "{found:?}"
        );
    }

    #[test]
    fn marks_of_later_work_and_stubs_fail_also_in_tests() {
        for mark in LATER_MARKS {
            assert_eq!(
                messages(&format!("//! A module.\n// {mark}: later\n")).len(),
                1
            );
            assert_eq!(messages(&format!("//! A module.\n// {mark}S\n")).len(), 0);
        }
        for stub in ["todo", "unimplemented"] {
            let text = format!("//! A module.\n#[test]\nfn a() {{ {stub}!() }}\n");
            assert_eq!(
                messages(&text),
                [format!("error: crates/a/src/b.rs:3: {stub}!: a stub")]
            );
        }
    }
}
