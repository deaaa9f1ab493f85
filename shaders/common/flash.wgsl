// Attention over any store, one query and one split of the tokens a workgroup: online softmax in f32 over tiles of WORKGROUP
// tokens (flash-decoding). The kernel declares `attention: Attention` in its params, and
//   load_query(query_row, lane)            once, before the first tile
//   query_is_finite(query_row)             whether the query may see anything
//   tile_score(query_row, kv_head, tile, token, lane)  <query, key>, `tile` the first token, `token` this lane's, clamped
//                                          to the store; may hold barriers
//   is_masked(kv_head, token)              a key or value row that must not be seen
//   value_scale(kv_head, token)            factor on a value row
//   four_values(kv_head, token, four)      channels 4 * four .. of a value row, before that factor
// and the bindings `spans`, one vec4 a sequence: its length, and the first and one past the last of its tokens that this pass
// may see; and `partials`, vec4s, where each split leaves what it found for combine.wgsl: its largest logit and its sum of
// exponentials in one, then its weighted sum of values.

// VALUE_LANES invocations cover a value row, four channels each; VALUE_GROUPS of them take turns at the tokens.
const VALUE_GROUPS: u32 = WORKGROUP / VALUE_LANES;

var<workgroup> weights: array<f32, WORKGROUP>;
var<workgroup> gathered: array<vec4<f32>, WORKGROUP>;

// First number of the part that this workgroup finds.
fn partial_base(index: u32) -> u32 {
    let query_row = params.attention.first_row + index / params.attention.splits;
    let split = params.attention.first_split + index % params.attention.splits;
    return (query_row * params.attention.all_splits + split) * (1u + VALUE_FOURS);
}

// Largest logit and sum of what another store of the same query has left there; zeros where none may have.
fn partial_before(index: u32) -> vec2<f32> {
    let before = partials[min(partial_base(index), arrayLength(&partials) - 1u)].xy;
    return select(vec2<f32>(), before, params.attention.adds == 1u);
}

// Both parts become one.
fn store_partial(index: u32, lane: u32, largest: f32, sum: f32, before: vec2<f32>) {
    let base = partial_base(index);
    let past_end = base + VALUE_FOURS >= arrayLength(&partials);
    if (index / params.attention.splits >= params.attention.rows || past_end) {
        return;
    }
    let joined = select(largest, max(largest, before.x), before.y > 0.0);
    let weight = exp(clamp(largest - joined, -200.0, 0.0));
    let weight_before = select(0.0, exp(clamp(before.x - joined, -200.0, 0.0)), before.y > 0.0);
    if (lane < VALUE_FOURS) {
        var total = vec4<f32>();
        for (var i = 0u; i < VALUE_GROUPS; i++) {
            total += gathered[i * VALUE_LANES + lane];
        }
        if (before.y > 0.0) {
            total = weight * total + weight_before * partials[base + 1u + lane];
        } else {
            total *= weight;
        }
        partials[base + 1u + lane] = total;
    }
    if (lane == 0u) {
        partials[base] = vec4<f32>(joined, weight * sum + weight_before * before.y, 0.0, 0.0);
    }
}

fn flash_attend(index: u32, lane: u32) {
    let row = min(index / params.attention.splits, params.attention.rows - 1u);
    let query_row = params.attention.first_row + row;
    let head = query_row / params.attention.queries;
    let query_heads = params.attention.query_heads;
    let batch = head / query_heads;
    let kv_head = (row / params.attention.queries / query_heads) * params.attention.kv_heads + (head % query_heads) / params.attention.group;
    let seen = visible_here(spans[batch], query_row % params.attention.queries);
    let first = (index % params.attention.splits) * params.attention.split;
    let last = min(seen.y, first + params.attention.split);
    let sees = query_is_finite(query_row);
    let four = lane % VALUE_LANES;

    load_query(query_row, lane);
    var largest = LOWEST;
    var sum = 0.0;
    var acc = vec4<f32>();
    // Whole tiles before the window see nothing and are left out.
    let skipped = (max(seen.x, first) - first) / WORKGROUP * WORKGROUP;
    for (var tile = first + skipped; tile < last; tile += WORKGROUP) {
        workgroupBarrier();
        let token = min(tile + lane, params.attention.tokens - 1u);
        let score = tile_score(query_row, kv_head, tile, token, lane);
        var x = LOWEST;
        if (sees && tile + lane >= seen.x && tile + lane < last && !is_masked(kv_head, token)) {
            x = logit(score);
        }
        let new_largest = max(largest, row_max(vec4<f32>(x), lane).x);
        // The floor keeps the difference of the two extremes from leaving f32.
        let rescale = exp(max(largest - new_largest, -200.0));
        largest = new_largest;
        let p = select(0.0, exp(max(x - largest, -200.0)), x > LOWEST);
        sum = sum * rescale + p;
        weights[lane] = select(0.0, p * value_scale(kv_head, token), x > LOWEST);
        workgroupBarrier();
        acc *= rescale;
        for (var i = lane / VALUE_LANES; i < WORKGROUP; i += VALUE_GROUPS) {
            if (tile + i < last && four < VALUE_FOURS && weights[i] != 0.0) {
                acc += weights[i] * four_values(kv_head, tile + i, four);
            }
        }
    }
    sum = row_sum(vec4<f32>(sum), lane).x;
    gathered[lane] = acc;
    let before = partial_before(index);
    storageBarrier();
    workgroupBarrier();
    store_partial(index, lane, largest, sum, before);
}
