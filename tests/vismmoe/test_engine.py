"""Whatever the memory, answers and logits are those of the resident model, byte for byte."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vismmoe.config import EngineConfig, PlanConfig
from vismmoe.engine import Engine, Request, plan_for
from vismmoe.errors import BudgetError, CheckpointError, ImageError, UsageError
from vismmoe.experts import places
from vismmoe.experts.store import ExpertStore
from vismmoe.models.checkpoint import open_checkpoint
from vismmoe.predictors.next_gate import NextGate
from vismmoe.types import LayerState

LAYERS, EXPERTS, TOP_K = 6, 16, 4
TOKENS = 8


@pytest.fixture(scope="module")
def question(picture: Image.Image) -> Request:
    return Request((picture,), "What is this?", TOKENS)


@pytest.fixture(scope="module")
def resident(tiny_checkpoint: Path, question: Request, answer: Callable[..., Any]) -> Any:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        return answer(engine, question)


def guided(config: EngineConfig, window: int = 3) -> Engine:
    """An engine that prefetches what the next gate foresees."""
    with Engine.load(config) as plain:
        gate = NextGate(plain.spec, plain.routers, plain.router_norms, window)
    return Engine.load(config, gate)


def reader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vismmoe-reader")]


# -- identity ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", ["on", "off"])
@pytest.mark.parametrize("slabs", [1, 2, TOP_K, 23, LAYERS * EXPERTS])
def test_streaming_from_disk_changes_no_bit(
    tiny_checkpoint: Path, question: Request, resident: Any, answer: Any, force_plan: Any, slabs: int, direct_io: Any
) -> None:
    force_plan(slabs=slabs, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), direct_io=direct_io)) as engine:
        assert answer(engine, question).same_bits(resident)


@pytest.mark.parametrize("slabs", [1, TOP_K, 11, 40])
@pytest.mark.usefixtures("slow_store")
def test_prefetching_beside_a_slow_disk_changes_no_bit(
    tiny_checkpoint: Path, question: Request, resident: Any, answer: Any, force_plan: Any, slabs: int
) -> None:
    force_plan(slabs=slabs, pinned_layers=1)
    with guided(EngineConfig(model=str(tiny_checkpoint), readers=2)) as engine:
        told = answer(engine, question)
        assert told.same_bits(resident)
        assert answer(engine, question).same_bits(resident), "the second request on the same engine"
    assert (told.result.experts.decode.prefetched > 0) == (slabs > TOP_K)


@pytest.mark.parametrize("hybrid", ["auto", "off"])
@pytest.mark.parametrize("copies", [1, 9, 200])
@pytest.mark.usefixtures("slow_store")
def test_experts_in_host_memory_change_no_bit_run_there_or_moved_up(
    tiny_checkpoint: Path, question: Request, resident: Any, answer: Any, force_plan: Any, hybrid: Any, copies: int
) -> None:
    size = open_checkpoint(tiny_checkpoint).layout.expert_bytes
    force_plan(slabs=TOP_K, pinned_layers=1, host={"expert_copies": copies * size})
    with guided(EngineConfig(model=str(tiny_checkpoint), hybrid=hybrid, readers=2)) as engine:
        told = answer(engine, question)
        assert told.same_bits(resident)
        again = answer(engine, question)
        assert again.same_bits(resident), "the second request on the same engine"
    assert 0 < told.result.memory.host_peak_bytes <= copies * size
    experts = again.result.experts
    if copies > 1:
        assert (experts.prefill.cpu_runs + experts.decode.cpu_runs > 0) == (hybrid == "auto")
    for phase in (experts.prefill, experts.decode):
        assert phase.accesses == phase.hits + phase.demand_loads + phase.cpu_runs


def test_one_tensor_per_file_changes_no_bit(
    checkpoint_copy: Path, question: Request, resident: Any, answer: Any, force_plan: Any, spread_over_files: Any
) -> None:
    force_plan(slabs=TOP_K, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(spread_over_files(checkpoint_copy)))) as engine:
        assert answer(engine, question).same_bits(resident)
        assert len(list(checkpoint_copy.glob("model-*.safetensors"))) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_odd_shapes_and_other_number_formats_change_no_bit(
    tmp_path: Path, make_tiny: Any, question: Request, answer: Any, force_plan: Any, dtype: torch.dtype
) -> None:
    folder = make_tiny(tmp_path, dtype=dtype, width=21, tied=True)
    with Engine.load(EngineConfig(model=str(folder))) as engine:
        wanted = answer(engine, question)
    force_plan(slabs=5, pinned_layers=2)
    with guided(EngineConfig(model=str(folder))) as engine:
        assert answer(engine, question).same_bits(wanted)


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [True, False])
def test_sixteen_bit_arithmetic_changes_no_bit_whichever_way_weights_lie(
    tmp_path: Path,
    make_tiny: Any,
    question: Request,
    answer: Any,
    force_plan: Any,
    compute_dtype: Any,
    transposed: bool,
) -> None:
    def straight(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: value.transpose(1, 2).contiguous() if ".experts." in name else value
            for name, value in tensors.items()
        }

    folder = make_tiny(tmp_path, dtype=getattr(torch, compute_dtype), change=None if transposed else straight)
    config = EngineConfig(model=str(folder), compute_dtype=compute_dtype)
    with Engine.load(config) as engine:
        assert {part.transposed for part in engine.checkpoint.layout.parts} == {transposed}
        wanted = answer(engine, question)
    force_plan(slabs=5, pinned_layers=1)
    with guided(config) as engine:
        assert answer(engine, question).same_bits(wanted)


@pytest.mark.parametrize("pad", [0, 1, 2, 5, 8, 4093])
def test_reading_straight_into_place_changes_no_bit_wherever_the_file_s_tensors_begin(
    checkpoint_copy: Path, question: Request, answer: Any, force_plan: Any, monkeypatch: pytest.MonkeyPatch, pad: int
) -> None:
    """As if these experts were large. Pinned, streamed and in the host tier each has the file's own alignment."""
    monkeypatch.setattr(places, "DIRECT_FROM_BYTES", 1)
    weights = checkpoint_copy / "model.safetensors"
    raw = weights.read_bytes()
    header = int.from_bytes(raw[:8], "little")
    weights.write_bytes((header + pad).to_bytes(8, "little") + raw[8 : 8 + header] + b" " * pad + raw[8 + header :])
    config = EngineConfig(model=str(checkpoint_copy), direct_io="on", compute_dtype="bfloat16", readers=2)
    with Engine.load(config) as engine:
        wanted = answer(engine, question)
        size = engine.checkpoint.layout.expert_bytes
    force_plan(slabs=6, pinned_layers=1, host={"expert_copies": 9 * (size + 4 * places.BLOCK)})
    with guided(config) as engine:
        assert answer(engine, question).same_bits(wanted)
        assert answer(engine, question).same_bits(wanted)
        pool = engine._pipeline._slabs
        assert pool.places.slab_bytes > size
        odd = bool(pad % 2)
        for expert, ranges in engine.checkpoint.layout.ranges.items():
            begin = pool.weights(0, expert)["gate_up_proj"].data_ptr() % places.BLOCK
            assert begin == (0 if odd else ranges[0].offset % places.BLOCK)


