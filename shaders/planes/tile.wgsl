// Moves rows that `encode` has coded, each row's bits one after the other, to the groups of 32 that attention reads (quads.wgsl):
// of keys 32 channels of one token, of values 32 tokens of one channel. One invocation a word; where rows fill a part of a word, the
// rest of it stays. Host: qjl::planes::gpu::tiles.

struct Params {
    heads: u32,
    // Rows of a head; where the scalars and means stand behind the codes of the rows.
    tokens: u32,
    from_scales_at: u32,
    from_means_at: u32,
    // The token of the store that the first row becomes, tiles of a head of the store, and its scalars and means.
    first: u32,
    store_tiles: u32,
    scales_at: u32,
    means_at: u32,
    // Block means of a head of the rows, the block of the store that the first becomes, and blocks of a head of the store.
    blocks: u32,
    first_block: u32,
    store_blocks: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> rows: array<u32>;
@group(0) @binding(2) var<storage, read_write> store: array<u32>;

// Words of a row, and in how many columns of words a tile stands: of keys one for each token, of values one for each channel, in
// whole fours.
const ROW_WORDS: u32 = FIRST_WORDS + SECOND_WORDS;
const COLUMNS: u32 = select((HEAD_DIM + 3u) / 4u * 4u, 32u, IS_KEYS);
const TILE_ROWS: u32 = FIRST_GROUPS * FIRST_PLANES + SECOND_GROUPS * SECOND_PLANES;

// Code `i` of a segment of a row.
fn code(row: u32, word_base: u32, i: u32, planes: u32) -> u32 {
    let bit = i * planes;
    let at = row * ROW_WORDS + word_base + bit / 32u;
    var code = rows[at] >> (bit % 32u);
    if (bit % 32u + planes > 32u) {
        code |= rows[at + 1u] << (32u - bit % 32u);
    }
    return code & ((1u << planes) - 1u);
}

// Where a word of a group of codes of `planes` bits has its fields: their width, the first bit of a code that they hold, and the
// codes of which a word holds them.
struct Field {
    width: u32,
    low: u32,
    first: u32,
    codes: u32,
}

fn field(word: u32, planes: u32) -> Field {
    if (planes == 8u) {
        return Field(8u, 0u, 4u * word, 4u);
    }
    if (planes >= 4u && word < 4u) {
        return Field(4u, 0u, 8u * word, 8u);
    }
    if (planes < 4u && word < (planes / 2u) * 2u) {
        return Field(2u, 0u, 16u * word, 16u);
    }
    return Field(1u, planes - 1u, 0u, 32u);
}

// The bit of a word at which a field has code `i` of its group.
fn field_bit(field: Field, i: u32) -> u32 {
    let in_byte = 4u * ((i >> 2u) & 1u) + field.width * ((i - field.first) >> 3u);
    return 8u * (i & 3u) + select(in_byte, 0u, field.width == 8u);
}

fn put(at: u32, bits: u32, mask: u32) {
    if (mask != 0u && at < arrayLength(&store)) {
        store[at] = (store[at] & ~mask) | bits;
    }
}

// A word of the tile in which token `tile` of the store stands: row `word` of them, column `column`.
fn put_code_word(head: u32, tile: u32, word: u32, column: u32) {
    let in_second = word >= FIRST_GROUPS * FIRST_PLANES;
    let planes = select(FIRST_PLANES, SECOND_PLANES, in_second);
    let word_in_segment = word - select(0u, FIRST_GROUPS * FIRST_PLANES, in_second);
    let channels = select(FIRST_CHANNELS, SECOND_CHANNELS, in_second);
    let base = select(0u, FIRST_WORDS, in_second);
    let at = field(word_in_segment % max(planes, 1u), planes);
    var bits = 0u;
    var mask = 0u;
    for (var i = at.first; i < at.first + at.codes; i++) {
        let token = 32u * tile + select(i, column, IS_KEYS);
        let channel = select(column, 32u * (word_in_segment / max(planes, 1u)) + i, IS_KEYS);
        let shift = field_bit(at, i);
        if (token >= params.first && token < params.first + params.tokens) {
            mask |= ((1u << at.width) - 1u) << shift;
            if (channel < channels) {
                let row = head * params.tokens + token - params.first;
                let field_bits = (code(row, base, channel, planes) >> at.low) & ((1u << at.width) - 1u);
                // Signed bytes stand 128 higher, so that attention takes all codes alike.
                bits |= (field_bits ^ select(0u, 0x80u, planes == 8u)) << shift;
            }
        }
    }
    let to = ((head * params.store_tiles + tile) * TILE_ROWS + word) * COLUMNS + column;
    put(to, bits, mask);
}

// The scalars of two tokens, or two of one.
fn put_scalars(head: u32, word: u32) {
    let two_a_token = SECOND_PLANES > 0u;
    var bits = 0u;
    var mask = 0u;
    for (var i = 0u; i < 2u; i++) {
        let token = select(2u * word + i, word, two_a_token);
        if (token >= params.first && token < params.first + params.tokens) {
            let row = head * params.tokens + token - params.first;
            let half = select(row, 2u * row + i, two_a_token);
            mask |= 0xffffu << (16u * i);
            bits |= half_at(rows[params.from_scales_at + half / 2u], half) << (16u * i);
        }
    }
    let words_a_head = params.store_tiles * select(16u, 32u, two_a_token);
    put(params.scales_at + head * words_a_head + word, bits, mask);
}

@compute @workgroup_size(WORKGROUP)
fn tile(place: Place, id: Invocation) {
    let index = linear_workgroup(place) * WORKGROUP + id.local_index;
    let first_tile = params.first / 32u;
    let tiles = (params.first + params.tokens + 31u) / 32u - first_tile;
    let words_a_tile = TILE_ROWS * COLUMNS;
    if (index < params.heads * tiles * words_a_tile) {
        let unit = index / words_a_tile;
        let word = index % words_a_tile;
        put_code_word(unit / tiles, first_tile + unit % tiles, word / COLUMNS, word % COLUMNS);
    }
    let scalars_a_tile = select(16u, 32u, SECOND_PLANES > 0u);
    if (index < params.heads * tiles * scalars_a_tile) {
        let words_a_head = tiles * scalars_a_tile;
        put_scalars(index / words_a_head, first_tile * scalars_a_tile + index % words_a_head);
    }
    let mean_words = params.blocks * MEAN_WORDS;
    if (index < params.heads * mean_words) {
        let head = index / mean_words;
        let to = (head * params.store_blocks + params.first_block) * MEAN_WORDS + index % mean_words;
        put(params.means_at + to, rows[params.from_means_at + index], 0xffffffffu);
    }
}
