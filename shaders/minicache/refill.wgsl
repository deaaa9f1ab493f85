// Fills a folded pair's store anew with other slots, directions in codes or taken back from them; the pages and the side stay as
// they are. Where codes come in, each magnitude takes its code's scalar. One invocation a word. Twin: minicache::cpu::refill.

struct Params {
    old: Sections,
    fresh: Sections,
    words: u32,
    // Where the codes' scalars begin, two f16 a word.
    scales_at: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> old_store: array<u32>;
@group(0) @binding(2) var<storage, read> slots: array<u32>;
@group(0) @binding(3) var<storage, read_write> store: array<u32>;

fn half_of(word: u32, index: u32) -> f32 {
    let both = unpack2x16float(word);
    return select(both.x, both.y, (index & 1u) == 1u);
}

fn scaled(magnitude: f32, index: u32) -> f32 {
    let slot = index / LAYERS;
    return magnitude * (half_of(slots[params.scales_at + slot / 2u], slot) / LEVEL_UNIT);
}

fn magnitudes(word: u32) -> u32 {
    let found = old_store[params.old.magnitudes + word];
    if (!CODES) {
        return found;
    }
    let both = unpack2x16float(found);
    let product = vec2<f32>(scaled(both.x, 2u * word), scaled(both.y, 2u * word + 1u));
    return pack2x16float(clamp(product, vec2<f32>(), vec2<f32>(65504.0)));
}

fn filled(word: u32) -> u32 {
    if (word < params.fresh.slots) {
        return old_store[word];
    }
    if (word < params.fresh.magnitudes) {
        return slots[word - params.fresh.slots];
    }
    if (word < params.fresh.side) {
        return magnitudes(word - params.fresh.magnitudes);
    }
    return old_store[params.old.side + word - params.fresh.side];
}

@compute @workgroup_size(WORKGROUP)
fn refill(place: Place, id: Invocation) {
    let word = linear_workgroup(place) * WORKGROUP + id.local_index;
    if (word < min(params.words, arrayLength(&store))) {
        store[word] = filled(word);
    }
}
