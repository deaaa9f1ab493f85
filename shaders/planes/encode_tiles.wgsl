// Codes keys or values as encode.wgsl does, and puts them where attention reads them (quads.wgsl), in one pass: for rows of one
// segment of 32, 64, 128 or 256 channels, turned by Walsh-Hadamard. A workgroup a tile of the store, LANES lanes for each of its 32
// tokens. A negative number at the very edge of a step goes to the next code outward, not inward: rows whose squares leave f32, whose
// step is none, are all such edges. Twin: qjl::planes::cpu::encode.

@group(0) @binding(1) var<storage, read> input: array<vec4<u32>>;

const WORDS: u32 = 8u * LANES + 1u;
const CODES: u32 = select(32u * WORDS, 1u, IS_KEYS);
// Codes from this one on stand for positive numbers, and all bits of a code.
const MIDDLE: u32 = 1u << (FIRST_PLANES - 1u);
const ALL: u32 = (1u << FIRST_PLANES) - 1u;
// Bits of a number from MIDDLE to 2 MIDDLE that are its fraction.
const FRACTION: u32 = 24u - FIRST_PLANES;

var<workgroup> scalars: array<u32, 32>;
// Codes of values, four a word, a token in a row of words; an odd number keeps eight tokens out of each other's banks.
var<workgroup> codes: array<u32, CODES>;

// The token of this lane, and its row.
struct Token {
    head: u32,
    // Counted from the first row of the call.
    token: u32,
    inside: bool,
}

fn token_at(head: u32, tile: u32, t: u32) -> Token {
    let token = 32u * tile + t;
    let last = params.first + params.view.tokens - 1u;
    return Token(head, clamp(token, params.first, last) - params.first, token == clamp(token, params.first, last));
}

fn raw_eight(at: u32) -> Eight {
    if (word_index(1u) == 1u) {
        return finite_words(input[at / 4u], input[at / 4u + 1u]);
    }
    return finite_halves(input[at / 8u]);
}

// The means of four channels.
fn means_at(here: Token, first: u32) -> vec4<f32> {
    if (CENTRING == UNCENTRED) {
        return vec4<f32>();
    }
    let at = table_of(here.head) + first;
    return vec4<f32>(mean_at(here.head, here.token, channels[at]), mean_at(here.head, here.token, channels[at + 1u]),
                     mean_at(here.head, here.token, channels[at + 2u]), mean_at(here.head, here.token, channels[at + 3u]));
}

// A lane's channels, centred, and in bits what they are: 1 where one is not finite, 2 where one is not 0.
struct Part {
    numbers: Channels,
    flags: u32,
}

fn load_part(here: Token, first: u32) -> Part {
    let at = view_token(params.view, here.head, here.token) + first;
    let ab = raw_eight(at);
    let cd = raw_eight(at + 8u);
    let ef = raw_eight(at + 16u);
    let gh = raw_eight(at + 24u);
    let x = Channels(ab.low - means_at(here, first), ab.high - means_at(here, first + 4u),
                     cd.low - means_at(here, first + 8u), cd.high - means_at(here, first + 12u),
                     ef.low - means_at(here, first + 16u), ef.high - means_at(here, first + 20u),
                     gh.low - means_at(here, first + 24u), gh.high - means_at(here, first + 28u));
    let bits = (bitcast<vec4<u32>>(x.a) | bitcast<vec4<u32>>(x.b) | bitcast<vec4<u32>>(x.c) | bitcast<vec4<u32>>(x.d)) |
               (bitcast<vec4<u32>>(x.e) | bitcast<vec4<u32>>(x.f) | bitcast<vec4<u32>>(x.g) | bitcast<vec4<u32>>(x.h));
    // A zero may have a sign.
    let nonzero = ((bits.x | bits.y | bits.z | bits.w) << 1u) != 0u;
    let finite = both(both(ab.finite, cd.finite), both(ef.finite, gh.finite));
    return Part(x, select(1u, 0u, finite) | select(0u, 2u, nonzero));
}

// Magnitudes in steps, from MIDDLE on, so that the whole steps are the same bits in all of them: codes without a conversion.
fn steps_of(y: vec4<f32>, inverse_step: f32) -> vec4<u32> {
    return bitcast<vec4<u32>>(min(fma(abs(y), vec4<f32>(inverse_step), vec4<f32>(f32(MIDDLE))),
                                  vec4<f32>(f32(2u * MIDDLE) - 0.5)));
}

// Half the magnitudes of the levels of four numbers: whole steps and a half. By floor: an H200 takes
// longer for the bits of steps_of.
fn levels_of(y: vec4<f32>, inverse_step: f32) -> vec4<f32> {
    return min(floor(abs(y) * inverse_step) + 0.5, vec4<f32>(f32(MIDDLE) - 0.5));
}

