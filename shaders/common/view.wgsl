// A host's tensor that a kernel reads row by row.

struct View {
    rows: u32,
    tokens: u32,
    heads: u32,
    // Offset of the first element, then batch, head and token strides.
    place: vec4<u32>,
}

// Element index of the first channel of a token, `head` counted over all sequences.
fn view_token(view: View, head: u32, token: u32) -> u32 {
    return view.place.x + (head / view.heads) * view.place.y + (head % view.heads) * view.place.z + token * view.place.w;
}

fn view_row(view: View, row: u32) -> u32 {
    return view_token(view, row / view.tokens, row % view.tokens);
}
