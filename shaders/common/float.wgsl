// What kernels ask of a number that they have computed.

// Whether it stays below 2^127, as a finite one does. Compared as an integer, with a bound that is not f32's end: fast math
// (Metal's default) assumes that no result is NaN or infinite, and so answers a question that tells those apart, or a
// comparison of numbers, as it likes. Stored numbers: element_is_finite in load_*.wgsl.
fn in_range(x: f32) -> bool {
    return (bitcast<u32>(x) & 0x7fffffffu) < 0x7f000000u;
}

fn inverse_or_zero(x: f32) -> f32 {
    return select(0.0, 1.0 / max(x, 1.1754944e-38), x > 0.0);
}