// |y| . L and L . L of a lane at a step, channel by channel of a four, with halves of levels.
struct Fit {
    along: vec4<f32>,
    squares: vec4<f32>,
}

fn with_four(fit: Fit, y: vec4<f32>, inverse_step: f32) -> Fit {
    let levels = levels_of(y, inverse_step);
    return Fit(fma(abs(y), levels, fit.along), fma(levels, levels, fit.squares));
}

// Both in one number each.
fn fit_of(y: Channels, inverse_step: f32) -> vec2<f32> {
    var fit = with_four(Fit(vec4<f32>(), vec4<f32>()), y.a, inverse_step);
    fit = with_four(fit, y.b, inverse_step);
    fit = with_four(fit, y.c, inverse_step);
    fit = with_four(fit, y.d, inverse_step);
    fit = with_four(fit, y.e, inverse_step);
    fit = with_four(fit, y.f, inverse_step);
    fit = with_four(fit, y.g, inverse_step);
    fit = with_four(fit, y.h, inverse_step);
    return vec2<f32>((fit.along.x + fit.along.y) + (fit.along.z + fit.along.w),
                     (fit.squares.x + fit.squares.y) + (fit.squares.z + fit.squares.w));
}

fn square_sum(y: Channels) -> f32 {
    let sums = (y.a * y.a + y.b * y.b) + (y.c * y.c + y.d * y.d) + ((y.e * y.e + y.f * y.f) + (y.g * y.g + y.h * y.h));
    return (sums.x + sums.y) + (sums.z + sums.w);
}

// How a row is coded: with one over the step, and nu.
struct Coding {
    inverse_step: f32,
    nu: f32,
}

// The step that fits a row best.
fn coding_of(y: Channels, lane: u32) -> Coding {
    let total = row_sum(vec4<f32>(square_sum(y), 0.0, 0.0, 0.0), lane).x;
    let base = 1.0 / (FIRST_DELTA * max(sqrt(total / f32(FIRST_CHANNELS)), 1e-20));
    var best = -1.0;
    // A quarter of L . L.
    var length = 0.25 * f32(FIRST_CHANNELS);
    var inverse_step = base;
    if (FIRST_PLANES > 1u) {
        for (var candidate = 0u; candidate < 5u; candidate++) {
            let step = base / (0.75 + 0.125 * f32(candidate));
            let sums = row_sum(vec4<f32>(fit_of(y, step), 0.0, 0.0), lane).xy;
            let score = sums.x * sums.x / sums.y;
            let better = score > best;
            best = select(best, score, better);
            length = select(length, sums.y, better);
            inverse_step = select(inverse_step, step, better);
        }
    }
    return Coding(inverse_step, sqrt(total) / sqrt(4.0 * length));
}

// Four codes, one a byte.
fn quad_of(y: vec4<f32>, inverse_step: f32) -> u32 {
    let positive = ((steps_of(y, inverse_step) >> vec4<u32>(FRACTION)) | vec4<u32>(MIDDLE)) & vec4<u32>(ALL);
    let codes = positive ^ select(vec4<u32>(), vec4<u32>(ALL), y < vec4<f32>());
    return (codes.x | (codes.y << 8u)) | ((codes.z << 16u) | (codes.w << 24u));
}

fn quads_of(y: Channels, inverse_step: f32) -> Quads {
    return Quads(vec4<u32>(quad_of(y.a, inverse_step), quad_of(y.b, inverse_step), quad_of(y.c, inverse_step),
                           quad_of(y.d, inverse_step)),
                 vec4<u32>(quad_of(y.e, inverse_step), quad_of(y.f, inverse_step), quad_of(y.g, inverse_step),
                           quad_of(y.h, inverse_step)));
}

// What a word holds of other rows stays.
fn put(at: u32, bits: u32, mask: u32) {
    if (mask == 0xffffffffu && at < arrayLength(&coded)) {
        coded[at] = bits;
    } else if (mask != 0u && at < arrayLength(&coded)) {
        coded[at] = (coded[at] & ~mask) | (bits & mask);
    }
}

// A group of keys is 32 channels of one token.
fn put_keys(tile: u32, quads: Quads, inside: bool, lane: u32) {
    for (var word = 0u; word < FIRST_PLANES; word++) {
        let row = tile * FIRST_GROUPS * FIRST_PLANES + (lane % LANES) * FIRST_PLANES + word;
        put(32u * row + lane / LANES, group_word(quads, word, FIRST_PLANES), select(0u, 0xffffffffu, inside));
    }
}

