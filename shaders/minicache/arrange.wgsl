// Lays the pages out by a prefix sum: which stay raw, and where each one's slots and side rows begin. One workgroup walks all
// pages in order, so that the layout is the same on every machine. Twin: minicache::cpu::arrange.

struct Params {
    pages: u32,
    pages_per_head: u32,
    // Rows of a head's last page, and the most raw rows that a full and a last page may hold and still be folded.
    last_rows: u32,
    full_limit: u32,
    last_limit: u32,
}

@group(0) @binding(0) var<uniform> params: Params;
@group(0) @binding(1) var<storage, read> bitmaps: array<u32>;
// Three words a page: first slot (or RAW), first side row, retained bits.
@group(0) @binding(2) var<storage, read_write> pages: array<u32>;
@group(0) @binding(3) var<storage, read_write> totals: array<u32>;

const RAW: u32 = 0xffffffffu;

// Slots, side rows and raw pages.
var<workgroup> sums: array<vec3<u32>, WORKGROUP>;

fn needs(page: u32) -> vec3<u32> {
    if (page >= params.pages) {
        return vec3<u32>();
    }
    let is_last = page % params.pages_per_head == params.pages_per_head - 1u;
    let rows = select(PAGE, params.last_rows, is_last);
    let retained = countOneBits(bitmaps[page]);
    if (MODE == COMPAT) {
        return vec3<u32>((rows + 1u) & ~1u, rows, 0u);
    }
    if (retained > select(params.full_limit, params.last_limit, is_last)) {
        return vec3<u32>(0u, LAYERS * rows, 1u);
    }
    return vec3<u32>((rows + 1u) & ~1u, retained * SIDE_PER_RETAINED, 0u);
}

@compute @workgroup_size(WORKGROUP)
fn arrange(place: Place, id: Invocation) {
    var before = vec3<u32>();
    for (var first = 0u; first < params.pages; first += WORKGROUP) {
        let page = first + id.local_index;
        let need = needs(page);
        sums[id.local_index] = need;
        workgroupBarrier();
        for (var offset = 1u; offset < WORKGROUP; offset <<= 1u) {
            var sum = sums[id.local_index];
            if (id.local_index >= offset) {
                sum += sums[id.local_index - offset];
            }
            workgroupBarrier();
            sums[id.local_index] = sum;
            workgroupBarrier();
        }
        if (page < params.pages) {
            let start = before + sums[id.local_index] - need;
            let is_raw = need.z == 1u;
            pages[3u * page] = select(start.x, RAW, is_raw);
            pages[3u * page + 1u] = start.y;
            pages[3u * page + 2u] = select(bitmaps[page], 0xffffffffu, is_raw);
        }
        before += sums[WORKGROUP - 1u];
        workgroupBarrier();
    }
    if (id.local_index == 0u) {
        totals[TOTALS_AT] = before.x;
        totals[TOTALS_AT + 1u] = before.y;
        totals[TOTALS_AT + 2u] = before.z;
    }
}