def test_a_quarter_of_the_way_from_minimum_to_all_resident_changes_no_bit(
    tiny_checkpoint: Path, question: Request, resident: Any, answer: Any
) -> None:
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint)))
    budget = plan.minimum_bytes + (plan.all_resident_bytes - plan.minimum_bytes) // 4
    for prefetch in (False, True):
        with guided(EngineConfig(model=str(tiny_checkpoint), device_memory=budget, prefetch=prefetch)) as engine:
            told = answer(engine, question)
        assert told.same_bits(resident)
        assert (told.result.experts.decode.prefetched > 0) == prefetch


def test_these_comparisons_streamed_at_all(tiny_checkpoint: Path, question: Request, force_plan: Any) -> None:
    force_plan(slabs=TOP_K, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        told = engine.generate(question).experts
    for phase in (told.prefill, told.decode):
        assert phase.bytes_loaded > 0
        assert phase.hits < phase.accesses
    assert told.evictions > 0
    assert told.slabs == TOP_K


def test_answers_are_those_of_transformers_itself(
    tiny_checkpoint: Path, question: Request, answer: Any, picture: Image.Image
) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(tiny_checkpoint)
    model = AutoModelForImageTextToText.from_pretrained(
        tiny_checkpoint, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[picture], return_tensors="pt")
    out = model.generate(
        **inputs, do_sample=False, max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True
    )
    told = processor.tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), compute_dtype="float32")) as engine:
        exact = answer(engine, question)
    assert exact.result.text == told
    for ours, theirs in zip(exact.logits, out.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# -- requests ---------------------------------------------------------------------------------------------------------


def test_requests_do_not_influence_each_other(
    tiny_checkpoint: Path, question: Request, resident: Any, answer: Any, make_picture: Any, force_plan: Any
) -> None:
    force_plan(slabs=9, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        engine.generate(Request((make_picture(96, 80), make_picture(32, 40, 1)), "Two?", 3, keep_ratio=0.5))
        engine.generate(Request((), "No image at all.", 3))
        assert answer(engine, question).same_bits(resident)


def test_the_report_adds_up(tiny_checkpoint: Path, question: Request, force_plan: Any) -> None:
    force_plan(slabs=12, pinned_layers=1)
    with guided(EngineConfig(model=str(tiny_checkpoint))) as engine:
        reports = [engine.generate(question).to_json() for _ in range(2)]
    for report in reports:
        for phase in ("prefill", "decode"):
            counts = report["experts"][phase]
            assert counts["accesses"] == counts["hits"] + counts["demand_loads"] + counts["cpu_runs"]
            assert 0 <= counts["prefetched_used"] <= counts["prefetched"]
        assert report["experts"]["decode"]["accesses"] == (TOKENS - 1) * (LAYERS - 1) * TOP_K
        assert report["experts"]["decode"]["prefetched_used"] > 0
        assert report["usage"] == {
            "prompt_tokens": report["usage"]["prompt_tokens"], "visual_tokens": 12, "kept_visual_tokens": 12,
            "completion_tokens": TOKENS, "cached_tokens": 0,
        }  # fmt: skip
        assert report["predictor"] == {"kind": "next-gate", "window": 3, "source": None, "version": None}
        assert report["timing_ms"]["predictor"] > 0
        assert report["timing_ms"]["total"] >= report["timing_ms"]["prefill"] + report["timing_ms"]["decode"]
        assert report["finish_reason"] == "length"


def test_every_byte_of_an_expert_that_was_loaded_is_counted(
    tiny_checkpoint: Path, question: Request, force_plan: Any
) -> None:
    force_plan(slabs=TOP_K, pinned_layers=1)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        told = engine.generate(question).experts
        size = engine.checkpoint.layout.expert_bytes
    for phase in (told.prefill, told.decode):
        assert phase.bytes_loaded == phase.demand_loads * size


def test_an_answer_stops_at_the_end_token(tmp_path: Path, make_tiny: Any, question: Request, resident: Any) -> None:
    import json

    folder = make_tiny(tmp_path)
    with Engine.load(EngineConfig(model=str(folder))) as engine:
        third = engine._processor.tokenizer(resident.result.text)["input_ids"][2]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [third], "do_sample": True}))
    with Engine.load(EngineConfig(model=str(folder))) as engine:
        told = engine.generate(question)
    assert told.finish_reason == "stop"
    assert told.usage.completion_tokens <= 3


