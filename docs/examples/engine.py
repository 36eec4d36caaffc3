"""The engine pattern: submodules compute their buckets, a manager puts one policy in force.

Each submodule knows the CUDA-graph configurations that it captures, so it derives its buckets from
them; nobody keeps a list of numbers by hand. The manager collects them, applies the policy on the
thread that warms up, and gives it to its executor as initializer.

    python docs/examples/engine.py                     # a backend that compiles nothing, in seconds
    python docs/examples/engine.py --backend inductor  # the real one
"""

from __future__ import annotations

import argparse
import functools
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo import lookup_backend

import dynapolicy as dp

WIDTH = 32


@dataclass(frozen=True)
class CaptureConfig:
    """What is captured as CUDA graphs: every batch size with every number of tokens."""

    batch_sizes: tuple[int, ...]
    token_buckets: tuple[int, ...] = (1,)

    def buckets(self, slots: int) -> dp.ShapeBuckets:
        # Each slot is captured apart, because its number is guarded: another entry for every shape.
        return dp.ShapeBuckets(batch=self.batch_sizes, tokens=self.token_buckets, variants=slots)


class Submodule:
    """Part of an engine: a model, its capture configurations, and slots with static memory."""

    def __init__(self, model: nn.Module, configs: Sequence[CaptureConfig], slots: int = 1) -> None:
        self.model, self.configs, self.slots = model, configs, slots
        self.memory = [torch.zeros(WIDTH) for _ in range(slots)]
        self.step: Callable[..., torch.Tensor] = self.run

    def run(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        raise NotImplementedError

    def captured(self) -> dp.ShapeBuckets:
        """All configurations together; a shape that is in two of them is captured once."""
        return functools.reduce(operator.or_, (config.buckets(self.slots) for config in self.configs))

    def eager(self) -> list[dp.ShapeBuckets]:
        """Compiled shapes that no graph is captured for."""
        return []

    def capture_buckets(self) -> dict[Any, list[dp.ShapeBuckets]]:
        """What the policy asks for: how many cache entries each compiled function needs."""
        return {type(self).run: [self.captured(), *self.eager()]}

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        """Batch, tokens and slot of everything declared, largest first."""
        captured = itertools.product(self.captured().shapes, range(self.slots))
        rest = ((shape, 0) for buckets in self.eager() for shape in buckets.shapes)
        found = ((shape["batch"], shape["tokens"], slot) for shape, slot in (*captured, *rest))
        return iter(sorted(found, key=lambda one: (-one[0] * one[1], one)))


class Prefill(Submodule):
    """Two configurations that overlap, captured through one method, and an eager path for long prompts."""

    LONG = (512, 1024)

    def run(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        return self.model(x) + self.memory[slot]

    def eager(self) -> list[dp.ShapeBuckets]:
        return [dp.ShapeBuckets(batch=(1,), tokens=self.LONG)]


class Decode(Submodule):
    """One token a sequence; two slots, so that one batch is prepared while the other runs."""

    def run(self, x: torch.Tensor, slot: int) -> torch.Tensor:
        return torch.tanh(self.model(x)) * 2 - self.memory[slot]


class Engine:
    """The manager: one policy for all submodules, in force wherever they compile."""

    def __init__(self, submodules: Mapping[str, Submodule], backend: str, environ: Mapping[str, str] | None) -> None:
        self.submodules = submodules
        self.compiled: Counter[str] = Counter()
        self.policy = dp.CompilePolicy.from_env(buckets=list(submodules.values()), environ=environ)
        # For the thread that warms up, which is this one, and for the one that serves.
        self.applied = dp.apply_policy(self.policy)
        self.executor = ThreadPoolExecutor(1, initializer=dp.apply_policy, initargs=(self.policy,))
        for name, part in submodules.items():
            part.step = dp.compile(part.run, policy=self.policy, backend=self._counting(name, backend))

    def _counting(self, name: str, backend: str) -> Callable[..., Any]:
        """The backend, with its calls counted: one for each cache entry."""
        compile_graph = lookup_backend(backend)

        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
            self.compiled[name] += 1
            return compile_graph(graph, inputs)

        return count

    @torch.no_grad()
    def call(self, name: str, batch: int, tokens: int, slot: int) -> torch.Tensor:
        part, x = self.submodules[name], torch.ones(batch, tokens, WIDTH)
        found = part.step(x, slot)
        torch.testing.assert_close(found, part.run(x, slot), rtol=1e-4, atol=1e-4)
        return found

    def warm_up(self) -> None:
        for name, part in self.submodules.items():
            for shape in part.shapes():
                self.call(name, *shape)

    def serve(self, name: str, batch: int, tokens: int, slot: int = 0) -> torch.Tensor:
        return self.executor.submit(self.call, name, batch, tokens, slot).result()

    def close(self) -> None:
        self.executor.shutdown()
        self.applied.restore()


def build(backend: str = "eager", environ: Mapping[str, str] | None = None) -> Engine:
    """An engine of two submodules; their numbers of entries follow from their configurations."""
    torch.manual_seed(0)
    short = CaptureConfig(batch_sizes=(1, 2, 4), token_buckets=(16, 32, 64))
    wide = CaptureConfig(batch_sizes=(1, 2, 4, 8), token_buckets=(16, 128))
    prefill = Prefill(nn.Linear(WIDTH, WIDTH), [short, wide])
    decode = Decode(nn.Linear(WIDTH, WIDTH), [CaptureConfig(batch_sizes=(1, 2, 4, *range(8, 65, 8)))], slots=2)
    return Engine({"prefill": prefill, "decode": decode}, backend, environ)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="eager", help="eager, aot_eager or inductor")
    engine = build(parser.parse_args(arguments).backend)
    engine.warm_up()
    warm = dict(engine.compiled)
    print("submodule   declared   compiled   recompile limit")
    for name, part in engine.submodules.items():
        declared = sum(buckets.entries for buckets in part.capture_buckets()[type(part).run])
        limit = engine.policy.limits_for(type(part).run).recompile_limit
        print(f"{name:<11} {declared:>8} {warm[name]:>10} {limit:>17}")

    engine.serve("decode", batch=64, tokens=1, slot=1)
    engine.serve("prefill", batch=8, tokens=128)
    print(f"compiled while serving what was declared:    {engine.compiled.total() - sum(warm.values())}")
    # Nobody declared this one: it takes a place of the headroom, on the thread that serves.
    engine.serve("decode", batch=65, tokens=1)
    print(f"compiled while serving an undeclared shape:  {engine.compiled.total() - sum(warm.values())}")
    engine.close()
    return 0 if warm == {name: len(list(part.shapes())) for name, part in engine.submodules.items()} else 1


if __name__ == "__main__":
    sys.exit(main())
