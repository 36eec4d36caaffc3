"""What compile workers gain: cold start to the end of warm-up, five configurations, one table.

Each run is a process of its own with empty inductor and Triton caches. Results are appended to a file
of JSON lines, and runs that are there already are not repeated, so that it can run in pieces::

    python tests/bench/workers_bench.py --out results.jsonl --budget 480
    python tests/bench/workers_bench.py --out results.jsonl --table --svg docs/workers.svg

    python tests/bench/workers_bench.py --start-only

The last one shows how long the call of ``start_workers`` takes by itself. ``--lanes 4`` lets four runs go
on at once, each on a quarter of the CPUs; such results belong in a file of their own.

Configurations: ``one`` worker; torch's ``default``; ``late``: the policy, started when the weights are
loaded; ``early``: the policy, started before; ``warm``: torch's default with full caches.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONFIGS = ("one", "default", "late", "early", "warm")
NAMES = {
    "one": "1 worker",
    "default": "torch's default",
    "late": "policy, no early start",
    "early": "policy, early start",
    "warm": "fully warm",
}
MODES = ("default", "max-autotune")
ZOO = {"default": 24, "max-autotune": 6}
CHUNK = 4 * 1024 * 1024


# -- one run, in a process of its own --------------------------------------------------------------------


def load_weights(seconds: float) -> None:
    """Read a real file in chunks, slowed down to what a shared file system gives."""
    with tempfile.NamedTemporaryFile() as file:
        chunks = max(1, int(seconds * 10))
        file.write(os.urandom(CHUNK))
        for _ in range(chunks - 1):
            file.write(b"\0" * CHUNK)
        file.seek(0)
        buffer, begin = bytearray(CHUNK), time.monotonic()
        for number in range(chunks):
            file.readinto(buffer)  # type: ignore[attr-defined]
            time.sleep(max(0.0, begin + seconds * (number + 1) / chunks - time.monotonic()))


def make_model(zoo: int, layers: int, device: str) -> Any:
    """Attention, norms, gated MLPs, and a zoo of different pointwise and reduction kernels."""
    import torch
    from torch import nn
    from torch.nn import functional

    points = (
        torch.sin,
        torch.tanh,
        torch.sigmoid,
        functional.gelu,
        functional.silu,
        functional.softplus,
        torch.erf,
        functional.hardswish,
    )
    reductions = (
        lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6),
        lambda x: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5),
        lambda x: torch.softmax(x, -1) * x,
        lambda x: x - x.logsumexp(-1, keepdim=True),
        lambda x: x / (x.abs().amax(-1, keepdim=True) + 1e-3),
        lambda x: x.cumsum(-1) / x.shape[-1],
    )

    class Animal(nn.Module):
        def __init__(self, number: int, width: int) -> None:
            super().__init__()
            inner = 64 * (number + 2)
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
            self.point, self.reduce = points[number % len(points)], reductions[number % len(reductions)]
            self.number = number

        def forward(self, x: Any) -> Any:
            inner = self.reduce(self.point(self.up(x)) * (1.0 + 0.1 * self.number))
            across = inner.mean(1, keepdim=True) + inner.amax(1, keepdim=True)
            return x + self.down(inner + across)

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.gate, self.up, self.down = (
                nn.Linear(width, 2 * width),
                nn.Linear(width, 2 * width),
                nn.Linear(2 * width, width),
            )
            self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)

        def forward(self, x: Any) -> Any:
            batch, tokens, width = x.shape
            q, k, v = self.qkv(self.one(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
            inner = self.two(x)
            return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))

    width = 256
    torch.manual_seed(0)
    parts = [Block(width, 4) for _ in range(layers)] + [Animal(number, width) for number in range(zoo)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return nn.Sequential(*parts).to(device, dtype), width, dtype


def watch_ready(begin: float, found: dict[str, float]) -> None:
    """Note when torch's pool has answered for the first time, whoever started it."""
    while "ready_after" not in found:
        time.sleep(0.1)
        home = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
        future = getattr(home, "_ready_future", None)
        if future is not None and future.done():
            found["ready_after"] = round(time.time() - begin, 1)


