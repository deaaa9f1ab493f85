// The means of keys that are coded, or nothing. The kernel's parameters say where positions, angles and block means are.

@group(0) @binding(2) var<storage, read> channels: array<Channel>;
@group(0) @binding(4) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(5) var<storage, read> positions: array<u32>;
@group(0) @binding(6) var<storage, read_write> coded: array<u32>;

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
