"""An asyncio server: apply in the lifespan task, warm up on the executor, freeze, serve, audit.

The lifespan task, the request handlers and the executor's thread are three different contexts. Since
torch 2.12 a limit that is set in one of them is not seen by the others; the policy is.

    python docs/examples/server.py --port 8080
    curl -d '{"tokens": [[1, 2, 3]]}' localhost:8080/step
    curl localhost:8080/audit

Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiohttp import web

import dynapolicy as dp

BATCH_SIZES = tuple(range(1, 13))
LENGTH = 16
VOCABULARY = 64


class Model(torch.nn.Module):
    """Scores the next token of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, 32)
        self.mix = torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: int64 ``(batch, length)``; gives float32 ``(batch, vocabulary)``."""
        hidden = torch.nn.functional.silu(self.mix(self.embed(tokens))).mean(dim=1)
        return self.head(hidden)


def bucket_of(rows: int) -> int:
    """The smallest captured batch size that holds ``rows``."""
    return next(size for size in BATCH_SIZES if size >= rows)


class Engine:
    """Owns the model, its compiled step and the one thread that runs it."""

    def __init__(self, backend: Callable[..., Any] | str = "eager") -> None:
        self.model = Model().eval()
        self.buckets = dp.ShapeBuckets(batch=BATCH_SIZES)
        self.policy = dp.CompilePolicy.from_env({Model.forward: [self.buckets]})
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.backend = backend

    def start(self) -> None:
        """Compile every declared batch size, on the thread that will serve."""
        self.step = dp.compile(self.model.forward, policy=self.policy, backend=self.backend)
        dp.warm_up(self.run, self.buckets, self.inputs, executor=self.executor, progress=False)

    @staticmethod
    def inputs(batch: int) -> torch.Tensor:
        """One full batch of a declared size."""
        return torch.zeros(batch, LENGTH, dtype=torch.int64)

    @torch.no_grad()
    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """One step, ``(batch, length)`` to ``(batch, vocabulary)``."""
        return self.step(tokens)

    def answer(self, rows: list[list[int]]) -> list[int]:
        """Pad the rows to a captured batch, run it, and give the likeliest next token of each row."""
        batch = self.inputs(bucket_of(len(rows)))
        for index, row in enumerate(rows):
            batch[index, : len(row)] = torch.tensor(row[:LENGTH])
        return self.run(batch).argmax(dim=1)[: len(rows)].tolist()


ENGINE = web.AppKey("engine", Engine)


async def lifespan(app: web.Application) -> AsyncIterator[None]:
    """Before the first request: apply, warm up, freeze. After the last: back to what was found."""
    engine = app[ENGINE]
    with dp.apply_policy(engine.policy):
        await asyncio.to_thread(engine.start)
        with dp.freeze():
            yield
    engine.executor.shutdown()


async def step(request: web.Request) -> web.Response:
    """POST {"tokens": [[...], ...]}, at most as many rows as the largest batch."""
    rows = (await request.json())["tokens"]
    engine = request.app[ENGINE]
    answer = await asyncio.get_running_loop().run_in_executor(engine.executor, engine.answer, rows)
    return web.json_response({"next": answer})


async def audit(request: web.Request) -> web.Response:
    """What is compiled, and whether anything ran eager."""
    return web.Response(text=str(dp.audit()))


def make_app(engine: Engine) -> web.Application:
    """The application around an engine."""
    app = web.Application()
    app[ENGINE] = engine
    app.cleanup_ctx.append(lifespan)
    app.add_routes([web.post("/step", step), web.get("/audit", audit)])
    return app


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--backend", default="inductor")
    arguments = parser.parse_args()
    web.run_app(make_app(Engine(arguments.backend)), host="127.0.0.1", port=arguments.port)


if __name__ == "__main__":
    main()
