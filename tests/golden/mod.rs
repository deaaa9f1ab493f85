//! Reads the golden files (README.md beside this).

#![allow(dead_code, reason = "each suite uses its part")]

use half::{bf16, f16};
use kvfold::Shape;
use kvfold::qjl::{Counts, QuantizedValues, SketchedKeys};
use safetensors::{Dtype, SafeTensors};

/// A golden file.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn open(name: &str) -> Self {
        let path = format!("{}/tests/golden/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self(std::fs::read(&path).unwrap_or_else(|cause| panic!("{path}: {cause}")))
    }

    /// The bytes of the file.
    pub fn raw(&self) -> &[u8] {
        &self.0
    }

    pub fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }

    /// The facts of its cases.
    pub fn facts(&self) -> serde_json::Value {
        let (_, head) = SafeTensors::read_metadata(&self.0).unwrap();
        serde_json::from_str(&head.metadata().as_ref().unwrap()["json"]).unwrap()
    }

    pub fn bytes<const N: usize>(&self, name: &str, dtype: Dtype) -> Vec<[u8; N]> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap_or_else(|cause| panic!("{name}: {cause}"));
        assert_eq!(tensor.dtype(), dtype, "{name}");
        tensor.data().as_chunks::<N>().0.to_vec()
    }

    /// A tensor of F16, BF16 or F32, widened.
    pub fn f32(&self, name: &str) -> Vec<f32> {
        let dtype = self.file().tensor(name).unwrap_or_else(|cause| panic!("{name}: {cause}")).dtype();
        match dtype {
            Dtype::F16 => {
                self.bytes(name, dtype).into_iter().map(|b| f16::from_le_bytes(b).to_f32()).collect()
            }
            Dtype::BF16 => {
                self.bytes(name, dtype).into_iter().map(|b| bf16::from_le_bytes(b).to_f32()).collect()
            }
            _ => self.bytes(name, Dtype::F32).into_iter().map(f32::from_le_bytes).collect(),
        }
    }

    pub fn u8(&self, name: &str) -> Vec<u8> {
        self.bytes::<1>(name, Dtype::U8).into_iter().map(|[b]| b).collect()
    }

    pub fn f64(&self, name: &str) -> Vec<f64> {
        self.bytes(name, Dtype::F64).into_iter().map(f64::from_le_bytes).collect()
    }

    pub fn i8(&self, name: &str) -> Vec<i8> {
        self.bytes::<1>(name, Dtype::I8).into_iter().map(|[b]| b.cast_signed()).collect()
    }
}

/// New tokens of each step of the golden stacks: a prefill and three steps of decoding.
pub const STACK_STEPS: [usize; 4] = [5, 1, 1, 1];

/// The rows that a step adds, out of a layer's whole output of 2 heads of 64 channels.
pub fn stack_rows(golden: &Golden, name: &str, step: usize) -> Vec<f32> {
    let (heads, dim, tokens) = (2, 64, STACK_STEPS.iter().sum::<usize>());
    let whole = golden.f32(name);
    assert_eq!(whole.len(), heads * tokens * dim, "{name}");
    let first: usize = STACK_STEPS[..step].iter().sum();
    let head = |head: usize| whole[(head * tokens + first) * dim..][..STACK_STEPS[step] * dim].to_vec();
    (0..heads).flat_map(head).collect()
}

/// The original's value codes: chosen in f16 arithmetic with a scale that is rounded to f16 only when it is stored.
pub fn original_f16_codes(values: &[f32], dim: usize) -> (Vec<i8>, Vec<f32>) {
    let scale = |row: &[f32]| row.iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0;
    let half = |x: f32| f16::from_f32(x).to_f32();
    let code = |v: f32, s: f32| half(v / half(s)).round_ties_even().clamp(-127.0, 127.0) as i8;
    let rows = values.chunks(dim);
    (
        rows.clone().flat_map(|row| row.iter().map(|&v| code(v, scale(row)))).collect(),
        rows.map(scale).collect(),
    )
}

/// The codes of coded values, row by row without padding.
pub fn codes_of(values: &QuantizedValues) -> Vec<i8> {
    let rows = values.words.chunks(values.words_per_row());
    rows.flat_map(|row| {
        row.iter()
            .flat_map(|w| w.to_le_bytes())
            .take(values.shape.dim)
            .map(u8::cast_signed)
            .collect::<Vec<_>>()
    })
    .collect()
}

/// Sign bits as the original's kernels pack them: bytes, least significant bit first.
pub fn packed_bytes(keys: &SketchedKeys) -> Vec<u8> {
    let rows = keys.words.chunks(keys.words_per_row());
    rows.flat_map(|row| {
        row.iter().flat_map(|w| w.to_le_bytes()).take(keys.sketch_dim / 8).collect::<Vec<_>>()
    })
    .collect()
}

/// The sketched keys of the long golden context: 2,048 keys of 128 channels and bits.
pub fn long_keys(golden: &Golden) -> SketchedKeys {
    let bytes = golden.u8("long/derived_packed_lsb");
    SketchedKeys {
        shape: Shape::new(1, 1, 2048, 128).unwrap(),
        sketch_dim: 128,
        words: bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect(),
        scale: golden.f32("long/norm").iter().map(|&n| f16::from_f32(n)).collect(),
        status: Counts::default(),
    }
}

/// The original's codes and scales in our layout.
pub fn values_of(codes: &[i8], scales: &[f32], dim: usize) -> QuantizedValues {
    let word = |four: &[i8]| four.iter().rev().fold(0, |word, &c| word << 8 | u32::from(c.cast_unsigned()));
    QuantizedValues {
        shape: Shape::new(1, 1, scales.len(), dim).unwrap(),
        words: codes.chunks(dim).flat_map(|row| row.chunks(4).map(word)).collect(),
        scale: scales.iter().map(|&s| f16::from_f32(s)).collect(),
        status: Counts::default(),
    }
}
