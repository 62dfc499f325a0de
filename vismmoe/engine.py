"""THE file to read: an Engine loads a checkpoint under a memory budget and answers requests, one at a time or together.

    image + question -> processor -> vision tower -> prefix layers on all tokens -> compressor keeps M of N
    -> each deeper layer: router, fetch, foresee, run, expire, prefetch (pipeline.py) -> logits

transformers' own generate() drives; hooks and a registered experts function do the rest. Requests that are
answered together meet at each MoE layer, which then loads each expert once for all of them.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vismmoe.compressors import get_compressor
from vismmoe.config import EngineConfig, resolve_model
from vismmoe.conversation import Conversation, in_words
from vismmoe.errors import CheckpointError, UsageError, VisMMoEError
from vismmoe.experts.plan import MemoryPlan
from vismmoe.images import ENOUGH_PIXELS, load_images, notes_of
from vismmoe.lockstep import LockStep
from vismmoe.memory import ResidentPeak, arithmetic_threads, return_freed_memory
from vismmoe.models.catalogue import check_compression
from vismmoe.models.checkpoint import Checkpoint, open_checkpoint
from vismmoe.models.chunks import ChunkedLayers
from vismmoe.models.dtypes import resolve_device, resolve_dtype
from vismmoe.models.generation import (
    ModelState,
    greedy_config,
    positions_of,
    stop_tokens,
    text_stream,
    token_chooser,
)
from vismmoe.models.hooks import StackHooks
from vismmoe.models.kv import CACHE_ARGUMENT, allocated_cache, expect
from vismmoe.models.load import (
    ExpertsRunner,
    limit_pixels,
    load_model,
    load_processor,
    moe_norm_weights,
    route_experts,
    router_weights,
    tensor_reader,
    tokenizer_of,
)
from vismmoe.models.prompt import Prompt, encode_messages
from vismmoe.models.tower import StreamedTower, streamed_names
from vismmoe.pipeline import ExpertPipeline, LayerCall, PipelineOptions, Watcher
from vismmoe.planning import (
    CONTEXT_TOKENS,
    IMAGE_SIZE,
    RequestSize,
    assumed_size,
    least_prefix_layers,
    plan_for,
    plan_request,
    plan_sizes,
    prefix_layers,
    size_of_request,
    sizes_of,
)
from vismmoe.predictors.next_gate import NextGate
from vismmoe.recording import Recorder
from vismmoe.reporting import timing, tokens_per_second, usage
from vismmoe.request import ExpertReport, GenerationResult, MemoryReport, PredictorReport, Recording, Request
from vismmoe.session import NOTHING, Past, Session
from vismmoe.types import AheadDemand, Compressor, ModelBytes, ModelSpec, Predictor, RequestRecord

__all__ = ["Engine", "GenerationResult", "Recording", "Request", "plan_for"]

OnText = Callable[[str], None]


@dataclass(frozen=True)
class PredictorOrigin:
    """Where a predictor came from, for the report."""

    source: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class _Asked:
    """A request that is ready to run."""

    request: Request
    session: Session
    started: float  # s, of time.perf_counter()
    whole: Prompt  # with what earlier turns have put into the cache
    images: tuple[Image.Image, ...]
    cache: Any


class _Here(threading.local):
    """Whose forward the calling thread runs: requests that are answered together have a thread each."""

    session: Session | None = None


class Engine:
    """One loaded checkpoint. A context manager; close() ends its threads. Calls are answered one after another."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        plan: MemoryPlan,
        pipeline: ExpertPipeline,
        model: nn.Module,
        processor: Any,
        predictor: tuple[Predictor | None, PredictorOrigin],
        planned_for: ModelBytes,
        peak: ResidentPeak,
        load_ms: float,
    ) -> None:
        """Use Engine.load()."""
        self.config = config
        self.checkpoint = checkpoint
        self.plan = plan
        self.predictor, self._origin = predictor
        self.prefix_layers = prefix_layers(checkpoint, config)  # MoE layers that see all visual tokens
        self._pipeline = pipeline
        self._model = model
        self._processor = processor
        self._stop = stop_tokens(checkpoint, processor)
        self._planned_for = planned_for
        self._peak = peak
        self._load_ms = load_ms
        self._device = resolve_device(config.device)
        self._here = _Here()
        self._state = ModelState(model)
        self._conversations: weakref.WeakSet[Conversation] = weakref.WeakSet()
        self._meeting: LockStep[tuple[int, LayerCall], Tensor, tuple[list[int], float]] | None = None
        self._gate: NextGate | None = None  # for recording
        self._turn = threading.Lock()
        self._closed = False
        self._tower: StreamedTower | None = None
        if config.vision == "streamed":
            dtype = resolve_dtype(config.compute_dtype, checkpoint.layout, self._device)
            read = tensor_reader(checkpoint, model, device=self._device, dtype=dtype)
            self._tower = StreamedTower(model, checkpoint, read)
        last = checkpoint.spec.moe_layers[self.prefix_layers - 1] if self.prefix_layers else -1
        self.boundary = last + 1  # first decoder layer that sees only the kept tokens
        StackHooks(model, checkpoint.family, self.boundary, lambda: self._here.session)
        ChunkedLayers(model, checkpoint.family, lambda: self._here.session)
        route_experts(model, checkpoint.family, self._runner)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        predictor: Predictor | None = None,
        *,
        origin: PredictorOrigin = PredictorOrigin(),
        image_size: tuple[int, int] = IMAGE_SIZE,
        context_tokens: int = CONTEXT_TOKENS,
        request: Request | None = None,
    ) -> Engine:
        """Plan, then load what the plan keeps resident. image_size (width, height) and context_tokens are what memory
        is planned for under `config.device_memory`, or else the one request that will be asked; a request that needs
        more than the budget is refused.

        Raises CheckpointError, BudgetError, UsageError.
        """
        started = time.perf_counter()
        checkpoint = open_checkpoint(resolve_model(config.model))
        processor = None
        size = assumed_size(checkpoint, config.seen_size(image_size), context_tokens)
        if request is not None:
            processor = load_processor(checkpoint.folder, checkpoint.family)
            size = _size_of(request, checkpoint, processor, config)
        sizes = sizes_of(checkpoint, config, size)
        plan = plan_sizes(checkpoint, config, sizes, size)
        device = resolve_device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.threads or arithmetic_threads(checkpoint.layout.expert_bytes))
            return_freed_memory(plan.planned_bytes)
        dtype = resolve_dtype(config.compute_dtype, checkpoint.layout, device)
        processor = processor or load_processor(checkpoint.folder, checkpoint.family)
        limit_pixels(processor, checkpoint.family, config.min_pixels, config.max_pixels)
        peak = ResidentPeak()  # code that is imported and the processor are no part of the model
        streamed = streamed_names(checkpoint) if config.vision == "streamed" else frozenset()
        pipeline = ExpertPipeline(
            checkpoint.spec, checkpoint.layout, plan, _options(config), device=device, dtype=dtype, predictor=predictor
        )
        try:
            if config.disk_rate is None:  # a disk that is slowed down is so for requests, not for loading
                pipeline.read_ahead(size.prompt_tokens)  # slabs fill while the rest of the model is read
            model = load_model(checkpoint, device=device, dtype=dtype, leave=streamed)
            load_ms = (time.perf_counter() - started) * 1e3
            return cls(config, checkpoint, plan, pipeline, model, processor, (predictor, origin), sizes, peak, load_ms)
        except BaseException:
            pipeline.close()
            raise

    # -- what others may know -------------------------------------------------------------------------------------
    @property
    def spec(self) -> ModelSpec:
        return self.checkpoint.spec

    @property
    def model(self) -> nn.Module:
        """The transformers model, for measurements that watch its modules."""
        return self._model

    @property
    def peak_bytes(self) -> int:
        """Device memory that the model, its experts and requests have taken at most until now."""
        return self._memory().device_peak_bytes

    @property
    def routers(self) -> Mapping[int, Tensor]:
        """Decoder layer -> router weight (E, H) float32, for the next-gate rule."""
        return router_weights(self._model, self.checkpoint)

    @property
    def router_norms(self) -> Mapping[int, Tensor]:
        """Decoder layer -> (H,) float32 weight of the norm before its MoE block."""
        return moe_norm_weights(self._model, self.checkpoint)

    # -- requests -------------------------------------------------------------------------------------------------
    def generate(self, request: Request, on_text: OnText | None = None) -> GenerationResult:
        """Answer. on_text is called with each finished piece of the answer, in order.

        Raises UsageError, ImageError, CheckpointError, BudgetError. An interruption closes the engine.
        """
        return self._answer((request,), on_text, None)[0][0]

    def converse(self) -> Conversation:
        """Several turns that share a KV cache: ask() each in turn. Others may be answered in between."""
        conversation = Conversation(lambda talk, request, on_text: self._answer((request,), on_text, None, talk)[0][0])
        self._conversations.add(conversation)
        return conversation

    def generate_together(self, requests: Sequence[Request]) -> list[GenerationResult]:
        """Answer several requests in lock-step, each with the very bits that generate() gives it alone.

        Each MoE layer loads an expert once for all of them. A load counts for the first request that needs the expert,
        evictions for the first request of all; times are those of a request among the others.

        Raises what generate() raises; BudgetError when each would fit alone and all together do not.
        """
        return [result for result, _ in self._answer(requests, None, None)]

    def record(self, request: Request, *, request_id: int = 0, item: str = "", window: int = 5) -> Recording:
        """Answer and note the routing of every forward and MoE layer; window: layers ahead of the next-gate masses."""
        if self._gate is None or self._gate.window != window:
            self._gate = NextGate(self.spec, self.routers, self.router_norms, window)
        recorder = Recorder(self.spec, self._gate, request_id)
        ((result, session),) = self._answer((request,), None, recorder)
        told = RequestRecord(
            request=request_id,
            item=item,
            prompt=request.prompt,
            answer=result.text,
            visual_tokens=result.usage.visual_tokens,
            kept_visual_tokens=result.usage.kept_visual_tokens,
            completion_tokens=result.usage.completion_tokens,
            visual_summary=session.visual_summary.cpu(),
        )
        return Recording(result, told, tuple(recorder.records))

    def watch(self, request: Request, watcher: Watcher) -> GenerationResult:
        """Answer while `watcher` is shown what each MoE layer's router chose, in every forward."""
        return self._answer((request,), None, watcher)[0][0]

    def _answer(
        self,
        requests: Sequence[Request],
        on_text: OnText | None,
        recorder: Watcher | None,
        conversation: Conversation | None = None,
    ) -> list[tuple[GenerationResult, Session]]:
        with self._turn:
            if self._closed:
                raise UsageError("this engine is closed: load a new one")
            if recorder is not None and any(request.prefill_chunk for request in requests):
                raise UsageError("routing is recorded of whole prompts only: leave prefill_chunk out")
            try:
                asked = [self._prepare(request, conversation) for request in requests]
            except Exception:
                raise
            except BaseException:  # Ctrl-C while images are read: what else is to be done is the same as below
                self.close()
                raise
            self._make_room(asked)
            evicted = self._pipeline.evictions
            try:
                answers = self._run(asked, on_text, recorder)
            except BaseException:
                if conversation is not None:
                    conversation.close()  # its cache may hold a part of this turn
                raise
            evictions = [self._pipeline.evictions - evicted] + [0] * len(asked)
            told = [
                (self._report(each, tokens, (ended - each.started) * 1e3, count), each.session)
                for each, (tokens, ended), count in zip(asked, answers, evictions, strict=False)
            ]
            if conversation is not None:
                _remember(conversation, asked[0], answers[0][0], told[0][0].text)
            return told

    def _prepare(self, request: Request, conversation: Conversation | None) -> _Asked:
        compressor = get_compressor(
            request.compressor, salient_ratio=self.config.salient_ratio, trade_off=self.config.trade_off
        )
        check_compression(self.checkpoint.family, compressor, request.keep_ratio)
        pictures = (source for said in request.messages for source in said.pictures)
        loaded = load_images(pictures, max(ENOUGH_PIXELS, self.config.max_pixels or 0))
        images, messages = tuple(self._resized(loaded, compressor, request.keep_ratio)), request.messages
        if conversation is not None:
            images, messages = (*conversation.images, *images), (*conversation.messages, *messages)
        started = time.perf_counter()
        config, family = self.checkpoint.config, self.checkpoint.family
        whole = encode_messages(self._processor, config, family, images, in_words(messages))
        past, prompt, cache = NOTHING, whole, None
        if conversation is not None:
            past, prompt, cache = conversation.resume(whole, self._processor, self.boundary)
        session = self._open_session(request, prompt, compressor, past)
        session.notes = notes_of(loaded)
        if cache is None:
            # the next turn may compress; a piece of a prompt must find every earlier one
            whole_windows = session.compresses or conversation is not None or request.prefill_chunk is not None
            cache = allocated_cache(config, request.max_new_tokens, whole=whole_windows)
        expect(cache, request.max_new_tokens)
        return _Asked(request, session, started, whole, images, cache)

    def _resized(
        self, images: Sequence[Image.Image], compressor: Compressor, keep_ratio: float
    ) -> Sequence[Image.Image]:
        """Pictures as the compressor wants the vision tower to see them; nearly all want them as they are."""
        vision = getattr(self.checkpoint.config, "vision_config", None)
        patch = getattr(vision, "patch_size", None)
        token_px = (patch if isinstance(patch, int) else 16) * int(getattr(vision, "spatial_merge_size", 1))
        sizes = [compressor.resize(*image.size, keep_ratio, token_px) for image in images]
        pairs = zip(images, sizes, strict=True)
        return [image if size == image.size else image.resize(size, Image.Resampling.BICUBIC) for image, size in pairs]

    def _open_session(self, request: Request, prompt: Prompt, compressor: Compressor, past: Past = NOTHING) -> Session:
        if request.prefill_chunk is not None and request.prefill_chunk < 1:
            raise UsageError(f"prefill_chunk must be at least 1 token, not {request.prefill_chunk}")
        if request.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
        if not 0 < request.keep_ratio <= 1:
            raise UsageError(f"keep_ratio must lie in (0, 1], not {request.keep_ratio}")
        total = len(prompt.visual_positions)
        count = compressor.count(total, request.keep_ratio)
        if count < total and self.prefix_layers < (least := least_prefix_layers(self.checkpoint)):
            raise UsageError(
                f"with prefix_layers {self.prefix_layers} no visual token can be dropped: give at least {least}, or "
                "keep_ratio 1"
            )
        return Session(
            self.spec,
            prompt,
            keep_count=count,
            compressor=compressor if count < total else None,
            prefix=self.spec.moe_layers[: self.prefix_layers],
            device=self._device,
            past=past,
            prefill_chunk=request.prefill_chunk,
            foresee=self._foresee(compressor.layers_ahead) if count < total and compressor.layers_ahead else None,
        )

    def _foresee(self, layers_ahead: int) -> Callable[[int, Tensor], AheadDemand] | None:
        """What the next deeper layers would be asked for, by their own routers (next gate), and what is there. None for
        a family whose routers cannot be asked ahead: compressors then look at the prefix alone."""
        try:
            gate = NextGate(self.spec, self.routers, self.router_norms, layers_ahead)
        except CheckpointError:
            return None

        def ask(layer: int, states: Tensor) -> AheadDemand:
            experts = gate.logits(layer, states, layers_ahead).topk(self.spec.top_k, dim=-1).indices
            row = self.spec.moe_layers.index(layer)
            layers = self.spec.moe_layers[row + 1 : row + 1 + len(experts)]
            sizes = torch.full((len(layers),), self.checkpoint.layout.expert_bytes)
            return AheadDemand(experts, self._pipeline.resident(layers), sizes)

        return ask

    def _make_room(self, asked: Sequence[_Asked]) -> None:
        """Give up slabs for a context that is longer than planned for; BudgetError where that is not enough.

        Requests in lock-step go through the vision tower one by one; all their caches are alive together.
        """
        size = RequestSize(
            max((len(each.session.prompt.visual_positions) for each in asked), default=0),
            self._kept_for_others(asked) + sum(each.session.known_tokens for each in asked),
            sum(each.request.max_new_tokens for each in asked),
            len(asked),
            _pieces(asked),
        )
        found = plan_request(self.plan, self._planned_for, self.checkpoint, self.config, size)
        if found is None:
            return
        try:
            self._pipeline.replan(found[0])
        except BaseException:
            self.close()
            raise
        self.plan, self._planned_for = found

    def _kept_for_others(self, asked: Sequence[_Asked]) -> int:
        """Tokens in the caches of other open conversations."""
        here = [id(each.cache) for each in asked]
        return sum(talk.cached_tokens for talk in self._conversations if id(talk.cache) not in here)

    def _run(
        self, asked: Sequence[_Asked], on_text: OnText | None, recorder: Watcher | None
    ) -> list[tuple[list[int], float]]:
        """For each: the ids of the answer's tokens, and when the last one was there."""
        self._pipeline.begin_request(sum(each.session.prompt.tokens for each in asked))
        self._pipeline.watcher = recorder
        try:
            if len(asked) == 1:
                return [self._decode(asked[0], on_text)]
            self._meeting = LockStep(
                [partial(self._decode, each, None) for each in asked],
                self._run_meeting,
                lambda call: (call[1].session.step, call[0]),
            )
            return self._meeting.run()
        except VisMMoEError:
            self._pipeline.recover()
            raise
        except BaseException:  # Ctrl-C above all: no thread may stay behind
            self.close()
            raise
        finally:
            self._meeting = None
            self._pipeline.watcher = None

    def _decode(self, asked: _Asked, on_text: OnText | None) -> tuple[list[int], float]:
        session, inputs = asked.session, dict(asked.session.prompt.inputs)
        torch.get_num_threads()  # a thread's first question lets torch give it the engine's number of threads
        self._here.session = session
        try:
            with torch.inference_mode():
                if session.past.tokens:  # of the new images alone transformers could not tell where they stand
                    inputs["position_ids"] = positions_of(self._model, asked.whole.inputs)
                ids = self._model.generate(  # type: ignore[operator]
                    **{name: self._placed(value) for name, value in inputs.items()},
                    **{CACHE_ARGUMENT: asked.cache},
                    generation_config=greedy_config(self._stop, self._processor, asked.request.max_new_tokens),
                    logits_processor=token_chooser(asked.request.sampling),
                    streamer=None if on_text is None else text_stream(tokenizer_of(self._processor), on_text),
                )
        finally:
            self._here.session = None
        return ids[0, session.known_tokens :].tolist(), time.perf_counter()

    def _placed(self, value: Any) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) else value

    def _runner(self, layer: int) -> ExpertsRunner:
        def run(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            session = self._here.session
            if session is None:
                raise RuntimeError("this model runs through Engine.generate only")
            if self._meeting is None:
                return self._pipeline.run_layer(session, module, layer, hidden, top_k_index, top_k_weights)
            kept = self._state.take()
            out = self._meeting.meet((layer, LayerCall(session, module, hidden, top_k_index, top_k_weights)))
            self._state.put(kept)
            return out

        return run

    def _run_meeting(self, calls: list[tuple[int, LayerCall]]) -> list[Tensor]:
        """All of one layer and forward: lock-step lets only those together."""
        with torch.inference_mode():
            return self._pipeline.run_together(calls[0][0], [call for _, call in calls])

    def _report(self, asked: _Asked, tokens: list[int], total_ms: float, evictions: int) -> GenerationResult:
        session, plan, kind, origin = asked.session, self.plan, self.predictor, self._origin
        text = str(tokenizer_of(self._processor).decode(tokens, skip_special_tokens=True))
        return GenerationResult(
            text=text,
            model=self.config.model,
            finish_reason="stop" if tokens and tokens[-1] in self._stop else "length",
            usage=usage(session, len(tokens)),
            timing_ms=timing(session.clock, load_ms=self._load_ms, total_ms=total_ms),
            tokens_per_second=tokens_per_second(session.clock),
            experts=ExpertReport(
                session.counters["prefill"],
                session.counters["decode"],
                evictions,
                plan.slabs,
                plan.pinned_layers,
                session.distinct_experts(),
            ),
            memory=self._memory(),
            predictor=None if kind is None else PredictorReport(kind.kind, kind.window, origin.source, origin.version),
            fallbacks=(*self._pipeline.fallbacks, *session.notes),
            sampling=asked.request.sampling,
        )

    def _memory(self) -> MemoryReport:
        host = self._pipeline.host_bytes
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
        else:
            peak = max(0, self._peak.bytes() - host)
        return MemoryReport(sum(self.plan.planned.values()), peak, sum(self.plan.host.values()), host)

    # -- lifetime -------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """End all threads and close all files. Twice is harmless."""
        self._closed = True
        if self._tower is not None:
            self._tower.close()
        self._pipeline.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pieces(asked: Sequence[_Asked]) -> int | None:
    """The most tokens that a layer takes at once; None: all of a prompt."""
    chunks = [each.request.prefill_chunk for each in asked]
    return None if not chunks or None in chunks else max(chunk for chunk in chunks if chunk is not None)


def _remember(conversation: Conversation, asked: _Asked, tokens: Sequence[int], answer: str) -> None:
    """A turn is over: what was said, and what the cache holds now."""
    ids = [*asked.whole.inputs["input_ids"][0].tolist(), *tokens]
    conversation.keep(asked.cache, ids, asked.session.held(), asked.session.known_tokens)
    conversation.remember(asked.request, asked.images, answer, asked.whole)


def _size_of(request: Request, checkpoint: Checkpoint, processor: Any, config: EngineConfig) -> RequestSize:
    pictures = [source for said in request.messages for source in said.pictures]
    loaded = load_images(pictures, max(ENOUGH_PIXELS, config.max_pixels or 0))
    seen = [config.seen_size(image.size) for image in loaded]
    return size_of_request(checkpoint, processor, seen, in_words(request.messages), request.max_new_tokens)


def _options(config: EngineConfig) -> PipelineOptions:
    return PipelineOptions(
        direct_io=config.direct_io,
        readers=config.readers,
        prefetch=config.prefetch,
        lookahead_top=config.lookahead_top,
        eviction=config.eviction,
        hybrid=config.hybrid,
        disk_rate=config.disk_rate,
    )
