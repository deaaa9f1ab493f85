// Tables of one sequence from its first keys and the energy of their queries: mean, balance, and the order in which channels
// matter. One workgroup a KV head. Twin: Tables::calibrate, in f64.

struct Params {
    view: View,
    fine_at: u32,
    // The position of the first token, where those of the others follow it.
    position: u32,
    consecutive: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> input: array<u32>;
@group(0) @binding(2) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(3) var<storage, read> positions: array<u32>;
// Of each KV head: the sums of squares of every channel of its queries, and how many queries they are of.
@group(0) @binding(4) var<storage, read> energies: array<f32>;
@group(0) @binding(5) var<storage, read_write> channels: array<Channel>;

// Added to every channel's energy, as a share of the head's mean.
const FLOOR: f32 = 1e-4;
// Energies are kept below this, so that no sum of them leaves f32.
const MOST: f32 = 1e35;
const TURNING: u32 = ROTARY / 2u;
// What is ordered as one: RoPE pairs, then the channels that do not turn.
const UNITS: u32 = HEAD_DIM - TURNING;

var<workgroup> seen: array<u32, TOKENS>;
var<workgroup> means: array<f32, HEAD_DIM>;
var<workgroup> key_energy: array<f32, HEAD_DIM>;
var<workgroup> query_energy: array<f32, HEAD_DIM>;
var<workgroup> weight: array<f32, UNITS>;

fn turn_at(index: u32) -> vec2<f32> {
    return angles[index];
}

fn number(head: u32, token: u32, channel: u32) -> f32 {
    let at = view_token(params.view, head, token) + channel;
    return element(input[word_index(at)], at);
}

fn pair_of(channel: u32) -> u32 {
    return select(channel % max(TURNING, 1u), channel / 2u, INTERLEAVED);
}

fn is_first(channel: u32) -> bool {
    return select(channel < TURNING, (channel & 1u) == 0u, INTERLEAVED);
}

fn partner(channel: u32) -> u32 {
    if (channel >= ROTARY) {
        return channel;
    }
    return select(select(channel - TURNING, channel + TURNING, channel < TURNING), channel ^ 1u, INTERLEAVED);
}

// A key's number before RoPE, where means are taken there.
fn unturned(head: u32, token: u32, channel: u32) -> f32 {
    let x = number(head, token, channel);
    if (!TURNS || channel >= ROTARY) {
        return x;
    }
    var position = params.position + token;
    if (params.consecutive == 0u) {
        position = positions[token];
    }
    let turn = angle(position, pair_of(channel));
    let y = number(head, token, partner(channel));
    return x * turn.x + select(-y, y, is_first(channel)) * turn.y;
}

// Rows that hold a number that is not finite are left out.
fn find_rows(head: u32, lane: u32) {
    for (var token = lane; token < TOKENS; token += WORKGROUP) {
        var finite = token < params.view.tokens;
        for (var i = 0u; i < HEAD_DIM; i++) {
            let at = view_token(params.view, head, min(token, params.view.tokens - 1u)) + i;
            finite = finite && element_is_finite(input[word_index(at)], at);
        }
        seen[token] = u32(finite);
    }
    workgroupBarrier();
}

fn key_moments(head: u32, channel: u32) -> vec2<f32> {
    var count = 0.0;
    var sum = 0.0;
    for (var token = 0u; token < params.view.tokens; token++) {
        if (seen[token] == 1u) {
            count += 1.0;
            sum += unturned(head, token, channel);
        }
    }
    let mean = select(sum / max(count, 1.0), 0.0, CENTRING == UNCENTRED);
    var squares = 0.0;
    for (var token = 0u; token < params.view.tokens; token++) {
        if (seen[token] == 1u) {
            let distance = unturned(head, token, channel) - mean;
            squares += distance * distance;
        }
    }
    return vec2<f32>(mean, min(squares / max(count, 1.0), MOST));
}

// An energy averaged over its RoPE pair, with a share of the head's mean; 1 for all where a head has none.
fn level(energy: f32, of_partner: f32, lane_sum: f32) -> f32 {
    let mean = lane_sum / f32(HEAD_DIM);
    return select(1.0, 0.5 * (energy + of_partner) + FLOOR * mean, mean > 0.0);
}

fn weight_of(unit: u32) -> f32 {
    let channel = select(ROTARY + unit - TURNING, select(unit, 2u * unit, INTERLEAVED), unit < TURNING);
    return key_energy[channel] * query_energy[channel];
}

// The f16 next to a number, by its bits: a driver may take what is packed and unpacked again for the number itself, and then a
// saved mean would not be the one that keys were coded with.
fn kept_as_half(number: f32) -> f32 {
    let x = clamp(number, -65504.0, 65504.0);
    if (abs(x) < 6.1035156e-5) {
        return round(x * 16777216.0) / 16777216.0;
    }
    let bits = bitcast<u32>(x);
    return bitcast<f32>((bits + 0xfffu + ((bits >> 13u) & 1u)) & 0xffffe000u);
}

// Where a channel stands among those of falling weight, ties in their own order.
fn place_of(channel: u32) -> u32 {
    let turns = channel < ROTARY;
    let unit = select(TURNING + channel - ROTARY, pair_of(channel), turns);
    var place = select(0u, 1u, turns && !is_first(channel));
    let own = weight[unit];
    for (var other = 0u; other < UNITS; other++) {
        let ahead = weight[other] > own || (weight[other] == own && other < unit);
        place += select(0u, select(1u, 2u, other < TURNING), ahead);
    }
    return place;
}

@compute @workgroup_size(WORKGROUP)
fn calibrate(place: Place, id: Invocation) {
    let lane = lane_of(id);
    let head = min(linear_workgroup(place), params.view.heads - 1u);
    find_rows(head, lane);
    let queries = energies[head * (HEAD_DIM + 1u) + HEAD_DIM];
    var sums = vec4<f32>();
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        let moments = key_moments(head, i);
        means[i] = moments.x;
        key_energy[i] = moments.y;
        query_energy[i] = min(energies[head * (HEAD_DIM + 1u) + i] / max(queries, 1.0), MOST);
        sums += vec4<f32>(key_energy[i], query_energy[i], 0.0, 0.0);
    }
    sums = row_sum(sums, lane);
    workgroupBarrier();
    // Both of a pair are levelled by its first, so that neither reads what the other has written.
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        if (i >= ROTARY || is_first(i)) {
            let key = level(key_energy[i], key_energy[partner(i)], sums.x);
            let query = level(query_energy[i], query_energy[partner(i)], sums.y);
            key_energy[i] = key;
            key_energy[partner(i)] = key;
            query_energy[i] = query;
            query_energy[partner(i)] = query;
        }
    }
    workgroupBarrier();
    var logs = 0.0;
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        logs += log(key_energy[i]) - log(query_energy[i]);
    }
    let centre = row_sum(vec4<f32>(logs), lane).x / f32(HEAD_DIM);
    for (var unit = lane; unit < UNITS; unit += WORKGROUP) {
        weight[unit] = weight_of(unit);
    }
    workgroupBarrier();
    for (var i = lane; i < HEAD_DIM; i += WORKGROUP) {
        // Without queries all channels weigh alike.
        let log_ratio = log(key_energy[i]) - log(query_energy[i]) - centre;
        let sigma = select(1.0, clamp(exp(EXPONENT * log_ratio), 0.0625, 16.0), queries > 0.0);
        var at = Channel(i, PAIRS - 1u, 0.0, 0.0, sigma);
        if (CENTRING == PRE_ROPE) {
            let kept = vec2<f32>(kept_as_half(means[i]), kept_as_half(means[partner(i)]));
            at.mean = kept.x;
            if (TURNS && i < ROTARY) {
                at.pair = pair_of(i);
                at.turned = select(kept.y, -kept.y, is_first(i));
            }
        }
        let stored = head * HEAD_DIM + select(i, place_of(i), SPLIT);
        if (stored < arrayLength(&channels)) {
            channels[stored] = at;
        }
    }
}
