//! Coded blocks as arrays of rows: what a file holds of them.

use half::f16;

use super::HostCodes;
use crate::qjl::planes::PlaneCodes;

/// One array of a block, `[kv_heads, rows, width]`.
pub(crate) struct Array<'a> {
    /// Its name in a file, behind the track's.
    pub(crate) name: String,
    /// Numbers of a row.
    pub(crate) width: usize,
    /// Tokens that share a row.
    pub(crate) tokens: usize,
    pub(crate) numbers: Numbers<'a>,
}

/// The numbers of an array, all rows that the block has room for.
pub(crate) enum Numbers<'a> {
    Words(&'a mut Vec<u32>),
    Halves(&'a mut Vec<f16>),
}

impl HostCodes {
    /// All arrays, in one order for all blocks of a layer. Arrays that hold nothing are left out.
    pub(crate) fn arrays(&mut self) -> Vec<Array<'_>> {
        let mut all = arrays_of("key", &mut self.keys);
        all.extend(arrays_of("value", &mut self.values));
        all
    }
}

fn arrays_of<'a>(side: &str, codes: &'a mut PlaneCodes) -> Vec<Array<'a>> {
    let mut all = Vec::new();
    let (shape, means) = (codes.shape, codes.means.len());
    let segments = codes.layout.segments().iter().zip(&mut codes.segments).enumerate();
    for (index, (segment, stored)) in segments.filter(|(_, (segment, _))| segment.planes > 0) {
        let name = |what: &str| format!("{side}.{what}.{index}");
        let (width, tokens) = (segment.words(), 1);
        all.push(Array { name: name("codes"), width, tokens, numbers: Numbers::Words(&mut stored.words) });
        all.push(Array { name: name("nu"), width: 1, tokens, numbers: Numbers::Halves(&mut stored.nu) });
    }
    if means > 0 {
        let blocks = means / (shape.heads * shape.dim).max(1);
        all.push(Array {
            name: format!("{side}.means"),
            width: shape.dim,
            tokens: shape.tokens.div_ceil(blocks.max(1)),
            numbers: Numbers::Halves(&mut codes.means),
        });
    }
    all
}
