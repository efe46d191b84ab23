"""Images, figures and histograms in the form of each logging service."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from io import BytesIO
from typing import Any

from roomier.api.logger import cannot_show
from roomier.loggers.histogram import Histogram
from roomier.loggers.pixels import Pixels, pixels_of_figure, png_of

WANDB_STEP = "trainer/global_step"
_NOT_IN_A_KEY = re.compile(r"[^a-zA-Z0-9_\-./ ]")  # of MLflow


class Visuals:
    """Destination of images, figures and histograms. By default, a notice reports that the logger cannot show them.

    Args:
        logger: name of the logger for the notice.
        target: object of the logging service.
    """

    def __init__(self, logger: str, target: Any = None) -> None:
        self._logger = logger
        self._target = target

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        """Show ``images``.

        Args:
            captions: one caption per image; empty if there are no captions.
        """
        cannot_show(self._logger, "images")

    def figure(self, key: str, figure: Any, step: int) -> None:
        """Show a figure of matplotlib. By default, show its pixels."""
        self.images(key, [pixels_of_figure(figure)], (), step)

    def histogram(self, key: str, histogram: Histogram, step: int) -> None:
        """Show a histogram."""
        cannot_show(self._logger, "histograms")


class TensorBoardVisuals(Visuals):
    """Images and histograms of a ``SummaryWriter``. TensorBoard has no captions."""

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        for name, image in zip(numbered(key, len(images)), images, strict=True):
            self._target.add_image(name, image, step, dataformats="HWC")

    def figure(self, key: str, figure: Any, step: int) -> None:
        self._target.add_figure(key, figure, step, close=False)

    def histogram(self, key: str, histogram: Histogram, step: int) -> None:
        counts, edges, centers = histogram.counts, histogram.edges, histogram.centers
        total = sum(count * center for count, center in zip(counts, centers, strict=True))
        squares = sum(count * center**2 for count, center in zip(counts, centers, strict=True))
        self._target.add_histogram_raw(
            key, edges[0], edges[-1], sum(counts), total, squares, edges[1:], counts, global_step=step
        )


class WandbVisuals(Visuals):
    """Media of a run of Weights & Biases."""

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        kind = import_module("wandb").Image
        self._log(key, [kind(each, caption=text) for each, text in with_captions(images, captions)], step)

    def histogram(self, key: str, histogram: Histogram, step: int) -> None:
        counts_and_edges = (histogram.counts, histogram.edges)
        self._log(key, import_module("wandb").Histogram(np_histogram=counts_and_edges), step)

    def _log(self, key: str, media: Any, step: int) -> None:
        self._target.log({key: media, WANDB_STEP: step})


class TrackioVisuals(Visuals):
    """Media of a run of trackio."""

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        kind = import_module("trackio").Image
        names = numbered(key, len(images))
        media = (kind(each, caption=text) for each, text in with_captions(images, captions))
        self._target.log(dict(zip(names, media, strict=True)), step)

    def histogram(self, key: str, histogram: Histogram, step: int) -> None:
        kind = import_module("trackio").Histogram
        self._target.log({key: kind(np_histogram=(histogram.counts, histogram.edges))}, step)


class CometVisuals(Visuals):
    """Images, figures and histograms of a Comet experiment."""

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        names = numbered(key, len(images))
        for name, (image, text) in zip(names, with_captions(images, captions), strict=True):
            metadata = None if text is None else {"caption": text}
            self._target.log_image(BytesIO(png_of(image)), name=name, step=step, metadata=metadata)

    def figure(self, key: str, figure: Any, step: int) -> None:
        self._target.log_figure(key, figure, step=step)

    def histogram(self, key: str, histogram: Histogram, step: int) -> None:
        shown = import_module("comet_ml.data_structure").Histogram()
        shown.add(histogram.centers, counts=histogram.counts)
        self._target.log_histogram_3d(shown, name=key, step=step)


class MLflowVisuals(Visuals):
    """Images and figures of an MLflow run. MLflow cannot show histograms.

    Args:
        logger: name of the logger for notices.
        target: the ``MlflowClient``.
        run_id: id of the run.
    """

    def __init__(self, logger: str, target: Any, run_id: str | None) -> None:
        super().__init__(logger, target)
        self._run_id = run_id

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        for name, image in zip(numbered(_NOT_IN_A_KEY.sub("_", key), len(images)), images, strict=True):
            self._target.log_image(self._run_id, image, key=name, step=step)

    def figure(self, key: str, figure: Any, step: int) -> None:
        self._target.log_figure(self._run_id, figure, f"figures/{_NOT_IN_A_KEY.sub('_', key)}/step={step}.png")


class _OwnMethod(Visuals):
    """The method ``log_image`` of a logger that is not part of roomier, with the arguments of Lightning's
    WandbLogger."""

    def images(self, key: str, images: Sequence[Pixels], captions: Sequence[str], step: int) -> None:
        options = {"caption": list(captions)} if captions else {}
        self._target.log_image(key=key, images=list(images), step=step, **options)


def visuals_of(inner: Any, name: str) -> Visuals:
    """Return the visuals of a logger that was written for Lightning, found by the methods of its ``experiment``."""
    experiment = getattr(inner, "experiment", None)
    if hasattr(experiment, "add_histogram_raw"):
        return TensorBoardVisuals(name, experiment)
    if hasattr(experiment, "log_histogram_3d"):
        return CometVisuals(name, experiment)
    if hasattr(experiment, "log_figure") and hasattr(inner, "run_id"):
        return MLflowVisuals(name, experiment, inner.run_id)
    if type(experiment).__module__.startswith("wandb."):
        return WandbVisuals(name, experiment)
    return _OwnMethod(name, inner) if callable(getattr(inner, "log_image", None)) else Visuals(name)


def numbered(key: str, number: int) -> list[str]:
    """Return ``key`` for one image, and ``key/0``, ``key/1``, ... for several."""
    return [key] if number == 1 else [f"{key}/{index}" for index in range(number)]


def with_captions(images: Sequence[Pixels], captions: Sequence[str]) -> list[tuple[Pixels, str | None]]:
    """Return each image with its caption; None if there are no captions."""
    texts: Sequence[str | None] = captions or [None] * len(images)
    return list(zip(images, texts, strict=True))
