"""From what one request's Session has counted to the report that users read."""

from __future__ import annotations

import statistics

from vismmoe.request import Timing, Usage
from vismmoe.session import Clock, Session


def usage(session: Session, completion_tokens: int) -> Usage:
    past, visual = session.past, len(session.prompt.visual_positions)
    kept = past.kept_visual + session.keep_count
    return Usage(session.known_tokens, past.visual + visual, kept, completion_tokens, past.tokens)


def timing(clock: Clock, *, load_ms: float, total_ms: float) -> Timing:
    """Vision and compress are taken out of the first forward; decode counts from its end."""
    prefill, *decode = clock.steps or [0.0]
    return Timing(
        load=load_ms,
        vision=clock.vision,
        compress=clock.compress,
        prefill=max(0.0, prefill - clock.vision - clock.compress),
        decode=sum(decode),
        decode_p50=percentile(decode, 50),
        decode_p95=percentile(decode, 95),
        predictor=clock.predictor,
        total=total_ms,
    )


def tokens_per_second(clock: Clock) -> float:
    """Decoded tokens, all but the first, per second of decode; 0 when the answer is a single token."""
    decode = clock.steps[1:]
    return len(decode) / sum(decode) * 1e3 if decode else 0.0


def percentile(values: list[float], percent: int) -> float:
    """Linear between neighbours; 0 without values."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
