//! Directions in codes: against the formulas in f64, and what they cost on a real model.

use half::f16;
use kvfold::minicache::{DirectionPlanes, Folded, Layer, MergeOptions, Retention, cpu};
use kvfold::qjl::planes::{Rotation, reference};
use kvfold::{Capture, DType, Shape, Tensor};

use crate::random::Random;
use crate::real::{neighbours, sample};

/// Expected squared error of a unit Gaussian in 1 to 5 bits by the best uniform quantiser (Max 1960).
const DISTORTION: [f64; 5] = [0.3634, 0.1188, 0.03744, 0.01154, 0.00349];

/// Two layers of which two rows in three point the same way but for a tenth.
fn pair(seed: u64, shape: Shape, dtype: DType) -> [Tensor; 2] {
    let mut random = Random(seed);
    let lower: Vec<f32> = random.normals(shape.elements()).iter().map(|&x| x as f32).collect();
    let mut upper: Vec<f32> = random.normals(shape.elements()).iter().map(|&x| x as f32).collect();
    for (row, (x, y)) in upper.chunks_mut(shape.dim).zip(lower.chunks(shape.dim)).enumerate() {
        if row % 3 != 0 {
            x.iter_mut().zip(y).for_each(|(x, y)| *x = 1.5 * (y + 0.1 * *x));
        }
    }
    [lower, upper].map(|numbers| Tensor::from_f32(&numbers, dtype, shape).unwrap())
}

/// The code of a channel in a slot's words.
fn code(words: &[u32], channel: usize, bits: usize) -> u8 {
    let bit = |at: usize| words[at / 32] >> (at % 32) & 1;
    (0..bits).fold(0, |code, i| code | (bit(channel * bits + i) as u8) << i)
}

fn magnitude(folded: &Folded, slot: usize, member: usize) -> f64 {
    f64::from(f16::from_bits((folded.magnitudes[slot] >> (16 * member)) as u16))
}

/// Slots of merged rows, and the rows they are of.
fn merged(folded: &Folded) -> Vec<(usize, (usize, usize, usize))> {
    let layout = &folded.layout;
    let place = |(b, h, t): (usize, usize, usize)| {
        let page = folded.pages[layout.page(b, h, t)];
        let is_merged = !page.is_raw() && page.retained >> (t % 32) & 1 == 0;
        is_merged.then_some((page.slots as usize + t % 32, (b, h, t)))
    };
    layout.shape.iter_rows().filter_map(place).collect()
}

fn numbers(tensor: &Tensor, (b, h, t): (usize, usize, usize)) -> Vec<f64> {
    let mut row = vec![0.0; tensor.shape().dim];
    tensor.view().read_row(b, h, t, &mut row);
    row.into_iter().map(f64::from).collect()
}

#[test]
fn codes_are_those_of_the_formulas() {
    let (mut same, mut all) = (0, 0);
    for (seed, dim) in (0..).zip([3, 5, 16, 64, 80, 128]) {
        for bits in 1..=5 {
            let planes = DirectionPlanes::default().bits(bits).rounds(1 + bits % 2).seed(seed);
            let [lower, upper] = pair(seed, Shape::new(2, 2, 37, dim).unwrap(), DType::F32);
            let options = MergeOptions::default().retention(Retention::Cosine(0.9));
            let whole = cpu::merge(&lower.view(), &upper.view(), &options).unwrap();
            let coded = cpu::merge(&lower.view(), &upper.view(), &options.planes(planes)).unwrap();
            assert_eq!((coded.totals, &coded.pages, &coded.side), (whole.totals, &whole.pages, &whole.side));
            let (words, whole_words) = (coded.layout.slot_words(), whole.layout.slot_words());
            assert_eq!(words, (dim * usize::from(bits)).div_ceil(32));
            let rotation = Rotation::new(dim, planes.rounds, planes.seed);
            // A layer's magnitude is over what a level counts.
            let unit = f64::from(1 << (dim.ilog2() / 2));
            let restored = [Layer::Lower, Layer::Upper].map(|layer| cpu::restore(&coded, layer).unwrap());
            for (slot, row) in merged(&coded) {
                let halves = &whole.slots[slot * whole_words..(slot + 1) * whole_words];
                let half = |i: usize| f64::from(f16::from_bits((halves[i / 2] >> (16 * (i % 2))) as u16));
                let direction: Vec<f64> = (0..dim).map(half).collect();
                let (want, nu) = reference::codes(bits, &reference::rotate(&rotation, &direction));
                let slots = &coded.slots[slot * words..(slot + 1) * words];
                let have: Vec<u8> = (0..dim).map(|i| code(slots, i, bits.into())).collect();
                same += have.iter().zip(&want).filter(|(a, b)| a == b).count();
                all += dim;
                // A number within rounding of a bound may fall on either side, and another step may then fit best.
                let top = f64::from((1u32 << bits) - 1);
                let levels: Vec<f64> = have.iter().map(|&c| 2.0 * f64::from(c) - top).collect();
                let back = reference::rotate_back(&rotation, &levels);
                for (member, restored) in restored.iter().enumerate() {
                    let scale = magnitude(&coded, slot, member) / unit;
                    if have == want {
                        // Of nu, of the length, and of their product: half an ulp of f16 each.
                        let product = nu * magnitude(&whole, slot, member);
                        assert!(
                            (scale - product).abs() <= product / 1000.0,
                            "{scale} {product}, {dim} {bits}"
                        );
                    }
                    for (x, y) in numbers(restored, row).iter().zip(&back) {
                        let y = scale * y;
                        // A level taken back is rounded to f16; sums of f32.
                        assert!((x - y).abs() <= y.abs() / 2000.0 + 1e-5 * scale, "{x} {y}, {dim} {bits}");
                    }
                }
            }
        }
    }
    assert!(all > 10_000 && (all - same) * 1000 <= all, "{same} of {all} codes");
}

