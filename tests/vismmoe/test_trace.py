"""Routing logs: what is written is read back, nothing half-written, nothing mixed, nothing repeated or lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vismmoe.errors import CorpusError
from vismmoe.trace import TraceHeader, TraceSet, TraceWriter, read_header, read_traces
from vismmoe.types import ModelSpec, RequestRecord, RoutingRecord

SPEC = ModelSpec("tiny", 3, (1, 2), num_experts=4, top_k=2, hidden_size=3, expert_width=4, fingerprint="abc")
HEADER = TraceHeader(SPEC, 0.5, "affinity", window=2, settings={"prefix_layers": 1})


def item(name: str, steps: int = 2) -> tuple[RequestRecord, list[RoutingRecord]]:
    random = torch.Generator().manual_seed(sum(name.encode()))
    rows = []
    for step in range(steps):
        for layer in SPEC.moe_layers:
            mean = torch.full((3,), float(layer))
            rows.append(
                RoutingRecord(
                    request=77,
                    step=step,
                    phase="decode" if step else "prefill",
                    layer=layer,
                    counts=torch.randint(5, (4,), generator=random),
                    gate_mass=torch.rand(4, generator=random),
                    retained_mean=mean,
                    token=torch.randn(3, generator=random),
                    own_gate=torch.rand(4, generator=random),
                    next_gate=torch.rand(2, 4, generator=random),
                )
            )
    return RequestRecord(77, name, f"What is {name}?", "a cat", 16, 8, steps, torch.randn(3, generator=random)), rows


def write(folder: Path, *names: str, header: TraceHeader = HEADER, resume: bool = False, shard_items: int = 2) -> Path:
    with TraceWriter(folder, header, resume, shard_items) as writer:
        for name in names:
            writer.add(*item(name))
    return folder


def items(traces: TraceSet) -> list[str]:
    return [request.item for request in traces.requests]


def test_rows_and_requests_come_back_as_they_were_written(tmp_path: Path) -> None:
    traces = read_traces([write(tmp_path / "logs", "a", "b", "c")])
    request, rows = item("b")
    assert items(traces) == ["a", "b", "c"]
    assert traces.header == HEADER
    assert len(traces) == 12
    at = (traces.request == 1).nonzero().flatten()
    assert traces.requests[1] == replace(request, request=1, visual_summary=traces.requests[1].visual_summary)
    for place, row in zip(at.tolist(), rows, strict=True):
        assert (traces.step[place], traces.layer[place], bool(traces.decode[place])) == (
            row.step, row.layer, row.phase == "decode"
        )  # fmt: skip
        assert torch.equal(traces.counts[place], row.counts.int())
        assert torch.equal(traces.gate_mass[place], row.gate_mass)
        assert torch.equal(traces.own_gate[place], row.own_gate)
        assert torch.equal(traces.next_gate[place], row.next_gate)
        torch.testing.assert_close(traces.token[place].float(), row.token, atol=2e-3, rtol=2e-3)
        assert traces.retained_mean[traces.retained_row[place]].float().tolist() == row.retained_mean.tolist()


def test_two_folders_of_one_model_are_read_as_one(tmp_path: Path) -> None:
    traces = read_traces([write(tmp_path / "one", "a", "b", "c"), write(tmp_path / "two", "d")])
    assert items(traces) == ["a", "b", "c", "d"]
    assert traces.request.unique().tolist() == [0, 1, 2, 3]
    assert [request.request for request in traces.requests] == [0, 1, 2, 3]


def test_a_folder_named_twice_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "logs", "a")
    with pytest.raises(CorpusError, match="twice"):
        read_traces([folder, tmp_path / "." / "logs"])


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(HEADER, keep_ratio=0.7), "keep_ratio"),
        (replace(HEADER, compressor="random"), "compressor"),
        (replace(HEADER, window=3), "window"),
        (replace(HEADER, settings={"prefix_layers": 2}), "settings.prefix_layers"),
        (replace(HEADER, spec=replace(SPEC, fingerprint="xyz")), "spec.fingerprint"),
    ],
)
def test_logs_of_other_models_or_settings_do_not_mix(tmp_path: Path, other: TraceHeader, told: str) -> None:
    folders = [write(tmp_path / "one", "a"), tmp_path / "two"]
    with TraceWriter(folders[1], other) as writer:
        request, rows = item("b")
        writer.add(request, [replace(row, next_gate=torch.zeros(other.window, 4)) for row in rows])
    with pytest.raises(CorpusError, match=f"do not mix.*{told}"):
        read_traces(folders)
    with pytest.raises(CorpusError, match=f"do not mix.*{told}"):
        TraceWriter(folders[0], other, resume=True)


def test_a_folder_with_logs_is_not_written_to_unless_asked(tmp_path: Path) -> None:
    folder = write(tmp_path / "logs", "a")
    with pytest.raises(CorpusError, match="--resume"):
        TraceWriter(folder, HEADER)


def test_going_on_keeps_what_is_there_and_knows_its_items(tmp_path: Path) -> None:
    folder = write(tmp_path / "logs", "a", "b", "c")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with TraceWriter(folder, HEADER, resume=True) as writer:
        assert writer.items == {"a", "b", "c"}
        with pytest.raises(CorpusError, match="'a' is in"):
            writer.add(*item("a"))
        writer.add(*item("d"))
    assert items(read_traces([folder])) == ["a", "b", "c", "d"]
    assert all((folder / name).read_bytes() == data for name, data in before.items())


def test_nothing_is_written_before_there_is_something_to_keep(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "logs", HEADER):
        pass
    assert not (tmp_path / "logs").exists()


def test_whole_items_survive_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TraceWriter(tmp_path / "logs", HEADER) as writer:  # noqa: PT012
        writer.add(*item("a"))
        raise KeyboardInterrupt
    assert items(read_traces([tmp_path / "logs"])) == ["a"]


def test_a_large_item_does_not_wait_for_its_shard_to_fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vismmoe.trace.MAX_PENDING_BYTES", 10)
    with TraceWriter(tmp_path / "logs", HEADER, shard_items=100) as writer:
        writer.add(*item("a"))
        assert (tmp_path / "logs/shard-00000.safetensors").exists()


WRITE_UNTIL_KILLED = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("logs", sys.argv[1])
logs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(logs)
with logs.TraceWriter(Path(sys.argv[2]), logs.HEADER, resume=True, shard_items=3) as writer:
    for number in range(int(sys.argv[3])):
        if f"i{number}" not in writer.items:
            writer.add(*logs.item(f"i{number}"))
"""


