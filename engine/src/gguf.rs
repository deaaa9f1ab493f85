//! A GGUF file: what its metadata says, and its tensors in f32.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Device, Tensor};

/// An open GGUF file.
pub(crate) struct Gguf {
    content: Content,
    reader: BufReader<File>,
}

impl Gguf {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let mut reader = BufReader::new(file);
        let content =
            Content::read(&mut reader).with_context(|| format!("{}: wanted a GGUF file", path.display()))?;
        Ok(Self { content, reader })
    }

    /// A metadata entry that may be absent.
    pub(crate) fn find(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(key)
    }

    /// A metadata entry.
    pub(crate) fn get(&self, key: &str) -> Result<&Value> {
        self.find(key).ok_or_else(|| anyhow!("metadata {key}: wanted in the file, had none"))
    }

    /// A whole number that the metadata has in whatever width.
    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        size(self.get(key)?).with_context(|| format!("metadata {key}"))
    }

    /// [`size`](Self::size), or this where the file does not say.
    pub(crate) fn size_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.find(key).is_some() { self.size(key) } else { Ok(default) }
    }

    pub(crate) fn float(&self, key: &str) -> Result<f32> {
        self.get(key)?.to_f32().with_context(|| format!("metadata {key}"))
    }

    /// A number that may be absent: this then.
    pub(crate) fn float_or(&self, key: &str, default: f32) -> Result<f32> {
        if self.find(key).is_some() { self.float(key) } else { Ok(default) }
    }

    /// A yes or no that may be absent: this then.
    pub(crate) fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        let flag = self.find(key).map_or(Ok(default), Value::to_bool);
        flag.with_context(|| format!("metadata {key}"))
    }

    pub(crate) fn text(&self, key: &str) -> Result<&str> {
        Ok(self.get(key)?.to_string().with_context(|| format!("metadata {key}"))?)
    }

    /// A list of texts.
    pub(crate) fn texts(&self, key: &str) -> Result<Vec<String>> {
        let all = self.list(key)?;
        all.iter().map(|text| Ok(text.to_string()?.clone())).collect()
    }

    /// A list of whole numbers.
    pub(crate) fn sizes(&self, key: &str) -> Result<Vec<usize>> {
        let all = self.list(key)?;
        all.iter().map(size).collect()
    }

    /// A list of numbers.
    pub(crate) fn floats(&self, key: &str) -> Result<Vec<f32>> {
        let all = self.list(key)?;
        all.iter().map(|number| number.to_f32().with_context(|| format!("metadata {key}"))).collect()
    }

    /// How long a list is.
    pub(crate) fn count(&self, key: &str) -> Result<usize> {
        Ok(self.list(key)?.len())
    }

    fn list(&self, key: &str) -> Result<&Vec<Value>> {
        self.get(key)?.to_vec().with_context(|| format!("metadata {key}"))
    }

    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// A tensor, its quantisation undone.
    pub(crate) fn tensor(&mut self, name: &str) -> Result<Tensor> {
        let stored = self.content.tensor(&mut self.reader, name, &Device::Cpu);
        let stored = stored.with_context(|| format!("tensor {name}"))?;
        stored.dequantize(&Device::Cpu).with_context(|| format!("tensor {name}"))
    }
}

fn size(value: &Value) -> Result<usize> {
    let number = match *value {
        Value::U8(x) => i64::from(x),
        Value::I8(x) => i64::from(x),
        Value::U16(x) => i64::from(x),
        Value::I16(x) => i64::from(x),
        Value::U32(x) => i64::from(x),
        Value::I32(x) => i64::from(x),
        Value::U64(x) => i64::try_from(x)?,
        Value::I64(x) => x,
        _ => bail!("wanted a whole number, had {value:?}"),
    };
    Ok(usize::try_from(number)?)
}