#[test]
fn rows_that_do_not_merge_stay_bit_for_bit() {
    for (seed, dtype) in (0..).zip(DType::ALL) {
        let both = pair(seed, Shape::new(1, 3, 70, 48).unwrap(), dtype);
        let options = MergeOptions::default().planes(DirectionPlanes::default());
        let folded = cpu::merge(&both[0].view(), &both[1].view(), &options).unwrap();
        let merged: Vec<_> = merged(&folded).into_iter().map(|(_, row)| row).collect();
        assert!(merged.len() > 50 && folded.totals.counts.retained() > 50);
        for (layer, rows) in [Layer::Lower, Layer::Upper].into_iter().zip(&both) {
            let restored = cpu::restore(&folded, layer).unwrap();
            for (b, h, t) in rows.shape().iter_rows().filter(|row| !merged.contains(row)) {
                assert_eq!(restored.view().row_bytes(b, h, t), rows.view().row_bytes(b, h, t));
            }
        }
    }
}

/// Every row of a real model merged by force: what codes add to the error is what the quantiser costs a Gaussian, and lengths
/// are kept.
#[test]
fn codes_of_real_directions_err_as_the_quantiser_does() {
    let capture: Capture = sample();
    for bits in 1..=5u8 {
        let planes = DirectionPlanes::default().bits(bits);
        let (mut error, mut squares) = (0.0, 0.0);
        for [lower, upper] in neighbours(&capture, false).into_iter().step_by(5) {
            let options = MergeOptions::default().retention(Retention::Never).sinks(0);
            let whole = cpu::merge(&lower.view(), &upper.view(), &options).unwrap();
            let coded = cpu::merge(&lower.view(), &upper.view(), &options.planes(planes)).unwrap();
            let bits_a_row = (whole.bytes() - coded.bytes()) * 8 / u64::from(coded.totals.slots);
            assert_eq!(bits_a_row, 64 * (16 - u64::from(bits)), "the codes' scalar takes no bytes");
            let [whole, coded] = [whole, coded].map(|folded| cpu::restore(&folded, Layer::Upper).unwrap());
            for row in whole.shape().iter_rows() {
                let (x, y) = (numbers(&whole, row), numbers(&coded, row));
                let length = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>();
                assert!((length(&x).sqrt() / length(&y).sqrt() - 1.0).abs() < 0.003);
                error += x.iter().zip(&y).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
                squares += length(&x);
            }
        }
        // The cosine of a row and its code is the root of what the quantiser leaves; lengths are equal.
        let want = 2.0 - 2.0 * (1.0 - DISTORTION[usize::from(bits) - 1]).sqrt();
        let have = error / squares;
        // Of five steps the one is taken that fits the row's 64 numbers, which does better than one step for all rows.
        assert!(have < 1.05 * want && have > 0.6 * want, "{bits} bits: {have} {want}");
    }
}
