"""This machine as a device profile: costs fitted to a model's own forwards, reads timed one by one and in batches."""

from __future__ import annotations

import mmap
import os
import platform
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import psutil
import torch
from PIL import Image
from torch import Tensor

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, plan_for
from vismmoe.errors import UsageError
from vismmoe.experts.slabs import SlabPool
from vismmoe.experts.store import ExpertStore
from vismmoe.experts.transfers import CpuTransfers, batch_size
from vismmoe.limits import usable_cpus
from vismmoe.request import GenerationResult, Request
from vismmoe.session import Session
from vismmoe.simulate.profile import DeviceProfile
from vismmoe.trace import write_atomically
from vismmoe.types import ExpertId, ExpertLayout, LayerState, Predictor

LAYER_EXPERTS = 4.0  # as DeviceProfile assumes
_ROUNDS = 3
_BLOCK, _LONG_READ = 4096, 4 << 20


@dataclass
class LayerTimes:
    """A pipeline's watcher: what one router's forward found, and how long it was until the next one's."""

    rows: list[tuple[int, int, float]] = field(default_factory=list)  # tokens, distinct experts, seconds
    _last: tuple[float, int, int, int] | None = None  # when, layer, tokens, experts

    def __call__(self, session: Session, state: LayerState, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        now = time.perf_counter()
        if self._last is not None and state.layer > self._last[1]:  # not across steps: sampling lies in between
            began, _, tokens, experts = self._last
            self.rows.append((tokens, experts, now - began))
        self._last = (time.perf_counter(), state.layer, len(top_k_index), len(set(top_k_index.flatten().tolist())))


def layer_costs(engine: Engine, requests: Sequence[Request]) -> tuple[float, float, float]:
    """(seconds of a layer, of one run of one expert, of one token): least squares over the forwards of a resident
    engine, every layer weighing the same whether it is quick or slow."""
    seen: defaultdict[tuple[int, int, int, int], list[float]] = defaultdict(list)
    for _ in range(_ROUNDS):
        for number, request in enumerate(requests):
            times = LayerTimes()
            engine.watch(request, times)
            for place, (tokens, experts, seconds) in enumerate(times.rows):
                seen[number, place, tokens, experts].append(seconds)
    rows = np.array([(1.0, experts, tokens) for _, _, tokens, experts in seen])
    taken = np.array([statistics.median(values) for values in seen.values()])
    return fit_costs(rows, taken)


_Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def fit_costs(rows: _Floats, seconds: _Floats) -> tuple[float, float, float]:
    """Non-negative x with rows @ x nearest to seconds, by relative error: what would be negative is left out, one after
    the other. rows: (N, 3), seconds: (N,)."""
    rows = rows / seconds[:, None]
    columns = list(range(rows.shape[1]))
    while True:
        found = np.linalg.lstsq(rows[:, columns], np.ones(len(rows)), rcond=None)[0]
        if (found >= 0).all() or len(columns) == 1:
            break
        columns.pop(int(found.argmin()))
    out = np.zeros(rows.shape[1])
    out[columns] = np.maximum(found, 0.0)
    return float(out[0]), float(out[1]), float(out[2])


def read_costs(store: ExpertStore, layout: ExpertLayout, experts: Sequence[ExpertId]) -> tuple[float, float]:
    """(seconds before the first byte, bytes a second) of reads as the transfers ask for them: alone and in batches."""
    largest = min(batch_size(layout.expert_bytes), len(experts), 16)
    pool = SlabPool(largest, layout)
    medians = []
    for size in (1, largest):
        taken = []
        for start in range(0, min(len(experts) - size, 8 * size) + 1, size):
            items = [(expert, pool.buffer(slot)) for slot, expert in enumerate(experts[start : start + size])]
            began = time.perf_counter()
            store.read_batch(items)
            taken.append(time.perf_counter() - began)
        medians.append(statistics.median(taken))
    if largest == 1:
        return 0.0, layout.expert_bytes / medians[0]
    each = max((medians[1] - medians[0]) / (largest - 1), 1e-9)
    return max(0.0, medians[0] - each), layout.expert_bytes / each


class _Noted:
    """Masters that note when they are asked."""

    def __init__(self) -> None:
        self.asked = 0.0

    def read_batch(self, items: Sequence[tuple[ExpertId, memoryview]]) -> None:
        self.asked = time.perf_counter()


def wake_cost(layout: ExpertLayout) -> float:
    """Seconds from an order to an idle reader's beginning."""
    masters, taken = _Noted(), []
    with CpuTransfers(masters, SlabPool(1, layout)) as transfers:
        for number in range(40):
            began = time.perf_counter()
            ticket = transfers.speculate(ExpertId(0, number), 0)
            time.sleep(2e-3)  # the reader gets its chance
            transfers.drain()
            if ticket.done:
                taken.append(masters.asked - began)
    return statistics.median(taken) if taken else 1e-3


def memory_rate(layout: ExpertLayout) -> float:
    """Bytes of weights a second that one token's products pass through: matrices larger than any cache."""
    side = 4096
    weight = torch.ones(side, side, dtype=layout.dtype if layout.dtype == torch.bfloat16 else torch.float32)
    token = torch.ones(1, side, dtype=weight.dtype)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        torch.nn.functional.linear(token, weight)
        taken.append(time.perf_counter() - began)
    return weight.nbytes / min(taken)


def disk_costs(file: Path) -> tuple[float, float]:
    """(seconds before the first byte, bytes a second) of reads of one block and of many, past the page cache where the
    file system can."""
    long = max(_BLOCK, min(_LONG_READ, file.stat().st_size // 4) // _BLOCK * _BLOCK)
    try:
        short_s, long_s = (_read_s(file, length, getattr(os, "O_DIRECT", 0)) for length in (_BLOCK, long))
    except OSError:
        short_s, long_s = (_read_s(file, length, 0) for length in (_BLOCK, long))
    rate = (long - _BLOCK) / max(long_s - short_s, 1e-9)
    return max(0.0, short_s - _BLOCK / rate), rate


def _read_s(file: Path, length: int, direct: int) -> float:
    taken, blocks = [], max(1, (file.stat().st_size - length) // _BLOCK)
    with memoryview(mmap.mmap(-1, length)) as buffer:  # starts on a page, as direct reads want it
        descriptor = os.open(file, os.O_RDONLY | direct)
        try:
            for turn in range(8):
                began = time.perf_counter()
                os.preadv(descriptor, [buffer], blocks * turn // 8 * _BLOCK)
                taken.append(time.perf_counter() - began)
        finally:
            os.close(descriptor)
    return statistics.median(taken)


def access_cost(
    config: EngineConfig, requests: Sequence[Request], resident_ms: float, guide: Predictor | None
) -> float:
    """Seconds that a needed expert costs beside its arithmetic and the wait for it, when it is not pinned: the rest of
    the time that an engine under a budget takes longer than a resident one (resident_ms for the same requests)."""
    spent = accesses = 0.0
    with Engine.load(config, guide) as engine:
        for _ in range(_ROUNDS):
            results = [engine.generate(request) for request in requests]
            spent += sum(_forward_ms(result) for result in results)
            for result in results:
                both = result.experts.prefill + result.experts.decode
                spent -= both.stall_ms + result.timing_ms.predictor
                accesses += both.accesses
    return max(0.0, (spent - _ROUNDS * resident_ms) / max(1.0, accesses)) / 1e3


def forward_ms(engine: Engine, requests: Sequence[Request]) -> float:
    """Milliseconds of prefill and decode over all requests, a mean of rounds."""
    return sum(_forward_ms(engine.generate(each)) for _ in range(_ROUNDS) for each in requests) / _ROUNDS


def _forward_ms(result: GenerationResult) -> float:
    return result.timing_ms.prefill + result.timing_ms.decode


def budget(config: EngineConfig, fraction: float) -> EngineConfig:
    """The same on this CPU with so much of the way from the least memory that runs to everything resident."""
    plan = plan_for(PlanConfig(model=config.model, device="cpu", prefix_layers=config.prefix_layers))
    room = plan.all_resident_bytes - plan.minimum_bytes
    return replace(config, device="cpu", device_memory=plan.minimum_bytes + int(room * fraction))


def measured_profile(engine: Engine, requests: Sequence[Request], name: str) -> DeviceProfile:
    """The machine as `engine`, whose experts are all resident, finds it; without access_ms."""
    layout = engine.checkpoint.layout
    size = layout.expert_bytes
    layer_s, expert_s, token_s = layer_costs(engine, requests)
    weights = memory_rate(layout)
    file = max((r.file for ranges in layout.ranges.values() for r in ranges), key=lambda path: path.stat().st_size)
    disk_s, disk_rate = disk_costs(file)
    flops = size * (engine.spec.top_k + LAYER_EXPERTS) / max(token_s, 1e-9)
    return DeviceProfile(
        name=name,
        device_memory=psutil.virtual_memory().total,
        disk_rate=int(disk_rate),
        disk_ms=round(disk_s * 1e3, 4),
        wake_ms=round(wake_cost(layout) * 1e3, 4),
        memory_rate=int(weights),
        compute_rate=float(f"{flops:.3g}"),
        expert_ms=round(max(0.0, expert_s - size / weights) * 1e3, 4),
        layer_ms=round(max(0.0, layer_s - LAYER_EXPERTS * size / weights) * 1e3, 4),
        layer_experts=LAYER_EXPERTS,
    )


def measure_profile(model: str, file: Path) -> str:
    """Measure this machine with `model`, write the profile, and say what it says. UsageError when it cannot be
    written."""
    config = EngineConfig(model=model, device="cpu")
    with Engine.load(config) as engine:
        requests = sample_requests()
        profile = measured_profile(engine, requests, f"{usable_cpus()} CPU cores, {platform.machine()}")
        resident_ms = forward_ms(engine, requests)
    access_ms = access_cost(budget(config, 0.3), requests, resident_ms, None) * 1e3
    profile = replace(profile, access_ms=round(access_ms, 4))
    lines = [f"# Measured with {Path(model).name} on {profile.name}, by `vismmoe simulate --measure-profile`."]
    lines += [f"{name}: {value}" for name, value in vars(profile).items() if value is not None]
    text = "\n".join(lines) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
    except OSError as error:
        raise UsageError(f"The profile cannot be written to {file}: {error.strerror}.") from None
    return f"{text}\nReplay with it: vismmoe simulate --traces DIR --profile {file}"


def sample_requests() -> list[Request]:
    """Prefills of different lengths: with and without pictures."""
    words = "Which objects do you see, what are their colours and where in the image do they stand?"
    pictures = [Image.new("RGB", (side, side), "gray") for side in (64, 128, 256)]
    return [
        Request((), "Is there a circle?", max_new_tokens=6),
        Request((), " ".join([words] * 6), max_new_tokens=6),
        *(Request((picture,), words, max_new_tokens=6) for picture in pictures),
    ]
