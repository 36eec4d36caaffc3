"""A decode step at the batch sizes that serving engines capture, compiled on a worker thread.

Three runs over one model, with the same line ``torch.compile(model.forward, dynamic=False)``:
without a policy, with a constant set at import, and with a policy. Which of the batch sizes
compile is counted where torch can't hide it: each run has a backend that counts its calls.

    python docs/examples/serve.py                 # 19 batch sizes, inductor
    python docs/examples/serve.py --sizes 1,2,4   # other batch sizes
    python docs/examples/serve.py --backend eager # the same counts in seconds, without inductor
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

# The three runs share what inductor compiles. A model as small as this one is faster on one thread.
os.environ.setdefault("TORCHINDUCTOR_FX_GRAPH_CACHE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.nn import functional

import dynapolicy as dp

SIZES = (1, 2, 4, *range(8, 129, 8))
VOCABULARY, WIDTH, HEADS, CONTEXT, LAYERS = 512, 64, 4, 32, 2
CONSTANT, STEPS = 64, 12


# -- the model -----------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    """One new token a sequence, against a key and value cache of fixed size."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(most, HEADS, CONTEXT, WIDTH // HEADS))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        query, key, value = self.qkv(x).view(batch, 3, HEADS, 1, WIDTH // HEADS).unbind(1)
        keys, values = self.keys[:batch], self.values[:batch]
        keys.index_copy_(2, position, key)
        values.index_copy_(2, position, value)
        seen = torch.arange(CONTEXT, device=x.device) <= position
        attended = functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen.view(1, 1, 1, CONTEXT))
        return self.out(attended.reshape(batch, WIDTH))


class GatedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, most: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(most), GatedMLP()
        self.after_attention, self.after_mlp = RMSNorm(), RMSNorm()

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.after_attention(x + self.attention(x, position))
        return self.after_mlp(x + self.mlp(x))


