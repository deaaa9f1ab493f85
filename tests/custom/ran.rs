//! Which kernels ran.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use kvfold::gpu::Variant;
use libtest_mimic::Arguments;

/// Labels of the variants that ran.
static RAN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

pub(super) fn add(label: &str) {
    let mut ran = RAN.lock().unwrap_or_else(PoisonError::into_inner);
    if !ran.contains(label) {
        ran.insert(label.to_owned());
    }
}

/// Whether variants ran of every kernel that has some whose labels count; says so. Of a selection of tests nothing is expected.
pub(crate) fn every_kernel(arguments: &Arguments, what: &str, counts: impl Fn(&str) -> bool) -> bool {
    if arguments.filter.is_some() || !arguments.skip.is_empty() || arguments.list || arguments.ignored {
        return true;
    }
    let ran = RAN.lock().unwrap_or_else(PoisonError::into_inner);
    let did_run = |(folder, name): &(&str, &str)| {
        let start = format!("{folder}-{name}-");
        ran.iter().any(|label| label.starts_with(&start) && counts(label))
    };
    let variants = Variant::every();
    let kernels: BTreeSet<_> =
        variants.iter().filter(|variant| counts(&variant.label())).map(Variant::file).collect();
    let (did, left): (Vec<_>, Vec<_>) = kernels.into_iter().partition(did_run);
    eprintln!("{} kernels ran {what}", did.len());
    if !left.is_empty() {
        eprintln!("none ran {what} of {left:?}");
    }
    left.is_empty()
}