def test_after_a_kill_no_item_is_lost_or_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    command = [sys.executable, "-c", WRITE_UNTIL_KILLED, __file__, str(folder), "1000000"]
    with subprocess.Popen(command) as process:
        while len(list(folder.glob("shard-*.safetensors"))) < 3 and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL  # it was at work, not done
    (folder / "shard-99999.safetensors.partial").write_bytes(b"cut off")
    done = len(items(read_traces([folder])))
    assert done >= 9
    with TraceWriter(folder, HEADER, resume=True, shard_items=3) as writer:
        for number in range(done + 10):
            if f"i{number}" not in writer.items:
                writer.add(*item(f"i{number}"))
    assert sorted(items(read_traces([folder]))) == sorted(f"i{number}" for number in range(done + 10))
    assert not list(folder.glob("*.partial"))


def test_a_damaged_shard_is_named_with_the_way_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "logs", "a", "b", "c")
    shard = folder / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    with pytest.raises(CorpusError, match=r"shard-00001.*--resume"):
        read_traces([folder])


def test_a_shard_of_another_form_is_refused(tmp_path: Path) -> None:
    folder, strange = write(tmp_path / "logs", "a"), write(tmp_path / "strange", "b")
    wide = replace(HEADER, spec=replace(SPEC, num_experts=5))
    (folder / "header.json").write_text(json.dumps(wide.to_json()))
    os.replace(strange / "shard-00000.safetensors", folder / "shard-00001.safetensors")
    with pytest.raises(CorpusError, match="counts is"):
        read_traces([folder])


