"""How long the Python original, VeloxQuant-MLX, takes for what benches/cpu.rs times, on one core of this machine:

    python3 -m venv peer && peer/bin/pip install "mlx[cpu]" VeloxQuant-MLX
    taskset -c 0 peer/bin/python benches/peer.py
    taskset -c 0 cargo bench --bench cpu

Prints the median, the least and the most of seven runs in milliseconds.
"""

import statistics
import time
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
from veloxquant_mlx.cache.qjl_cache import QJLKVCache
from veloxquant_mlx.quantizers.minicache import merge_pair, reconstruct_layer

TOKENS, DIM = 16_384, 128


def normal(*shape):
    return mx.array(np.random.default_rng(1).standard_normal(shape).astype(np.float16))


def timed(name, call, runs=7):
    call()
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        took.append(1e3 * (time.perf_counter() - start))
    print(f"{name}: {statistics.median(took):.1f} ms ({min(took):.1f} to {max(took):.1f})", flush=True)


def fold():
    lower, upper = normal(1, 8, 4096, DIM), normal(1, 8, 4096, DIM)

    def call():
        merged = merge_pair(lower, upper, retention_threshold=-1.0, t=0.5)
        mx.eval(reconstruct_layer(merged, "merge"), merged.retained)

    timed("minicache [1, 8, 4096, 128]: merge and restore one layer", call)


def attend():
    cache = QJLKVCache(SimpleNamespace(head_dim=DIM, jl_dim=DIM, seed=42, store=None, capacity=TOKENS))
    for row in normal(TOKENS, DIM):
        cache.append_key(row)
        cache.append_value(row)
    query = normal(DIM)
    timed(f"qjl: attend one head, n = {TOKENS}, m = {DIM}", lambda: mx.eval(cache.attend(query)))


mx.set_default_device(mx.cpu)
fold()
attend()
