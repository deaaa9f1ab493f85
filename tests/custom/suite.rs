//! The tests of tests/gpu that need no adapter of their own, for suites that bring a device.

#[path = "../gpu/attention.rs"]
pub(crate) mod attention;
#[path = "../gpu/cache.rs"]
pub(crate) mod cache;
#[path = "../gpu/coded.rs"]
pub(crate) mod coded;
#[path = "../random/mod.rs"]
#[allow(dead_code, unreachable_pub, reason = "shared with suites that are crates of their own")]
pub(crate) mod numbers;

#[path = "../caches/mod.rs"]
#[allow(unreachable_pub, reason = "shared with suites that are crates of their own")]
pub(crate) mod caches;
#[path = "../gpu/golden.rs"]
pub(crate) mod golden;
#[path = "../gpu/groups.rs"]
pub(crate) mod groups;
#[path = "../gpu/learnt.rs"]
pub(crate) mod learnt;
#[path = "../gpu/minicache.rs"]
pub(crate) mod minicache;
#[path = "../gpu/planes.rs"]
pub(crate) mod planes;
#[path = "../gpu/qjl.rs"]
pub(crate) mod qjl;
#[path = "../gpu/random.rs"]
pub(crate) mod random;
#[path = "../gpu/rows.rs"]
pub(crate) mod rows;
#[path = "../gpu/selftest.rs"]
pub(crate) mod selftest;

use kvfold::Gpu;

/// A test by name; it fails by panicking or by an error.
pub(crate) type Test = (&'static str, fn(&Gpu) -> kvfold::Result<()>);

/// Every test that needs no adapter of its own.
pub(crate) fn tests() -> Vec<Test> {
    [
        attention::TESTS,
        minicache::TESTS,
        coded::TESTS,
        cache::TESTS,
        groups::TESTS,
        learnt::TESTS,
        qjl::TESTS,
        planes::TESTS,
        golden::TESTS,
        random::TESTS,
        selftest::TESTS,
    ]
    .concat()
}

/// The tests of these names.
pub(crate) fn named(names: &[&str]) -> Vec<Test> {
    for name in names {
        assert!(tests().iter().any(|(test, _)| test == name), "no test {name}");
    }
    tests().into_iter().filter(|(test, _)| names.contains(test)).collect()
}
