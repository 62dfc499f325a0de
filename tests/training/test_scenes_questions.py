"""Questions about scenes: answers that follow from the ground truth, in fair shares."""

from collections import Counter

import numpy as np
import pytest

from vismmoe_training.scenes import (
    CELLS,
    COLOUR_NAMES,
    KINDS,
    NEGATIVES,
    STYLES,
    THEMES,
    Question,
    Scene,
    all_questions,
    ask,
    sample_scene,
)

Asked = list[tuple[Scene, Question]]


@pytest.fixture(scope="module")
def asked() -> Asked:
    rng = np.random.default_rng(21)
    scenes = [sample_scene(rng) for _ in range(600)]
    return [(scene, question) for scene in scenes for question in ask(scene, rng, per_style=2)]


def of_style(asked: Asked, style: str) -> Asked:
    return [(scene, question) for scene, question in asked if question.style == style]


def named_kind(prompt: str) -> str:
    return next(word for word in prompt.split("\n")[0].rstrip("?").split() if word in KINDS)


def truth(scene: Scene, question: str) -> str:
    """The answer in words, found from the objects alone."""
    kind = named_kind(question)
    matching = [item for item in scene.objects if item.kind == kind]
    if question.startswith("How many"):
        return str(len(matching))
    (item,) = matching
    return item.colour if question.startswith("What colour") else CELLS[scene.cell_of(item)]


def test_answers_about_existence_follow_from_the_scene(asked: Asked) -> None:
    for scene, question in of_style(asked, "existence"):
        present = named_kind(question.prompt) in scene.kinds()
        assert question.answer == ("yes" if present else "no")
        assert (question.negative is None) == present


def test_yes_and_no_are_equally_frequent_and_negatives_of_all_three_sorts(asked: Asked) -> None:
    pairs = of_style(asked, "existence")
    answers = Counter(question.answer for _, question in pairs)
    assert answers["yes"] == answers["no"] == len(pairs) / 2
    first = [question.answer for _, question in pairs[::2]]
    assert 0.4 < first.count("yes") / len(first) < 0.6
    origins = Counter(question.negative for _, question in pairs if question.negative)
    assert set(origins) == set(NEGATIVES)
    assert min(origins.values()) > 0.2 * sum(origins.values())


def test_adversarial_negatives_share_a_theme_with_the_scene(asked: Asked) -> None:
    for scene, question in of_style(asked, "existence"):
        if question.negative == "adversarial":
            theme = next(theme for theme in THEMES if named_kind(question.prompt) in theme)
            assert set(theme) & set(scene.kinds())


def test_counts_colours_and_positions_follow_from_the_scene(asked: Asked) -> None:
    for style in ("count", "position", "colour"):
        for scene, question in of_style(asked, style):
            if question.prompt == "How many objects are in the image?":
                assert question.answer == str(len(scene.objects))
            else:
                assert question.answer == truth(scene, question.prompt)


def test_reading_asks_for_the_text_and_only_where_there_is_some(asked: Asked) -> None:
    for scene, question in of_style(asked, "reading"):
        assert scene.text is not None
        assert question.answer == scene.text.text
        assert ("number" in question.prompt) == scene.text.is_number


def test_choices_have_one_right_option_and_balanced_letters(asked: Asked) -> None:
    choices = of_style(asked, "choice")
    for scene, question in choices:
        assert len(set(question.options)) == 4
        assert question.prompt.endswith("\nAnswer with the letter.")
        right = question.options["ABCD".index(question.answer)]
        if question.prompt.startswith("Which"):
            assert [option for option in question.options if option in scene.kinds()] == [right]
        else:
            assert right == truth(scene, question.prompt)
    letters = Counter(question.answer for _, question in choices)
    assert min(letters.values()) > 0.2 * len(choices)


def test_a_choice_reads_as_agreed(asked: Asked) -> None:
    question = next(q for _, q in of_style(asked, "choice") if q.prompt.startswith("What colour"))
    a, b, c, d = question.options
    head = question.prompt.split("\n")[0]
    assert question.prompt == f"{head}\nA. {a}\nB. {b}\nC. {c}\nD. {d}\nAnswer with the letter."
    assert set(question.options) <= set(COLOUR_NAMES)


def test_training_questions_are_distinct_and_take_turns_over_the_styles() -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        scene = sample_scene(rng)
        questions = all_questions(scene, rng, 8)
        assert len({question.prompt for question in questions}) == len(questions) == 8
        possible = [style for style in STYLES if ask(scene, rng, [style])]
        assert [question.style for question in questions[: len(possible)]] == possible


def test_questions_repeat_with_the_seed() -> None:
    scene = sample_scene(np.random.default_rng(9))
    first, again = (all_questions(scene, np.random.default_rng(4), 10) for _ in range(2))
    assert first == again