class Decoder(nn.Module):
    """One step of a decoder: the next token's logits for a batch of sequences."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(most) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, position)
        return self.head(x)


# -- one run -------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """What one batch size met: backend calls that it caused, and milliseconds of a later step."""

    calls: int
    milliseconds: float


class CountingBackend:
    """Another backend, and how often torch called it."""

    def __init__(self, name: str) -> None:
        self.compile = lookup_backend(name)
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.calls += 1
        return self.compile(graph, inputs)


class Engine:
    """Owns a compiled step and the one worker thread that runs it: there torch compiles, on the first call."""

    def __init__(self, model: Decoder, backend: str) -> None:
        self.backend = CountingBackend(backend)
        self.step = torch.compile(model.forward, dynamic=False, backend=self.backend)
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="engine")

    @torch.no_grad()
    def serve(self, size: int, reference: Decoder) -> Step:
        """A few steps of one batch size, each compared with the model itself."""
        tokens = torch.arange(size) * 7 % VOCABULARY
        before, times = self.backend.calls, []
        for place in range(STEPS):
            position = torch.tensor([place])
            start = time.perf_counter()
            logits = self.step(tokens, position)
            times.append(time.perf_counter() - start)
            torch.testing.assert_close(logits, reference(tokens, position), rtol=1e-4, atol=1e-4)
        return Step(self.backend.calls - before, 1000 * min(times[1:]))


def serve(model: Decoder, sizes: Sequence[int], backend: str) -> list[Step]:
    """Serve every batch size on a fresh engine, and leave nothing compiled behind."""
    engine, reference = Engine(model, backend), copy.deepcopy(model)
    try:
        return [engine.executor.submit(engine.serve, size, reference).result() for size in sizes]
    finally:
        engine.executor.shutdown()
        torch._dynamo.reset()


# -- the three runs ------------------------------------------------------------------------------------


def no_policy(_: Sequence[int]) -> Callable[[], None]:
    return lambda: None


def constant_at_import(_: Sequence[int]) -> Callable[[], None]:
    """What many programs write at the top of a module: it runs once, on the main thread."""
    config = torch._dynamo.config
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    before = getattr(config, name)
    setattr(config, name, CONSTANT)
    return lambda: setattr(config, name, before)


def policy(sizes: Sequence[int]) -> Callable[[], None]:
    """One call, also on the main thread."""
    buckets = {Decoder.forward: [dp.ShapeBuckets(batch=sizes)]}
    return dp.apply_policy(dp.CompilePolicy.from_env(buckets=buckets)).restore


RUNS = {"no policy": no_policy, f"constant {CONSTANT}": constant_at_import, "policy": policy}


def compare(sizes: Sequence[int], backend: str) -> dict[str, list[Step]]:
    """What each batch size met, by the name of the run. Each run puts back what it changed."""
    torch.manual_seed(0)
    model = Decoder(max(sizes)).eval()
    found = {}
    for name, prepare in RUNS.items():
        start = time.perf_counter()
        restore = prepare(sizes)
        try:
            found[name] = serve(model, sizes, backend)
        finally:
            restore()
        print(f"  {name:<12} {time.perf_counter() - start:6.1f} s", flush=True)
    return found


# -- what is printed -----------------------------------------------------------------------------------


def keep_quiet() -> list[str]:
    """Torch says once, in its log, that a code object hit the limit. Keep that for the end."""
    said: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    logging.getLogger("torch._dynamo.convert_frame").addFilter(keep)
    return said


def usable(backend: str) -> str:
    """``backend``, or one that needs no compiler where this machine has none for inductor."""
    try:
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(8))
    except Exception as error:  # each release has its own classes for a missing compiler
        print(f"{backend} can't compile on this machine ({type(error).__name__}); it needs a C++ compiler.")
        print("The counts below come from the backend aot_eager, which needs none.")
        backend = "aot_eager"
    torch._dynamo.reset()
    return backend


def table(sizes: Sequence[int], found: dict[str, list[Step]]) -> str:
    """One row a batch size, one column a run, and the sums."""
    lines = ["batch  " + "".join(f"{name:<22}" for name in found)]
    for row, size in enumerate(sizes):
        cells = (steps[row] for steps in found.values())
        lines.append(f"{size:>5}  " + "".join(f"{state(step):<9}{step.milliseconds:>7.2f} ms   " for step in cells))
    sums = (f"{compiled(steps)} compiled, {len(steps) - compiled(steps)} eager" for steps in found.values())
    return "\n".join([*lines, "       " + "".join(f"{text:<22}" for text in sums)])


def state(step: Step) -> str:
    return "compiled" if step.calls else "EAGER"


def compiled(steps: Sequence[Step]) -> int:
    return sum(step.calls > 0 for step in steps)


def explain(found: dict[str, list[Step]]) -> str:
    """What the constant came to, as measured here."""
    plain, constant, declared = (compiled(steps) for steps in found.values())
    if constant == plain < declared:
        return f"The constant changed nothing: torch {torch.__version__} keeps it from the thread that compiles."
    return f"The constant reached the worker: on torch {torch.__version__} a setting holds for the whole process."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="batch sizes, separated by commas")
    parser.add_argument("--backend", default="inductor", help="inductor, aot_eager or eager")
    given = parser.parse_args(arguments)
    sizes = tuple(dict.fromkeys(int(size) for size in given.sizes.split(",")))

    said = keep_quiet()
    backend = usable(given.backend)
    print(f"torch {torch.__version__}, backend {backend}, {len(sizes)} batch sizes, {LAYERS} layers. Three runs:")
    found = compare(sizes, backend)
    print(f"\n{table(sizes, found)}\n")
    print(explain(found))
    print(f"Torch said so in {len(said)} log lines in all. The policy's results equal eager.")
    return 0 if compiled(found["policy"]) == len(sizes) else 1


if __name__ == "__main__":
    sys.exit(main())
