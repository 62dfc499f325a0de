"""Seeded scenes: small pictures with ground truth, token labels and questions."""

from .corpus import write_corpus
from .draw import Rendering, draw_scene, object_masks, render
from .labels import TokenLabels, label_tokens, token_owners
from .negatives import NEGATIVES
from .questions import STYLES, Question, all_questions, ask
from .sampling import sample_scene, scene_from_seed
from .scene import Background, Scene, SceneObject, SceneSpec, SceneText
from .vocabulary import CELLS, CHARACTERS, COLOUR_NAMES, COLOURS, KINDS, THEMES, WORDS, kind_weights

__all__ = [
    "CELLS",
    "CHARACTERS",
    "COLOURS",
    "COLOUR_NAMES",
    "KINDS",
    "NEGATIVES",
    "STYLES",
    "THEMES",
    "WORDS",
    "Background",
    "Question",
    "Rendering",
    "Scene",
    "SceneObject",
    "SceneSpec",
    "SceneText",
    "TokenLabels",
    "all_questions",
    "ask",
    "draw_scene",
    "kind_weights",
    "label_tokens",
    "object_masks",
    "render",
    "sample_scene",
    "scene_from_seed",
    "token_owners",
    "write_corpus",
]
