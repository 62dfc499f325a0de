"""Weights in one byte against weights in four."""

from __future__ import annotations

import pytest
import torch

from vismmoe.predictors import LookaheadNet, LookaheadPredictor, NextGate, PredictorConfig, decode_call
from vismmoe.predictors.products import Exact, Packed, short
from vismmoe.types import LayerState, ModelSpec


def test_a_row_of_few_levels_is_packed_without_loss() -> None:
    weight = torch.zeros(64, 64)
    weight[0, :3] = torch.tensor([127.0, -64.0, 1.0]) / 127  # scale 1 / 127, rounded to bfloat16
    packed = Packed.pack(weight)
    step = float(packed.scales[0])
    assert packed.values[0, :4].tolist() == [127, -64, 1, 0]
    vector = torch.zeros(64)
    vector[:3] = torch.tensor([1.0, 2.0, 4.0])
    assert float(packed.of(vector)[0]) == pytest.approx(step * (127 - 128 + 4), rel=2**-8)
    assert packed.of(vector)[1:].abs().sum() == 0


def test_a_packed_product_is_within_a_hundredth_of_the_vectors_lengths() -> None:
    random = torch.Generator().manual_seed(0)
    weight, vector = torch.randn(128, 256, generator=random), torch.randn(256, generator=random)
    exact, packed = Exact(weight), short(weight)
    assert isinstance(packed, Packed)
    bias = torch.randn(128, generator=random)
    lengths = weight.norm(dim=1) * vector.norm()
    for found, wanted in ((packed.of(vector), exact.of(vector)), (packed.plus(bias, vector), exact.plus(bias, vector))):
        assert float(((found - wanted).abs() / lengths).max()) < 0.01


@pytest.mark.parametrize("shape", [(63, 64), (64, 65), (5, 3), (360, 192)])
def test_sizes_that_the_kernel_does_not_take_are_multiplied_in_float32(shape: tuple[int, int]) -> None:
    # it reads whole blocks of rows and columns, whatever the sizes are
    assert isinstance(short(torch.ones(shape)), Exact)


def test_a_wide_models_call_names_the_experts_that_float32_names(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec("wide", 7, tuple(range(7)), 128, 8, 256, 32, "f")
    config = PredictorConfig(token_rank=64)
    torch.manual_seed(0)
    net = LookaheadNet(config, spec, folded=True)
    assert net.token_basis is not None
    for parameter in (*net.parameters(), net.token_basis):
        parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
    gate = NextGate(spec, {layer: torch.randn(128, 256) for layer in spec.moe_layers})
    packed = LookaheadPredictor(net, spec, gate)
    monkeypatch.setattr(decode_call, "short", Exact)
    exact = LookaheadPredictor(net, spec, gate)
    for layer in spec.moe_layers[:-1]:
        state = LayerState(layer, "decode", torch.randn(1, 256), torch.randn(256), torch.randn(256), torch.rand(7, 128))
        ahead = min(5, 6 - layer)
        ours, theirs = (one.predict(state)[:ahead] for one in (packed, exact))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.1)
        top, wanted = (scores.topk(20, -1).indices for scores in (ours, theirs))
        shared = [len(set(a) & set(b)) for a, b in zip(top.tolist(), wanted.tolist(), strict=True)]
        assert min(shared) >= 18
