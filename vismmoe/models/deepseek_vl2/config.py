"""The published config.json, with the defaults of the official classes where a release leaves keys out."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import DeepseekV3Config, PreTrainedConfig, SiglipVisionConfig

IMAGE_SIZE = 384  # pixels a side of one tile
GATES = (("softmax", "greedy"), ("softmax", "group_limited_greedy"), ("sigmoid", "noaux_tc"))  # that are run
RESOLUTIONS = tuple(
    (IMAGE_SIZE * width, IMAGE_SIZE * height)
    for width, height in (
        *((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (1, 4), (4, 1), (2, 2), (1, 5), (5, 1), (1, 6), (6, 1)),
        *((2, 3), (3, 2), (1, 7), (7, 1), (1, 8), (8, 1), (2, 4), (4, 2), (1, 9), (9, 1), (3, 3)),
    )
)  # (width, height) in pixels; the order decides between equals


@strict
class DeepseekVL2TextConfig(DeepseekV3Config):  # type: ignore[misc]
    """The language model: a DeepSeek-V3 config with the switches in which the releases differ."""

    model_type = "deepseek_v2"
    attribute_map: ClassVar[dict[str, str]] = {
        "num_local_experts": "n_routed_experts",
        "num_experts": "n_routed_experts",
    }

    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    moe_intermediate_size: int = 1407
    num_hidden_layers: int = 30
    num_attention_heads: int = 32
    num_key_value_heads: int | None = 32
    n_shared_experts: int = 2
    n_routed_experts: int = 64
    routed_scaling_factor: float = 1.0
    kv_lora_rank: int | None = 512
    n_group: int | None = 1
    topk_group: int | None = 1
    num_experts_per_tok: int | None = 6
    first_k_dense_replace: int | None = 0
    moe_layer_freq: int = 1
    norm_topk_prob: bool | None = False
    scoring_func: str = "softmax"
    topk_method: str | None = "greedy"
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 100000
    eos_token_id: int | list[int] | None = 100001
    use_mla: bool = True
    mlp_bias: bool = False
    num_mtp_layers: int = 0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if not self.use_mla:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if (self.scoring_func, self.topk_method) not in GATES:
            known = ", ".join(f"{scoring}/{method}" for scoring, method in GATES)
            raise ValueError(f"the gate {self.scoring_func}/{self.topk_method} is not run; these are: {known}")

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` has routed experts."""
        return layer >= (self.first_k_dense_replace or 0) and layer % self.moe_layer_freq == 0


@strict
class DeepseekVL2VisionConfig(SiglipVisionConfig):  # type: ignore[misc]
    """SigLIP under the official names: width, layers, heads, mlp_ratio."""

    attribute_map: ClassVar[dict[str, str]] = {
        "width": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
    }

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    image_size: int | list[int] | tuple[int, int] = IMAGE_SIZE
    patch_size: int | list[int] | tuple[int, int] = 14
    vision_use_head: bool = False  # the checkpoint's attn_pool is never used
    mlp_ratio: float | None = None
    spatial_merge_size: int = 2  # patches a side that become one visual token

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.mlp_ratio is not None:
            self.intermediate_size = int(self.hidden_size * self.mlp_ratio)


@strict
class DeepseekVL2ProjectorConfig(PreTrainedConfig):  # type: ignore[misc]
    """From merged patches to the language model's width."""

    model_type = "mlp_projector"

    projector_type: str = "downsample_mlp_gelu"
    input_dim: int = 1152
    n_embed: int = 2048
    depth: int = 2
    mlp_ratio: int = 1
    downsample_ratio: int = 2
    token_pooling: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.projector_type != "downsample_mlp_gelu" or self.token_pooling:
            raise ValueError(f"the projector {self.projector_type!r} is not run; downsample_mlp_gelu is")


@strict
class DeepseekVL2Config(PreTrainedConfig):  # type: ignore[misc]
    """config.json of a release. `language_config` is the official name of `text_config`."""

    model_type = "deepseek_vl_v2"
    sub_configs: ClassVar[dict[str, Any]] = {
        "text_config": DeepseekVL2TextConfig,
        "vision_config": DeepseekVL2VisionConfig,
        "projector_config": DeepseekVL2ProjectorConfig,
    }

    text_config: Any = None  # given as a dict, held as a config
    vision_config: Any = None
    projector_config: Any = None
    tile_tag: str = "2D"
    global_view_pos: str = "head"
    candidate_resolutions: list[Any] | tuple[Any, ...] = RESOLUTIONS  # (width, height) in pixels
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        language = kwargs.pop("language_config", None)
        self.text_config = _part(DeepseekVL2TextConfig, language if self.text_config is None else self.text_config)
        self.vision_config = _part(DeepseekVL2VisionConfig, self.vision_config)
        self.projector_config = _part(DeepseekVL2ProjectorConfig, self.projector_config)
        self.vision_config.spatial_merge_size = self.projector_config.downsample_ratio
        self.tie_word_embeddings = self.text_config.tie_word_embeddings
        super().__post_init__(**kwargs)
        if self.tile_tag != "2D" or self.global_view_pos != "head":
            given = f"tile_tag {self.tile_tag!r} and global_view_pos {self.global_view_pos!r}"
            raise ValueError(f"{given} are not run; '2D' and 'head' are")


def _part(kind: Any, value: Any) -> Any:
    return value if isinstance(value, kind) else kind(**(dict(value) if value else {}))
