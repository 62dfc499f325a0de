"""Choosing which visual tokens the deeper layers see: one method, one file, one verb."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import fields

from vismmoe.compressors.affinity import AffinityCompressor
from vismmoe.compressors.affinity_bytes import AffinityBytesCompressor
from vismmoe.compressors.affinity_mass import AffinityMassCompressor
from vismmoe.compressors.affinity_prompt import AffinityPromptCompressor
from vismmoe.compressors.affinity_resident import AffinityResidentCompressor
from vismmoe.compressors.diversity import DiversityCompressor
from vismmoe.compressors.downsample import DownsampleCompressor
from vismmoe.compressors.prompt import PromptCompressor
from vismmoe.compressors.random import RandomCompressor
from vismmoe.compressors.saliency import SaliencyCompressor
from vismmoe.compressors.uniform import UniformCompressor
from vismmoe.errors import UsageError
from vismmoe.types import Compressor

COMPRESSORS: Mapping[str, Callable[..., Compressor]] = {
    "affinity": AffinityCompressor,
    "affinity-bytes": AffinityBytesCompressor,
    "affinity-mass": AffinityMassCompressor,
    "affinity-prompt": AffinityPromptCompressor,
    "affinity-resident": AffinityResidentCompressor,
    "diversity": DiversityCompressor,
    "downsample": DownsampleCompressor,
    "prompt": PromptCompressor,
    "random": RandomCompressor,
    "saliency": SaliencyCompressor,
    "uniform": UniformCompressor,
}


def get_compressor(name: str, **options: float) -> Compressor:
    """The compressor of that name; of `options` it takes those that it has (all methods share one command line).

    Raises UsageError for a name that is not one of COMPRESSORS.
    """
    method = COMPRESSORS.get(name)
    if method is None:
        near = difflib.get_close_matches(name, COMPRESSORS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"There is no compressor {name!r}; there are {', '.join(COMPRESSORS)}.{hint}")
    known = {field.name for field in fields(method)} - {"name"}  # type: ignore[arg-type]
    return method(**{key: value for key, value in options.items() if key in known})