def test_streamed_pieces_are_the_text(tiny_checkpoint: Path, question: Request) -> None:
    pieces: list[str] = []
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        told = engine.generate(question, pieces.append)
    assert "".join(pieces) == told.text


# -- compression ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["affinity", "random", "saliency", "uniform"])
@pytest.mark.parametrize("ratio", [0.7, 0.5, 0.05])
def test_floor_of_the_asked_share_of_visual_tokens_is_kept(
    tiny_checkpoint: Path, picture: Image.Image, ratio: float, method: str
) -> None:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        told = engine.generate(Request((picture,), "Hm?", 2, ratio, method))
    assert told.usage.kept_visual_tokens == int(ratio * 12)
    assert told.timing_ms.compress > 0


@pytest.mark.parametrize("prefix", [1, 2, 4])
def test_compression_equals_masking_the_dropped_tokens_in_the_deeper_layers(
    tiny_checkpoint: Path, picture: Image.Image, answer: Any, prefix: int
) -> None:
    """The independent computation keeps all rows and hides the dropped ones from attention after the prefix."""
    seen: list[Any] = []
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), prefix_layers=prefix, compute_dtype="float32")) as engine:
        open_session = engine._open_session
        engine._open_session = lambda *args: seen.append(open_session(*args)) or seen[-1]  # type: ignore[method-assign]
        told = answer(engine, Request((picture,), "What is this?", 4, 0.5, "random"))
        kept = seen[0].kept()
        inputs = {name: value.clone() for name, value in seen[0].prompt.inputs.items()}
    assert len(kept) == seen[0].prompt.tokens - 6
    wanted = _masked_logits(tiny_checkpoint, inputs, kept, prefix, steps=4)
    for ours, theirs in zip(told.logits, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def _masked_logits(folder: Path, inputs: dict[str, Any], kept: Any, prefix: int, steps: int) -> list[Any]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    ).eval()
    tokens = inputs["input_ids"].shape[1]
    dropped = torch.ones(tokens, dtype=torch.bool)
    dropped[kept] = False

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        rows = args[0].shape[1]
        columns = tokens + len(logits)  # one more token a step
        mask = torch.zeros(rows, columns)
        if rows > 1:
            mask.masked_fill_(torch.ones(rows, columns, dtype=torch.bool).triu(1), -torch.inf)
        hidden = torch.nn.functional.pad(dropped, (0, columns - tokens))
        mask[:, hidden] = -torch.inf
        if rows > 1:
            mask.fill_diagonal_(0)  # a dropped row sees itself, so that its softmax is defined
        return args, {**kwargs, "attention_mask": mask[None, None]}

    logits: list[Any] = []
    for layer in model.model.language_model.layers[prefix:]:
        layer.register_forward_pre_hook(hide, with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: logits.append(output.logits[0, -1:]))
    with torch.inference_mode():
        model.generate(**inputs, do_sample=False, max_new_tokens=steps)
    return logits


