"""The page ``compatibility.md``: versions that roomier accepts, and versions with which the tests pass."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tests.docs.markdown import table

ROOT = Path(__file__).parents[2]
_INTRODUCTION = """# Compatibility

roomier requires Python {python}. The tests run with Python {tested} on Linux, on CPUs and on a [simulated
accelerator](design/simulator.md). This version of roomier has not been run on a GPU.

The *accepted* column contains the versions that pip accepts, and the *tested* column contains the version with which
the tests pass, as listed in `constraints.txt`. To install exactly the tested versions, pass `-c constraints.txt` to
pip. The packages in the second table are optional: install only the packages whose features you use.
"""
_POLICY = """## Version policy

Versions follow [Semantic Versioning](https://semver.org/). As long as the major version is 0, a minor release (such as
0.2) may change names and defaults, but a patch release may not. The changelog lists every change that can affect your
code, and a name that has been replaced raises an error that contains the new name.

Your files stay usable in later versions. You can load a checkpoint from any earlier version and resume its run, because
each file format has a version number, and roomier converts old formats when it reads them. A checkpoint from a newer
version is rejected with an error that names its format version.

roomier supports the Python versions that receive security fixes, from 3.11, and at least the last three minor versions
of torch. Support for an older version is dropped only in a minor release.
"""
_TESTED_PYTHON = "3.11"
_FEATURES = {
    "accelerate": "comparison of `roomier.Accelerator` with the original",
    "comet_ml": "`CometLogger`",
    "gcsfs": "URLs in Google Cloud Storage (`gs://`)",
    "huggingface_hub": "`roomier export --push-to-hub`",
    "lightning": "Lightning modules, callbacks and loggers",
    "mlflow-skinny": "`MLFlowLogger`",
    "onnx": "export to ONNX",
    "onnxruntime": "verification of an ONNX export",
    "onnxscript": "export to ONNX",
    "s3fs": "URLs in Amazon S3 and compatible stores (`s3://`)",
    "tensorboard": "`TensorBoardLogger`",
    "torchmetrics": "metric objects in `log`",
    "transformers": "Hugging Face models",
    "wandb": "`WandbLogger`",
    "webdataset": "WebDataset streams as training data",
}


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {_key(name): version for name, _, version in (line.partition("==") for line in lines) if version}
    optional = [each for extra in project["optional-dependencies"].values() for each in extra]
    accepted = dict(_parsed(each) for each in (*optional, *project["dependencies"]))
    required = [_parsed(each)[0] for each in project["dependencies"]]
    rows = [(f"`{name}`", accepted[name], tested[_key(name)]) for name in sorted(required)]
    features = [(f"`{name}`", text, accepted[name], tested[_key(name)]) for name, text in _FEATURES.items()]
    introduction = _INTRODUCTION.format(python=project["requires-python"], tested=_TESTED_PYTHON)
    tables = [table(("package", "accepted", "tested"), rows), table(("package", "for", "accepted", "tested"), features)]
    yield "compatibility.md", "\n\n".join([introduction, *tables, _POLICY])


def _parsed(requirement: str) -> tuple[str, str]:
    """Return the name and the versions of a requirement."""
    match = re.fullmatch(r"([\w-]+)(?:\[[^\]]*\])?(.*)", requirement)
    assert match is not None
    return match[1], match[2] or "any"


def _key(name: str) -> str:
    return name.lower().replace("_", "-")
