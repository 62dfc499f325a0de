"""What `make paper` prints and writes: the published figure, ours, the spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vismmoe.compressors import COMPRESSORS
from vismmoe.config import DEFAULT_COMPRESSOR
from vismmoe.talk import table
from vismmoe_training.evaluate_predictors import CEILING, Recall
from vismmoe_training.paper import published
from vismmoe_training.paper.ablation import STEPS, Step
from vismmoe_training.paper.answers import VANILLA, Answers, Part, Posed, everything
from vismmoe_training.paper.choice import RULE, WHOLE, beyond, retention, unique_experts, winner
from vismmoe_training.paper.foresight import OURS, PUBLISHED, TOP, WINDOW, Foresight
from vismmoe_training.paper.paired import Difference
from vismmoe_training.paper.scale import ARMS, CURVE, HALF, KEEP_RATIOS, SPECS, Paper
from vismmoe_training.paper.spread import Figure
from vismmoe_training.scenes import STYLES

JUDGED = ("all", *(f"{kind} scenes" for kind in SPECS))  # parts on which methods are held against random dropping
Cell = tuple[str, str, int, int]  # rule, phase, k, distance


class Results:
    """All figures of one run."""

    def __init__(self, paper: Paper, foresights: Sequence[Foresight], answers: Sequence[Answers]) -> None:
        self.ablations: Sequence[Mapping[str, Step]] = ()
        self.simulator_errors: Mapping[str, Figure] = {}
        self.seconds = 0.0
        self._paper, self._foresights, self._answers = paper, foresights, answers
        self._recall = _by_cell([f.recalls for f in foresights], "recall")
        self._kept = {key: retention(answers, key) for key in ARMS}
        self._unique = {key: unique_experts(answers, key) for key in [(VANILLA, 1.0), *ARMS]}
        self.winner = winner(self._kept, self._unique)

    @property
    def default(self) -> str:
        """The winner, or what is the default now when the rule names nobody."""
        return self.winner or DEFAULT_COMPRESSOR

    # -- for people -----------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        scale = self._paper.scale
        last = (
            f"{scale.seeds} seeds, spread as standard deviation; for each {scale.heldout_images} held-out scenes of "
            f"every kind ({', '.join(SPECS)}), {len(self._answers[0].posed)} questions, "
            f"{scale.fewer_questions * len(SPECS)} where a method was not asked all; {self.seconds:.0f} s in all. "
            "Published: Qwen3-VL-30B-A3B on four benchmarks; ours: the reference model on drawn scenes."
        )
        parts = (
            self._coverage(), self._hot_recall(), self._distances(), self._union(), self._features(), self._accuracy(),
            self._against_random(), self._kinds(), self._ablation(), self._simulator(), last,
        )  # fmt: skip
        return "\n\n".join(parts)

    def _coverage(self) -> str:
        rows = [(name, f"{value:.1%}", self._covered(name).percent()) for name, value in published.COVERAGE.items()]
        return table(rows, ("top-20 expert coverage", "published", "ours"))

    def _hot_recall(self) -> str:
        both = [(phase, k) for phase in ("decode", "prefill") for k in TOP]
        rows = [(rule, *(self._cell((rule, phase, k, 0)) for phase, k in both)) for rule in self._rules()]
        paper = ("the paper", *(f"{published.HOT_RECALL[k]:.1%}" for k in TOP), *("-" for _ in TOP))
        head = ("hot recall, blended over W = 5", *(f"decode @{k}" for k in TOP), *(f"prefill @{k}" for k in TOP))
        controls = ", ".join(f"{f.control:.1%}" for f in self._foresights)
        return f"{table([paper, *rows], head)}\ncontrol: next gate at distance 0 reads {controls}"

    def _distances(self) -> str:
        rows = [
            (rule, k, *(self._cell((rule, "decode", k, d)) for d in range(1, WINDOW + 1)))
            for k in TOP
            for rule in self._rules()
            if rule != CEILING
        ]
        head = ("decode, by distance", "k", *(f"d={d}" for d in range(1, WINDOW + 1)))
        told = {"precision": "precision", "recall by gate mass": "mass_recall", "experts to load": "moved"}
        extra = [f"{name} of lookahead@20: {self._along(field)}" for name, field in told.items()]
        return "\n".join((table(rows, head), *extra))

    def _union(self) -> str:
        rows = [(name, *(self._one_list(name, k).percent() for k in TOP)) for name in self._foresights[0].union]
        ceiling = ("ceiling", *(self._one_list(PUBLISHED, -k).percent() for k in TOP))
        return table([*rows, ceiling], ("one list for all five layers, decode", *(f"@{k}" for k in TOP)))

    def _features(self) -> str:
        names = list(self._foresights[0].without)
        whole = ("all features", *(self._cell((OURS, "decode", k, 0)) for k in TOP))
        rows = [(f"without {name}", *(self._without(name, k).percent() for k in TOP)) for name in names]
        return table([whole, *rows], ("lookahead, decode, blended", *(f"@{k}" for k in TOP)))

    def _accuracy(self) -> str:
        vanilla = self._vanilla()
        rows = []
        for method, ratio in sorted(ARMS, key=lambda key: (-key[1], self._unique[key].mean)):
            told = published.RETENTION.get(method, {}).get(ratio)
            rows.append(
                (
                    f"{ratio:.0%}",
                    method,
                    "-" if told is None else f"{told:.1%}",
                    self._kept[method, ratio].percent(),
                    self._unique[method, ratio].plain(),
                    self._tokens(method, ratio),
                    sum(len(a.outcomes[method, ratio].right) for a in self._answers),
                )
            )
        head = ("kept", "compressor", "published", "accuracy of vanilla's", "unique experts", "tokens", "questions")
        first = f"vanilla: {vanilla.percent()} right, {self._unique[VANILLA, 1.0].plain()} experts a deeper layer"
        return f"{table(rows, head)}\n{first}\nThe rule ({RULE}) names: {self.winner or 'nobody'}"

    def _against_random(self) -> str:
        rows = [
            (f"{ratio:.0%}", method, *(self._beyond(method, ratio, self._parts()[name]).points() for name in JUDGED))
            for ratio in KEEP_RATIOS
            for method in self._shown()
            if method != "random"
        ]
        table_ = table(rows, ("kept", "beyond random dropping, points of vanilla's", *JUDGED))
        return f"{table_}\nin brackets: 95 % of 2000 paired draws of pictures, all seeds together"

    def _kinds(self) -> str:
        """At half of the tokens, by kind of scene and of question; vanilla's own accuracy above."""
        parts = self._parts()
        first = ("vanilla, right", *(f"{self._vanilla(part).mean:.1%}" for part in parts.values()))
        asked = ("questions", *(str(sum(map(part, self._posed()))) for part in parts.values()))
        rows = [
            (method, *(retention(self._answers, (method, HALF), part).percent() for part in parts.values()))
            for method in self._shown()
        ]
        return table([asked, first, *rows], ("50 % kept, of vanilla's", *parts))

    def _ablation(self) -> str:
        rows = [
            (
                name,
                f"{published.ABLATION_S[name]:.2f}",
                self._step(name, "ms").plain(0),
                self._step(name, "stall_ms").plain(2),
                self._step(name, "mebibytes").plain(2),
                self._step(name, "hit_rate").percent(),
            )
            for name in STEPS
        ]
        return table(rows, ("ablation", "published s", "ours ms", "stall ms", "MiB read", "hits"))

    def _simulator(self) -> str:
        rows = [(name, figure.percent()) for name, figure in self.simulator_errors.items()]
        return table(rows, ("simulated against measured stall, reads slowed down", "off by"))

    # -- for programs ---------------------------------------------------------------------------------------------
    def to_json(self) -> dict[str, Any]:
        """Plain values; shares in [0, 1], each with its mean, its spread and every seed's."""
        phases = {"hot_recall": "decode", "hot_recall_prefill": "prefill"}
        return {
            "coverage": {name: self._covered(name).to_json() for name in published.COVERAGE},
            **{key: self._recalls_of(phase) for key, phase in phases.items()},
            "hot_recall_union": {
                name: {str(k): self._one_list(name, k).to_json() for k in (*TOP, *(-k for k in TOP))}
                for name in self._foresights[0].union
            },
            "hot_recall_by_layer": self._by_layer(),
            "features": {
                name: {str(k): self._without(name, k).to_json() for k in TOP} for name in self._foresights[0].without
            },
            "control": Figure.of([f.control for f in self._foresights]).to_json(),
            "accuracy": {
                VANILLA: {"1.0": self._vanilla().to_json()},
                **{name: {str(r): self._kept[m, r].to_json() for m, r in ARMS if m == name} for name in COMPRESSORS},
            },
            "accuracy_is": "share of exact matches; of compressors as a share of vanilla's",
            "accuracy_at_half_by_part": {
                name: {
                    "questions": sum(map(part, self._posed())),
                    VANILLA: self._vanilla(part).to_json(),
                    **{m: retention(self._answers, (m, HALF), part).to_json() for m, r in ARMS if r == HALF},
                }
                for name, part in self._parts().items()
            },
            "beyond_random": {
                name: {
                    part: {str(r): self._beyond(m, r, self._parts()[part]).to_json() for m, r in ARMS if m == name}
                    for part in JUDGED
                }
                for name in COMPRESSORS
                if name != "random"
            },
            "questions": len(self._posed()),
            "unique_experts": {
                name: {str(r): figure.to_json() for (m, r), figure in self._unique.items() if m == name}
                for name in (VANILLA, *COMPRESSORS)
            },
            "default_compressor": {"rule": RULE, "winner": self.winner},
            "ablation": {
                name: {field: self._step(name, field).to_json() for field in Step.__annotations__} for name in STEPS
            },
            "simulator_error": {name: figure.to_json() for name, figure in self.simulator_errors.items()},
            "seconds": round(self.seconds, 1),
        }

    def _recalls_of(self, phase: str) -> dict[str, Any]:
        return {
            rule: {
                str(k): {
                    str(d) if d else "blended": self._recall[rule, phase, k, d].to_json() for d in range(WINDOW + 1)
                }
                for k in TOP
            }
            for rule in self._rules()
        }

    def _by_layer(self) -> dict[str, Any]:
        layers = sorted({phase for rule, phase, k, d in self._recall if phase.startswith("decode, layer")})
        return {
            rule: {phase.split()[-1]: self._recall[rule, phase, 20, 0].to_json() for phase in layers}
            for rule in self._rules()
            if rule != PUBLISHED
        }

    # -- cells ----------------------------------------------------------------------------------------------------
    def _rules(self) -> list[str]:
        found = dict.fromkeys(rule for rule, *_ in self._recall)
        return [*(rule for rule in found if rule != CEILING), CEILING]

    def _cell(self, cell: Cell) -> str:
        return self._recall[cell].percent()

    def _along(self, field: str) -> str:
        """Of decoded tokens, by distance."""
        cells = _by_cell([f.recalls for f in self._foresights], field)
        return ", ".join(f"d={d} {cells[OURS, 'decode', 20, d].plain(3)}" for d in range(1, WINDOW + 1))

    def _covered(self, name: str) -> Figure:
        return Figure.of([a.coverage[name] for a in self._answers])

    def _one_list(self, name: str, k: int) -> Figure:
        return Figure.of([f.union[name][k] for f in self._foresights])

    def _without(self, name: str, k: int) -> Figure:
        cells = _by_cell([f.without[name] for f in self._foresights], "recall")
        return cells[OURS, "decode", k, 0]

    def _shown(self) -> tuple[str, ...]:
        """The default first, then the others of which the whole curve is known."""
        return tuple(dict.fromkeys((self.default, *CURVE)))

    def _posed(self) -> list[Posed]:
        return [posed for answers in self._answers for posed in answers.posed]

    def _parts(self) -> dict[str, Part]:
        kinds: dict[str, Part] = {f"{kind} scenes": partial(_of_kind, kind) for kind in SPECS}
        styles: dict[str, Part] = {style: partial(_of_style, style) for style in STYLES}
        asked = [name for name, part in styles.items() if any(map(part, self._posed()))]
        return {"all": everything, **kinds, **{name: styles[name] for name in asked}}

    def _vanilla(self, part: Part = everything) -> Figure:
        """Share of right answers."""
        rights = [a.right(WHOLE, a.asked(WHOLE, part)) for a in self._answers]
        return Figure.of([sum(right) / max(1, len(right)) for right in rights])

    def _beyond(self, method: str, ratio: float, part: Part) -> Difference:
        return beyond(self._answers, (method, ratio), ("random", ratio), part)

    def _tokens(self, method: str, ratio: float) -> str:
        kept = [a.outcomes[method, ratio].kept[number] for a in self._answers for number in a.asked_of_all()]
        return f"{sum(kept) / len(kept):.0f}"

    def _step(self, name: str, field: str) -> Figure:
        return Figure.of([float(getattr(found[name], field)) for found in self.ablations])


def _of_kind(kind: str, posed: Posed) -> bool:
    return posed.kind == kind


def _of_style(style: str, posed: Posed) -> bool:
    return posed.asked.style == style


def _by_cell(seeds: Sequence[Sequence[Recall]], field: str) -> dict[Cell, Figure]:
    found: dict[Cell, list[float]] = {}
    for recalls in seeds:
        for r in recalls:
            found.setdefault((r.rule, r.phase, r.k, r.distance), []).append(getattr(r, field))
    return {cell: Figure.of(values) for cell, values in found.items()}