@pytest.mark.parametrize(
    ("text", "told"),
    [("{", "not JSON"), ("[]", "not the header"), ('{"schema": "vismmoe-routing-log", "version": 9}', "version 9"),
     ('{"schema": "vismmoe-routing-log", "version": 1}', "incomplete")],
)  # fmt: skip
def test_a_wrong_header_is_refused_in_a_sentence(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "header.json").write_text(text)
    with pytest.raises(CorpusError, match=told):
        read_header(tmp_path)


def change_header(folder: Path, **changes: Any) -> None:
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps({**header, **changes}))


@pytest.mark.parametrize(
    "change",
    [
        {"keep_ratio": float("nan")}, {"keep_ratio": 0}, {"compressor": [1]}, {"window": "2"}, {"window": 10**12},
        {"settings": [1]}, {"settings": {"prefix_layers": "x"}}, {"settings": {"prefix_layers": 10**9}}, {"spec": [1]},
        {"spec": {**asdict(SPEC), "hidden_size": 10**15}},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_of_values_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write(tmp_path / "logs", "a")
    change_header(folder, **change)
    with pytest.raises(CorpusError, match=r"header\.json"):
        read_traces([folder])


def rewrite(folder: Path, *, items: str | None = None, **tensors: Any) -> None:
    """Change the tensors (functions of what they were) or the list of items of the first shard."""
    file = folder / "shard-00000.safetensors"
    with safe_open(file, framework="pt") as held:
        told, old = held.metadata()["requests"], {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    new = {name: tensors[name](value) if name in tensors else value for name, value in old.items()}
    save_file(new, file, metadata={"requests": items or told})


@pytest.mark.parametrize(
    "change",
    [
        {"items": "[" * 200_000},
        {"items": '[{"item": [1]}]'},
        {"request": lambda held: torch.tensor(1, dtype=torch.int32)},
        {"gate_mass": lambda held: held * float("nan")},
        {"token": lambda held: held * float("inf")},
        {"counts": lambda held: -held - 1},
        {"step": lambda held: held - 1},
    ],
    ids=["deep", "item that is a list", "scalar", "nan", "infinity", "negative counts", "negative steps"],
)
def test_a_shard_of_values_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write(tmp_path / "logs", "a", "b")
    rewrite(folder, **change)
    with pytest.raises(CorpusError, match=r"shard-00000.*is damaged"):
        read_traces([folder])


@pytest.mark.parametrize("cut", [0, 4, 8, 20, 300, 900])
def test_a_shard_cut_anywhere_is_refused_in_a_sentence(tmp_path: Path, cut: int) -> None:
    shard = write(tmp_path / "logs", "a") / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(CorpusError, match=r"shard-00000.*is damaged"):
        read_traces([tmp_path / "logs"])


def test_a_pipe_in_place_of_a_shard_is_not_waited_for(tmp_path: Path) -> None:
    shard = write(tmp_path / "logs", "a") / "shard-00000.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CorpusError, match="no regular file"):
        read_traces([tmp_path / "logs"])


def test_a_copied_shard_does_not_count_twice(tmp_path: Path) -> None:
    folder = write(tmp_path / "logs", "a")
    shutil.copy(folder / "shard-00000.safetensors", folder / "shard-00007.safetensors")
    with pytest.raises(CorpusError, match="an item twice"):
        read_traces([folder])


def test_a_folder_without_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no routing logs"):
        read_traces([tmp_path])
    with pytest.raises(CorpusError, match="No folder"):
        read_traces([])


def test_values_beyond_half_precision_are_cut_not_made_infinite(tmp_path: Path) -> None:
    request, rows = item("a")
    with TraceWriter(tmp_path / "logs", HEADER) as writer:
        writer.add(request, [replace(row, token=torch.full((3,), 1e6)) for row in rows])
    assert torch.isfinite(read_traces([tmp_path / "logs"]).token).all()
