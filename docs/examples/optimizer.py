"""A compiled optimizer step over many parameter shapes.

The step is one function that is called per parameter, so it needs one cache entry per distinct shape:
a model with more than eight of them hits torch's default limit, even with ``dynamic=True``, because
the shapes of ``nn.Parameter`` are always static.

    python docs/examples/optimizer.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import dynapolicy as dp


def update(parameter: torch.nn.Parameter, grad: torch.Tensor, momentum: torch.Tensor, rate: float) -> None:
    """One step of a sign-momentum optimizer, in place. All three tensors have the parameter's shape."""
    momentum.mul_(0.9).add_(grad, alpha=0.1)
    parameter.sub_(rate * torch.sign(momentum))


class Signum:
    """Calls the compiled update for every parameter."""

    def __init__(self, model: torch.nn.Module, rate: float = 1e-2, backend: Callable[..., Any] | str = "eager") -> None:
        self.parameters = list(model.parameters())
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.rate = rate
        self.policy = dp.CompilePolicy.from_env({update: [dp.ShapeBuckets.of_parameters(model)]})
        self.backend = backend

    @functools.cached_property
    def update(self) -> Callable[..., None]:
        """The compiled step. Where torch has the keyword, it alone gives this function its budget."""
        return dp.compile(update, policy=self.policy, backend=self.backend, fullgraph=True)

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for parameter, momentum in zip(self.parameters, self.momenta, strict=True):
            if parameter.grad is not None:
                self.update(parameter, parameter.grad, momentum, self.rate)


def make_model(widths: int = 13) -> torch.nn.Module:
    """Layers of different widths: two parameter shapes each."""
    sizes = range(4, 4 + widths)
    layers = [torch.nn.Linear(one, one + 1) for one in sizes]
    return torch.nn.Sequential(*layers)


def main() -> None:
    """Take two steps and show that every shape compiled."""
    model = make_model()
    optimizer = Signum(model)
    with dp.apply_policy(optimizer.policy):
        for _ in range(2):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        print(dp.audit())


if __name__ == "__main__":
    main()
