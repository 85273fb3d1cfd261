# SPDX-License-Identifier: Apache-2.0
"""caps.py FRAMEWORK STOP: take GPU memory by a framework's own ways until it is refused.

With a STOP that is not 0 it takes no more than so many bytes, for a run without a cap. It
says what it does, a line each, and goes on when it gets one. Where the framework cannot be
imported it says "lacks".
"""

import sys
import time

MIB = 1 << 20
SIZES = (256 * MIB, 64 * MIB, 16 * MIB, 1 * MIB)


def tell(word, **values):
    print(word, *(f"{key}={value}" for key, value in values.items()), flush=True)
    if not sys.stdin.readline():
        sys.exit(1)


def timed(what, began):
    tell("time", what=what, ms=round((time.monotonic() - began) * 1000, 1))


class Store:
    """What was taken, by a function that takes and an error that refuses."""

    def __init__(self, take, refused, stop):
        self.take, self.refused, self.stop = take, refused, stop
        self.have, self.sizes = [], []

    def fill(self):
        for size in SIZES:
            while not self.stop or sum(self.sizes) + size <= self.stop:
                try:
                    self.have.append(self.take(size))
                except self.refused:
                    break
                self.sizes.append(size)

    def give(self, every):
        del self.have[::every], self.sizes[::every]


def torch(stop):
    import torch

    free, total = torch.cuda.mem_get_info()
    tell("sees", total=total, free=free)
    last = 2 * MIB  # what the native allocator asks for to hold a small tensor
    if torch.cuda.get_allocator_backend() == "cudaMallocAsync":
        last = 32 * MIB  # a pool grows by pieces
    store = Store(lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError, stop)
    began = time.monotonic()
    store.fill()
    torch.cuda.synchronize()
    timed("fill", began)
    tell("full", request=last)
    store.give(2)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    tell("half")
    store.fill()
    torch.cuda.synchronize()
    tell("full", request=last)

    # Work beside much memory: cuBLAS and cuDNN take workspaces of their own.
    store.give(2)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    began = time.monotonic()
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        b = a @ a
    net = torch.nn.Conv2d(64, 128, 3).cuda()
    x = torch.randn(32, 64, 96, 96, device="cuda", requires_grad=True)
    for _ in range(5):
        net(x).square().mean().backward()
    torch.cuda.synchronize()
    timed("work", began)
    store.fill()
    torch.cuda.synchronize()
    tell("full", request=last)
    # And work where there is no room: it is refused or goes on, and nothing breaks.
    try:
        y = a @ a
        net(x).square().mean().backward()
        torch.cuda.synchronize()
        del y
    except (torch.OutOfMemoryError, RuntimeError) as e:
        tell("refused", by=type(e).__name__)
    store.give(1)
    del a, b, net, x
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    began = time.monotonic()
    for i in range(2000):
        torch.empty(1024 + i, device="cuda")
    torch.cuda.synchronize()
    timed("2000-small-tensors", began)
    began = time.monotonic()
    for i in range(200):
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
    torch.cuda.synchronize()
    timed("200-tensors-given-back", began)


def two(stop):
    """One of several processes that share a cap."""
    import torch

    store = Store(lambda size: torch.zeros(size, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError, stop)
    torch.zeros(1, device="cuda")
    tell("ready")
    for _ in range(3):
        store.fill()
        torch.cuda.synchronize()
        store.give(3)
        torch.cuda.empty_cache()
    store.fill()
    torch.cuda.synchronize()
    tell("full", request=2 * MIB)


def jax(stop):
    import jax
    import jax.numpy as jnp

    x = jnp.ones((4096, 4096), jnp.bfloat16)
    (x @ x).block_until_ready()
    most = jax.devices()[0].memory_stats()["bytes_limit"]
    tell("holds", bytes=most)

    def take(size):
        return jnp.zeros(size, jnp.uint8).block_until_ready()

    # Less than it has: before it refuses it waits ten seconds.
    Store(take, jax.errors.JaxRuntimeError, min(stop or most, most) * 9 // 10).fill()
    tell("filled")


def cupy(stop):
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    tell("sees", total=total, free=free)
    store = Store(lambda size: cupy.zeros(size, dtype=cupy.uint8), cupy.cuda.memory.OutOfMemoryError, stop)
    store.fill()
    cupy.cuda.Device().synchronize()
    tell("full", request=2 * MIB)
    store.give(2)
    cupy.get_default_memory_pool().free_all_blocks()
    a = cupy.random.random((2048, 2048), dtype=cupy.float32)
    float((a @ a).sum())
    tell("half")


def main():
    framework, stop = sys.argv[1], int(sys.argv[2])
    began = time.monotonic()
    try:
        __import__("torch" if framework == "two" else framework)
    except ImportError as e:
        print(e, file=sys.stderr)
        tell("lacks")
        return
    timed("import", began)
    {"torch": torch, "two": two, "jax": jax, "cupy": cupy}[framework](stop)
    timed("all", began)
    tell("end")


main()
