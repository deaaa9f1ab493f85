//! What `kvfold doctor` runs.

use kvfold::selftest::{selftest, timings};
use kvfold::{Capture, Error, Gpu};

use crate::Test;

pub(crate) const TESTS: &[Test] = &[
    ("the_self_test_passes_on_every_check", passes),
    ("the_self_test_ends_when_asked_to", cancelled),
    ("every_operation_is_timed_beside_its_twin", timed),
];

fn passes(gpu: &Gpu) -> kvfold::Result<()> {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/web/samples/smollm2_prose_s128.safetensors");
    let checks = gpu.block_on(selftest(gpu, Some(&Capture::open(sample)?), &mut |_, _| true))?;
    for check in &checks {
        assert!(check.passed(), "{check:?}");
    }
    // On made-up rows all but Hadamard, which needs a power of two; on the capture all.
    assert_eq!(checks.len(), (1 + 9 + 3 + 1 + 3 + 12) + (1 + 9 + 3 + 1 + 6 + 12));
    // Folds and codes may agree to the last bit; sums of attention in another order do not.
    let attention = checks.iter().filter(|check| check.kernel.contains("atten"));
    assert!(attention.clone().count() == 23 && attention.filter(|check| check.apart > Some(0.0)).count() > 8);
    Ok(())
}

fn cancelled(gpu: &Gpu) -> kvfold::Result<()> {
    let error = gpu.block_on(selftest(gpu, None, &mut |done, _| done < 1)).unwrap_err();
    assert!(matches!(error, Error::Cancelled { done: 1, of: 12 }), "{error}");
    Ok(())
}

fn timed(gpu: &Gpu) -> kvfold::Result<()> {
    let start = std::time::Instant::now();
    let clock = || start.elapsed().as_secs_f64() * 1e3;
    let found = gpu.block_on(timings(Some(gpu), None, &clock, &mut |_, _| true))?;
    assert_eq!(found.len(), 12);
    assert!(found.iter().all(|timing| timing.milliseconds > Some(0.0) && timing.twin_milliseconds > 0.0));
    for kernel in ["minicache-merge", "qjl-quantize", "planes-attend", "attention-exact"] {
        assert!(gpu.variants().iter().any(|label| label.starts_with(kernel)), "{kernel} of the timed ones");
    }
    let error = gpu.block_on(timings(Some(gpu), None, &clock, &mut |_, _| false)).unwrap_err();
    assert!(matches!(error, Error::Cancelled { done: 0, of: 12 }), "{error}");
    Ok(())
}
