"""What a scene is: sizes, objects and text, without any pixels."""

from dataclasses import dataclass

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class SceneSpec:
    """Limits of the sampled scenes. All `_px` values are pixels of the finished picture."""

    min_objects: int = 1
    max_objects: int = 5
    min_side_px: int = 128
    max_side_px: int = 256
    side_step_px: int = 16
    text_probability: float = 0.6
    min_object_px: int = 32  # of the longer side of the object's box
    max_object_px: int = 64
    size_skew: float = 0.42  # each further step of a side is exp(-size_skew) times as likely
    min_text_px: int = 20  # font size
    max_text_px: int = 28

    def __post_init__(self) -> None:
        """Refuse limits that no scene can meet."""
        if not 0 < self.min_objects <= self.max_objects:
            raise ValueError("need 0 < min_objects <= max_objects")
        if not 0 < self.min_side_px <= self.max_side_px or self.min_side_px % self.side_step_px:
            raise ValueError("sides must be positive multiples of side_step_px")
        if not 0 < self.min_object_px <= self.max_object_px or self.min_object_px * 2 > self.min_side_px:
            raise ValueError("objects must fit twice along the shortest side")


@dataclass(frozen=True)
class SceneObject:
    """One drawn thing; `box_px` (x0, y0, x1, y1) is the tight, end-exclusive box of its drawing."""

    kind: str
    colour: str
    box_px: Box
    rotation_degrees: int = 0

    @property
    def size_px(self) -> tuple[int, int]:
        """Width and height of the box in pixels."""
        return self.box_px[2] - self.box_px[0], self.box_px[3] - self.box_px[1]


@dataclass(frozen=True)
class SceneText:
    """One written word or two-digit number; `box_px` is the box of its plate."""

    text: str
    is_number: bool
    colour: str
    box_px: Box
    font_px: int


@dataclass(frozen=True)
class Background:
    """How the backdrop is painted: two texture names and the seed of all its other choices."""

    seed: int
    textures: tuple[str, str]
    dark: bool


@dataclass(frozen=True)
class Scene:
    """Full ground truth of one picture; later objects are drawn over earlier ones."""

    width_px: int
    height_px: int
    background: Background
    objects: tuple[SceneObject, ...]
    text: SceneText | None
    seed: int

    def cell_of(self, item: SceneObject) -> int:
        """Index in CELLS of the ninth of the picture that holds the centre of the object's box."""
        x, y = centre(item.box_px)
        return 3 * int(3 * y / self.height_px) + int(3 * x / self.width_px)

    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds in drawing order."""
        return tuple(dict.fromkeys(item.kind for item in self.objects))

    def count(self, kind: str) -> int:
        """How many objects are of this kind."""
        return sum(item.kind == kind for item in self.objects)

    def single_objects(self) -> tuple[SceneObject, ...]:
        """The objects whose kind occurs once, so that "the KIND" names them."""
        return tuple(item for item in self.objects if self.count(item.kind) == 1)


def centre(box: Box) -> tuple[float, float]:
    """Centre (x, y) of a box in pixels."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def overlap_px(a: Box, b: Box, gap_px: int = 0) -> int:
    """Area in square pixels that two boxes share, the first one grown by `gap_px` on all sides."""
    width = min(a[2] + gap_px, b[2]) - max(a[0] - gap_px, b[0])
    height = min(a[3] + gap_px, b[3]) - max(a[1] - gap_px, b[1])
    return max(width, 0) * max(height, 0)
