"""Draw terminals for the README and the site: ``python docs/pictures/terminal.py`` runs each command and writes its
output, with colors, to an SVG file in ``docs/pictures``.
"""

import io
import os
import pty
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

FOLDER = Path(__file__).parent
CODE = FOLDER.parent / "code"
WIDTH = 96
COMMANDS = {
    "plan": "roomier plan --model gpt2-xl --hardware rtx-4090:2 --trainer.precision bf16-mixed",
    "training": "python 1_line.py",
}
# The default format of rich loads a font from the internet.
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="TITLE">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
{styles}
</style>
<defs>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})">{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def output_of(command: str, folder: str) -> str:
    """Run ``command`` in a terminal of ``WIDTH`` columns, and return its output with escape sequences."""
    reader, writer = pty.openpty()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdin=writer, stdout=writer, stderr=writer
    )
    os.close(writer)
    output = io.BytesIO()
    try:
        while chunk := os.read(reader, 1 << 16):
            output.write(chunk)
    except OSError:  # Linux raises EIO when the last process has closed the terminal
        pass
    process.wait()
    return output.getvalue().decode()


def screen(output: str) -> str:
    """Return the lines that remain visible: the last state of each line that a progress bar overwrites. Omit the plans
    that were rejected, which are too long for a picture."""
    lines = output.replace("\r\n", "\n").partition("\nrejected: ")[0].split("\n")
    return "\n".join(line.rsplit("\r", 1)[-1] for line in lines)


def draw(name: str, command: str) -> None:
    """Write the picture ``name`` of ``command`` and its output."""
    with tempfile.TemporaryDirectory() as folder:
        for path in CODE.joinpath("ten_lines").glob("*.py"):
            Path(folder, path.name).write_bytes(path.read_bytes())
        output = screen(output_of(command, folder))
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.assemble(("$ ", "bold"), command))
    console.print(Text.from_ansi(output.rstrip()))
    code_format = FORMAT.replace("TITLE", escape(command))
    svg = console.export_svg(title=command, theme=MONOKAI, code_format=code_format, unique_id=name)
    FOLDER.joinpath(f"{name}.svg").write_text("".join(f"{line.rstrip()}\n" for line in svg.splitlines()))


if __name__ == "__main__":
    for name in sys.argv[1:] or COMMANDS:
        draw(name, COMMANDS[name])
