"""DeepSeek-VL2 (tiny, small, base) for current transformers; arXiv:2412.10302.

Built from transformers' SigLIP tower and DeepSeek and Llama language blocks. What is written here is what they lack:
tiling, the projector, the sequence of an image, the prompt's format, and the names of the published checkpoints.
"""

from vismmoe.models.deepseek_vl2.config import DeepseekVL2Config
from vismmoe.models.deepseek_vl2.model import DeepseekVL2ForConditionalGeneration
from vismmoe.models.deepseek_vl2.processor import DeepseekVL2Processor

__all__ = ["DeepseekVL2Config", "DeepseekVL2ForConditionalGeneration", "DeepseekVL2Processor"]
