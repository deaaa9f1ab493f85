//! Made-up keys and values with every kind of row that a fold must survive, and their way to a device.

use kvfold::{DType, Gpu, KvView, Shape, Strides, Tensor};
use proptest::test_runner::{RngAlgorithm, TestRng};

/// Numbers from a fixed seed, uniform in `[-1, 1)`.
pub(crate) struct Numbers(TestRng);

impl Numbers {
    pub(crate) fn new(seed: u8) -> Self {
        Self(TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32]))
    }

    pub(crate) fn next(&mut self) -> f32 {
        use proptest::prelude::Rng;
        (self.0.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn row(&mut self, dim: usize) -> Vec<f32> {
        (0..dim).map(|_| self.next()).collect()
    }
}

/// What the upper row is to the lower one.
const KINDS: usize = 12;

fn pair_of_rows(numbers: &mut Numbers, dim: usize, kind: usize) -> [Vec<f32>; 2] {
    let a = numbers.row(dim);
    let scaled = |row: &[f32], scale: f32| row.iter().map(|x| x * scale).collect::<Vec<_>>();
    let near: Vec<f32> = a.iter().map(|x| 3.0 * x + 0.2 * numbers.next()).collect();
    let zero = vec![0.0; dim];
    match kind {
        0 => [a, numbers.row(dim)],
        1 => [a.clone(), a],
        2 => [a.clone(), scaled(&a, -2.0)],
        3 => [zero, a],
        4 => [a, zero],
        5 => [zero.clone(), zero],
        6 => [scaled(&a, 1e-5), scaled(&near, 1e-5)],
        7 => [scaled(&a, 3e4), scaled(&near, 1e4)],
        8 => {
            let mut broken = near;
            broken[dim / 2] = if dim.is_multiple_of(2) { f32::NAN } else { f32::INFINITY };
            [a, broken]
        }
        // What f32 does not measure; in f16 a zero row and one that is not finite.
        9 => [scaled(&a, 1e-33), near],
        10 => [a, scaled(&near, 1e33)],
        _ => [a, near],
    }
}

/// A pair of layers in which half the rows are similar and the others are of every odd kind.
pub(crate) fn pair(seed: u8, shape: Shape, dtype: DType) -> [Tensor; 2] {
    let mut numbers = Numbers::new(seed);
    let (mut lower, mut upper) = (Vec::new(), Vec::new());
    for row in 0..shape.rows() {
        let kind = if row % 2 == 0 { KINDS } else { (row / 2) % KINDS };
        let [a, b] = pair_of_rows(&mut numbers, shape.dim, kind);
        lower.extend(a);
        upper.extend(b);
    }
    [lower, upper].map(|numbers| Tensor::from_f32(&numbers, dtype, shape).unwrap())
}

/// A contiguous view of a tensor copied to the device.
pub(crate) fn upload(gpu: &Gpu, tensor: &Tensor) -> KvView {
    KvView::new(&gpu.upload("tensor", tensor.bytes()).unwrap(), tensor.dtype(), tensor.shape())
}

/// A view of a tensor copied to the device at `offset`, with these strides; around its rows stand NaNs.
pub(crate) fn scatter(gpu: &Gpu, tensor: &Tensor, offset: usize, strides: Strides) -> KvView {
    let (shape, size) = (tensor.shape(), tensor.dtype().size());
    let mut bytes = vec![0xff; (offset + strides.extent(shape).unwrap() + 3) * size];
    for (b, h, t) in shape.iter_rows() {
        let start = offset + b * strides.batch + h * strides.heads + t * strides.tokens;
        bytes[start * size..(start + shape.dim) * size].copy_from_slice(tensor.view().row_bytes(b, h, t));
    }
    let buffer = gpu.upload("scattered tensor", &bytes).unwrap();
    KvView::new(&buffer, tensor.dtype(), shape).at(offset).strides(strides)
}

/// A tensor of a view's shape from the bytes of its whole buffer.
pub(crate) fn download(gpu: &Gpu, view: &KvView) -> Tensor {
    let read_back =
        gpu.submit(|encoder| kvfold::gpu::ReadBack::schedule(gpu, encoder, view.buffer())).unwrap();
    let mut bytes = read_back.wait_blocking().unwrap();
    bytes.truncate(view.shape().bytes(view.dtype()));
    Tensor::new(bytes, view.dtype(), view.shape()).unwrap()
}
