"""Videos and pictures of an agent's episodes."""

import itertools
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np

from common import files

MOMENTS = 8  # in each row of a film strip


def film_strip(frames: np.ndarray, scenes: int, moments: int = MOMENTS) -> np.ndarray:
    """A picture uint8 [scenes * H, moments * W, 3] of a film uint8 [T, H, W, 3]: a row of evenly spaced frames, the
    first and the last included, for each of its scenes, which are of equal length."""
    rows = []
    for scene in np.array_split(frames, scenes):
        chosen = scene[np.linspace(0, len(scene) - 1, moments).round().astype(int)]
        rows.append(np.concatenate(chosen, axis=1))
    return np.concatenate(rows)


def side_by_side(films: dict[str, np.ndarray], size: int = 384) -> Iterator[np.ndarray]:
    """Yields frames uint8 [size + 32, size * len(films), 3]: films uint8 [T, H, W, 3] side by side, each scaled to
    `size` x `size` pixels, under their names. A film that ends early stays on its last frame."""
    from PIL import Image, ImageDraw, ImageFont

    band = 32
    title = Image.new("RGB", (size * len(films), band), "white")
    for i, name in enumerate(films):
        middle = size * (i + 0.5), band / 2
        ImageDraw.Draw(title).text(middle, name, "black", ImageFont.load_default(18), anchor="mm")
    for t in range(max(map(len, films.values()))):
        frames = [Image.fromarray(film[min(t, len(film) - 1)]) for film in films.values()]
        row = np.concatenate([frame.resize((size, size), Image.Resampling.NEAREST) for frame in frames], axis=1)
        yield np.concatenate([np.asarray(title), row])


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Writes a picture uint8 [H, W, 3] as png, atomically."""
    from PIL import Image

    with files.atomic_write(path) as temporary:
        Image.fromarray(picture).save(temporary, format="png")


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float = 15) -> None:
    """Writes frames uint8 [H, W, 3] as mp4, enlarged to some 400 pixels, atomically."""
    import av

    frames = iter(frames)
    first = next(frames)
    scale = round(400 / len(first))
    with files.atomic_write(path) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps), options={"crf": "18"})
        stream.height, stream.width = (scale * size for size in first.shape[:2])
        stream.pix_fmt = "yuv420p"
        for frame in itertools.chain([first], frames):
            picture = np.ascontiguousarray(frame.repeat(scale, axis=0).repeat(scale, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
