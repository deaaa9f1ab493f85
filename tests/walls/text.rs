//! Rust source as the walls read it: without comments, without the contents of literals, without unit tests.

use std::ops::Range;

/// Whether a byte can stand inside an identifier.
fn in_word(byte: u8) -> bool {
    byte == b'_' || byte.is_ascii_alphanumeric()
}

/// The source with comments, and the insides of strings unless `keep_strings`, turned to spaces. Offsets and line
/// numbers stay as they are.
pub(crate) fn blank(source: &str, keep_strings: bool) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let (length, inside) = token(&bytes[at..]);
        let comment = bytes[at..].starts_with(b"//") || bytes[at..].starts_with(b"/*");
        if comment || !keep_strings {
            erase(&mut out, at + inside.start..at + inside.end);
        }
        at += length;
    }
    String::from_utf8(out).expect("only whole characters are replaced")
}

/// Length of the comment, literal or single byte at the start, and the part of it that is not code.
fn token(rest: &[u8]) -> (usize, Range<usize>) {
    if rest.starts_with(b"//") {
        let length = rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
        return (length, 0..length);
    }
    if rest.starts_with(b"/*") {
        let length = block_comment(rest);
        return (length, 0..length);
    }
    if rest[0] == b'r' {
        let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
        if rest.get(1 + hashes) == Some(&b'"') {
            return raw_string(rest, hashes);
        }
    }
    if rest[0] == b'"' {
        let length = quoted(rest, b'"');
        return (length, 1..(length - 1).max(1));
    }
    if rest[0] == b'\'' && !is_lifetime(rest) {
        let length = quoted(rest, b'\'');
        return (length, 1..(length - 1).max(1));
    }
    (1, 0..0)
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut at, mut depth) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    rest.len()
}

fn raw_string(rest: &[u8], hashes: usize) -> (usize, Range<usize>) {
    let open = hashes + 2;
    let close = [b"\"", "#".repeat(hashes).as_bytes()].concat();
    let inside = rest[open..].windows(close.len()).position(|w| w == close);
    inside.map_or((rest.len(), open..rest.len()), |n| (open + n + close.len(), open..open + n))
}

/// Length of a literal with its two quotes, escapes skipped.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// `'a` as in `&'a str`, not `'a'`.
fn is_lifetime(rest: &[u8]) -> bool {
    let name = rest[1..].iter().take_while(|&&b| in_word(b)).count();
    name > 0 && rest.get(1 + name) != Some(&b'\'')
}

fn erase(out: &mut [u8], range: Range<usize>) {
    for byte in &mut out[range] {
        if *byte != b'\n' {
            *byte = b' ';
        }
    }
}

/// `text` without the items under `#[cfg(test)]`, which `code` (the same file, fully blanked) tells apart.
pub(crate) fn without_tests(text: &str, code: &str) -> String {
    let mut out = text.as_bytes().to_vec();
    let mut from = 0;
    while let Some(found) = code[from..].find("#[cfg(") {
        let start = from + found;
        let condition = start + closing(&code.as_bytes()[start..], b']');
        let attribute = &code[start..condition];
        from = condition;
        if !words(attribute, "test").is_empty() && !attribute.contains("not(test") {
            from = condition + item(&code.as_bytes()[condition..]);
            erase(&mut out, start..from);
        }
    }
    String::from_utf8(out).expect("items end on character borders")
}

