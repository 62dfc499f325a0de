"""Kinds of scenes that methods are compared on."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from .scene import SceneSpec

# Scenes as the model was trained on; more things; and smaller things and letters than it ever saw, a token or two wide,
# where a dropped token costs most. The third kind was found on seeds 70_001 and 70_002 by what random dropping loses
# there; what is reported of it is asked on other seeds.
MIXES: Final[Mapping[str, SceneSpec]] = MappingProxyType(
    {
        "usual": SceneSpec(),
        "crowded": SceneSpec(min_objects=3, max_objects=7, min_side_px=192, max_side_px=256, max_object_px=44),
        "small": SceneSpec(
            min_objects=2,
            max_objects=5,
            min_side_px=160,
            max_side_px=256,
            min_object_px=24,
            max_object_px=32,
            max_text_px=22,
            text_probability=1.0,
        ),
    }
)
