//! What the rules decide.

use kvfold::minicache::{Cause, Layer, Layout, MergeOptions, Mode, Retention, Row, cpu, order_key};
use kvfold::{DType, Shape, Tensor};
use proptest::prelude::*;

use crate::options::{Case, MODES, cases};
use crate::rows::{Kind, pair_of};

fn causes(pair: &[Tensor; 2], options: &MergeOptions) -> (Vec<Row>, Vec<Option<Cause>>) {
    let (lower, upper) = (pair[0].view(), pair[1].view());
    let at = (lower.shape(), lower.dtype());
    let layout = Layout::new(at, at, options.mode).unwrap();
    let rows = cpu::similarity(&lower, &upper, options).unwrap();
    let causes = cpu::retain(&rows, &cpu::threshold(&rows, &layout, options), &layout, options);
    (rows, causes)
}

/// The tokens `range` of every head, on their own.
fn tokens(tensor: &Tensor, range: std::ops::Range<usize>) -> Tensor {
    let shape = Shape { tokens: range.len(), ..tensor.shape() };
    let row = |(b, h, t): (usize, usize, usize)| tensor.view().row_bytes(b, h, range.start + t).to_vec();
    Tensor::new(shape.iter_rows().flat_map(row).collect(), tensor.dtype(), shape).unwrap()
}

fn check_fraction(case: &Case, rho: f32, kinds: &[Kind]) {
    let pair = pair_of(case.seed, case.shape, case.dtype, kinds);
    let options = case.options.clone().retention(Retention::Fraction(rho));
    let (rows, causes) = causes(&pair, &options);
    let (sequence, sinks) = (case.shape.heads * case.shape.tokens, options.sink_tokens() as usize);
    for (rows, causes) in rows.chunks(sequence.max(1)).zip(causes.chunks(sequence.max(1))) {
        let candidate = |i: &usize| {
            rows[*i].fault != Some(Cause::NonFinite)
                && i % case.shape.tokens >= sinks
                && (options.mode == Mode::Compat || !rows[*i].both_zero())
        };
        let mut order: Vec<usize> = (0..rows.len()).filter(candidate).collect();
        let keep = (rho * order.len() as f32).ceil() as usize;
        order.sort_by_key(|&i| (order_key(rows[i].cosine), i));
        let mut want = order[..keep].to_vec();
        want.sort_unstable();
        let have: Vec<usize> = (0..rows.len()).filter(|&i| causes[i] == Some(Cause::Rule)).collect();
        assert_eq!(have, want);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Exactly `ceil(rho n)` of a sequence's candidates, the least similar first, ties by the lower row; one-hot rows tie.
    #[test]
    fn fraction_keeps_the_least_similar(case in cases(), rho in 0f32..=1.0) {
        check_fraction(&case, rho, &Kind::ALL);
        check_fraction(&case, rho, &[Kind::OneHot, Kind::ZeroUpper, Kind::ZeroBoth]);
        check_fraction(&case, 0.1, &[Kind::Identical, Kind::Similar]);
    }

    #[test]
    fn sinks_stay_raw(case in cases()) {
        let (_, causes) = causes(&case.pair(), &case.options);
        for ((_, _, token), cause) in case.shape.iter_rows().zip(causes) {
            let position = case.options.first_position as usize + token;
            if position < case.options.sinks as usize {
                prop_assert!(matches!(cause, Some(Cause::Sink | Cause::NonFinite)), "{:?}", cause);
            } else {
                prop_assert_ne!(cause, Some(Cause::Sink));
            }
        }
    }

    /// A row's verdict needs nothing but the row under an absolute threshold, so chunks decide and store as the whole does.
    #[test]
    fn chunks_decide_as_the_whole(case in cases(), threshold in -1f32..=1.0, cut in 0f64..=1.0) {
        let pair = case.pair();
        let options = case.options.clone().retention(Retention::Cosine(threshold)).raw_page_share(1.0);
        let first = (cut * case.shape.tokens as f64) as usize;
        let parts = [0..first, first..case.shape.tokens].map(|range| {
            let options = options.clone().first_position(options.first_position + range.start as u32);
            let pair = [0, 1].map(|which| tokens(&pair[which], range.clone()));
            let folded = cpu::merge(&pair[0].view(), &pair[1].view(), &options).unwrap();
            let restored = [Layer::Lower, Layer::Upper].map(|which| cpu::restore(&folded, which).unwrap());
            (range, causes(&pair, &options).1, restored)
        });
        let whole = cpu::merge(&pair[0].view(), &pair[1].view(), &options).unwrap();
        let restored = [Layer::Lower, Layer::Upper].map(|which| cpu::restore(&whole, which).unwrap());
        let decided = causes(&pair, &options).1;
        for (range, causes, rows) in parts {
            let shape = rows[0].shape();
            for (row, (b, h, t)) in shape.iter_rows().enumerate() {
                let token = range.start + t;
                prop_assert_eq!(causes[row], decided[case.shape.row(b, h, token)]);
                for which in [0, 1] {
                    let want = restored[which].view().row_bytes(b, h, token);
                    prop_assert_eq!(rows[which].view().row_bytes(b, h, t), want);
                }
            }
        }
    }
}

/// In every mode: opposite rows, numbers that are not finite, rows out of range. Zero rows merge where a direction is left.
#[test]
fn each_odd_row_has_its_cause() {
    let none = [None; 3];
    let raw = |cause: Cause| [Some(cause); 3];
    // Shared, Anchor, Compat.
    let table = [
        (Kind::Identical, none),
        (Kind::Opposite, raw(Cause::Antiparallel)),
        (Kind::NonFinite, raw(Cause::NonFinite)),
        (Kind::ZeroLower, [None, Some(Cause::Antiparallel), None]),
        (Kind::ZeroUpper, none),
        (Kind::ZeroBoth, none),
        (Kind::Immeasurable, raw(Cause::Range)),
    ];
    let shape = Shape::new(2, 2, 35, 24).unwrap();
    for (kind, want) in table {
        let pair = pair_of(9, shape, DType::F32, &[kind]);
        for (mode, want) in MODES.into_iter().zip(want) {
            let options = MergeOptions::default().mode(mode).retention(Retention::Never).sinks(0);
            let (_, causes) = causes(&pair, &options);
            assert!(causes.iter().all(|&cause| cause == want), "{kind:?} {mode:?}: {causes:?}");
        }
    }
}