/// Length of the item that follows an attribute: to its `;`, or through its braces.
fn item(rest: &[u8]) -> usize {
    let mut at = 0;
    while at < rest.len() {
        match rest[at] {
            b'(' => at += closing(&rest[at..], b')'),
            b'[' => at += closing(&rest[at..], b']'),
            b'{' => return at + closing(&rest[at..], b'}'),
            b';' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// Length up to and with the `close` that ends the first bracket of its kind.
fn closing(rest: &[u8], close: u8) -> usize {
    let open = match close {
        b')' => b'(',
        b']' => b'[',
        _ => b'{',
    };
    let mut depth = 0;
    for (at, &byte) in rest.iter().enumerate() {
        if byte == open {
            depth += 1;
        } else if byte == close {
            depth -= 1;
            if depth == 0 {
                return at + 1;
            }
        }
    }
    rest.len()
}

/// Offsets at which `needle` stands with no identifier running on to either side of it.
pub(crate) fn words(text: &str, needle: &str) -> Vec<usize> {
    let bytes = text.as_bytes();
    let open_left = !needle.starts_with(|c: char| c.is_ascii() && in_word(c as u8));
    let open_right = !needle.ends_with(|c: char| c.is_ascii() && in_word(c as u8));
    let free = |at: usize| {
        let end = at + needle.len();
        (open_left || at == 0 || !in_word(bytes[at - 1]))
            && (open_right || bytes.get(end).is_none_or(|&b| !in_word(b)))
    };
    text.match_indices(needle).map(|(at, _)| at).filter(|&at| free(at)).collect()
}

/// Offsets at which code refers to a module: in a path, or anywhere in a `use`.
pub(crate) fn modules(code: &str, name: &str) -> Vec<usize> {
    let uses: Vec<Range<usize>> = words(code, "use")
        .into_iter()
        .map(|at| at..code[at..].find(';').map_or(code.len(), |length| at + length))
        .collect();
    let refers = |at: usize| {
        code[..at].ends_with("::")
            || code[at + name.len()..].starts_with("::")
            || uses.iter().any(|range| range.contains(&at))
    };
    words(code, name).into_iter().filter(|&at| refers(at)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked_in_place() {
        let source = "a // b\nc /* d /* e */ f */ g \"h\\\" i\" j r#\"k\" l\"# m 'n' '\\'' &'o p";
        let code = blank(source, false);
        assert_eq!(code.len(), source.len());
        assert_eq!(code.find('\n'), source.find('\n'));
        let left: String = code.split_whitespace().collect();
        assert_eq!(left, "acg\"\"jr#\"\"#m''''&'op");
        let with_strings = blank(source, true);
        assert!(
            with_strings.contains("h\\\" i") && with_strings.contains("k\" l") && !with_strings.contains('d')
        );
    }

    #[test]
    fn unterminated_text_is_read_to_its_end() {
        for source in ["\"a", "r#\"a", "/* a", "'", "'\\", "\"\\", "#[cfg(test", "#[cfg(test)] mod a {"] {
            let code = blank(source, false);
            assert_eq!(without_tests(&code, &code).len(), source.len());
        }
    }

    #[test]
    fn tests_are_left_out_and_nothing_else() {
        let source = "fn a() {}\n#[cfg(test)]\n#[allow(x)]\nfn b(c: [u8; 2]) { d() }\n#[cfg(not(test))]\nfn e() {}\n\
                      #[cfg(all(test, f))]\nmod g;\nfn h() {}";
        let code = blank(source, false);
        let left = without_tests(&code, &code);
        assert_eq!(left.split_whitespace().collect::<String>(), "fna(){}#[cfg(not(test))]fne(){}fnh(){}");
        assert_eq!(left.lines().count(), source.lines().count());
    }

    #[test]
    fn words_end_at_identifiers() {
        assert_eq!(words("wgpu wgpu_x xwgpu (wgpu)", "wgpu"), [0, 19]);
        assert_eq!(words("eprintln!(); println!()", "println!"), [13]);
        assert_eq!(words("device.poll(x)", ".poll("), [6]);
    }

    #[test]
    fn modules_are_told_from_variables() {
        assert!(modules("let cpu = 1; f(cpu)", "cpu").is_empty());
        assert!(modules("use super::cpu_cache::A;", "cpu").is_empty());
        for code in
            ["cpu::merge()", "super::cpu", "use super::{config, cpu};", "use crate::qjl::cpu as twin;"]
        {
            assert_eq!(modules(code, "cpu").len(), 1, "{code}");
        }
    }
}
