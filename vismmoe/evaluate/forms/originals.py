"""Benchmarks as their authors publish them: MME's folders or zip, POPE's json lines, OCRBench.json, TextVQA's json."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vismmoe.errors import CorpusError
from vismmoe.evaluate.forms.items import Item, OpenImage, file_in
from vismmoe.evaluate.mme import COGNITION, PERCEPTION
from vismmoe.evaluate.pope import SPLITS
from vismmoe.images import MAX_BYTES
from vismmoe.untrusted import parse_json, read_text

Tree = Path | zipfile.Path  # the same questions can be asked of both
SUFFIXES = (".jpg", ".png", ".jpeg", ".JPG", ".PNG", ".webp")
MAX_TEXT_BYTES = 1 << 24  # of one file of questions
DEPTH = 3  # folders between what is named and the subtasks


# -- MME --------------------------------------------------------------------------------------------------------------


def read_mme(source: Path) -> list[Item]:
    """`<subtask>/<stem>.txt` beside the picture, or `questions_answers_YN/<stem>.txt` and `images/<stem>.*`."""
    root: Tree = zipfile.Path(_open_zip(source)) if source.is_file() else source
    subtasks = _subtasks(root, DEPTH)
    if not subtasks:
        raise CorpusError(f"{source} holds none of MME's 14 subtasks as a folder ({', '.join(PERCEPTION[:3])}, ...).")
    order = (*PERCEPTION, *COGNITION)
    return [item for name in order if name in subtasks for item in _subtask(name, subtasks[name])]


def _open_zip(file: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:
        raise CorpusError(f"{file} cannot be read as a zip file ({error}).") from None


def _subtasks(root: Tree, depth: int) -> dict[str, Tree]:
    folders = sorted((each for each in root.iterdir() if each.is_dir()), key=lambda each: each.name)
    found: dict[str, Tree] = {each.name: each for each in folders if each.name in (*PERCEPTION, *COGNITION)}
    if found or depth == 0:
        return found
    return next((inner for each in folders if (inner := _subtasks(each, depth - 1))), {})


def _subtask(name: str, folder: Tree) -> Iterator[Item]:
    split = (folder / "images").is_dir() and (folder / "questions_answers_YN").is_dir()
    texts, pictures = (folder / "questions_answers_YN", folder / "images") if split else (folder, folder)
    for text in sorted((each for each in texts.iterdir() if each.name.endswith(".txt")), key=lambda each: each.name):
        yield from _mme_text(name, text, pictures)


def _mme_text(name: str, text: Tree, pictures: Tree) -> Iterator[Item]:
    stem = text.name.removesuffix(".txt")
    picture = next((pictures / (stem + end) for end in SUFFIXES if (pictures / (stem + end)).is_file()), None)
    if picture is None:
        raise CorpusError(f"{name}/{text.name}: there is no picture {stem}.jpg or .png beside it.")
    try:
        lines = _bytes(text, MAX_TEXT_BYTES).decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise CorpusError(f"{name}/{text.name} is not UTF-8 text.") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{name}/{text.name}, line {number}"
        question, _, answer = line.rpartition("\t")
        if not question:
            raise CorpusError(f"{where}: a question, a tab and Yes or No must stand there, not {line[:60]!r}.")
        row = {"question_id": f"{name}/{picture.name}", "category": name, "question": question, "answer": answer}
        yield Item(where, row, _opener(picture))


def _opener(picture: Tree) -> OpenImage:
    if isinstance(picture, Path):
        path = picture
        return lambda: path
    held = picture
    return lambda: _bytes(held, MAX_BYTES)


def _bytes(file: Tree, most: int) -> bytes:
    """The file's content. CorpusError for anything but a regular file, for damage, and for more than `most` bytes: a
    zip file of a few kilobytes may unfold to terabytes."""
    try:
        if not file.is_file():
            raise CorpusError(f"{file} is no regular file.")
        with file.open("rb") as stream:
            data: bytes = stream.read(most + 1)
    except (OSError, EOFError, RuntimeError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise CorpusError(f"{file} cannot be read ({error}).") from None
    if len(data) > most:
        raise CorpusError(f"{file} has more than {most} bytes.")
    return data


# -- POPE -------------------------------------------------------------------------------------------------------------


def read_pope(source: Path, images: Sequence[Path]) -> list[Item]:
    """One file, or all coco_pope_*.json of a folder: JSON lines whose split stands in the file's name."""
    files = [source] if source.is_file() else _pope_files(source)
    near = [folder for file in files[:1] for folder in _near(file, ("val2014", "coco/val2014", "images"))]
    return [item for file in files for item in _pope_file(file, [*images, *near])]


