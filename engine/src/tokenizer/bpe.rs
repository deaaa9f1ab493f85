//! Byte-level byte-pair encoding (Sennrich et al. 2016, arXiv 1508.07909, over bytes as GPT-2 has it) of words as GPT-2 splits
//! them.

use std::collections::HashMap;

use anyhow::{Result, bail};
use regex::Regex;

use super::Vocabulary;
use crate::gguf::Gguf;

/// Words as GPT-2 splits them; of a run of spaces before a word the last belongs to that word, which
/// [`Bpe::words`] sees to.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
/// The rule by which words fall into tokens.
pub(super) struct Bpe {
    ranks: HashMap<(String, String), usize>,
    digits_apart: bool,
    words: Regex,
}

impl Bpe {
    pub(super) fn from_gguf(file: &Gguf) -> Result<Self> {
        // How words are split differs between models; another splitting gives other tokens and wrong figures.
        let pre =
            if file.find("tokenizer.ggml.pre").is_some() { file.text("tokenizer.ggml.pre")? } else { "" };
        let digits_apart = match pre {
            "smollm" => true,
            "" | "default" | "gpt-2" => false,
            _ => bail!("splitting into words: wanted smollm or gpt-2, had {pre}"),
        };
        Self::new(&file.texts("tokenizer.ggml.merges")?, digits_apart)
    }

    /// A rule of these merges in falling rank, as `left right`.
    fn new(merges: &[String], digits_apart: bool) -> Result<Self> {
        let pair = |(rank, merge): (usize, &String)| {
            let (left, right) = merge.split_once(' ')?;
            Some(((left.to_owned(), right.to_owned()), rank))
        };
        let ranks = merges.iter().enumerate().filter_map(pair).collect();
        Ok(Self { ranks, digits_apart, words: Regex::new(WORDS)? })
    }

    pub(super) fn encode(&self, vocabulary: &Vocabulary, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let digit = |c: char| self.digits_apart && c.is_numeric();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let length = if digit(first) { first.len_utf8() } else { rest.find(digit).unwrap_or(rest.len()) };
            let (part, behind) = rest.split_at(length);
            for word in self.words(part) {
                for token in self.merged(word) {
                    ids.push(vocabulary.id(&token)?);
                }
            }
            rest = behind;
        }
        Ok(())
    }

    /// The words of a text.
    fn words<'a>(&self, text: &'a str) -> Vec<&'a str> {
        let mut words = Vec::new();
        let mut at = 0;
        while let Some(found) = self.words.find_at(text, at) {
            let mut word = found.as_str();
            let before_word = found.end() < text.len() && word.chars().all(char::is_whitespace);
            if let Some((last, _)) =
                word.char_indices().next_back().filter(|&(last, _)| before_word && last > 0)
            {
                word = word.get(..last).unwrap_or(word);
            }
            words.push(word);
            at = found.start() + word.len();
        }
        words
    }

    /// A word in tokens: the pair of lowest rank becomes one, until none is in the table.
    fn merged(&self, word: &str) -> Vec<String> {
        let mut parts: Vec<String> = word.bytes().map(|byte| byte_char(byte).to_string()).collect();
        loop {
            let pairs = parts.iter().zip(parts.iter().skip(1)).enumerate();
            let ranked = pairs.filter_map(|(i, (left, right))| {
                self.ranks.get(&(left.clone(), right.clone())).map(|&rank| (rank, i))
            });
            let Some((_, i)) = ranked.min() else { return parts };
            let right = parts.remove(i + 1);
            if let Some(left) = parts.get_mut(i) {
                left.push_str(&right);
            }
        }
    }
}

/// The bytes that a token stands for.
pub(super) fn bytes(token: &str) -> Vec<u8> {
    let bytes: Option<Vec<u8>> = token.chars().map(char_byte).collect();
    bytes.unwrap_or_else(|| token.as_bytes().to_vec())
}

/// The printable character that stands for a byte in the tables.
fn byte_char(byte: u8) -> char {
    let code = match byte {
        33..=126 | 161..=172 | 174..=255 => u32::from(byte),
        // The others follow from 256 on in their order.
        0..=32 => 256 + u32::from(byte),
        127..=160 => 256 + 33 + u32::from(byte) - 127,
        173 => 256 + 33 + 34,
    };
    char::from_u32(code).unwrap_or('?')
}

fn char_byte(c: char) -> Option<u8> {
    (0..=u8::MAX).find(|&byte| byte_char(byte) == c)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{there_and_back, with_special};
    use super::super::{Pieces, Tokenizer};
    use super::*;

    fn rule(digits_apart: bool) -> Bpe {
        Bpe::new(&["t h", "th e", "Ġ the"].map(str::to_owned), digits_apart).unwrap()
    }

    fn tokenizer(digits_apart: bool) -> Tokenizer {
        let mut tokens: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
        tokens.extend(["th", "the", "Ġthe"].map(str::to_owned));
        with_special(tokens, &["<|end|>"], Pieces::Bpe(rule(digits_apart)))
    }

    #[test]
    fn bytes_have_characters_of_their_own() {
        let mut seen: Vec<char> = (0..=255).map(byte_char).collect();
        assert_eq!(
            (byte_char(b' '), byte_char(b'\n'), byte_char(b'a'), byte_char(173)),
            ('Ġ', 'Ċ', 'a', 'Ń')
        );
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 256);
    }

    #[test]
    fn the_lowest_rank_merges_first_and_special_tokens_stand_for_themselves() {
        let text = "the the<|end|>th";
        let (names, back) = there_and_back(&tokenizer(false), text);
        assert_eq!(names, ["the", "Ġthe", "<|end|>", "th"]);
        assert_eq!(back, text);
    }

    #[test]
    fn the_last_space_belongs_to_the_word() {
        let plain = rule(false);
        assert_eq!(plain.words("it's  12 \n\n of,  "), ["it", "'s", " ", " 12", " \n\n", " of", ",", "  "]);
        assert_eq!(plain.words("a\n b"), ["a", "\n", " b"]);
        assert_eq!(plain.words("a\nb"), ["a", "\n", "b"]);
    }

    #[test]
    fn text_comes_back_whatever_it_is() {
        let text = "Ärger 2026,\t\u{1f600}  the   end \n";
        for digits_apart in [false, true] {
            assert_eq!(there_and_back(&tokenizer(digits_apart), text).1, text);
        }
        assert_eq!(rule(true).words.find_iter("20").count(), 1);
    }
}
