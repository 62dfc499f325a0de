from __future__ import annotations

from pathlib import Path

import pytest

from vismmoe import config as configs
from vismmoe.cli import COMMANDS
from vismmoe.config import CollectConfig, InferConfig, PlanConfig, TrainConfig
from vismmoe.errors import UsageError
from vismmoe.schema import options
from vismmoe.settings import build, read_yaml
from vismmoe.simulate.profile import DeviceProfile

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str, name: str = "given.yaml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_flags_override_later_files_which_override_earlier_ones(tmp_path: Path) -> None:
    first = write(tmp_path, "prompt: a\nkeep_ratio: 0.25\ntrade_off: 1", "first.yaml")
    second = write(tmp_path, "keep_ratio: 0.5\nsalient_ratio: 0.4", "second.yaml")
    config = build(InferConfig, [first, second], {"salient_ratio": "0.1"})
    assert (config.trade_off, config.keep_ratio, config.salient_ratio) == (1.0, 0.5, 0.1)


def test_an_unknown_key_is_refused_and_the_nearest_one_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"keep_ration.*Did you mean keep_ratio"):
        read_yaml(write(tmp_path, "keep_ration: 0.5"), InferConfig)


def test_a_flag_spelling_as_key_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Did you mean keep_ratio"):
        read_yaml(write(tmp_path, "keep-ratio: 0.5"), InferConfig)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="twice"):
        read_yaml(write(tmp_path, "keep_ratio: 0.5\nkeep_ratio: 0.7"), InferConfig)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("device_memory: 1.5GiB", "device_memory", 3 * 2**29),
        ("device_memory: 4096", "device_memory", 4096),
        ("device_memory: null", "device_memory", None),
        ("learning_rate: 1e-3", "learning_rate", 1e-3),  # YAML reads this one as text
        ("direct_io: off", "direct_io", "off"),  # and this one as a truth value
        ("prefetch: no", "prefetch", False),
        ("image_size: 640x480", "image_size", (640, 480)),
        ("image_size: [640, 480]", "image_size", (640, 480)),
        ("traces: one", "traces", ("one",)),
        ("traces: [one, two]", "traces", ("one", "two")),
        ("max_epochs: 3", "max_epochs", 3),
        ("max_epochs: 3.0", "max_epochs", 3),
    ],
)
def test_values_arrive_as_the_type_of_their_field(tmp_path: Path, line: str, field: str, value: object) -> None:
    kind = next(kind for kind in (InferConfig, PlanConfig, TrainConfig) if has_field(kind, field))
    read = read_yaml(write(tmp_path, line), kind)[field]
    assert read == value
    assert type(read) is type(value)


def has_field(kind: type, name: str) -> bool:
    return any(option.name == name for option in options(kind))


@pytest.mark.parametrize(
    "line",
    [
        "keep_ratio: half",
        "keep_ratio: true",
        "keep_ratio: [0.5]",
        "keep_ratio: null",
        "max_new_tokens: 1.5",
        "max_new_tokens: .inf",
        "prefetch: sometimes",
        "device_memory: 6 potatoes",
        "device_memory: -1",
        "device_memory: 1.5",
        "compressor: afinity",
        "prompt: 3",
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_file_and_key(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(InferConfig, [write(tmp_path, line)], {} if line.startswith("prompt") else {"prompt": "x"})
    assert "given.yaml" in str(caught.value)
    assert line.split(":")[0] in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b", "just text", "a: [", "\x00", "a: !!python/object:os.system x"])
def test_a_file_that_is_no_list_of_keys_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"given\.yaml"):
        read_yaml(write(tmp_path, text), InferConfig)


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00a")
    for name in ("binary.yaml", "none.yaml"):
        with pytest.raises(UsageError, match=name):
            read_yaml(tmp_path / name, InferConfig)


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_path_does_not_mean_the_working_folder(empty: str) -> None:
    flags = {"images": "datasets", "output": empty}
    with pytest.raises(UsageError, match="--output is empty: give DIR"):
        build(CollectConfig, flags=flags)


def test_an_empty_file_overrides_nothing(tmp_path: Path) -> None:
    assert build(PlanConfig, [write(tmp_path, "# only a comment\n")]) == PlanConfig()


def test_a_missing_required_value_names_its_flag() -> None:
    with pytest.raises(UsageError, match="--prompt"):
        build(InferConfig)


SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_shipped_config_is_read_by_its_command(file: Path) -> None:
    room = file.relative_to(ROOT / "configs").parts[0]
    command = {"models": "infer", "tuned": "train"}.get(room, room)
    kind = DeviceProfile if room == "devices" else getattr(configs, COMMANDS[command].config)
    values = read_yaml(file, kind)
    assert values, "a config that overrides nothing has no use"


def test_a_file_for_several_commands_gives_each_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("commands: [train, infer]\nwindow: 3\nkeep_ratio: 0.5\n")
    assert read_yaml(file, TrainConfig) == {"window": 3}
    assert read_yaml(file, InferConfig) == {"keep_ratio": 0.5}
    with pytest.raises(UsageError, match="no other command"):
        read_yaml(file, PlanConfig)


def test_a_shared_file_is_read_as_strictly_as_any(tmp_path: Path) -> None:
    file = tmp_path / "both.yaml"
    file.write_text("commands: [train, infer]\nwindwo: 3\n")
    with pytest.raises(UsageError, match="windwo"):
        read_yaml(file, TrainConfig)
    file.write_text("commands: [train, dance]\n")
    with pytest.raises(UsageError, match="dance"):
        read_yaml(file, TrainConfig)


LAUGH = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


@pytest.mark.parametrize(
    "text",
    [
        "context: " + "[" * 100_000 + "]" * 100_000,
        "context: 2001-99-99",
        "context: " + "9" * 6000,
        "context: 0x" + "f" * 10_000,
        "commands: &x [*x]",
        "context: &x [*x]",
        LAUGH + "context: *a8",
        LAUGH + "device: *a8",
        LAUGH + "commands: *a8",
        "context: !!python/object/apply:os.system ['true']",
        "? [1, 2]\n: 3",
        "context: 1\0",
    ],
    ids=[
        "deep", "no such day", "long number", "long hexadecimal", "circle", "circle in a value", "a billion laughs",
        "laughs for a choice", "laughs for commands", "python", "a list as key", "a zero byte",
    ],
)  # fmt: skip
def test_a_hostile_file_is_refused_in_a_short_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError) as refused:
        build(PlanConfig, [write(tmp_path, text)])
    assert len(str(refused.value)) < 2000


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="no file has such a name"):
        build(PlanConfig, ["a\0b"])
