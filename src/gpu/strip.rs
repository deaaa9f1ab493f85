//! WGSL text without what only its readers need, as a browser's module carries it.

/// The bytes of a text that are kept: no comment, no indentation, no trailing blank, no empty line.
#[derive(Clone, Copy)]
struct Kept<'a> {
    text: &'a [u8],
    at: usize,
    /// Whether the line has given a byte yet.
    begun: bool,
}

impl Kept<'_> {
    /// The byte `ahead` of the next one; a line feed after the end.
    #[allow(clippy::indexing_slicing, reason = "a const fn has no get, and the index is checked")]
    const fn peek(&self, ahead: usize) -> u8 {
        if self.at + ahead < self.text.len() { self.text[self.at + ahead] } else { b'\n' }
    }

    /// Whether nothing but blanks and a comment is left of the line.
    const fn is_over(&self) -> bool {
        let mut ahead = 0;
        while self.peek(ahead) == b' ' {
            ahead += 1;
        }
        self.peek(ahead) == b'\n' || (self.peek(ahead) == b'/' && self.peek(ahead + 1) == b'/')
    }

    const fn next(&mut self) -> Option<u8> {
        while self.at < self.text.len() {
            let byte = self.peek(0);
            if self.is_over() {
                while self.peek(0) != b'\n' {
                    self.at += 1;
                }
                self.at += 1;
                if self.begun {
                    self.begun = false;
                    return Some(b'\n');
                }
            } else {
                self.at += 1;
                if self.begun || byte != b' ' {
                    self.begun = true;
                    return Some(byte);
                }
            }
        }
        if self.begun {
            self.begun = false;
            return Some(b'\n');
        }
        None
    }
}

const fn kept(text: &str) -> Kept<'_> {
    Kept { text: text.as_bytes(), at: 0, begun: false }
}

/// A text, stripped as the program runs.
#[cfg(not(target_arch = "wasm32"))]
pub(super) fn stripped(text: &str) -> String {
    let mut kept = kept(text);
    String::from_utf8_lossy(&std::iter::from_fn(|| kept.next()).collect::<Vec<u8>>()).into_owned()
}

/// The length of a stripped text.
#[cfg(any(test, target_arch = "wasm32"))]
pub(super) const fn length(text: &str) -> usize {
    let (mut kept, mut length) = (kept(text), 0);
    while kept.next().is_some() {
        length += 1;
    }
    length
}

/// A stripped text, of [`length`] bytes, made as the program is compiled.
#[cfg(any(test, target_arch = "wasm32"))]
#[allow(clippy::indexing_slicing, reason = "a const fn has no get_mut, and the index is checked")]
pub(super) const fn strip<const N: usize>(text: &str) -> [u8; N] {
    let (mut kept, mut bytes, mut at) = (kept(text), [b'\n'; N], 0);
    while let Some(byte) = kept.next() {
        if at < N {
            bytes[at] = byte;
        }
        at += 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "// A kernel.\n\nfn f(a: u32) -> u32 {  // doubles\n    // twice\n    return a\n        * 2u / 1u; \n}\n\n";
    const WANT: &str = "fn f(a: u32) -> u32 {\nreturn a\n* 2u / 1u;\n}\n";

    #[test]
    fn what_readers_need_is_left_out() {
        const STRIPPED: [u8; length(TEXT)] = strip(TEXT);
        assert_eq!(str::from_utf8(&STRIPPED).unwrap(), WANT);
        assert_eq!(stripped(TEXT), WANT);
        for last in ["fn f() {}", "fn f() {} // the end", "fn f() {}\n"] {
            assert_eq!(stripped(last), "fn f() {}\n");
            assert_eq!(length(last), 10);
        }
        assert_eq!(length("// no more\n\n"), 0);
    }
}
