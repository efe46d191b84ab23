"""Run ``examples/demo.py`` with this script's arguments, a small GPT, and a part of the standard library as data."""

import runpy
import shutil
import sysconfig
import tempfile
from pathlib import Path

import roomier.trainer  # noqa: F401 - before the folder of the standard library is replaced
from roomier.models import gpt

DEMO = Path(__file__).parents[3] / "examples" / "demo.py"
LIBRARY = Path(sysconfig.get_path("stdlib"))


class SmallConfig(gpt.GPTConfig):
    """The configuration of the demo with one layer of width 192."""

    def __init__(self, vocab_size: int, context: int, **_: object) -> None:
        super().__init__(vocab_size, context, num_layers=1, num_heads=2, width=192, dropout=0.0)


with tempfile.TemporaryDirectory() as folder:
    for path in [*LIBRARY.glob("[a-d]*.py"), *LIBRARY.glob("email/*.py")]:
        (Path(folder) / path.relative_to(LIBRARY)).parent.mkdir(exist_ok=True)
        shutil.copy(path, Path(folder) / path.relative_to(LIBRARY))
    sysconfig.get_path = lambda _: folder
    gpt.GPTConfig = SmallConfig
    runpy.run_path(str(DEMO), run_name="__main__")
