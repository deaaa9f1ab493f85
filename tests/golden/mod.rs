//! Reads the golden files (README.md beside this).

use half::{bf16, f16};
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
}
