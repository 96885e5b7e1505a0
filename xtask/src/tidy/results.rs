//! Limits the size of files in `docs/results`: every run of a bench rewrites them, and git keeps every version.

use super::Problem;
use anyhow::{Context, Result};
use std::fs;
use std::path::Path;

const FOLDER: &str = "docs/results";
/// Upper bound on the bytes of one file; benches compress long files.
const BYTES_MAX: u64 = 200_000;

/// Finds files that are too large.
pub fn check(root: &Path) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    let folder = root.join(FOLDER);
    for bench in fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
        let bench = bench?.path();
        if !bench.is_dir() {
            continue;
        }
        for file in fs::read_dir(&bench).with_context(|| bench.display().to_string())? {
            let file = file?;
            let bytes = file.metadata()?.len();
            if bytes > BYTES_MAX {
                let path = file.path();
                let place = path
                    .strip_prefix(root)
                    .unwrap_or(&path)
                    .display()
                    .to_string();
                let message = format!(
                    "{bytes} bytes, at most {BYTES_MAX}: sample the data, and describe the sampling"
                );
                problems.push(Problem::error(&place, 0, message));
            }
        }
    }
    problems.sort_by(|one, other| one.place.cmp(&other.place));
    Ok(problems)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_files_fail() {
        let root = tempfile::tempdir().unwrap();
        let bench = root.path().join(FOLDER).join("soak");
        fs::create_dir_all(&bench).unwrap();
        fs::write(bench.join("summary.json"), "[]").unwrap();
        assert_eq!(check(root.path()).unwrap().len(), 0);
        fs::write(bench.join("raw.jsonl"), vec![b'x'; 200_001]).unwrap();
        let problems = check(root.path()).unwrap();
        assert_eq!(problems.len(), 1);
        assert!(
            problems[0]
                .to_string()
                .contains("docs/results/soak/raw.jsonl: 200001 bytes")
        );
    }
}
