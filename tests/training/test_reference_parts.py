"""The parts of the reference model's recipe, on tiny shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerBase

from vismmoe_training.reference.dialogue import IGNORED, DialogueEncoder, token_grid
from vismmoe_training.reference.experts import grouped_experts
from vismmoe_training.reference.pool import LABELS, batches_of_like_size, build_pool, pixel_values, pool_scene
from vismmoe_training.reference.routing import RoutingMeter
from vismmoe_training.reference.shape import (
    ReferenceShape,
    build_config,
    build_model,
    build_processor,
    save_reference,
)
from vismmoe_training.reference.sheets import find_strips, sheet_batch
from vismmoe_training.reference.tokenizer import build_tokenizer
from vismmoe_training.reference.whole import decode, encode_pool, imbalance_within, surprise
from vismmoe_training.scenes import COLOUR_NAMES, KINDS, WORDS, SceneSpec, all_questions, draw_scene

TINY = ReferenceShape(layers=3, experts=16, top_k=4, vision_layers=2, deepstack_layers=(0, 1))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


class _Experts(nn.Module):
    def __init__(self, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width))


def _one_by_one(experts: _Experts, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows = []
    for token in range(hidden.shape[0]):
        total = hidden.new_zeros(hidden.shape[1])
        for choice in range(ids.shape[1]):
            own = ids[token, choice]
            gate, up = (experts.gate_up_proj[own] @ hidden[token]).chunk(2)
            total = total + weights[token, choice] * (experts.down_proj[own] @ (nn.functional.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def test_grouped_experts_give_the_values_and_gradients_of_one_expert_at_a_time() -> None:
    torch.manual_seed(0)
    experts = _Experts(8, 12, 5)
    hidden = torch.randn(70, 12, requires_grad=True)
    weights, ids = torch.randn(70, 8).softmax(-1).topk(3)
    weights = weights.detach().requires_grad_()
    inputs = [hidden, weights, experts.gate_up_proj, experts.down_proj]
    ours, theirs = (run(experts, hidden, ids, weights) for run in (grouped_experts, _one_by_one))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for got, wanted in zip(*(torch.autograd.grad(out.sin().sum(), inputs) for out in (ours, theirs)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_every_word_of_the_scenes_is_one_token_with_and_without_a_leading_space(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    words = [form + word for word in (*KINDS, *COLOUR_NAMES, *WORDS, "yes", "no", "top") for form in ("", " ")]
    assert [word for word in words if len(tokenizer(word).input_ids) != 1] == []


def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Ünknown wörds, 漢字 and \t tabs\n\n 123?"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_pooled_pixels_are_those_of_the_processor(tokenizer: PreTrainedTokenizerBase) -> None:
    scene = pool_scene(5, SceneSpec())
    ours, grid = pixel_values([scene])
    processor = build_processor(TINY, tokenizer)
    theirs = processor.image_processor(images=[draw_scene(scene.scene)], return_tensors="pt")
    assert grid.tolist() == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(ours, theirs["pixel_values"], rtol=0, atol=1e-5)


def test_a_pool_is_the_same_on_any_number_of_workers() -> None:
    alone, shared = (build_pool(70, 3, [SceneSpec(max_side_px=128)], workers) for workers in (1, 2))
    assert all(np.array_equal(a.patches, b.patches) for a, b in zip(alone, shared, strict=True))


def test_batches_of_like_size_hold_every_index_once() -> None:
    sizes = np.arange(100) % 7
    batches = list(batches_of_like_size(sizes, 8, np.random.default_rng(0), window=4))
    assert sorted(int(i) for batch in batches for i in batch) == list(range(100))


def test_a_sheet_holds_the_text_of_its_strips() -> None:
    pool = build_pool(24, 8, [SceneSpec(max_side_px=128, text_probability=1.0)], workers=1)
    pixels, grids, labels = sheet_batch(pool, find_strips(pool), 2, np.random.default_rng(0))
    assert grids.tolist() == [[1, 18, 16]] * 2
    assert pixels.shape[0] == 2 * 18 * 16
    assert labels.shape[1] == 2 * 9 * 8
    written = labels[LABELS.index("text")].view(6, 3, 8)
    assert all(len(strip[strip > 0].unique()) == 1 for strip in written)


def test_the_outline_of_a_token_is_zero_exactly_where_it_shows_no_object() -> None:
    pooled = pool_scene(4, SceneSpec())
    shown = pooled.labels[LABELS.index("kind")] > 0
    assert np.array_equal(pooled.outlines[:, -1] > 0, shown)
    assert 0 < pooled.outlines[shown, :16].mean() < 1


def test_balance_within_is_zero_for_even_routing_and_large_for_one_expert() -> None:
    mask = torch.ones(2, 8, dtype=torch.bool)
    even = torch.arange(16).view(16, 1) % 8
    assert float(imbalance_within(torch.zeros(16, 8), even, mask)) == pytest.approx(0.0)
    lonely = torch.full((16, 8), -20.0)
    lonely[:, 3] = 20.0
    assert float(imbalance_within(lonely, torch.full((16, 1), 3), mask)) == pytest.approx(7.0)


def test_a_router_that_already_agrees_surprises_nobody() -> None:
    logits, mask = torch.randn(5, 8), torch.ones(5, dtype=torch.bool)
    assert float(surprise(2 * logits + 1, logits, mask)) == pytest.approx(0.0, abs=1e-5)
    assert float(surprise(-logits, logits, mask)) == pytest.approx(2.0, abs=1e-5)


def test_a_branch_among_many_gets_the_logits_of_a_request_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_model(build_config(TINY, tokenizer), seed=1).eval()
    processor, encoder = build_processor(TINY, tokenizer), DialogueEncoder(tokenizer)
    scene = pool_scene(9, SceneSpec())
    questions = all_questions(scene.scene, np.random.default_rng(0), 4)
    batch = encoder.batch([token_grid(scene.scene)], [[encoder.branch(q) for q in questions]])
    with torch.no_grad():
        hidden = decode(model, batch, encode_pool(model, [scene])[0].float())
        logits = hidden @ model.model.language_model.embed_tokens.weight.t()
    for number, question in enumerate(questions, start=1):
        own = batch.branch[0] == number
        content = [{"type": "image"}, {"type": "text", "text": question.prompt}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        inputs = processor(text=[text + question.answer], images=[draw_scene(scene.scene)], return_tensors="pt")
        # float16 features may tip a near tie of the router, so most of the logits have to agree, not the last one
        alone = model(**inputs).logits[0, -int(own.sum()) :]
        assert inputs["input_ids"][0, -int(own.sum()) :].tolist() == batch.input_ids[0, own].tolist()
        assert float(((alone - logits[0, own]).abs() < 0.02).float().mean()) > 0.9


def test_labels_are_the_answers(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder, scene = DialogueEncoder(tokenizer), pool_scene(11, SceneSpec())
    questions = all_questions(scene.scene, np.random.default_rng(0), 5)
    batch = encoder.batch([token_grid(scene.scene)], [[encoder.branch(q) for q in questions]])
    answers = tokenizer.decode(batch.labels[batch.labels != IGNORED])
    assert answers == "".join(f"{q.answer}<|im_end|>" for q in questions)


def test_the_saved_model_has_the_published_layout_and_loads_in_plain_transformers(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = build_model(build_config(TINY, tokenizer), seed=2)
    save_reference(model, build_processor(TINY, tokenizer), tmp_path)
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float()), name
    assert type(AutoProcessor.from_pretrained(tmp_path)).__name__ == "Qwen3VLProcessor"


def test_routing_figures_of_a_worked_case() -> None:
    # Two layers, 40 experts, three text tokens of two choices; the second token repeats one choice of the first.
    chosen = torch.tensor([[[0, 1], [1, 2], [3, 4]], [[5, 6], [5, 6], [5, 6]]])
    meter = RoutingMeter(2, 40)
    everybody = torch.ones(3, dtype=torch.bool)
    meter.add(chosen, everybody, everybody)
    meter.add_next_gate(torch.tensor([[[5, 9], [5, 6], [7, 8]]]), chosen[1:])
    figures = meter.figures()
    assert figures.coverage_text == (1.0, 1.0)
    assert figures.previous_token_text == pytest.approx((0.25, 1.0))
    assert figures.next_gate == pytest.approx((0.5,))
    assert figures.least_share == (0.0, 0.0)
    assert any("least_share" in line for line in figures.failures())
