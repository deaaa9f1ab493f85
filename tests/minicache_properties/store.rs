//! What a fold stores, whatever it is given.

use half::f16;
use kvfold::minicache::{DirectionPlanes, Folded, Layer, MergeOptions, Mode, PAGE, Page, Retention, cpu};
use kvfold::{DType, Shape, Tensor, TensorView};
use proptest::prelude::*;

use crate::options::{Case, MODES, cases};
use crate::rows::{Kind, pair_of};

/// The page that holds a row, counted over all heads and sequences, and the row within it.
fn page_of(folded: &Folded, row: usize) -> (usize, usize) {
    let (head, token) = (row / folded.layout.shape.tokens, row % folded.layout.shape.tokens);
    (head * folded.layout.pages_per_head() + token / PAGE, token % PAGE)
}

/// Whether a row is kept raw, by itself or with its page.
pub fn is_raw(folded: &Folded, row: usize) -> bool {
    let (page, bit) = page_of(folded, row);
    folded.pages[page].retained >> bit & 1 == 1
}

/// Whether a mode keeps every row of layer `which` (0 lower, 1 upper) as it came.
pub fn kept(mode: Mode, which: usize) -> bool {
    which == 0 && mode != Mode::Shared
}

/// A raw row of the upper layer as Compat keeps it: in f16, as the original does.
fn through_f16(row: &[u8], dtype: DType) -> Tensor {
    let shape = Shape::new(1, 1, 1, row.len() / dtype.size()).unwrap();
    let numbers = TensorView::new(row, dtype, shape).unwrap().to_f32();
    let rounded: Vec<f32> = numbers.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
    Tensor::from_f32(&rounded, dtype, shape).unwrap()
}

fn check_raw_rows(folded: &Folded, pair: &[Tensor; 2], case: &Case) {
    for (which, (layer, tensor)) in [Layer::Lower, Layer::Upper].into_iter().zip(pair).enumerate() {
        let restored = cpu::restore(folded, layer).unwrap();
        assert_eq!((restored.shape(), restored.dtype()), (case.shape, case.dtype));
        for (row, (batch, head, token)) in case.shape.iter_rows().enumerate() {
            if !is_raw(folded, row) && !kept(case.options.mode, which) {
                continue;
            }
            let want = tensor.view().row_bytes(batch, head, token);
            let have = restored.view().row_bytes(batch, head, token).to_vec();
            let rounded = case.options.mode == Mode::Compat && which == 1 && case.dtype != DType::F16;
            if rounded {
                let (have, want) = (through_f16(&have, case.dtype), through_f16(want, case.dtype));
                let same = |(x, y): (f32, f32)| x.to_bits() == y.to_bits() || x.is_nan() && y.is_nan();
                assert!(have.view().to_f32().into_iter().zip(want.view().to_f32()).all(same), "row {row}");
            } else {
                assert_eq!(have, want, "layer {which} row {row}");
            }
        }
    }
}

fn check_sizes(folded: &Folded, case: &Case) {
    let vectors = size_of_val(&folded.pages[..])
        + size_of_val(&folded.slots[..])
        + size_of_val(&folded.magnitudes[..])
        + size_of_val(&folded.side[..]);
    assert_eq!(folded.bytes(), vectors as u64);
    assert_eq!(folded.totals.bytes(&folded.layout), folded.bytes());
    let counts = folded.totals.counts;
    assert_eq!((counts.merged + counts.retained()) as usize, case.shape.rows());
    assert_eq!(folded.pages.len(), case.shape.batch * case.shape.heads * case.shape.tokens.div_ceil(PAGE));
    assert_eq!(folded.pages.iter().filter(|page| page.is_raw()).count(), folded.totals.raw_pages as usize);
}