def one_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """From the start of this process to the end of the warm-up."""
    begin = float(os.environ["WORKERS_BENCH_BEGIN"])
    found: dict[str, float] = {}
    if arguments.cpus:
        os.sched_setaffinity(0, arguments.cpus)  # before anything counts them
    threading.Thread(target=watch_ready, args=(begin, found), daemon=True).start()
    import dynapolicy as dp

    config, workers = arguments.config, None
    if config == "early":
        workers = dp.start_workers()
    import torch

    load_weights(arguments.load_seconds)
    loaded = time.time()
    if config == "late":
        workers = dp.start_workers()
    model, width, dtype = make_model(arguments.zoo, arguments.layers, arguments.device)
    ready = workers is not None and workers.ready
    buckets = dp.ShapeBuckets(batch=tuple(arguments.batches), tokens=(128,))
    policy = dp.CompilePolicy({type(model).forward: [buckets]})

    def inputs(batch: int, tokens: int) -> Any:
        return (torch.randn(batch, tokens, width, device=arguments.device, dtype=dtype),)

    with dp.apply_policy(policy), torch.no_grad():
        mode = None if arguments.mode == "default" else "max-autotune-no-cudagraphs"
        step = torch.compile(model.forward, dynamic=False, mode=mode)
        dp.warm_up(step, buckets, inputs, progress=False)
        if arguments.device == "cuda":
            torch.cuda.synchronize()
    end = time.time()
    report = None if workers is None else workers.report()
    return {
        "seconds": round(end - begin, 2),
        "warm_up": round(end - loaded, 2),
        "loaded": round(loaded - begin, 2),
        "ready_when_loaded": ready,
        "ready_after": found.get("ready_after"),
        "workers": None if report is None else report.got,
        "notes": [] if report is None else list(report.notes),
        "torch": str(torch.__version__),
        "gpu": torch.cuda.get_device_name() if arguments.device == "cuda" else "",
    }


# -- many runs --------------------------------------------------------------------------------------------


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines() if line.strip()] if out.exists() else []


def missing(done: list[dict[str, Any]], arguments: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Round after round, so that a machine that changes meanwhile changes for all configurations."""
    have = {(one["mode"], one["config"], one["run"]) for one in done if "seconds" in one}
    for mode in arguments.modes:
        for run in range(arguments.runs):
            for config in arguments.configs:
                if (mode, config, run) not in have:
                    yield mode, config, run


def run_all(arguments: argparse.Namespace) -> None:
    """What is missing, as far as the budget goes."""
    runs = Runs(arguments)
    # Warm runs last: they use what a cold run of this session has left.
    for warm in (False, True):
        todo = [one for one in missing(read(arguments.out), arguments) if (one[1] == "warm") == warm]
        with ThreadPoolExecutor(arguments.lanes) as pool:
            list(pool.map(runs.one, todo))
    for folder in runs.kept.values():
        shutil.rmtree(folder, ignore_errors=True)


def shares(lanes: int) -> list[list[int]]:
    """The CPUs of each lane; one lane takes what there is, unpinned."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // lanes
    return [[]] if lanes == 1 else [cpus[lane * each : (lane + 1) * each] for lane in range(lanes)]


class Runs:
    """The runs of one session: how long they take, and the caches that they leave for warm ones."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.begin = time.monotonic()
        self.longest = dict.fromkeys(MODES, arguments.first_guess)
        temporary = Path(tempfile.gettempdir())
        self.kept = {mode: temporary / f"workers-bench-{os.getpid()}-{mode}" for mode in MODES}
        self.lock = threading.Lock()
        self.lanes: queue.Queue[list[int]] = queue.Queue()
        for cpus in shares(arguments.lanes):
            self.lanes.put(cpus)

    def one(self, job: tuple[str, str, int]) -> None:
        """One run, on the CPUs of a lane that is free."""
        mode, config, run = job
        left = self.arguments.budget - (time.monotonic() - self.begin)
        if left < self.longest[mode]:
            return
        cpus = self.lanes.get()
        cache = self.kept[mode] if config == "warm" else Path(tempfile.mkdtemp(prefix="workers-bench-"))
        if config == "warm" and not cache.exists():
            child(self.arguments, mode, "default", cache, left, cpus)
        started = time.monotonic()
        result = child(self.arguments, mode, config, cache, left, cpus)
        seconds = time.monotonic() - started + 3.0
        self.lanes.put(cpus)
        line = {"mode": mode, "config": config, "run": run, "cpus": len(cpus) or os.cpu_count()}
        line |= {"layers": self.arguments.layers, "zoo": zoo_of(self.arguments, mode), **result}
        with self.lock:
            self.longest[mode] = max(self.longest[mode] if config == "warm" else 0.0, seconds)
            with self.arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            if config != "warm" and not self.kept[mode].exists():
                cache.rename(self.kept[mode])
            elif config != "warm":
                shutil.rmtree(cache, ignore_errors=True)


def zoo_of(arguments: argparse.Namespace, mode: str) -> int:
    """How many different blocks; 0 is a number as well."""
    return ZOO[mode] if arguments.zoo is None else arguments.zoo


def environ(**more: str) -> dict[str, str]:
    """For a child that finds the package of this checkout, with no number of compile threads of the shell's."""
    kept = {name: text for name, text in os.environ.items() if name != "TORCHINDUCTOR_COMPILE_THREADS"}
    root = str(Path(__file__).resolve().parents[2])
    return {**kept, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]), **more}


