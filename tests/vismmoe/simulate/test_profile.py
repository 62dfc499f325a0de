"""Profiles: the shipped ones are read, and a file of the other kind is told by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from vismmoe.config import CollectConfig, InferConfig
from vismmoe.errors import UsageError
from vismmoe.settings import read_yaml
from vismmoe.simulate.profile import DEFAULT_PROFILE, read_profile

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize("file", sorted((CONFIGS / "devices").iterdir()), ids=lambda file: file.stem)
def test_every_file_of_configs_devices_is_a_profile(file: Path) -> None:
    assert read_profile(str(file)).device_memory > 10**10


@pytest.mark.parametrize("file", sorted((CONFIGS / "infer").iterdir()), ids=lambda file: file.stem)
def test_settings_are_no_profile_and_the_other_way_round(file: Path) -> None:
    assert read_yaml(file, InferConfig)
    with pytest.raises(UsageError, match=r"is no device profile.*configs/devices.*--config"):
        read_profile(str(file))
    with pytest.raises(UsageError, match=r"is a device profile, which `vismmoe simulate --profile` reads"):
        read_yaml(CONFIGS / "devices/rtx-3090.yaml", CollectConfig)


def test_the_shipped_profiles_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_profile(DEFAULT_PROFILE) == read_profile(str(CONFIGS / "devices/cpu-2-cores.yaml"))


def test_costs_grow_with_tokens_and_with_the_size_of_experts() -> None:
    profile = read_profile("configs/devices/rtx-3090.yaml")
    assert profile.expert_s(1, 10**6) < profile.expert_s(1, 10**7) < profile.expert_s(4000, 10**7)
    assert profile.link_s(25 * 10**9) == pytest.approx(1 + 1e-5)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("disk_rate: 0", "disk_rate"),
        ("disk_rate: 3G", "not a size"),
        ("disc_rate: 3GB", "Did you mean disk_rate"),
        ("parallel_reads: 0", "parallel_reads"),
    ],
)
def test_a_wrong_line_is_named(line: str, told: str, tmp_path: Path) -> None:
    text = (CONFIGS / "devices/rtx-3090.yaml").read_text()
    kept = [old for old in text.splitlines() if old.split(":")[0] != line.split(":")[0]]
    (tmp_path / "mine.yaml").write_text("\n".join([*kept, line]) + "\n")
    with pytest.raises(UsageError, match=told):
        read_profile(str(tmp_path / "mine.yaml"))


def test_what_a_profile_lacks_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\ndisk_rate: 1GB\ncompute_rate: 1e9\n")
    with pytest.raises(UsageError, match="lacks device_memory, memory_rate; configs/devices has complete ones"):
        read_profile(str(tmp_path / "mine.yaml"))
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(UsageError, match="lacks name, device_memory"):
        read_profile(str(tmp_path / "mine.yaml"))
