//! SentencePiece's byte-pair encoding (Kudo and Richardson 2018, arXiv 1808.06226): neighbouring pieces whose union has the
//! highest score become one, and what is in no table is spelt in bytes.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use anyhow::{Result, ensure};

use super::Vocabulary;
use crate::gguf::Gguf;

/// What stands for a space in pieces.
const SPACE: &str = "\u{2581}";

/// The rule by which a text falls into pieces.
pub(super) struct SentencePiece {
    /// Of every token.
    scores: Vec<f32>,
    /// Whether a plain text is read as if a space stood before it.
    leading_space: bool,
}

impl SentencePiece {
    pub(super) fn from_gguf(file: &Gguf) -> Result<Self> {
        let scores = file.floats("tokenizer.ggml.scores")?;
        let tokens = file.count("tokenizer.ggml.tokens")?;
        ensure!(scores.len() == tokens, "scores of tokens: wanted {tokens}, had {}", scores.len());
        Ok(Self::new(scores, file.flag_or("tokenizer.ggml.add_space_prefix", true)?))
    }

    pub(super) const fn new(scores: Vec<f32>, leading_space: bool) -> Self {
        Self { scores, leading_space }
    }

    pub(super) fn encode(&self, vocabulary: &Vocabulary, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        let text = text.replace(' ', SPACE);
        let text = if self.leading_space { format!("{SPACE}{text}") } else { text };
        for piece in Merger::new(self, vocabulary, &text).pieces() {
            match vocabulary.find(piece) {
                Some(id) => ids.push(id),
                None => {
                    for byte in piece.bytes() {
                        ids.push(vocabulary.id(&format!("<0x{byte:02X}>"))?);
                    }
                }
            }
        }
        Ok(())
    }
}

/// The bytes that a plain token stands for.
pub(super) fn bytes(token: &str) -> Vec<u8> {
    let hex =
        token.strip_prefix("<0x").and_then(|behind| behind.strip_suffix('>')).filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => token.replace(SPACE, " ").into_bytes(),
    }
}

/// A part of the text that is one piece; empty once the piece before has taken it in.
#[derive(Clone, Copy)]
struct Span {
    start: usize,
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
}

/// Two neighbouring pieces that could become one. The highest score comes first, of equals the one further left.
struct Union {
    score: f32,
    left: usize,
    right: usize,
    /// Of both together, by which a union is told whose pieces have changed since.
    length: usize,
}

impl Ord for Union {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Union {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Union {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Union {}

/// A text on its way from characters to pieces.
struct Merger<'a> {
    rule: &'a SentencePiece,
    vocabulary: &'a Vocabulary,
    text: &'a str,
    spans: Vec<Span>,
    waiting: BinaryHeap<Union>,
}

impl<'a> Merger<'a> {
    fn new(rule: &'a SentencePiece, vocabulary: &'a Vocabulary, text: &'a str) -> Self {
        let last = text.chars().count().saturating_sub(1);
        let span = |(index, (start, c)): (usize, (usize, char))| Span {
            start,
            end: start + c.len_utf8(),
            before: index.checked_sub(1),
            after: (index < last).then_some(index + 1),
        };
        let spans: Vec<Span> = text.char_indices().enumerate().map(span).collect();
        let mut merger = Self { rule, vocabulary, text, spans, waiting: BinaryHeap::new() };
        (0..last).for_each(|left| merger.offer(Some(left), Some(left + 1)));
        merger
    }

    /// Remembers two neighbours if they are a token together.
    fn offer(&mut self, left: Option<usize>, right: Option<usize>) {
        let (Some(left), Some(right)) = (left, right) else { return };
        let (Some(a), Some(b)) = (self.spans.get(left), self.spans.get(right)) else { return };
        let token = self.text.get(a.start..b.end).and_then(|text| self.vocabulary.find(text));
        if let Some(&score) = token.and_then(|id| self.rule.scores.get(id as usize)) {
            self.waiting.push(Union { score, left, right, length: b.end - a.start });
        }
    }

