// What four query rows see of a store's tokens, and how they weigh it. The kernel binds `spans`, one vec4 a sequence: its length, and
// the first and one past the last of its tokens that this pass may see.

// The tokens that each row sees: the first, and one past the last.
struct Seen {
    first: vec4<u32>,
    end: vec4<u32>,
}

// Of those rows that may see anything.
fn seen_by(four: Fours, sees: vec4<bool>) -> Seen {
    let span = spans[four.sequence];
    let a = visible_here(span, four.queries.x);
    let b = visible_here(span, four.queries.y);
    let c = visible_here(span, four.queries.z);
    let d = visible_here(span, four.queries.w);
    let end = select(vec4<u32>(), vec4<u32>(a.y, b.y, c.y, d.y), four.exist & sees);
    return Seen(select(vec4<u32>(0xffffffffu), vec4<u32>(a.x, b.x, c.x, d.x), end > vec4<u32>()), end);
}

// The first token that any row sees, and one past the last.
fn seen_by_any(seen: Seen) -> vec2<u32> {
    return vec2<u32>(min(min(seen.first.x, seen.first.y), min(seen.first.z, seen.first.w)),
                     max(max(seen.end.x, seen.end.y), max(seen.end.z, seen.end.w)));
}

// Logits of one token; LOWEST where a row does not see it.
fn logits_of(scores: vec4<f32>, token: u32, finite: bool, seen: Seen) -> vec4<f32> {
    let sees = vec4<bool>(finite) & (vec4<u32>(token) >= seen.first) & (vec4<u32>(token) < seen.end);
    return select(vec4<f32>(LOWEST), logits(scores), sees);
}

// exp of logits relative to `peak`; 0 for what is not seen. The floor keeps the difference of two extremes from leaving f32.
fn exponentials(x: vec4<f32>, peak: vec4<f32>) -> vec4<f32> {
    return select(vec4<f32>(), exp(max(x - peak, vec4<f32>(-200.0))), x > vec4<f32>(LOWEST));
}
