//! Reads the golden files (README.md beside this).

#![allow(dead_code, reason = "each suite uses its part")]

use half::{bf16, f16};
use kvfold::Shape;
use kvfold::qjl::{Counts, QuantizedValues};
use safetensors::{Dtype, SafeTensors};

/// A golden file.
pub struct Golden(Vec<u8>);

impl Golden {
    pub fn open(name: &str) -> Self {
        let path = format!("{}/tests/golden/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Self(std::fs::read(&path).unwrap_or_else(|cause| panic!("{path}: {cause}")))
    }

    pub fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
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
