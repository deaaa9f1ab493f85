//! Other shapes, at the original's defaults: threshold 0.9, t 0.5.

use kvfold::DType;
use kvfold::minicache::{Cause, Mode, Retention};

use crate::golden::Golden;
use crate::pair::{Pair, Tolerance, distance, original, row_of, widened};

/// Of each shape: rows, and rows that the original retains.
const SHAPES: [(&str, usize, usize); 5] =
    [("s0", 30, 21), ("s1", 1, 1), ("s2", 128, 79), ("s3", 21, 15), ("s4", 5, 3)];

#[test]
fn every_shape_agrees_with_the_original() {
    let golden = Golden::open("minicache_shapes_f16");
    for (shape, rows, retained) in SHAPES {
        let at = |name: &str| format!("{shape}/{name}");
        let pair = Pair::read(&golden, [at("x_primary"), at("x_merge")], DType::F16);
        let mask = golden.u8(&at("retained"));
        assert_eq!((mask.len(), mask.iter().map(|&m| usize::from(m)).sum()), (rows, retained), "{shape}");
        let both = pair.run(&original(Mode::Compat, Retention::Cosine(0.9), 0.5));
        let shared = pair.run(&original(Mode::Shared, Retention::Cosine(0.9), 0.5));
        let (cosine, direction) = (golden.f32(&at("cos")), golden.f32(&at("shared")));
        let recon = [golden.f32(&at("recon_primary")), golden.f32(&at("recon_merge"))];
        let sizes = [golden.f32(&at("mag_primary")), golden.f32(&at("mag_merge"))];
        let dim = pair.dim();
        for row in 0..rows {
            let context = format!("{shape} row {row}");
            let cause = (mask[row] == 1).then_some(Cause::Rule);
            for causes in [&both.reference.causes, &both.causes, &shared.reference.causes, &shared.causes] {
                assert_eq!(causes[row], cause, "{context}");
            }
            let cosines = [both.reference.rows[row].cosine, f64::from(both.rows[row].cosine)];
            assert!(cosines.iter().all(|c| (c - f64::from(cosine[row])).abs() <= 1e-6), "{context}");
            let want = row_of(&direction, row, dim);
            assert!(distance(&both.reference.rows[row].direction, &want) <= 5e-7, "{context}");
            assert!(distance(&pair.direction(row, &both.rows[row]), &want) <= 5e-7, "{context}");
            for which in [0, 1] {
                let want = row_of(&recon[which], row, dim);
                let (folded, size) = (row_of(&shared.restored[which], row, dim), sizes[which][row]);
                if cause.is_some() {
                    assert_eq!(folded, want, "{context}: raw in Shared");
                    continue;
                }
                check_shared(&folded, &want, size, &context);
                let exact =
                    [&shared.reference.lower, &shared.reference.upper].map(|all| row_of(all, row, dim));
                Tolerance::exact(5e-7).check(&exact[which], &want, size, &context);
            }
            let (upper, want) = (widened(&row_of(&both.restored[1], row, dim)), row_of(&recon[1], row, dim));
            if cause.is_some() {
                assert_eq!(upper, widened(&want), "{context}: raw in Compat");
            } else {
                Tolerance::twin(5e-7, DType::F16).check(&upper, &want, sizes[1][row], &context);
            }
        }
    }
}

/// Shared rounds direction, magnitude and product to f16, where the original rounds only the product: half an ulp, at most
/// 2^-11 of the number, each; and half of f16's smallest step, 2^-25, for small channels of a direction and of a product.
fn check_shared(have: &[f32], want: &[f32], magnitude: f32, context: &str) {
    for (have, want) in have.iter().zip(want) {
        let tolerance =
            4.0 * 2f32.powi(-11) * want.abs() + magnitude * (2f32.powi(-25) + 5e-7) + 2.0 * 2f32.powi(-25);
        assert!((have - want).abs() <= tolerance, "{context}: {have}, the original {want}");
    }
}