def child(
    arguments: argparse.Namespace, mode: str, config: str, cache: Path, timeout: float, cpus: list[int]
) -> dict[str, Any]:
    more = {"TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "TRITON_CACHE_DIR": str(cache / "triton")}
    if config == "one":
        more["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    more["WORKERS_BENCH_BEGIN"] = repr(time.time())
    zoo = str(zoo_of(arguments, mode))
    command = [
        *(sys.executable, __file__, "--one", "--config", config, "--mode", mode, "--device", arguments.device),
        *("--zoo", zoo, "--layers", str(arguments.layers), "--load-seconds", str(arguments.load_seconds)),
        *("--out", str(arguments.out), "--batches", *map(str, arguments.batches), "--cpus", *map(str, cpus)),
    ]
    try:
        done = subprocess.run(
            command, env=environ(**more), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"longer than the {timeout:.0f} s that were left"}
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (IndexError, ValueError):
        return {"error": done.stderr[-1500:]}


# -- the call itself -------------------------------------------------------------------------------------

START = """
import sys, time, os
if sys.argv[1] == "imported":
    import torch
begin = time.perf_counter()
import dynapolicy as dp
dp.start_workers
loaded = time.perf_counter()
dp.start_workers()
end = time.perf_counter()
print(loaded - begin, end - loaded)
sys.stdout.flush()
os._exit(0)  # before the background gets anywhere
"""


def start_only(runs: int) -> str:
    """How long the call takes, by whether torch was imported before."""
    lines = ["| torch | import of dynapolicy's part, ms | `start_workers()`, ms: median and most |", "|---|---|---|"]
    for case in ("imported", "not imported"):
        command = [sys.executable, "-c", START, case]
        pairs = []
        for _ in range(runs):
            done = subprocess.run(command, env=environ(), capture_output=True, text=True, check=True)
            pairs.append([1000 * float(seconds) for seconds in done.stdout.split()])
        loads, calls = zip(*pairs, strict=True)
        lines.append(
            f"| {case} | {statistics.median(loads):.0f} | {statistics.median(calls):.1f} and {max(calls):.1f} |"
        )
    return "\n".join(lines)


# -- the table and the chart ------------------------------------------------------------------------------


def summary(done: list[dict[str, Any]], mode: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for config in CONFIGS:
        seconds = [
            one["seconds"] for one in done if (one["mode"], one["config"]) == (mode, config) and "seconds" in one
        ]
        if seconds:
            found[config] = sorted(seconds)
    return found


def verdict(seconds: list[float], base: list[float]) -> str:
    """A gain counts where the difference of the medians exceeds the range of either."""
    gain = statistics.median(base) - statistics.median(seconds)
    spread = max(seconds[-1] - seconds[0], base[-1] - base[0])
    if len(seconds) < 2 or len(base) < 2:
        return f"{gain:+.1f} s, too few runs to say"
    return f"{gain:+.1f} s" if abs(gain) > spread else f"{gain:+.1f} s, within the range: no gain"


def table(done: list[dict[str, Any]]) -> str:
    lines = []
    for mode in MODES:
        found = summary(done, mode)
        if not found:
            continue
        lines += [f"Mode `{mode}`, seconds from the start of the process to the end of `warm_up`:", ""]
        lines += ["| configuration | runs | median | range | gain over torch's default |", "|---|---|---|---|---|"]
        for config, seconds in found.items():
            gain = "" if config == "default" or "default" not in found else verdict(seconds, found["default"])
            median = statistics.median(seconds)
            lines.append(
                f"| {NAMES[config]} | {len(seconds)} | {median:.1f} | {seconds[0]:.1f} to {seconds[-1]:.1f} | {gain} |"
            )
        lines.append("")
    return "\n".join(lines)


def svg(done: list[dict[str, Any]]) -> str:
    """A bar for each median, a line for each range."""
    rows = [(mode, config, seconds) for mode in MODES for config, seconds in summary(done, mode).items()]
    most = max(seconds[-1] for _, _, seconds in rows)
    left, scale, height = 250, 420 / most, 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="760" height="{len(rows) * height + 40}">',
        "<style>text { font: 13px sans-serif }</style>",
        f'<rect width="760" height="{len(rows) * height + 40}" fill="white"/>',
        '<text x="10" y="20">Cold start to the end of warm_up, seconds: median and range</text>',
    ]
    for number, (mode, config, seconds) in enumerate(rows):
        y, median = 32 + number * height, statistics.median(seconds)
        middle = y + 9
        color = {"early": "#2a7f62", "warm": "#b0b0b0"}.get(config, "#7aa6c2")
        low, high = left + seconds[0] * scale, left + seconds[-1] * scale
        parts += [
            f'<text x="10" y="{y + 14}">{NAMES[config]}{" · max-autotune" if mode != "default" else ""}</text>',
            f'<rect x="{left}" y="{y}" width="{median * scale:.1f}" height="18" fill="{color}"/>',
            f'<line x1="{low:.1f}" y1="{middle}" x2="{high:.1f}" y2="{middle}" stroke="black" stroke-width="2"/>',
            f'<text x="{high + 8:.1f}" y="{y + 14}">{median:.1f}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("workers_bench.jsonl"), help="file of JSON lines")
    parser.add_argument("--start-only", action="store_true", help="only time the call of start_workers")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--first-guess", type=float, default=60.0, help="seconds that a run may take")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=CONFIGS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--zoo", type=int, help=f"different kernels; {ZOO} where not given")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batches", nargs="+", type=int, default=(1, 4), help="batch sizes, one bucket each")
    parser.add_argument("--lanes", type=int, default=1, help="runs at once, each on its share of the CPUs")
    parser.add_argument("--cpus", nargs="*", type=int, default=(), help=argparse.SUPPRESS)
    parser.add_argument("--load-seconds", type=float, default=10.0)
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    parser.add_argument("--svg", type=Path, help="write the chart of what is there")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--config", choices=CONFIGS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start_only:
        print(start_only(arguments.runs))
    elif arguments.one:
        print(json.dumps(one_run(arguments)), flush=True)
    elif arguments.table or arguments.svg:
        done = read(arguments.out)
        print(table(done))
        if arguments.svg:
            arguments.svg.write_text(svg(done))
    else:
        run_all(arguments)
        print(table(read(arguments.out)))


if __name__ == "__main__":
    main()