    /// Makes two neighbours one, if they still are what they were when they were offered.
    fn unite(&mut self, union: &Union) {
        let (Some(&a), Some(&b)) = (self.spans.get(union.left), self.spans.get(union.right)) else { return };
        let unchanged = a.start < a.end && b.start < b.end && b.end - a.start == union.length;
        if !unchanged || a.after != Some(union.right) {
            return;
        }
        if let Some(right) = self.spans.get_mut(union.right) {
            right.start = right.end;
        }
        if let Some(left) = self.spans.get_mut(union.left) {
            (left.end, left.after) = (b.end, b.after);
        }
        if let Some(after) = b.after.and_then(|after| self.spans.get_mut(after)) {
            after.before = Some(union.left);
        }
        self.offer(a.before, Some(union.left));
        self.offer(Some(union.left), b.after);
    }

    fn pieces(mut self) -> impl Iterator<Item = &'a str> {
        while let Some(union) = self.waiting.pop() {
            self.unite(&union);
        }
        let text = self.text;
        let whole = self.spans.into_iter().filter(|span| span.start < span.end);
        whole.filter_map(move |span| text.get(span.start..span.end))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{there_and_back, with_special};
    use super::super::{Pieces, Tokenizer};
    use super::*;

    /// All bytes, some letters, and pieces with their scores.
    fn tokenizer(leading_space: bool) -> Tokenizer {
        let bytes = (0..=255u8).map(|byte| (format!("<0x{byte:02X}>"), 0.0));
        let letters = "abcdeöü▁".chars().map(|c| (c.to_string(), -10.0));
        let pieces = [("ab", -1.0), ("bc", -0.5), ("abc", -3.0), ("▁ab", -2.0), ("dd", -4.0), ("üb", -5.0)];
        let pieces = pieces.map(|(piece, score)| (piece.to_owned(), score));
        let (tokens, scores): (Vec<String>, Vec<f32>) = bytes.chain(letters).chain(pieces).unzip();
        let rule = SentencePiece::new(scores, leading_space);
        with_special(tokens, &["<end>"], Pieces::SentencePiece(rule))
    }

    fn pieces(text: &str) -> Vec<String> {
        there_and_back(&tokenizer(false), text).0
    }

    #[test]
    fn the_highest_score_merges_first_and_the_left_of_equals() {
        // `bc` before `ab`, and then the whole.
        assert_eq!(pieces("abc"), ["abc"]);
        assert_eq!(pieces("abcd"), ["abc", "d"]);
        assert_eq!(pieces("ab ab"), ["ab", "▁ab"]);
        assert_eq!(pieces("ddd"), ["dd", "d"]);
        assert_eq!(pieces("bbcc"), ["b", "bc", "c"]);
        assert_eq!(pieces("dddd<end>ab"), ["dd", "dd", "<end>", "ab"]);
    }

    #[test]
    fn what_is_in_no_table_is_spelt_in_bytes() {
        assert_eq!(pieces("über"), ["üb", "e", "<0x72>"]);
        assert_eq!(pieces("é"), ["<0xC3>", "<0xA9>"]);
        assert_eq!(pieces("a\u{1f600}\n"), ["a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0x0A>"]);
        assert_eq!(bytes("<0xZZ>"), b"<0xZZ>");
    }

    #[test]
    fn text_comes_back_whatever_it_is() {
        for text in ["", "  a  b ", "Ärger 2026,\t\u{1f600}  日本語 abc \n", "<0x41>"] {
            assert_eq!(there_and_back(&tokenizer(false), text).1, text);
        }
        let (pieces, back) = there_and_back(&tokenizer(true), "ab");
        assert_eq!((pieces[0].as_str(), back.as_str()), ("▁ab", " ab"), "the space before is a token's");
    }
}
