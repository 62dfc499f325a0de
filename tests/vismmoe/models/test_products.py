"""One row times a weight: right to the number format's rounding, and the same bits wherever the weight lies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from vismmoe.models.products import OneRowLinear, product, quicken_linears, round_up_rows

HALVES = (torch.bfloat16, torch.float16)
SHAPES = ((96, 64), (1, 7), (8, 1), (30, 33), (256, 1000))  # (N, K)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def operands(out: int, length: int, dtype: torch.dtype, rows: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(out * length)
    drawn = torch.randn(rows + out, length, generator=generator).to(dtype)
    return drawn[:rows], drawn[rows:]


def placed(weight: Tensor, transposed: bool, shift: int) -> Tensor:
    """The same weight, `shift` numbers off a block's start; transposed: its columns lie one after the other."""
    held = weight.t() if transposed else weight
    memory = torch.empty(held.numel() + shift, dtype=weight.dtype)[shift:].view(held.shape)
    memory.copy_(held)
    return memory.t() if transposed else memory


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("out", "length"), SHAPES)
def test_one_row_is_right_to_the_last_digit_but_one(
    dtype: torch.dtype, transposed: bool, out: int, length: int
) -> None:
    row, weight = operands(out, length, dtype)
    exact = row.double() @ weight.double().t()
    found = product(row, placed(weight, transposed, 0))
    assert found.shape == exact.shape
    assert found.dtype is dtype
    assert float((found.double() - exact).abs().max()) <= float(exact.abs().max()) * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("out", "length"), SHAPES)
def test_the_bits_do_not_depend_on_where_the_weight_lies(
    two_threads: None, dtype: torch.dtype, transposed: bool, out: int, length: int
) -> None:
    row, weight = operands(out, length, dtype)
    first = product(row, placed(weight, transposed, 0))
    for shift in (1, 3, 32, 256):
        assert torch.equal(product(row, placed(weight, transposed, shift)), first), shift


@pytest.mark.parametrize("transposed", [False, True])
def test_float32_and_whole_tiles_and_biases_have_the_bits_of_linear(transposed: bool) -> None:
    for dtype, rows, biased in (
        (torch.float32, 1, False),
        (torch.float32, 3, True),
        (torch.bfloat16, 16, False),
        (torch.bfloat16, 1, True),
    ):
        row, weight = operands(48, 32, dtype, rows)
        weight = placed(weight, transposed, 0)
        bias = torch.linspace(-1, 1, 48).to(dtype) if biased else None
        assert torch.equal(product(row, weight, bias), functional.linear(row, weight, bias))


@pytest.mark.parametrize("rows", [0, 2, 3, 5, 17, 33, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_of_zeros_are_taken_away_again(rows: int, biased: bool) -> None:
    held, weight = operands(48, 32, torch.bfloat16, rows)
    bias = torch.linspace(-1, 1, 48).bfloat16() if biased else None
    found = product(held, weight, bias)
    assert found.shape == (rows, 48)
    exact = functional.linear(held.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, atol=0.05, rtol=0.01)


def test_few_numbers_of_rows_are_made_of_all() -> None:
    made = {count: round_up_rows(count) for count in range(1, 4097)}
    assert made[1] == 1
    assert all(count <= made[count] < 2 * count for count in made)
    assert all(made[count] - count < max(16, count / 4) for count in made)
    assert all(round_up_rows(size) == size for size in made.values())
    assert len({size for size in made.values() if size <= 128}) <= 12
    assert len(set(made.values())) <= 40


def test_plain_linears_of_a_model_are_swapped_and_nothing_else_is() -> None:
    class Special(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 8), Special(8, 8)).bfloat16()
    x = torch.randn(1, 3, 32).bfloat16()
    state, wanted = {name: value.clone() for name, value in model.state_dict().items()}, model(x)
    quicken_linears(model)
    assert [type(each) for each in model] == [OneRowLinear, OneRowLinear, Special]
    assert torch.equal(model(x), wanted), "three rows"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    first = model[0]
    assert isinstance(first, nn.Linear)
    for shape in ((32,), (1, 32), (1, 1, 32)):
        one = x[0, 0].view(shape)
        assert torch.equal(first(one).view(-1), product(x[0, :1], first.weight)[0])
        assert first(one).shape == (*shape[:-1], 48)


def test_one_row_may_be_asked_for_outside_of_inference_after_it_was_within() -> None:
    row, weight = operands(24, 40, torch.bfloat16)
    with torch.inference_mode():
        product(row, placed(weight, True, 0))
    asked = row.clone().requires_grad_()
    product(asked, placed(weight, True, 0)).sum().backward()
    assert asked.grad is not None
    torch.testing.assert_close(asked.grad, weight.sum(0, keepdim=True), atol=0.1, rtol=0.02)
