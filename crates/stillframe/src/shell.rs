//! Quotes words for a POSIX shell.

/// One line that a POSIX shell splits into exactly these words.
pub fn join<'w>(words: impl IntoIterator<Item = &'w str>) -> String {
    words.into_iter().map(quote).collect::<Vec<_>>().join(" ")
}

fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,@%+".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        // Within single quotes only the single quote is special.
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_shell_reads_back_what_was_joined() {
        let words = [
            "a", "", "b c", "it's", "$HOME", "`x`", "\\", "*", "~", "ä\n", "a=b,c:d", "#", "-n",
        ];
        let script = format!("printf '%s\\0' {}", join(words));
        let output = Command::new("/bin/sh")
            .args(["-c", &script])
            .output()
            .unwrap();
        let mut expected = words.join("\0").into_bytes();
        expected.push(0);
        assert_eq!(output.stdout, expected);
    }
}
