"""Seconds from a new process to all first batches: cold, torch's own means, and ``warm_start``.

    python tests/bench/artifacts_bench.py --out results.jsonl --work /some/empty/folder

One JSON line is appended per run. Called again with the same ``--out`` and ``--work`` it goes on where
it stopped. Each run is a process of its own with HOME, the temporary folder and every cache folder
below ``--work``; a cold run gets empty ones. It uses a GPU where torch sees one.

``total_s`` counts from the start of the process, ``first_batches_s`` from the moment when torch is imported
and the model is built: loading, checking and all first calls are in both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

METHODS = ("cold", "blob", "folder", "blob_precompile", "ours", "ours_precompile")
BUCKETS = {"cuda": (1, 2, 4, 8, 16, 32, 48, 64), "cpu": (1, 2, 4, 8)}


# -- the child: one start ----------------------------------------------------------------------------


class Layer(nn.Module):
    """One block of a decoder."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Of global scope, because torch can't precompile a class that is defined in a function."""

    def __init__(self, width, heads, layers):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build(device):
    """The model, and a function from a batch size to its input."""
    width, heads, layers, dtype = (1024, 16, 8, torch.bfloat16) if device == "cuda" else (64, 4, 4, torch.float32)
    torch.manual_seed(0)
    model = Decoder(width, heads, layers).to(device, dtype).eval()

    def inputs(batch):
        # Of a spread like real activations: rows that are all alike leave the norms nothing but rounding.
        generator = torch.Generator().manual_seed(batch)
        return torch.randn(batch, 16, width, generator=generator).to(device, dtype)

    return model, inputs


def child(method, device, store, began, each_layer):
    import torch._dynamo
    import torch._inductor.async_compile
    import torch._inductor.compile_fx  # seconds that every start pays, whatever its method

    import dynapolicy
    from dynapolicy.artifacts.session import WarmStart  # noqa: F401 - as above

    dynapolicy.apply_policy(dynapolicy.CompilePolicy(floor=64))
    model, make = build(device)
    with torch.no_grad():
        # The first eager call brings CUDA's libraries up.
        right = [model(make(batch)).float() for batch in BUCKETS[device]]
    if device == "cuda":
        torch.cuda.synchronize()
    ready = time.time()
    record = None
    loaded = 0.0
    with torch.no_grad(), contextlib.ExitStack() as stack:
        start = None
        if method.startswith("ours"):
            mode = "precompile" if method == "ours_precompile" else "default"
            start = stack.enter_context(dynapolicy.warm_start("bench", root=store, signature=model, mode=mode))
        elif method == "blob_precompile":
            torch._dynamo.config.caching_precompile = True
        if method.startswith("blob") and (store / "blob").exists():
            torch.compiler.load_cache_artifacts((store / "blob").read_bytes())
            loaded = time.time() - ready
        for part in model.layers if each_layer else [model]:
            part.compile(dynamic=False)
        results = [model(make(batch)) for batch in BUCKETS[device]]
        if device == "cuda":
            torch.cuda.synchronize()
        done = time.time()
        good = all(
            (one.float() - other).norm() <= 0.05 * other.norm() for one, other in zip(results, right, strict=True)
        )
        if start is not None:
            fields = ("verdict", "reason", "compiled", "bytes", "load_seconds")
            record = {name: getattr(start.record(), name) for name in fields}
            loaded = record["load_seconds"]
    if method in ("cold", "blob_precompile") and not (store / "blob").exists():
        saved = torch.compiler.save_cache_artifacts()
        (store / "blob").write_bytes(saved[0])
    return {
        "method": method,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "each_layer": each_layer,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "total_s": round(done - began, 3),
        "first_batches_s": round(done - ready, 3),
        "load_s": round(loaded, 3),
        "equal": good,
        "start": record,
    }


# -- the parent ----------------------------------------------------------------------------------------


def start(method, device, work, seed, each_layer):
    """One process: a fresh home, and what its method brings along."""
    home = work / f"home-{os.urandom(4).hex()}"
    cache = home / "inductor"
    store = work / _store(method)
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.mkdir(mode=0o700)
    (home / "tmp").mkdir()
    if method == "folder":
        shutil.copytree(store / "folder", cache)
    environment = {
        **os.environ,
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "CUDA_CACHE_PATH": str(home / "nv"),
        "TRITON_HOME": str(home),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")))),
    }
    environment.pop("TRITON_CACHE_DIR", None)
    began = time.time()
    arguments = {"--child": method, "--device": device, "--work": store, "--began": began}
    command = [sys.executable, __file__, *(str(word) for pair in arguments.items() for word in pair)]
    command += ["--each-layer"] * each_layer
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        print(f"{method}: {ran.stderr[-3000:]}", file=sys.stderr)
        line = None
    else:
        line = json.loads(ran.stdout.splitlines()[-1])
        if method == "cold" and not (store / "folder").exists():
            shutil.copytree(cache, store / "folder")
        if seed:
            line["method"] += "_first"
    shutil.rmtree(home, ignore_errors=True)
    return line


def _store(method):
    return "torch" if method in ("cold", "blob", "folder") else method


def seeded(method, work):
    return method == "cold" or (work / _store(method) / ("bundles" if method.startswith("ours") else "blob")).exists()


def summary(lines):
    for method in dict.fromkeys(line["method"] for line in lines):
        times = sorted(line["first_batches_s"] for line in lines if line["method"] == method)
        totals = sorted(line["total_s"] for line in lines if line["method"] == method)
        verdicts = {line["start"]["verdict"] for line in lines if line["method"] == method and line["start"]}
        print(
            f"{method:24} n={len(times)}  first batches {statistics.median(times):7.2f} s "
            f"({times[0]:.2f} - {times[-1]:.2f})  with imports {statistics.median(totals):7.2f} s  "
            f"{' '.join(sorted(verdicts))}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--device", choices=("cuda", "cpu"))
    parser.add_argument(
        "--each-layer", action="store_true", help="compile the layers, which share their code, one by one"
    )
    parser.add_argument("--stop-after", type=float, default=float("inf"), help="seconds after which no run is begun")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(child(asked.child, asked.device, asked.work, asked.began, asked.each_layer)))
        return
    device = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    lines = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    asked.work.mkdir(parents=True, exist_ok=True, mode=0o700)
    until = time.monotonic() + asked.stop_after
    for run in range(asked.runs):
        for method in asked.methods:
            done = sum(line["method"] == method for line in lines)
            while done <= run and time.monotonic() < until:
                seed = not seeded(method, asked.work)
                line = start(method, device, asked.work, seed, asked.each_layer)
                if line is None:
                    break
                lines.append(line)
                with asked.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                done += not seed
    summary(lines)


if __name__ == "__main__":
    main()
