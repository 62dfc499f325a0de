"""Task files with which lmms-eval runs its own benchmark code on data in a folder of yours.

    python -m vismmoe_deploy.lmms_eval_tasks --data runs/eval-demo/data/scenes-mme --benchmark mme --name scenes_mme \\
        --output tasks --plain
    lmms_eval --model vismmoe --include_path tasks --tasks scenes_mme --batch_size 8
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

# benchmark -> task file below lmms_eval/tasks
TASKS = {
    "mme": "mme/mme.yaml",
    "mmbench": "mmbench/mmbench_en_dev_static.yaml",
    "pope": "pope/pope.yaml",
    "ocrbench": "ocrbench/ocrbench.yaml",
}
PLAIN_MMBENCH = "{{question}}\nA. {{A}}\nB. {{B}}\nC. {{C}}\nD. {{D}}\nAnswer with the letter."


def write_task(benchmark: str, name: str, data: Path | str, output: Path | str, *, plain: bool = False) -> Path:
    """Write `<output>/<name>.yaml` and return it. plain: our prompt set of that name in place of lmms-eval's own."""
    import lmms_eval

    assert lmms_eval.__file__ is not None
    lines = [
        f"include: {Path(lmms_eval.__file__).parent / 'tasks' / TASKS[benchmark]}",
        f"task: {name}",
        f"dataset_path: {Path(data).absolute()}",
        "dataset_kwargs: {}",
    ]
    if plain:
        lines.append('lmms_eval_specific_kwargs: {default: {pre_prompt: "", post_prompt: ""}}')
        if benchmark == "mmbench":
            lines.append(f"doc_to_text: {json.dumps(PLAIN_MMBENCH)}")
    file = Path(output) / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vismmoe_deploy.lmms_eval_tasks", description=__doc__)
    parser.add_argument("--benchmark", required=True, choices=list(TASKS))
    parser.add_argument("--data", required=True, metavar="DIR", help="folder with the data in the hub's layout")
    parser.add_argument("--name", required=True, help="what the task is called")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the task file")
    parser.add_argument("--plain", action="store_true", help="ask without lmms-eval's additions to the questions")
    given = parser.parse_args()
    print(write_task(given.benchmark, given.name, given.data, given.output, plain=given.plain))


if __name__ == "__main__":
    main()
