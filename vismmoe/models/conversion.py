"""From a checkpoint's tensors to the model's, by transformers' own table of names and conversions.

transformers knows how each family is published (experts as one linear each, packed and transposed, renamed ...). Its
renaming rules are applied to the headers here, so that nothing is read before all of it is known to fit.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vismmoe.errors import CheckpointError
from vismmoe.models.headers import TensorEntry


@dataclass(frozen=True)
class Recipe:
    """How one or several of the model's tensors come out of the checkpoint's."""

    sources: Mapping[str, tuple[TensorEntry, ...]]  # transformers' source pattern -> tensors, numbers ascending
    converter: Any | None  # transformers' WeightConverter; None: one tensor as it is

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return tuple(entry for held in self.sources.values() for entry in held)

    @property
    def operations(self) -> tuple[Any, ...]:
        return () if self.converter is None else tuple(self.converter.operations)

    def run(self, target: str, model: nn.Module, load: Callable[[TensorEntry], Tensor]) -> dict[str, Tensor]:
        """Name -> tensor of all the recipe's targets. CheckpointError when the tensors do not fit together."""
        if self.converter is None:
            return {target: load(self.entries[0])}
        converter = deepcopy(self.converter)
        for pattern, held in self.sources.items():
            for entry in held:
                converter.add_tensor(target, entry.name, pattern, load(entry))
        try:
            made = converter.convert(target, model=model, config=model.config)
        except Exception as error:  # transformers' operations raise whatever torch does
            raise CheckpointError(
                f"{self.entries[0].file}: {target} cannot be made of {self.entries[0].name} and what belongs to it "
                f"({str(error).splitlines()[0] if str(error) else error!r})"
            ) from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


@dataclass(frozen=True)
class TensorSource:
    """Where one parameter or buffer of the model comes from."""

    name: str  # in the model
    shape: tuple[int, ...]  # in the model, as the checkpoint's tensors give it
    recipe: Recipe
    first_target: str  # the target that names the recipe

    @property
    def dtype(self) -> torch.dtype:
        return self.recipe.entries[0].dtype

    @property
    def origin(self) -> TensorEntry:
        """The first of the checkpoint's tensors."""
        return self.recipe.entries[0]

    def read(self, model: nn.Module) -> Tensor:
        """The tensor, in memory of its own: a piece of a larger one (query, key and value in one) does not keep it."""
        made = self.recipe.run(self.first_target, model, lambda entry: entry.read())[self.name]
        return made if made.untyped_storage().nbytes() == made.nbytes else made.clone()


def tensor_sources(
    model: nn.Module, tensors: Mapping[str, TensorEntry]
) -> tuple[dict[str, TensorSource], tuple[str, ...]]:
    """(name in the model -> where it comes from, names in the checkpoint that the model has no place for).

    Tensors that transformers itself passes over for this model (further prediction heads, say) count as neither.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    transforms = _transforms(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = model.state_dict(keep_vars=True)
    prefix = model.base_model_prefix
    groups: dict[str, dict[str, list[TensorEntry]]] = defaultdict(lambda: defaultdict(list))
    recipes: dict[str, Any] = {}
    surplus = []
    for name in sorted(tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=wanted)
        if target not in wanted:
            if not _passed_over(model, name, target):
                surplus.append(name)
            continue
        recipes.setdefault(target, by_pattern[pattern] if pattern is not None else None)
        groups[target][pattern or ""].append(tensors[name])
    found: dict[str, TensorSource] = {}
    for target, held in groups.items():
        recipe = Recipe({pattern: tuple(entries) for pattern, entries in held.items()}, recipes[target])
        for name, value in recipe.run(target, model, _shape_only).items():
            found[name] = TensorSource(name, tuple(value.shape), recipe, target)
    return found, tuple(surplus)


def _transforms(model: nn.Module) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    own = getattr(model, "checkpoint_transforms", None)  # a model class of this project brings its own rules
    found: list[Any] = own() if own is not None else get_model_conversion_mapping(model)
    return found


def _passed_over(model: nn.Module, name: str, target: str) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, name) or re.search(pattern, target) for pattern in patterns)


def _shape_only(entry: TensorEntry) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")
