// Eight neighbouring channels of a row that starts at a whole vec4.

// As they came; `high` is used by 32-bit types only.
struct Channels {
    low: vec4<u32>,
    high: vec4<u32>,
}

// vec4s of eight channels in the input's type, and where the last of them stands after the first.
const VECTORS_AN_EIGHT: u32 = 3u - ELEMENTS;
const LAST: u32 = VECTORS_AN_EIGHT - 1u;

const UNITS: u32 = HEAD_DIM / 8u;

fn low_numbers(channels: Channels) -> vec4<f32> {
    if (ELEMENTS == 1u) {
        return bitcast<vec4<f32>>(channels.low);
    }
    return vec4<f32>(unpack_pair(channels.low.x, 0u), unpack_pair(channels.low.y, 0u));
}

fn high_numbers(channels: Channels) -> vec4<f32> {
    if (ELEMENTS == 1u) {
        return bitcast<vec4<f32>>(channels.high);
    }
    return vec4<f32>(unpack_pair(channels.low.z, 0u), unpack_pair(channels.low.w, 0u));
}