/// Pages lie behind one another without gap or overlap, and one is raw iff too many of its rows are retained.
fn check_pages(folded: &Folded, case: &Case) {
    let (mut slots, mut side) = (0, 0);
    for (index, page) in folded.pages.iter().enumerate() {
        let rows = folded.layout.page_rows(index);
        assert_eq!(page.side, side, "page {index}");
        if page.is_raw() {
            assert_eq!(page.retained, u32::MAX, "page {index}");
            side += 2 * rows as u32;
            continue;
        }
        let retained = page.retained.count_ones();
        assert!(page.retained >> (rows - 1) <= 1, "page {index}: a bit past its end");
        assert!(
            case.options.mode == Mode::Compat || retained <= case.options.raw_limit(rows),
            "page {index}"
        );
        assert_eq!(page.slots, slots, "page {index}");
        slots += rows.next_multiple_of(2) as u32;
        side += folded.layout.page_side(rows, retained as usize) as u32;
    }
    assert_eq!((slots, side), (folded.totals.slots, folded.totals.side));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn raw_rows_keep_their_bits_and_sizes_add_up(case in cases()) {
        let pair = case.pair();
        let folded = cpu::merge(&pair[0].view(), &pair[1].view(), &case.options).unwrap();
        check_raw_rows(&folded, &pair, &case);
        check_sizes(&folded, &case);
        check_pages(&folded, &case);
    }

    /// No merged row gains a number that is not finite, even where magnitudes are rounded up at the edge of the type.
    #[test]
    fn merged_rows_stay_finite(case in cases()) {
        let pair = pair_of(case.seed, case.shape, case.dtype, &[Kind::Edge, Kind::Large, Kind::Immeasurable]);
        let options = case.options.clone().retention(Retention::Never);
        let bits = 1 + (case.seed % 5) as u8;
        let coded = options.clone().mode(Mode::Shared).planes(DirectionPlanes::default().bits(bits));
        for options in [options, coded] {
            let folded = cpu::merge(&pair[0].view(), &pair[1].view(), &options).unwrap();
            for layer in [Layer::Lower, Layer::Upper] {
                let numbers = cpu::restore(&folded, layer).unwrap().view().to_f32();
                for (row, numbers) in numbers.chunks(case.shape.dim).enumerate() {
                    prop_assert!(is_raw(&folded, row) || numbers.iter().all(|x| x.is_finite()), "row {}", row);
                }
            }
        }
    }
}

fn ratio(folded: &Folded) -> f64 {
    folded.layout.bytes_before() as f64 / folded.bytes() as f64
}

#[test]
fn a_pair_in_which_nothing_merges_costs_its_page_table() {
    let shape = Shape::new(2, 3, 96, 64).unwrap();
    let [lower, upper] = pair_of(5, shape, DType::F16, &[Kind::Random]);
    for mode in [Mode::Shared, Mode::Anchor] {
        let options = MergeOptions::default().mode(mode);
        let folded = cpu::merge(&lower.view(), &upper.view(), &options).unwrap();
        assert_eq!((folded.totals.counts.merged, folded.totals.raw_pages), (0, 18));
        assert_eq!(folded.bytes(), (folded.layout.bytes_before() + 18 * size_of::<Page>()) as u64);
        assert!(ratio(&folded) >= 0.998, "{}", ratio(&folded));
    }
}

/// Per row: a direction or the lower row, 2 D bytes; magnitudes; and a page's 12 bytes over 32 rows.
#[test]
fn identical_layers_cost_one_of_them_and_the_magnitudes() {
    for dim in [64usize, 128] {
        let shape = Shape::new(2, 3, 96, dim).unwrap();
        let [lower, _] = pair_of(6, shape, DType::F16, &[Kind::Random]);
        for (mode, magnitudes) in MODES.into_iter().zip([4, 2, 0]) {
            let options = MergeOptions::default().mode(mode).sinks(0);
            let folded = cpu::merge(&lower.view(), &lower.view(), &options).unwrap();
            assert_eq!(folded.totals.counts.merged as usize, shape.rows());
            // Compat keeps both layers in full.
            let rows = if mode == Mode::Compat { 4 * dim } else { 2 * dim };
            let per_row = (rows + magnitudes) as f64 + 12.0 / 32.0;
            assert_eq!(ratio(&folded), 4.0 * dim as f64 / per_row, "{mode:?} D {dim}");
        }
    }
}

#[test]
fn a_store_shorter_than_its_layout_is_refused() {
    let shape = Shape::new(1, 2, 40, 16).unwrap();
    let [lower, upper] = pair_of(7, shape, DType::F16, &[Kind::Similar]);
    let whole = cpu::merge(&lower.view(), &upper.view(), &MergeOptions::default()).unwrap();
    let cuts: [fn(&mut Folded); 4] = [
        |f| f.pages.truncate(f.pages.len() - 1),
        |f| f.slots.truncate(f.slots.len() - 1),
        |f| f.magnitudes.truncate(f.magnitudes.len() - 1),
        |f| f.side.truncate(f.side.len() - 1),
    ];
    for cut in cuts {
        let mut folded = whole.clone();
        cut(&mut folded);
        let error = cpu::restore(&folded, Layer::Upper).unwrap_err();
        assert!(matches!(error, kvfold::Error::Shape { .. }), "{error}");
    }
}
