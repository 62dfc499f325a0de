"""The parts of the reference model's recipe, on tiny shapes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerBase

from vismmoe_training.reference.bands import RunningBands
from vismmoe_training.reference.dialogue import IGNORED, DialogueEncoder, token_grid
from vismmoe_training.reference.experts import grouped_experts
from vismmoe_training.reference.pool import LABELS, batches_of_like_size, build_pool, pixel_values, pool_scene
from vismmoe_training.reference.revive import _router_inputs, revive
from vismmoe_training.reference.routing import RoutingMeter
from vismmoe_training.reference.shape import (
    ReferenceShape,
    build_config,
    build_model,
    build_processor,
    save_reference,
)
from vismmoe_training.reference.sheets import find_strips, sheet_batch
from vismmoe_training.reference.terms import imbalance_within, indecision, neglect, surprise
from vismmoe_training.reference.tokenizer import build_tokenizer
from vismmoe_training.reference.whole import RoutingWeights, WholeStage, decode, encode_pool
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
    logits = 20 * torch.eye(8)[:5] + 20 * torch.eye(8).roll(1, 0)[:5]
    assert float(surprise(logits + 1, logits, 2)) == pytest.approx(0.0, abs=1e-3)
    assert float(surprise(-logits, logits, 2)) > 10


def test_a_surprised_router_learns_to_foresee_its_choice() -> None:
    late, early = torch.tensor([[3.0, 2.0, 1.0, 0.0]]), torch.tensor([[0.0, 2.0, 0.5, 1.0]], requires_grad=True)
    surprise(early, late, 2).backward()
    assert early.grad is not None
    pushed = (-early.grad).sign()[0].tolist()
    assert pushed == [1.0, 1.0, -1.0, -1.0]  # 0 and 1 are chosen late; 2 and 3 stand near the line


def test_indecision_falls_as_the_chosen_draw_away_from_the_runners_up() -> None:
    near, far = (torch.tensor([[gap, gap, 0.0, 0.0, -9.0]]) for gap in (0.1, 4.0))
    assert float(indecision(torch.zeros(1, 5), 2)) == pytest.approx(2 * np.log(2), abs=1e-4)
    assert float(indecision(far, 2)) < float(indecision(near, 2)) < 2 * np.log(2)


def test_a_neglected_expert_is_drawn_to_the_tokens_that_would_soonest_choose_it() -> None:
    logits = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    logits[:, 5] = -4.0
    logits[:6, 5] = -1.0  # as many as a share of .4 asks of 64 tokens with 2 choices among 8 experts
    logits.requires_grad_()
    neglect(logits, 2).backward()
    assert logits.grad is not None
    drawn = logits.grad[:, 5] < 0
    assert drawn.nonzero().flatten().tolist() == list(range(6))
    assert not logits.grad[:, :5].any()


def test_experts_that_are_all_used_are_left_alone() -> None:
    assert float(neglect(torch.eye(8).repeat(4, 1), 1)) == 0.0


def _noted(chosen: Tensor, guessed: Tensor) -> RunningBands:
    bands = RunningBands(chosen.shape[0], 64)
    visual = torch.ones(chosen.shape[1:3], dtype=torch.bool)
    visual[:, chosen.shape[2] // 2 :] = False
    bands.note(chosen, guessed, visual, ~visual)
    return bands


def test_a_term_pulls_only_on_the_layers_outside_their_band() -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(4, 400, 64, generator=generator).topk(8).indices  # each expert as often as any other
    narrow = torch.rand(4, 400, 21, generator=generator).topk(8).indices
    chosen = torch.stack([spread, narrow])
    agreeing = chosen[1:].clone()
    agreeing[..., 6:] = 63  # six of eight are foreseen: just at the edge
    pulls = _noted(chosen, agreeing).pulls()
    assert pulls["coverage_visual"].sign().tolist() == [1.0, -1.0]  # too spread, too narrow
    assert pulls["least_share"][1] > 1.0
    assert pulls["least_share"][0] < 1.0
    assert pulls["next_gate"][0] == 0.0  # nothing foresees the first layer
    assert pulls["next_gate"][1] == pytest.approx(1.0)
    assert _noted(chosen, chosen[1:]).pulls()["next_gate"][1] < 0.0  # too easily foreseen
    agreeing[:, :, ::2, 6] = chosen[1:, :, ::2, 6]  # seven of eight for every other token: .8125
    assert _noted(chosen, agreeing).pulls()["next_gate"][1] == 0.0


def test_experts_that_no_token_chose_are_in_use_after_revival(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_model(build_config(TINY, tokenizer), seed=1)
    encoder, rng = DialogueEncoder(tokenizer), np.random.default_rng(0)
    scenes = [pool_scene(seed, SceneSpec(max_side_px=128)) for seed in range(4)]
    branches = [[encoder.branch(question) for question in all_questions(s.scene, rng, 1)] for s in scenes]
    batch = encoder.batch([token_grid(s.scene) for s in scenes], branches)
    requests = [(batch, torch.cat(encode_pool(model, scenes), dim=1).float())]
    assert revive(model, requests, least=0.0) == 0
    gates = [layer.mlp.gate for layer in model.model.language_model.layers]
    with torch.no_grad():
        gates[1].weight[3] = -gates[1].weight.mean(0) * 4  # chosen by nearly none
    before = _load(gates[1].weight, _router_inputs(model, requests)[1])
    assert revive(model, requests, least=0.3) > 0
    for gate, inputs in zip(gates, _router_inputs(model, requests), strict=True):
        assert float(_load(gate.weight, inputs).min()) > max(0.15, float(before.min()))


def _load(rows: Tensor, inputs: Tensor) -> Tensor:
    chosen = (inputs @ rows.t()).topk(TINY.top_k, dim=-1).indices.reshape(-1)
    return torch.bincount(chosen, minlength=TINY.experts) * TINY.experts / chosen.numel()


def test_running_figures_follow_the_batches() -> None:
    generator = torch.Generator().manual_seed(0)
    wide, narrow = (torch.rand(1, 2, 80, n, generator=generator).topk(8).indices for n in (64, 16))
    bands = _noted(wide, wide[1:])
    first = float(bands.coverage_visual)
    visual = torch.ones(2, 80, dtype=torch.bool)
    visual[:, 40:] = False
    bands.note(narrow, narrow[1:], visual, ~visual)
    assert float(bands.coverage_visual) == pytest.approx(first * bands.keep + 1.0 * (1 - bands.keep))


def test_the_loss_pulls_on_routers_by_the_terms_that_are_asked_for(tokenizer: PreTrainedTokenizerBase) -> None:
    model = build_model(build_config(TINY, tokenizer), seed=1)
    encoder, scene = DialogueEncoder(tokenizer), pool_scene(9, SceneSpec(max_side_px=128))
    questions = all_questions(scene.scene, np.random.default_rng(0), 1)
    batch = encoder.batch([token_grid(scene.scene)], [[encoder.branch(q) for q in questions]])
    features = encode_pool(model, [scene])[0].float()
    none = dict.fromkeys(vars(RoutingWeights()), 0.0)
    grads = []
    for weights in (none, {**none, "foresight": 1.0}):
        stage = WholeStage(model, steps=1, routing=RoutingWeights(**weights))
        model.zero_grad()
        stage.training_step((batch, features), 0).backward()
        grads.append(model.model.language_model.layers[1].mlp.gate.weight.grad.clone())
        assert int(stage.bands.batches) == 1
    assert not torch.allclose(grads[0], grads[1])


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
