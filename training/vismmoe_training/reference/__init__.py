"""The reference model: a small Qwen3-VL-MoE trained from scratch on generated scenes."""