def test_a_budget_changes_no_compressed_answer(
    tiny_checkpoint: Path, picture: Image.Image, answer: Any, force_plan: Any
) -> None:
    request = Request((picture,), "What is this?", TOKENS, 0.5)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), prefix_layers=2)) as engine:
        wanted = answer(engine, request)
        all_tokens = answer(engine, Request((picture,), "What is this?", TOKENS))
    assert not wanted.same_bits(all_tokens)
    force_plan(slabs=TOP_K, pinned_layers=2)
    with guided(EngineConfig(model=str(tiny_checkpoint), prefix_layers=2)) as engine:
        assert answer(engine, request).same_bits(wanted)


# -- recording --------------------------------------------------------------------------------------------------------


def test_recording_notes_every_layer_of_every_forward(tiny_checkpoint: Path, picture: Image.Image) -> None:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), prefix_layers=2)) as engine:
        told = engine.record(Request((picture,), "What is this?", 3, 0.5), request_id=7, item="cat.png", window=2)
        plain = engine.generate(Request((picture,), "What is this?", 3, 0.5))
    assert told.result.text == plain.text
    assert (told.request.request, told.request.item, told.request.answer) == (7, "cat.png", plain.text)
    assert [(r.step, r.layer) for r in told.routing] == [(s, layer) for s in range(3) for layer in range(LAYERS)]
    prompt = plain.usage.prompt_tokens
    for record in told.routing:
        tokens = 1 if record.step else prompt - (6 if record.layer >= 2 else 0)
        assert record.phase == ("decode" if record.step else "prefill")
        assert int(record.counts.sum()) == tokens * TOP_K
        assert float(record.gate_mass.sum()) == pytest.approx(
            tokens, rel=1e-3
        )  # summed in bfloat16 where a machine has it
        assert record.next_gate.shape == (2, EXPERTS)
    decode_means = {r.layer: r.retained_mean for r in told.routing if r.step == 0}
    assert all(torch.equal(r.retained_mean, decode_means[r.layer]) for r in told.routing)
    assert told.request.visual_summary.abs().sum() > 0


def test_next_gate_zero_layers_ahead_is_the_router_itself(tiny_checkpoint: Path, question: Request) -> None:
    seen: list[tuple[LayerState, Any]] = []
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        gate = NextGate(engine.spec, engine.routers, engine.router_norms, 1)
        pipeline = engine._pipeline
        run_layer = pipeline.run_layer
        pipeline.run_layer = lambda s, m, layer, hidden, index, weights: (  # type: ignore[method-assign]
            seen.append((hidden, (layer, index))),
            run_layer(s, m, layer, hidden, index, weights),
        )[1]
        engine.generate(question)
    decoded = [(hidden, layer, index) for hidden, (layer, index) in seen if len(hidden) == 1]
    assert decoded
    for hidden, layer, index in decoded:
        assert set(gate.here(layer, hidden).topk(TOP_K).indices.tolist()) == set(index[0].tolist())


# -- failures ---------------------------------------------------------------------------------------------------------


def test_an_interruption_leaves_no_thread(tiny_checkpoint: Path, question: Request, force_plan: Any) -> None:
    force_plan(slabs=TOP_K, pinned_layers=1)

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    engine = Engine.load(EngineConfig(model=str(tiny_checkpoint)))
    assert reader_threads()
    with pytest.raises(KeyboardInterrupt):
        engine.generate(question, interrupt)
    assert not reader_threads()
    with pytest.raises(UsageError, match="closed"):
        engine.generate(question)


