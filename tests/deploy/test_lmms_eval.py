"""lmms-eval itself: it drives our engine, and its own functions agree with our `lmms-eval` scorer.

Needs the extra `lmms` (pip install 'vismmoe[lmms]'); skipped without.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest.importorskip("lmms_eval", reason="lmms-eval is not installed: pip install 'vismmoe[lmms]'")

from vismmoe.config import EngineConfig, in_clone
from vismmoe.evaluate.benchmarks import BENCHMARKS, checked_all
from vismmoe.evaluate.forms import load_items
from vismmoe.evaluate.mcq import extract_mcq_answer, lmms_eval_letter, option_in_text
from vismmoe.evaluate.text import lmms_eval_answer, lmms_eval_yes_no
from vismmoe.evaluate.textvqa import evalai
from vismmoe_training.scenes.benchmarks import Sizes, write_benchmarks

ROOT = Path(__file__).parent.parent.parent
SHAPES = ("mme", "mmbench", "pope", "ocrbench")
PIECES = (
    "yes", "Yes", "NO", "no", "nO", "Y", "n", "not", "None", "know", ".", ",", "!", "?", ":", " ", "  ", "\n", "\t",
    "A", "B", "C", "D", "E", "(B)", "B.", "C)", ":D", "(A).", "the answer is", "Answer is **C**", "dog", "red", "dark",
    "nan", "banana", "<think>", "</think>", "<analysis>", "</analysis>", "**", "Ａ", "ＡＢＣ", "\u3000", "1,234", "12",
    "x = 1", "\\frac", "I choose", "two", "the", "isnt", "it's", "/", "-", '"', "é", "否", "答案是", "a", "3.5", "...",
)  # fmt: skip


def answers(count: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices(PIECES, k=dice.randint(0, 7))) for _ in range(count)]


def test_ten_thousand_random_answers_are_read_as_lmms_eval_reads_them() -> None:
    from lmms_eval.api.reasoning import strip_reasoning_tags
    from lmms_eval.tasks._task_utils.mcq_extract import extract_mcq_answer as theirs
    from lmms_eval.tasks._task_utils.vqa_eval_metric import EvalAIAnswerProcessor
    from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator
    from lmms_eval.tasks.mme.utils import parse_pred_ans

    tags = [["<think>", "</think>"], ["<analysis>", "</analysis>"]]
    judge, processor = MMBench_Evaluator(), EvalAIAnswerProcessor()
    options = {"A": "red", "B": "dark red", "C": "nan", "D": "Dog"}
    for answer in answers(10_000, 1):
        assert lmms_eval_answer(answer) == strip_reasoning_tags(answer, tags), answer
        assert lmms_eval_yes_no(answer) == parse_pred_ans(answer), answer
        assert (lmms_eval_letter(answer) or False) == judge.can_infer_option(answer), answer
        assert (option_in_text(answer, options) or False) == judge.can_infer_text(answer, dict(options)), answer
        assert extract_mcq_answer(answer, list("ABCD")) == theirs(answer, list("ABCD")), answer
        assert evalai(answer) == processor(answer), answer


def test_ten_thousand_random_answers_score_as_lmms_eval_scores_them(tmp_path: Path) -> None:
    """Each through process_results and the aggregation of the task, 2,500 a benchmark."""
    for benchmark in SHAPES:
        rows = random_rows(benchmark)
        score, _ = BENCHMARKS[benchmark].scorers["lmms-eval"](checked_all(BENCHMARKS[benchmark], numbered(rows)))
        ours = dict(score.values)
        for name, value in by_their_code(benchmark, rows, tmp_path).items():
            assert ours[name] == pytest.approx(value, abs=1e-9), (benchmark, name)


def numbered(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"row {place}", row) for place, row in enumerate(rows)]


def random_rows(benchmark: str, count: int = 2_500) -> list[dict[str, Any]]:
    dice = random.Random(benchmark)
    told = answers(count, 2)
    rows: list[dict[str, Any]] = []
    for place, answer in enumerate(told):
        row: dict[str, Any] = {"question": "?", "prediction": answer}
        if benchmark == "mme":
            category = ("existence", "OCR", "code_reasoning")[place // 2 % 3]
            row |= {"question_id": f"{category}/{place // 2}", "category": category}
            row["answer"] = "Yes" if place % 2 else "No"
        elif benchmark == "pope":
            row |= {"question_id": str(place), "image_source": str(place // 6), "category": "random"}
            row["answer"] = dice.choice(("yes", "no"))
        elif benchmark == "ocrbench":
            row |= {"dataset": dice.choice(("HME100k", "IIIT5K")), "question_type": "Regular Text Recognition"}
            row["answer"] = dice.choices(("dog", "ABC", "x = 1\n", "1,234", "Red"), k=dice.randint(1, 3))
        else:
            options = dict(zip("ABCD", dice.sample(("dog", "red", "dark red", "nan", "banana", "yes"), 4), strict=True))
            row |= {
                "index": place // 4 + place % 4 * 1_000_000,
                "hint": "nan",
                "source": "x",
                "split": "dev",
                **options,
            }
            row |= {
                "answer": dice.choice("ABCD"),
                "category": f"c{place // 4 % 3}",
                "L2-category": f"l{place // 4 % 2}",
            }
            row["prediction"] = row["answer"] if dice.random() < 0.8 else answer
        rows.append(row)
    return rows


def by_their_code(benchmark: str, rows: list[dict[str, Any]], folder: Path) -> dict[str, float]:
    def cleaned(row: dict[str, Any]) -> list[str]:
        return [lmms_eval_answer(row["prediction"])]

    if benchmark == "mme":
        from lmms_eval.tasks.mme import utils as mme

        told = [mme.mme_process_results(row, cleaned(row)) for row in rows]
        return {
            name: mme.mme_aggregate_results([one[key] for one in told if key in one])
            for name, key in (("perception", "mme_perception_score"), ("cognition", "mme_cognition_score"))
        }
    if benchmark == "pope":
        from lmms_eval.tasks.pope import utils as pope

        each = [pope.pope_process_results(row, cleaned(row))["pope_accuracy"] for row in rows]
        return {
            "accuracy": pope.pope_aggregate_accuracy(each),
            "precision": pope.pope_aggregate_precision(each),
            "recall": pope.pope_aggregate_recall(each),
            "f1": pope.pope_aggregate_f1_score(each),
            "yes_ratio": pope.pope_aggregate_yes_ratio(each),
        }
    if benchmark == "ocrbench":
        from lmms_eval.tasks.ocrbench import utils as ocr

        return {
            "final_score": sum(ocr.ocrbench_process_results(r, cleaned(r))["ocrbench_accuracy"]["score"] for r in rows)
        }
    from lmms_eval.tasks.mmbench.en_utils import mmbench_evaluator, mmbench_process_results

    found = [mmbench_process_results(row, cleaned(row))["gpt_eval_score"] for row in rows]
    overall, category, level = mmbench_evaluator.eval_result(found, eval_method="static")
    return {
        "overall": 100 * overall,
        "category": {name: 100 * value for name, value in category.items()},
        "l2_category": {name: 100 * value for name, value in level.items()},
    }


# -- the plug-in ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lmms_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run of `lmms_eval --model vismmoe` over all four scene sets, most of the visual tokens dropped at random."""
    from vismmoe_deploy.lmms_eval_tasks import write_task

    folder = tmp_path_factory.mktemp("lmms")
    data = write_benchmarks(folder / "data", Sizes(mme=6, mmbench=3, pope=2, ocrbench=6))
    for shape, place in data.items():
        write_task(shape, f"scenes_{shape}", place, folder / "tasks", plain=True)
    model = in_clone("checkpoints/reference")
    assert model is not None
    words = [
        sys.executable, "-m", "lmms_eval", "--model", "vismmoe", "--model_args",
        f"model={model.absolute()},device=cpu,keep_ratio=0.3,compressor=random", "--include_path",
        str(folder / "tasks"), "--tasks", ",".join(f"scenes_{shape}" for shape in SHAPES), "--batch_size", "8",
        "--log_samples", "--output_path", str(folder / "out"),
    ]  # fmt: skip
    path = os.pathsep.join((str(declare_entry_points(folder / "meta")), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    # lmms-eval's exit status says nothing; its tasks write files of like names into `submissions`
    (results,) = (file for file in (folder / "out").glob("*/*_results.json") if file.parent.name != "submissions")
    told = json.loads(results.read_text())["results"]
    samples = {shape: next((folder / "out").glob(f"*/*_samples_scenes_{shape}.jsonl")) for shape in SHAPES}
    assert done.returncode == 0, done.stderr[-2000:]
    return {"data": data, "results": told, "samples": samples}


def declare_entry_points(folder: Path) -> Path:
    """What installing the project would declare, also where an older installation does not."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    info = folder / "vismmoe_entry_points-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vismmoe-entry-points\nVersion: 0\n")
    lines = [
        f"[{group}]\n{name} = {value}\n"
        for group, all_ in settings["entry-points"].items()
        for name, value in all_.items()
    ]
    (info / "entry_points.txt").write_text("".join(lines))
    return folder


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shape", SHAPES)
def test_lmms_eval_gives_our_numbers_for_the_answers_of_its_own_run(lmms_run: dict[str, Any], shape: str) -> None:
    benchmark = BENCHMARKS[shape]
    lines = [json.loads(line) for line in lmms_run["samples"][shape].read_text("utf-8").splitlines()]
    answered = {line["doc_id"]: line for line in lines}
    items = load_items(benchmark, str(lmms_run["data"][shape]))
    assert len(answered) == len(items)
    for place, item in enumerate(items):
        assert answered[place]["input"] == benchmark.prompts["plain"].text(item.row), "both ask the same"
    rows = [{**item.row, "prediction": answered[place]["filtered_resps"]} for place, item in enumerate(items)]
    score, _ = benchmark.scorers["lmms-eval"](rows)
    told = lmms_run["results"][f"scenes_{shape}"]
    pairs = {
        "mme": {"mme_perception_score": "perception"},
        "mmbench": {"gpt_eval_score": "overall"},
        "pope": {
            f"pope_{name}": name.removesuffix("_score") for name in ("accuracy", "precision", "recall", "f1_score")
        },
        "ocrbench": {"ocrbench_accuracy": "ocrbench_accuracy"},
    }[shape]
    for theirs, ours in pairs.items():
        assert score.values[ours] == pytest.approx(told[f"{theirs},none"], abs=1e-9), theirs


@pytest.mark.timeout(1200)
def test_our_own_run_gives_the_answers_that_lmms_eval_got(lmms_run: dict[str, Any]) -> None:
    """Greedy, the same prompts, one by one instead of in eights."""
    from vismmoe.engine import Engine, Request

    lines = [json.loads(line) for line in lmms_run["samples"]["pope"].read_text("utf-8").splitlines()]
    items = load_items(BENCHMARKS["pope"], str(lmms_run["data"]["pope"]))
    with Engine.load(EngineConfig(device="cpu")) as engine:
        for line, item in zip(sorted(lines, key=lambda each: each["doc_id"]), items, strict=True):
            assert item.image is not None
            request = Request((item.image(),), line["input"], 128, 0.3, "random")
            assert engine.generate(request).text.strip() == line["filtered_resps"]


def test_model_args_that_are_unknown_are_named() -> None:
    from vismmoe.errors import UsageError
    from vismmoe_deploy.lmms_eval_model import VisMMoE

    with pytest.raises(UsageError, match="keep_ration"):
        VisMMoE(keep_ration="0.5")
