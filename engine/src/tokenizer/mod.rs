//! Text to tokens and back, from a GGUF file's own tables.

mod bpe;
mod sentencepiece;

use std::collections::HashMap;

use anyhow::{Result, bail, ensure};
use regex::Regex;

use crate::gguf::Gguf;
use bpe::Bpe;
use sentencepiece::SentencePiece;

/// Token types of the file: control and user-defined tokens stand for themselves in a text.
const SPECIAL: [usize; 2] = [3, 4];

/// The tokens of a model.
struct Vocabulary {
    tokens: Vec<String>,
    ids: HashMap<String, u32>,
}

impl Vocabulary {
    fn new(tokens: Vec<String>) -> Self {
        // Of tokens of the same text the last is meant.
        let ids = tokens.iter().zip(0..).map(|(token, id)| (token.clone(), id)).collect();
        Self { tokens, ids }
    }

    fn find(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    fn id(&self, token: &str) -> Result<u32> {
        match self.find(token) {
            Some(id) => Ok(id),
            None => bail!("token {token:?}: wanted in the model's vocabulary"),
        }
    }

    fn text(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }
}

/// How text between special tokens becomes tokens.
enum Pieces {
    Bpe(Bpe),
    SentencePiece(SentencePiece),
}

/// Text to tokens and back.
pub(crate) struct Tokenizer {
    vocabulary: Vocabulary,
    pieces: Pieces,
    special: Option<Regex>,
    /// Of every token, whether it is a special one; the rest are plain where the list ends.
    is_special: Vec<bool>,
    /// The token that begins every text.
    begin: Option<u32>,
    /// The token that ends a text.
    pub(crate) end: Option<u32>,
}

impl Tokenizer {
    pub(crate) fn from_gguf(file: &Gguf) -> Result<Self> {
        let pieces = match file.text("tokenizer.ggml.model")? {
            "gpt2" => Pieces::Bpe(Bpe::from_gguf(file)?),
            "llama" => Pieces::SentencePiece(SentencePiece::from_gguf(file)?),
            model => bail!("tokenizer: wanted gpt2 (byte-level BPE) or llama (SentencePiece), had {model}"),
        };
        let tokens = file.texts("tokenizer.ggml.tokens")?;
        let types = file.sizes("tokenizer.ggml.token_type")?;
        ensure!(types.len() == tokens.len(), "token types: wanted {}, had {}", tokens.len(), types.len());
        let is_special = types.iter().map(|kind| SPECIAL.contains(kind)).collect();
        // A SentencePiece model begins its texts with a token of their own unless it says otherwise.
        let begins =
            file.flag_or("tokenizer.ggml.add_bos_token", matches!(pieces, Pieces::SentencePiece(_)))?;
        let mut tokenizer = Self::new(tokens, is_special, pieces)?;
        let id = |key: &str| -> Result<Option<u32>> {
            if file.find(key).is_some() { Ok(Some(u32::try_from(file.size(key)?)?)) } else { Ok(None) }
        };
        tokenizer.begin = if begins { id("tokenizer.ggml.bos_token_id")? } else { None };
        tokenizer.end = id("tokenizer.ggml.eos_token_id")?;
        Ok(tokenizer)
    }

    /// A tokenizer of these tokens, with no token that begins or ends a text.
    fn new(tokens: Vec<String>, is_special: Vec<bool>, pieces: Pieces) -> Result<Self> {
        let special =
            tokens.iter().zip(&is_special).filter(|(token, special)| **special && !token.is_empty());
        let mut special: Vec<&String> = special.map(|(token, _)| token).collect();
        // The longest first: where one begins as another does, the longer is meant.
        special.sort_by_key(|token| std::cmp::Reverse(token.len()));
        let alternatives: Vec<String> = special.iter().map(|token| regex::escape(token)).collect();
        let special = if alternatives.is_empty() { None } else { Some(Regex::new(&alternatives.join("|"))?) };
        Ok(Self { vocabulary: Vocabulary::new(tokens), pieces, special, is_special, begin: None, end: None })
    }

    /// The tokens of a text.
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids: Vec<u32> = self.begin.into_iter().collect();
        let mut at = 0;
        for found in self.special.iter().flat_map(|special| special.find_iter(text)) {
            self.encode_plain(text.get(at..found.start()).unwrap_or_default(), &mut ids)?;
            ids.push(self.vocabulary.id(found.as_str())?);
            at = found.end();
        }
        self.encode_plain(text.get(at..).unwrap_or_default(), &mut ids)?;
        Ok(ids)
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        match &self.pieces {
            Pieces::Bpe(bpe) => bpe.encode(&self.vocabulary, text, ids),
            Pieces::SentencePiece(pieces) => pieces.encode(&self.vocabulary, text, ids),
        }
    }

    /// The bytes that a token stands for.
    pub(crate) fn bytes(&self, id: u32) -> Vec<u8> {
        let Some(token) = self.vocabulary.text(id) else { return Vec::new() };
        if self.is_special.get(id as usize).copied().unwrap_or(false) {
            return token.as_bytes().to_vec();
        }
        match &self.pieces {
            Pieces::Bpe(_) => bpe::bytes(token),
            Pieces::SentencePiece(_) => sentencepiece::bytes(token),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tokenizer, its last tokens special.
    pub(super) fn with_special(mut tokens: Vec<String>, special: &[&str], pieces: Pieces) -> Tokenizer {
        let plain = tokens.len();
        tokens.extend(special.iter().map(|&token| token.to_owned()));
        let is_special = (0..tokens.len()).map(|id| id >= plain).collect();
        Tokenizer::new(tokens, is_special, pieces).unwrap()
    }

    /// The texts of a text's tokens, and the text that their bytes make.
    pub(super) fn there_and_back(tokenizer: &Tokenizer, text: &str) -> (Vec<String>, String) {
        let ids = tokenizer.encode(text).unwrap();
        let names = ids.iter().map(|&id| tokenizer.vocabulary.tokens[id as usize].clone()).collect();
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.bytes(id)).collect();
        (names, String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn the_longest_special_token_is_meant_and_stands_for_itself() {
        let pieces = Pieces::SentencePiece(SentencePiece::new(vec![0.0], false));
        let tokenizer = with_special(vec!["a".to_owned()], &["\n", "\n\n", "<▁>"], pieces);
        let text = "a\n\n\na<▁>";
        let (names, back) = there_and_back(&tokenizer, text);
        assert_eq!(
            (names, back.as_str()),
            (["a", "\n\n", "\n", "a", "<▁>"].map(str::to_owned).to_vec(), text)
        );
    }
}
