"""One start of a small program in a process of its own. Prints what the warm start said, as JSON.

python artifacts_child.py ROOT MODE BATCHES [INSTANCES [RESETS]]
"""

from __future__ import annotations

import enum
import functools
import json
import sys
import threading
import warnings

import attrs
import torch

import dynapolicy as dp


def helper(x):
    return x.sin()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x)) + helper(x)


class Acting(torch.nn.Module):
    def __init__(self, act):
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x) + 1


class Mode(enum.Enum):
    SIN = "sin"
    COS = "cos"

    def of(self, x):
        return x.sin() if self is Mode.SIN else x.cos()


class Moded(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        return self.mode.of(x) + 2


class Asked(torch.nn.Module):
    def forward(self, x, mode):
        return mode.of(x) + 3


def after(act):
    def decorate(forward):
        @functools.wraps(forward)
        def decorated(self, x):
            return act(forward(self, x))

        return decorated

    return decorate


class Sine(torch.nn.Module):
    @after(torch.sin)
    def forward(self, x):
        return x + 4


class Cosine(torch.nn.Module):
    @after(torch.cos)
    def forward(self, x):
        return x + 4


def count_guard_builds():
    """How often torch builds the guards of a graph, loaded or new."""
    import torch._dynamo.guards

    manager, built = torch._dynamo.guards.CheckFunctionManager, []
    build = getattr(manager, "build_guards", None)  # torch 2.6 has none

    def counted(*args, **kwargs):
        built.append(1)
        return build(*args, **kwargs)

    manager.build_guards = counted
    return built


def count_stacks():
    """For each fake tensor mode that torch makes for a tensor in loaded guards, whether it has its maker's stack."""
    from torch._subclasses import FakeTensorMode

    made, taken = FakeTensorMode.__init__, []

    @functools.wraps(made)
    def counted(mode, *args, **kwargs):
        made(mode, *args, **kwargs)
        if sys._getframe(1).f_code.co_name == "_unpickle_tensor":
            taken.append(bool(mode._stack_trace))

    FakeTensorMode.__init__ = counted
    return taken


def left_in_force():
    """On this thread and on another, the settings that a warm start holds while it lasts."""
    import torch._dynamo
    from torch.compiler import config

    seen = []

    def look():
        seen.append([config.cache_key_tag, getattr(torch._dynamo.config, "caching_precompile", False)])

    look()
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return seen


def compile_and_compare(models, batches):
    """Whether every result equals eager's."""
    steps = [torch.compile(model.forward, dynamic=False) for model in models]
    inputs = [torch.ones(batch, 8) for batch in batches]
    # The last to be compiled is the first to be called.
    pairs = [*zip(steps, models, strict=True)][::-1]
    return all(torch.allclose(step(x), model(x), atol=1e-5) for x in inputs for step, model in pairs)


def main(root, mode, batches, instances=1, resets=0):
    built, stacks = count_guard_builds(), count_stacks()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    models = torch.nn.ModuleList(Model() for _ in range(instances))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), dp.warm_start("small", root=root, signature=models, mode=mode) as start:
            right = compile_and_compare(models, batches)
            record = attrs.asdict(start.record())
            for _ in range(resets):
                torch._dynamo.reset()
                right = right and compile_and_compare(models, batches)
    said = [str(one.message) for one in caught if issubclass(one.category, dp.DynapolicyWarning)]
    saw = {
        "text": str(start),
        "right": right,
        "said": said,
        "builds": len(built),
        "stacks": stacks,
        "left": left_in_force(),
    }
    print(json.dumps({**record, **saw}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(one) for one in sys.argv[3].split(",") if one], *map(int, sys.argv[4:]))