@pytest.mark.parametrize("reads", [3, 200], ids=["in the prefill", "in decode"])
def test_ctrl_c_in_the_middle_of_reads_leaves_no_thread(
    tiny_checkpoint: Path, question: Request, force_plan: Any, monkeypatch: pytest.MonkeyPatch, reads: int
) -> None:
    """A real signal while readers and the computing thread wait for a disk."""
    force_plan(slabs=TOP_K, pinned_layers=1)
    read, count = ExpertStore.read_batch, itertools.count(1)

    def counted(self: ExpertStore, items: Sequence[Any], paced: bool = True) -> None:
        if next(count) == reads:
            os.kill(os.getpid(), signal.SIGALRM)
        read(self, items, paced)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = Engine.load(EngineConfig(model=str(tiny_checkpoint), readers=2))
    monkeypatch.setattr(ExpertStore, "read_batch", counted)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(Request(question.images, question.prompt, 500))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not reader_threads()
    with pytest.raises(UsageError, match="closed"):
        engine.generate(question)


@pytest.mark.parametrize("where", ["load_model", "ExpertPipeline._load_pinned", "StackHooks"])
def test_an_interruption_while_loading_leaves_no_thread(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"vismmoe.engine.{where}", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Engine.load(EngineConfig(model=str(tiny_checkpoint)))
    assert not reader_threads()


def test_an_engine_goes_on_after_a_read_error(
    tiny_checkpoint: Path, question: Request, resident: Any, answer: Any, force_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    force_plan(slabs=7, pinned_layers=1)
    read = ExpertStore.read_batch
    broken: list[bool] = []

    def failing(self: ExpertStore, items: Sequence[Any], paced: bool = True) -> None:
        if broken and any(expert.layer == 3 for expert, _ in items):
            raise OSError("disk on fire")
        read(self, items, paced)

    monkeypatch.setattr(ExpertStore, "read_batch", failing)
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine:
        broken.append(True)
        with pytest.raises(CheckpointError, match="layer 3"):
            engine.generate(question)
        broken.clear()
        assert answer(engine, question).same_bits(resident)
    assert not reader_threads()


def test_a_request_that_outgrows_the_budget_is_refused_before_it_runs(
    tiny_checkpoint: Path, picture: Image.Image
) -> None:
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint)))
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), device_memory=plan.minimum_bytes)) as engine:
        with pytest.raises(BudgetError, match="--device-memory"):
            engine.generate(Request((picture,), "Long?", 100_000))
        assert engine.generate(Request((picture,), "Short?", 2)).text


def test_slabs_make_room_for_a_longer_answer_and_the_named_budget_is_accepted(
    tiny_checkpoint: Path, picture: Image.Image
) -> None:
    request = Request((picture,), "Long?", 20_000)
    plan = plan_for(PlanConfig(model=str(tiny_checkpoint)))
    with (
        Engine.load(EngineConfig(model=str(tiny_checkpoint), device_memory=plan.minimum_bytes)) as engine,
        pytest.raises(BudgetError, match=r"up to 200\d\d tokens in all") as refused,
    ):
        engine.generate(request)
    named = re.search(r"Give --device-memory (\d+) or more", str(refused.value))
    assert named is not None
    with Engine.load(EngineConfig(model=str(tiny_checkpoint), device_memory=int(named[1]))) as engine:
        before = engine.plan
        engine._stop = list(range(256))  # the answer ends with its first token: the room is what matters
        assert engine.generate(request).text
        assert engine.plan.pinned_layers < before.pinned_layers
        assert engine.plan.planned["kv"] > before.planned["kv"]
        assert engine.plan.planned_bytes <= int(named[1])


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Request((), "  "), UsageError),
        (Request((), "a <|image_pad|> b"), UsageError),
        (Request((), "x", 0), UsageError),
        (Request((), "x", 1, 0.0), UsageError),
        (Request((b"junk",), "x"), ImageError),
        (Request((Image.new("RGB", (4000, 4)),), "x"), ImageError),
    ],
)
def test_a_wrong_request_is_told_in_a_sentence(tiny_checkpoint: Path, request_: Request, error: type) -> None:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine, pytest.raises(error):
        engine.generate(request_)


def test_an_unknown_compressor_is_refused_even_when_all_is_kept(tiny_checkpoint: Path) -> None:
    with Engine.load(EngineConfig(model=str(tiny_checkpoint))) as engine, pytest.raises(UsageError, match="affinity"):
        engine.generate(Request((), "x", 1, 1.0, "afinity"))
