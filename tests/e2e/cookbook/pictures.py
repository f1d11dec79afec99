"""A small data set of pictures, drawn here: the photos that the recipe `vlm_classifier` expects, without a download.

Each picture is a disc on a grey ground, and its class is the colour of the disc. The files lie as `datasets` reads a
folder of pictures: a folder for each split, and in it one for each class. Knows no model.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

DATASET = "dpdl-benchmark/caltech101"
"""The data set that the recipe loads by default, and so the name of the directory."""
COLOURS = {"red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 60, 220), "white": (245, 245, 245)}
WIDTH, HEIGHT = 96, 64
SEED = 5


def draw(colour: str, rng: Random) -> Image.Image:
    """An RGB picture of the class `colour`, with a random ground, place and size."""
    ground, side = rng.randint(90, 130), rng.randint(50, 62)
    left, top = rng.randint(0, WIDTH - side), rng.randint(0, HEIGHT - side)
    picture = Image.new("RGB", (WIDTH, HEIGHT), (ground, ground, ground))
    ImageDraw.Draw(picture).ellipse((left, top, left + side, top + side), fill=COLOURS[colour])
    return picture


def write_dataset(root: Path, train: int, test: int) -> None:
    """Write `train` and `test` pictures of each class below `root`. Every other file is a JPEG, the rest PNG."""
    rng = Random(SEED)
    for split, count in (("train", train), ("test", test)):
        for colour in COLOURS:
            directory = root / DATASET / split / colour
            directory.mkdir(parents=True)
            for number in range(count):
                draw(colour, rng).save(directory / f"{number}.{'jpg' if number % 2 else 'png'}")
