"""Layout of a page in a real browser, which is headless Chromium."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CONTRAST = """
// Text whose contrast with the color behind it is below the limits of WCAG AA, and text whose contrast is unknown.
function rgb(color) { return color.match(/[\\d.]+/g).map(Number); }
function light(color) {
  const [r, g, b] = color.map(each => each / 255)
    .map(each => each <= .04045 ? each / 12.92 : ((each + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
function over(front, back) { const a = front[3] ?? 1; return back.map((each, i) => a * front[i] + (1 - a) * each); }
function ground(element) {
  if (!element) return [255, 255, 255];
  const color = rgb(getComputedStyle(element).backgroundColor);
  return color[3] === 0 ? ground(element.parentElement) : over(color, ground(element.parentElement));
}
function faint(root) {
  return [...root.querySelectorAll('*')].filter(each => each.getClientRects().length && !each.closest('svg')
    && [...each.childNodes].some(node => node.nodeType === 3 && node.data.trim())).flatMap(each => {
    const style = getComputedStyle(each), back = ground(each), size = parseFloat(style.fontSize);
    const [a, b] = [light(over(rgb(style.color), back)), light(back)].sort((a, b) => b - a);
    const least = size >= 24 || size >= 18.66 && style.fontWeight >= 700 ? 3 : 4.5, ratio = (a + .05) / (b + .05);
    return ratio >= least ? [] : [[ratio.toFixed(2), style.color, back.join(), each.outerHTML.slice(0, 120)]];
  });
}
"""
_LOOK = """
function boxes(root, selector) { return [...root.querySelectorAll(selector)]; }
function inside(box, frame) {
  return box.left >= frame.left - 1 && box.right <= frame.right + 1 && box.top >= frame.top - 1
    && box.bottom <= frame.bottom + 1;
}
function named(element) { return element.outerHTML.slice(0, 160); }
function look(frame) {
  const page = frame.contentDocument, width = frame.clientWidth;
  const scrolling = element => element.closest('.scroll') !== null || element.closest('thead') !== null;
  const seen = boxes(page, 'body *').filter(each => each.getClientRects().length && !scrolling(each)
    && !each.closest('svg'));
  return {
    width: width,
    scroll_width: page.documentElement.scrollWidth,
    outside: seen.filter(each => { const box = each.getBoundingClientRect();
      return box.right > width + 1 || box.left < -1; }).map(named),
    clipped: boxes(page, '.phases span, .tick, .mark div, dd, .size, .name, h1, h2, p, figcaption').filter(
      each => each.scrollWidth > each.clientWidth + 1 && getComputedStyle(each).display !== 'inline').map(named),
    shapes_outside: boxes(page, 'svg rect, svg path').filter(each => each.ownerSVGElement.clientWidth
      && !each.closest('defs')
      && !inside(each.getBoundingClientRect(), each.ownerSVGElement.getBoundingClientRect())).map(named),
    num_shapes: boxes(page, 'svg rect, svg path').length,
    overlaps: overlaps(boxes(page, '.tick')),
    faint: faint(page.body),
    ground: getComputedStyle(page.querySelector('.roomier')).backgroundColor,
    text: getComputedStyle(page.querySelector('.roomier')).color,
  };
}
function overlaps(found) {
  return found.filter((each, index) => index && each.parentElement === found[index - 1].parentElement
    && each.getBoundingClientRect().bottom > found[index - 1].getBoundingClientRect().top + 2).map(named);
}
addEventListener('load', () => {
  const result = document.createElement('script');
  result.type = 'application/json';
  result.id = 'result';
  result.textContent = JSON.stringify([...document.querySelectorAll('iframe')].map(look));
  document.body.append(result);
});
"""


def browser() -> str:
    """Return the path of the browser. Skip the test if no browser is installed."""
    command = next((each for name in NAMES if (each := shutil.which(name))), None)
    if command is None:
        pytest.skip("no browser: run `make install` as root on Debian, or apt-get install chromium")
    return command


def look_at(page: str, widths: tuple[int, ...], folder: Path, *, is_dark: bool = False) -> list[dict[str, Any]]:
    """Return the layout of ``page`` at each of ``widths`` in pixels. Skip the test if no browser is installed.

    The page is rendered in frames, because a window has a minimum width.
    """
    command = browser()
    frames = "".join(
        f'<iframe style="border:0;width:{width}px;height:4000px" srcdoc="{html.escape(page)}"></iframe>'
        for width in widths
    )
    file = folder / "frames.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><body>{frames}<script>{CONTRAST}{_LOOK}</script></body>')
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    options += ["--enable-logging=stderr", "--virtual-time-budget=5000", "--window-size=1600,1200"]
    options += ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    done = subprocess.run(
        [command, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=500, check=True
    )
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    result = re.search(r'<script type="application/json" id="result">(.*?)</script>', done.stdout, re.DOTALL)
    assert result is not None, done.stdout[-2000:]
    found: list[dict[str, Any]] = json.loads(result[1])
    return found
