//! Byte-level byte-pair encoding (Sennrich et al. 2016, arXiv 1508.07909, over bytes as GPT-2 has it) from a GGUF file's own
//! tables.

use std::collections::HashMap;

use anyhow::{Result, bail};
use regex::Regex;

use crate::gguf::Gguf;

/// Words as GPT-2 splits them; of a run of spaces before a word the last belongs to that word, which
/// [`Tokenizer::words`] sees to.
const WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+";
/// Token types of the file: control and user-defined tokens stand for themselves in a text.
const SPECIAL: [usize; 2] = [3, 4];

/// Text to tokens and back.
pub(crate) struct Tokenizer {
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
    ranks: HashMap<(String, String), usize>,
    special: Option<Regex>,
    digits_apart: bool,
    words: Regex,
    /// The token that ends a text.
    pub(crate) end: Option<u32>,
}

impl Tokenizer {
    pub(crate) fn from_gguf(file: &Gguf) -> Result<Self> {
        let model = file.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            bail!("tokenizer: wanted gpt2 (byte-level BPE), had {model}");
        }
        // How words are split differs between models; another splitting gives other tokens and wrong figures.
        let pre =
            if file.find("tokenizer.ggml.pre").is_some() { file.text("tokenizer.ggml.pre")? } else { "" };
        let digits_apart = match pre {
            "smollm" => true,
            "" | "default" | "gpt-2" => false,
            _ => bail!("splitting into words: wanted smollm or gpt-2, had {pre}"),
        };
        let tokens = file.texts("tokenizer.ggml.tokens")?;
        let types = file.sizes("tokenizer.ggml.token_type")?;
        let special = tokens.iter().zip(types).filter(|(_, kind)| SPECIAL.contains(kind));
        let special = special.map(|(token, _)| token.clone()).collect();
        let mut tokenizer = Self::new(tokens, &file.texts("tokenizer.ggml.merges")?, special, digits_apart)?;
        if file.find("tokenizer.ggml.eos_token_id").is_some() {
            tokenizer.end = Some(u32::try_from(file.size("tokenizer.ggml.eos_token_id")?)?);
        }
        Ok(tokenizer)
    }

    /// A tokenizer of these tokens, merges in falling rank as `left right`, and tokens that stand for themselves.
    fn new(
        tokens: Vec<String>,
        merges: &[String],
        mut special: Vec<String>,
        digits_apart: bool,
    ) -> Result<Self> {
        let pair = |(rank, merge): (usize, &String)| {
            let (left, right) = merge.split_once(' ')?;
            Some(((left.to_owned(), right.to_owned()), rank))
        };
        // The longest first: where one begins as another does, the longer is meant.
        special.sort_by_key(|token| std::cmp::Reverse(token.len()));
        let alternatives: Vec<String> = special.iter().map(|token| regex::escape(token)).collect();
        Ok(Self {
            ids: tokens.iter().zip(0..).map(|(token, id)| (token.clone(), id)).collect(),
            ranks: merges.iter().enumerate().filter_map(pair).collect(),
            special: if special.is_empty() { None } else { Some(Regex::new(&alternatives.join("|"))?) },
            digits_apart,
            words: Regex::new(WORDS)?,
            end: None,
            tokens,
        })
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut at = 0;
        for found in self.special.iter().flat_map(|special| special.find_iter(text)) {
            self.encode_plain(text.get(at..found.start()).unwrap_or_default(), &mut ids)?;
            ids.push(self.id(found.as_str())?);
            at = found.end();
        }
        self.encode_plain(text.get(at..).unwrap_or_default(), &mut ids)?;
        Ok(ids)
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        let digit = |c: char| self.digits_apart && c.is_numeric();
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let length = if digit(first) { first.len_utf8() } else { rest.find(digit).unwrap_or(rest.len()) };
            let (part, behind) = rest.split_at(length);
            for word in self.words(part) {
                for token in self.merged(word) {
                    ids.push(self.id(&token)?);
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

    fn id(&self, token: &str) -> Result<u32> {
        match self.ids.get(token) {
            Some(&id) => Ok(id),
            None => bail!("token {token:?}: wanted in the model's vocabulary"),
        }
    }

    /// The bytes that a token stands for.
    pub(crate) fn bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.tokens.get(id as usize) else { return Vec::new() };
        let bytes: Option<Vec<u8>> = token.chars().map(char_byte).collect();
        bytes.unwrap_or_else(|| token.as_bytes().to_vec())
    }
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
    use super::*;

    fn tokenizer(digits_apart: bool) -> Tokenizer {
        let mut tokens: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
        tokens.extend(["th", "the", "Ġthe", "<|end|>"].map(str::to_owned));
        let merges = ["t h", "th e", "Ġ the"].map(str::to_owned);
        Tokenizer::new(tokens, &merges, vec!["<|end|>".to_owned()], digits_apart).unwrap()
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
        let tokenizer = tokenizer(false);
        let ids = tokenizer.encode("the the<|end|>th").unwrap();
        let names: Vec<&str> = ids.iter().map(|&id| tokenizer.tokens[id as usize].as_str()).collect();
        assert_eq!(names, ["the", "Ġthe", "<|end|>", "th"]);
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.bytes(id)).collect();
        assert_eq!(bytes, b"the the<|end|>th");
    }

    #[test]
    fn the_last_space_belongs_to_the_word() {
        let plain = tokenizer(false);
        assert_eq!(plain.words("it's  12 \n\n of,  "), ["it", "'s", " ", " 12", " \n\n", " of", ",", "  "]);
        assert_eq!(plain.words("a\n b"), ["a", "\n", " b"]);
        assert_eq!(plain.words("a\nb"), ["a", "\n", "b"]);
    }

    #[test]
    fn text_comes_back_whatever_it_is() {
        for digits_apart in [false, true] {
            let tokenizer = tokenizer(digits_apart);
            let text = "Ärger 2026,\t\u{1f600}  the   end \n";
            let ids = tokenizer.encode(text).unwrap();
            let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.bytes(id)).collect();
            assert_eq!(String::from_utf8(bytes).unwrap(), text);
        }
        assert_eq!(tokenizer(true).words.find_iter("20").count(), 1);
    }
}
