// What kernels ask of numbers that they have computed.

// Whether they stay below 2^127, as finite ones do. Compared as integers, with a bound that is not f32's end: fast math
// (Metal's default) assumes that no result is NaN or infinite, and so answers a question that tells those apart, or a
// comparison of numbers, as it likes. Stored numbers: element_is_finite in load_*.wgsl.
fn are_in_range(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4<u32>(0x7fffffffu)) < vec4<u32>(0x7f000000u);
}

fn inverse_or_zero(x: f32) -> f32 {
    return select(0.0, 1.0 / max(x, 1.1754944e-38), x > 0.0);
}
