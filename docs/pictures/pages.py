"""Draw pages for the site: ``python docs/pictures/pages.py [NAME...]`` runs the commands of a picture in a folder with
the code of a page, and writes a picture of the HTML file that they write, taken with Chromium, to ``docs/pictures``.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image

FOLDER = Path(__file__).parent
CODE = FOLDER.parent / "code"
PLAN = "roomier plan --model gpt2-xl --hardware rtx-4090:2 --what_if"
PAGES = {  # the folder of the code, the commands that write page.html, and the size of the picture
    "runs": (
        "compare_runs",
        "python 1_fit.py && roomier report runs/version_0 runs/version_1 --html page.html",
        1000,
        900,
    ),
    "page": ("plan", f"{PLAN} --html page.html > /dev/null", 1000, 1250),
    "samples": ("images", f"python 1_images.py && python {Path(__file__).absolute()} --gallery", 560, 210),
}


def draw(name: str, code: str, command: str, width: int, height: int) -> None:
    """Write ``NAME.png``, a picture of the page that ``command`` writes."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as folder:
        for file in CODE.joinpath(code).glob("*.py"):
            shutil.copy(file, folder)
        subprocess.run(["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, check=True)
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        picture = [f"--user-data-dir={folder}/profile", f"--screenshot={FOLDER / name}.png"]
        page = Path(folder, "page.html").as_uri()
        size = f"--window-size={width},{height}"
        subprocess.run(["chromium", *options, size, *picture, page], check=True, capture_output=True)
    image = Image.open(FOLDER / f"{name}.png").convert("RGB")
    image.quantize(128, dither=Image.Dither.NONE).save(FOLDER / f"{name}.png", optimize=True)


def gallery() -> None:
    """Write a page with the last images that a run in this folder logged, and their captions."""
    row = json.loads(Path("runs/version_0/images.jsonl").read_text().splitlines()[-1])
    figures = "".join(
        f'<figure><img src="runs/version_0/{file}" width="144" style="image-rendering:pixelated">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for file, caption in zip(row["files"], row["captions"], strict=True)
    )
    style = "display:flex;justify-content:space-around;text-align:center;font:15px system-ui,sans-serif"
    Path("page.html").write_text(
        f'<!doctype html><meta charset="utf-8"><style>figure{{margin:8px}}</style>'
        f'<body style="{style}">{figures}</body>'
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--gallery"]:
        gallery()
    else:
        for name in sys.argv[1:] or PAGES:
            draw(name, *PAGES[name])
