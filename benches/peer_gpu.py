"""What others take on a GPU for the work of `cargo bench --bench gpu`, beside which it is run.

    python3 benches/peer_gpu.py

It wants PyTorch with CUDA. Microseconds of one call, medians of eleven times fifty calls between two events, over rotating inputs
that together exceed a last-level cache: exact attention by `scaled_dot_product_attention`, one query token of 32 heads over 8 KV
heads of 128 channels in f16; and MiniCache's merge of two layers' tensors by MiniCache (Liu et al., 2024), section 3.3, written in
PyTorch's own operations, as they are and compiled.
"""

import statistics

import torch
import torch.nn.functional as functional

ROTATING_BYTES = 256 << 20


def microseconds(call):
    for turn in range(30):
        call(turn)
    torch.cuda.synchronize()
    times = []
    for _ in range(11):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for turn in range(50):
            call(turn)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 20)
    return statistics.median(times)


def rows(tokens):
    return torch.randn(1, 8, tokens, 128, device="cuda", dtype=torch.float16)


def attention(tokens):
    sets = max(2, ROTATING_BYTES // (4096 * tokens))
    query = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.float16)
    pairs = [(rows(tokens), rows(tokens)) for _ in range(sets)]
    return microseconds(
        lambda turn: functional.scaled_dot_product_attention(query, *pairs[turn % sets], enable_gqa=True)
    )


def merge(lower, upper, t=0.5):
    """The shared direction of two layers' rows, and their magnitudes."""
    lower, upper = lower.float(), upper.float()
    norms = lower.norm(dim=-1, keepdim=True), upper.norm(dim=-1, keepdim=True)
    units = lower / norms[0], upper / norms[1]
    angle = (units[0] * units[1]).sum(-1, keepdim=True).clamp(-1, 1).arccos()
    shared = torch.sin((1 - t) * angle) * units[0] + torch.sin(t * angle) * units[1]
    return (shared / torch.sin(angle)).half(), norms[0].half(), norms[1].half()


def main():
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__)
    for tokens in (1024, 4096, 16_384, 65_536, 131_072):
        print(f"attend exact f16 n={tokens}: {attention(tokens):.1f} us")
    pairs = [(rows(65_536), rows(65_536)) for _ in range(2)]
    for name, form in (("eager", merge), ("compiled", torch.compile(merge))):
        print(f"merge n=65536, {name}: {microseconds(lambda turn: form(*pairs[turn % 2])):.1f} us")


if __name__ == "__main__":
    main()