// Bytes of the tokens 4 k to 4 k + 3 of a channel.
fn token_quad(channel: u32, k: u32) -> u32 {
    let at = 4u * k * WORDS + channel / 4u;
    let four = vec4<u32>(codes[at], codes[at + WORDS], codes[at + 2u * WORDS], codes[at + 3u * WORDS]);
    let bytes = (four >> vec4<u32>(8u * (channel & 3u))) & vec4<u32>(0xffu);
    return (bytes.x | (bytes.y << 8u)) | ((bytes.z << 16u) | (bytes.w << 24u));
}

// All bits of those of the tokens that are rows of the call.
fn token_mask(first: u32) -> u32 {
    let tokens = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
    let inside = (tokens >= vec4<u32>(params.first)) & (tokens < vec4<u32>(params.first + params.view.tokens));
    let bytes = select(vec4<u32>(), vec4<u32>(0xffu, 0xff00u, 0xff0000u, 0xff000000u), inside);
    return (bytes.x | bytes.y) | (bytes.z | bytes.w);
}

// A group of values is 32 tokens of one channel: codes change lanes through workgroup memory.
fn put_values(tile: u32, first_token: u32, quads: Quads, lane: u32) {
    let at = (lane / LANES) * WORDS + 8u * (lane % LANES);
    codes[at] = quads.low.x;
    codes[at + 1u] = quads.low.y;
    codes[at + 2u] = quads.low.z;
    codes[at + 3u] = quads.low.w;
    codes[at + 4u] = quads.high.x;
    codes[at + 5u] = quads.high.y;
    codes[at + 6u] = quads.high.z;
    codes[at + 7u] = quads.high.w;
    workgroupBarrier();
    let masks = Quads(vec4<u32>(token_mask(first_token), token_mask(first_token + 4u), token_mask(first_token + 8u),
                                token_mask(first_token + 12u)),
                      vec4<u32>(token_mask(first_token + 16u), token_mask(first_token + 20u), token_mask(first_token + 24u),
                                token_mask(first_token + 28u)));
    for (var channel = lane; channel < HEAD_DIM; channel += WORKGROUP) {
        let group = Quads(vec4<u32>(token_quad(channel, 0u), token_quad(channel, 1u), token_quad(channel, 2u),
                                    token_quad(channel, 3u)),
                          vec4<u32>(token_quad(channel, 4u), token_quad(channel, 5u), token_quad(channel, 6u),
                                    token_quad(channel, 7u)));
        for (var word = 0u; word < FIRST_PLANES; word++) {
            put((tile * FIRST_PLANES + word) * HEAD_DIM + channel, group_word(group, word, FIRST_PLANES),
                group_word(masks, word, FIRST_PLANES));
        }
    }
}

// The scalars of a tile, two tokens a word.
fn put_scalars(tile: u32, first_token: u32, lane: u32) {
    for (var word = lane; word < 16u; word += WORKGROUP) {
        let two = token_mask(first_token + 2u * word);
        let mask = select(0u, 0xffffu, (two & 0xffu) != 0u) | select(0u, 0xffff0000u, (two & 0xff00u) != 0u);
        put(params.scales_at + 16u * tile + word, scalars[2u * word] | (scalars[2u * word + 1u] << 16u), mask);
    }
}

@compute @workgroup_size(WORKGROUP)
fn encode_tiles(place: Place, id: Invocation) {
    let lane = lane_of(id);
    // Tiles of a head that the rows touch; the few workgroups too many put what the last does, and count nothing.
    let first_tile = params.first / 32u;
    let tiles = (params.first + params.view.tokens + 31u) / 32u - first_tile;
    let heads = params.view.rows / params.view.tokens;
    let unit = min(linear_workgroup(place), heads * tiles - 1u);
    let is_own = unit == linear_workgroup(place);
    let head = unit / tiles;
    let tile = first_tile + unit % tiles;
    let here = token_at(head, tile, lane / LANES);
    load_weights(table_of(head), lane);
    let part = load_part(here, 32u * (lane % LANES));
    let all = row_or(part.flags, lane);
    let finite = (all & 1u) == 0u;
    let turned = rotate_row(part.numbers, lane);
    let coding = coding_of(turned, lane);
    let found = quads_of(turned, coding.inverse_step);
    let quads = Quads(select(vec4<u32>(), found.low, finite), select(vec4<u32>(), found.high, finite));
    let nu = nu_bits(coding.nu, finite);
    if (lane % LANES == 0u) {
        scalars[lane / LANES] = nu;
        if (is_own && here.inside) {
            count_row(finite, all == 0u, vec2<f32>(coding.nu, 0.0));
        }
    }
    workgroupBarrier();
    let store_tile = head * params.store_tiles + tile;
    if (IS_KEYS) {
        put_keys(store_tile, quads, here.inside, lane);
    } else {
        put_values(store_tile, 32u * tile, quads, lane);
    }
    put_scalars(store_tile, 32u * tile, lane);
}
