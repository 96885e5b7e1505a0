//! Finds Markdown tables by their columns.

/// One row below a header and its rule.
#[derive(Debug, PartialEq)]
pub struct Row<'a> {
    /// Its line, counted from 1.
    pub line: usize,
    /// Its cells; their number may differ from that of the header.
    pub cells: Vec<&'a str>,
}

/// The rows of every table that has these columns, in lower or upper case.
pub fn rows<'a>(text: &'a str, columns: &[&str]) -> Vec<Row<'a>> {
    let mut rows = Vec::new();
    let mut in_table = false;
    for (index, line) in text.lines().enumerate() {
        let Some(cells) = cells_of(line) else {
            in_table = false;
            continue;
        };
        let names = cells.iter().map(|cell| cell.to_lowercase());
        if names.eq(columns.iter().copied()) {
            in_table = true;
        } else if in_table && !cells.iter().all(|cell| is_rule(cell)) {
            let line = index + 1;
            rows.push(Row { line, cells });
        }
    }
    rows
}

/// A cell without backticks.
pub fn bare(cell: &str) -> String {
    cell.replace('`', "")
}

fn cells_of(line: &str) -> Option<Vec<&str>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(str::trim).collect())
}

fn is_rule(cell: &str) -> bool {
    !cell.is_empty() && cell.chars().all(|letter| letter == '-' || letter == ':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_found_by_the_columns_of_their_table() {
        let text = "\
| what | else |
|---|---|
| not | this |

| Name | Size |
| :-- | --: |
| a | `1` |
| b |

| name | size |
| --- | --- |
| c | 3 |
";
        let found = rows(text, &["name", "size"]);
        let found: Vec<_> = found.iter().map(|row| (row.line, &row.cells[..])).collect();
        assert_eq!(
            found,
            [(7, &["a", "`1`"][..]), (8, &["b"]), (12, &["c", "3"])]
        );
        assert_eq!(bare("`1` or `2`"), "1 or 2");
    }
}
