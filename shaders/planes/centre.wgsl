// What kernels that code rows are given, and the means of keys, or nothing. The kernel declares `input`, the rows, as it reads them.

struct Params {
    view: View,
    // Heads of all sets of tables that a sequence skips to reach its own: 0 where all share one.
    set_heads: u32,
    // Where the fine rows follow the coarse ones among the angles, and the scalars and means the codes or signs of the rows.
    fine_at: u32,
    scales_at: u32,
    means_at: u32,
    // Tokens of a block mean.
    block: u32,
    // The position of the first token, where those of the others follow it.
    position: u32,
    consecutive: u32,
    // Where rows go to tiles at once: the token of the store that the first becomes, and tiles of a head of the store.
    first: u32,
    store_tiles: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(2) var<storage, read> channels: array<Channel>;
@group(0) @binding(4) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> positions: array<u32>;
@group(0) @binding(6) var<storage, read_write> coded: array<u32>;
@group(0) @binding(7) var<storage, read_write> status: array<atomic<u32>, 3>;

fn turn_at(index: u32) -> vec2<f32> {
    return angles[index];
}

// Where the channels of a head of the view begin.
fn table_of(head: u32) -> u32 {
    return ((head / params.view.heads) * params.set_heads + head % params.view.heads) * HEAD_DIM;
}

// The mean of a channel at a token.
fn mean_at(head: u32, token: u32, at: Channel) -> f32 {
    if (CENTRING == PRE_ROPE) {
        var position = params.position + token;
        if (params.consecutive == 0u) {
            position = positions[(head / params.view.heads) * params.view.tokens + token];
        }
        let turn = angle(position, at.pair);
        return at.mean * turn.x + at.turned * turn.y;
    }
    if (CENTRING == BLOCK_MEAN) {
        let blocks = (params.view.tokens + params.block - 1u) / params.block;
        let row = (head * blocks + token / params.block) * MEAN_WORDS;
        let both = unpack2x16float(coded[params.means_at + row + at.channel / 2u]);
        return select(both.x, both.y, (at.channel & 1u) == 1u);
    }
    return 0.0;
}
