"""What house-keeping promises: which way imports point, where code may stand, how files are written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "vismmoe", ROOT / "training/vismmoe_training", ROOT / "deploy/vismmoe_deploy")
SOURCES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def imports_of(file: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) for each import statement, wherever it stands."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module, node.lineno


def test_imports_point_downwards_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    status = lint_imports(no_cache=True, no_logo=True)
    assert status == 0, capsys.readouterr().out


def test_every_file_of_the_runtime_has_its_place_in_the_contract() -> None:
    (contract,) = SETTINGS["tool"]["importlinter"]["contracts"]
    placed = {name for layer in contract["layers"] for name in layer.replace("|", ":").replace(" ", "").split(":")}
    rooms = {f"vismmoe.{path.stem}" for path in (ROOT / "vismmoe").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - placed - {"vismmoe.__init__", "vismmoe.__pycache__"} == set()


@pytest.mark.parametrize("room", ["datasets", "checkpoints", "configs"])
def test_no_python_stands_in_a_data_room(room: str) -> None:
    assert [str(path) for path in (ROOT / room).rglob("*.py")] == []


def test_one_file_only_imports_hugging_face_datasets() -> None:
    importing = {path.name for path in SOURCES for name, _ in imports_of(path) if name.split(".")[0] == "datasets"}
    assert importing == {"tables.py"}


def test_nothing_is_pickled() -> None:
    pickling = ("pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal")
    found = [f"{path}:{line}" for path in SOURCES for name, line in imports_of(path) if name.split(".")[0] in pickling]
    assert found == []


def test_torch_files_are_only_read_as_plain_weights_and_only_while_training() -> None:
    calls = [
        (path, ast.unparse(node))
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save")
    ]
    wrong = [text for path, text in calls if PACKAGES[1] not in path.parents or "weights_only=False" in text]
    wrong += [text for _, text in calls if text.startswith("torch.load") and "weights_only=True" not in text]
    assert wrong == []


def test_module_level_names_are_constants() -> None:
    """State lives in objects with one owner: a list or dict that a module fills at run time has none."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Global):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} global {', '.join(node.names)}")
    assert found == []


def test_every_file_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip() and ast.get_docstring(ast.parse(path.read_text("utf-8"))) is None
    ]
    assert silent == []


def test_the_wheel_holds_the_three_packages_and_nothing_else() -> None:
    packages = SETTINGS["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(ROOT / name for name in packages) == sorted(PACKAGES)


def test_the_tested_set_names_no_place_and_satisfies_the_ranges() -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert [line for line in lines if "/" in line or "@" in line or " -" in line] == []
    project = SETTINGS["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for requirement in map(Requirement, asked):
        version = pins.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not pinned"
        assert version in requirement.specifier, f"{requirement.name} {version} is outside {requirement.specifier}"
