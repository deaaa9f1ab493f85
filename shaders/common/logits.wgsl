// From scores to logits, and which tokens a query sees: what every attention kernel shares. The kernel has
// `attention: Attention` in its params.

const LOWEST: f32 = -3.402823e38;

// cap * tanh(x / cap) by an exponential that cannot overflow.
fn soft_capped(x: vec4<f32>) -> vec4<f32> {
    let cap = params.attention.soft_cap;
    let e = exp(-2.0 * abs(x / cap));
    return sign(x) * cap * ((1.0 - e) / (1.0 + e));
}

// Of four scores; LOWEST where they are out of range. One question whether there is a cap, not one for each.
fn logits(scores: vec4<f32>) -> vec4<f32> {
    let x = params.attention.scale * scores;
    var capped = x;
    if (params.attention.soft_cap > 0.0) {
        capped = soft_capped(x);
    }
    return select(vec4<f32>(LOWEST), capped, are_in_range(x));
}

// First and one past the last token of a sequence that a query sees.
fn visible(length: u32, query_index: u32) -> vec2<u32> {
    let queries = params.attention.queries + params.attention.behind;
    if (length + query_index < queries) {
        return vec2<u32>();
    }
    let window = params.attention.window;
    let position = length + query_index - queries;
    let hides_later = params.attention.causal == 1u || window != 0xffffffffu;
    let end = select(length, min(length, position + 1u), hides_later);
    let start = select(0u, position + 1u - min(position + 1u, window), window != 0xffffffffu);
    return vec2<u32>(min(start, end), end);
}

// What of it this pass may see, as tokens of the store.
fn visible_here(span: vec4<u32>, query_index: u32) -> vec2<u32> {
    let seen = clamp(visible(span.x, query_index), span.yy, span.zz);
    let start = params.attention.start;
    let here = max(seen, vec2<u32>(start)) - start;
    return clamp(here, vec2<u32>(params.attention.live_first), vec2<u32>(params.attention.live_end));
}
