"""What the paper prints (arXiv 2605.05899), for ours to stand beside. Its models are larger, its data real."""

from __future__ import annotations

COVERAGE = {"text": 0.7691, "raw visual": 0.4541, "pruned visual": 0.6026}  # top-20 of 128, Qwen3-VL-30B-A3B
HOT_RECALL = {10: 0.641, 20: 0.819, 30: 0.898}  # blended over W = 5
CHANCE = {10: 0.078, 20: 0.156, 30: 0.234}
# share of vanilla at 70 and 50 % of the visual tokens, Qwen3-VL: mean over MME, OCRBench, POPE, MMBench
_VANILLA = (2498, 829, 90.02, 86.4)
_ACCURACY = {
    "affinity": {0.7: (2470, 801, 90.1, 84.6), 0.5: (2299, 705, 89.6, 83.5)},
    "random": {0.7: (2181, 674, 89.8, 82.6), 0.5: (2053, 554, 88.3, 80.15)},
    "saliency": {0.7: (2475, 819, 90.1, 84.8), 0.5: (2309, 741, 89.6, 83.7)},  # VisionZip
}
RETENTION = {
    method: {
        ratio: sum(own / whole for own, whole in zip(scores, _VANILLA, strict=True)) / len(_VANILLA)
        for ratio, scores in by_ratio.items()
    }
    for method, by_ratio in _ACCURACY.items()
}
ABLATION_S = {"base": 13.17, "+ compression": 11.55, "+ prediction and prefetch": 7.72, "+ pipeline": 4.91}