def _pope_files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*_pope_*.json")) or sorted(folder.rglob("*pope*.jsonl"))
    if not found:
        raise CorpusError(f"{folder} holds no *_pope_random.json, *_pope_popular.json or *_pope_adversarial.json.")
    return found


def _pope_file(file: Path, folders: list[Path]) -> Iterator[Item]:
    split = next((name for name in SPLITS if name in file.stem), "")
    for number, row in _json_lines(file):
        where = f"{file.name}, line {number}"
        picture = file_in(folders, str(row.get("image") or ""), where)
        yield Item(where, {"category": split, **row}, picture)


def _json_lines(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text(file).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise CorpusError(f"{file.name}, line {number} is no JSON ({error}).") from None
        if not isinstance(row, dict):
            raise CorpusError(f"{file.name}, line {number} is no JSON object.")
        yield number, row


# -- OCRBench and TextVQA ---------------------------------------------------------------------------------------------


def read_ocrbench(source: Path, images: Sequence[Path]) -> list[Item]:
    """OCRBench.json, or the folder that holds it; pictures in OCRBench_Images."""
    file = source if source.is_file() else _only(source, ("OCRBench.json", "*.json"))
    folders = [*images, *_near(file, ("OCRBench_Images", "images")), file.parent]
    items = []
    for number, row in enumerate(_list(file, _json(file)), start=1):
        where = f"{file.name}, entry {number}"
        items.append(Item(where, row, file_in(folders, str(row.get("image_path") or ""), where)))
    return items


def read_textvqa(source: Path, images: Sequence[Path]) -> list[Item]:
    """TextVQA_0.5.1_val.json, or the folder that holds it; pictures in train_images by their id."""
    file = source if source.is_file() else _only(source, ("TextVQA_*val*.json", "*.json"))
    told = _json(file)
    folders = [*images, *_near(file, ("train_images", "images")), file.parent]
    items = []
    for number, row in enumerate(_list(file, told.get("data") if isinstance(told, dict) else told), start=1):
        where = f"{file.name}, entry {number}"
        items.append(Item(where, row, file_in(folders, f"{row.get('image_id')}.jpg", where)))
    return items


# -- files ------------------------------------------------------------------------------------------------------------


def _near(file: Path, names: Sequence[str]) -> list[Path]:
    """Folders of these names beside the file or up to three folders above it."""
    return [place / name for place in list(file.resolve().parents)[:4] for name in names if (place / name).is_dir()]


def _only(folder: Path, patterns: Sequence[str]) -> Path:
    for pattern in patterns:
        if found := sorted(folder.glob(pattern)):
            return found[0]
    raise CorpusError(f"{folder} holds no {patterns[0]}.")


def _list(file: Path, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{file} must hold a list of entries.")
    for number, entry in enumerate(value, start=1):
        if not isinstance(entry, dict):
            raise CorpusError(f"{file.name}, entry {number} is no JSON object.")
    return value


def _json(file: Path) -> Any:
    try:
        return parse_json(_text(file))
    except ValueError as error:
        raise CorpusError(f"{file} is no JSON ({error}).") from None


def _text(file: Path) -> str:
    try:
        return read_text(file)
    except ValueError as error:
        raise CorpusError(f"{file} cannot be used: {error}.") from None
