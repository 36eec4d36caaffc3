"""A trainer with activation checkpointing: the recompute runs on autograd's own threads.

Each block is compiled and checkpointed, so its forward runs once in the forward pass and once more
inside ``backward``. On a GPU, and on a CPU once backwards nest deep enough, that second run happens on
a thread of autograd's, which since torch 2.12 sees no limit that anybody set.

    python docs/examples/trainer.py
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import dynapolicy as dp

LENGTHS = tuple(range(4, 16))

#: Autograd moves a backward to a thread of its own when this many are nested in one another.
NESTED = 64


class Block(torch.nn.Module):
    """One residual block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 2 * width)
        self.down = torch.nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: float32 ``(length, width)``; the same out."""
        return hidden + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden))))


class Deep(torch.autograd.Function):
    """Runs its backward inside ``depth`` nested ones, as reentrant checkpoints of a deep model do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, run: Callable[..., torch.Tensor], depth: int) -> torch.Tensor:
        """Nothing but ``hidden``; the work happens in backward."""
        ctx.run, ctx.depth = run, depth
        ctx.save_for_backward(hidden)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        """One more level, or the recompute itself at the bottom."""
        (saved,) = ctx.saved_tensors
        with torch.enable_grad():
            hidden = saved.detach().requires_grad_()
            inner = Deep.apply(hidden, ctx.run, ctx.depth - 1) if ctx.depth else ctx.run(hidden)
            torch.autograd.backward(inner, grad)
        return hidden.grad, None, None


class Trainer:
    """Compiled, checkpointed blocks under a policy.

    Attributes:
        threads: names of the threads on which a block's forward ran.
    """

    def __init__(self, backend: Callable[..., Any] | str = "eager") -> None:
        self.block = Block()
        # Forward with gradients, without (checkpoint's first run), and both for the recompute's input.
        buckets = dp.ShapeBuckets(length=LENGTHS, variants=2)
        self.policy = dp.CompilePolicy.from_env({Block.forward: [buckets]}, on_limit="raise")
        self.backend = backend
        self.threads: set[int] = set()

    @functools.cached_property
    def step(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The compiled block; made once the policy is applied."""
        return dp.compile(self.block.forward, policy=self.policy, backend=self.backend)

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        """The compiled block, noting the thread."""
        self.threads.add(threading.get_ident())
        return self.step(hidden)

    def train_one(self, length: int) -> float:
        """One forward and backward at a length; gives the sum of the input's gradient."""
        hidden = torch.ones(length, 16, requires_grad=True)
        shallow = checkpoint(self.run, hidden, use_reentrant=True)
        Deep.apply(shallow, self.run, NESTED).sum().backward()
        assert hidden.grad is not None
        return float(hidden.grad.sum())


def main() -> None:
    """Train every declared length once, and say on how many threads blocks compiled."""
    trainer = Trainer()
    with dp.apply_policy(trainer.policy):
        for length in LENGTHS:
            print(f"length {length:3}: gradient {trainer.train_one(length):9.4f}")
        print(f"blocks ran on {len(trainer.threads)} threads")
        print(dp.audit())


if __name__ == "__main__":
    main()
