"""The pages ``reference/api``: one page for each public module, and one for each large class of ``roomier``."""

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tests.docs.exported import exported_names
from tests.docs.markdown import markdown, table

WITHOUT_ALL = {"roomier.memory": ["anatomy"], "roomier.models.gpt": ["GPT", "GPTConfig"]}
"""Public names of modules that do not define ``__all__``."""

OWN_PAGE = ("Accelerator", "Callback", "DataModule", "Logger", "Module", "Trainer")
"""Classes of ``roomier`` that have their own page."""

FOLDER = "reference/api"


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each page."""
    modules = exported_names() | WITHOUT_ALL
    yield f"{FOLDER}/index.md", _index(modules)
    for name in OWN_PAGE:
        options = {"inherited_members": "true"} if name == "Module" else {}
        yield f"{FOLDER}/roomier.{name}.md", f"# roomier.{name}\n\n{_entry(f'roomier.{name}', **options)}"
    for module, names in modules.items():
        if module not in ("roomier", "roomier.trainer"):  # roomier.trainer.Trainer is roomier.Trainer
            yield f"{FOLDER}/{module}.md", _module_page(module, names)


def _index(modules: dict[str, list[str]]) -> str:
    names = {name: f"roomier.{name}.md" for name in OWN_PAGE}
    names |= {"Plan": "roomier.plan.md#roomier.Plan"}
    here = [name for name in modules["roomier"] if name not in names and not name.endswith("Error")]
    names |= {name: f"#roomier.{name}" for name in here}
    rows = [
        (f"[`{name}`]({link})", _summary("roomier", name) if name != "__version__" else "Version of the package.")
        for name, link in sorted(names.items())
    ]
    module_rows = [
        (f"[`{module}`]({module}.md)", markdown(_first_sentence(import_module(module))))
        for module in modules
        if module not in ("roomier", "roomier.trainer")
    ]
    return "\n\n".join(
        [
            "# API",
            "The names that `import roomier` provides:",
            table(("name", "meaning"), rows),
            "Its errors are on the page [Errors](../errors.md). The other public names are in these modules:",
            table(("module", "contents"), module_rows),
            *(_entry(f"roomier.{name}") for name in here),
        ]
    )


def _module_page(module: str, names: list[str]) -> str:
    """Return the page of a module. A class that has an entry on another page gets an entry without members."""
    rows = [(f"[`{name}`](#{_path(module, name)})", _summary(module, name)) for name in names]
    entries = [_entry(f"{module}.{name}", **({"members": "false"} if name in OWN_PAGE else {})) for name in names]
    if module == "roomier.plan":
        entries = [entry.replace("::: roomier.plan.Plan\n", "::: roomier.Plan\n") for entry in entries]
    introduction = markdown(import_module(module).__doc__ or "")
    return "\n\n".join([f"# {module}", introduction, table(("name", "meaning"), rows), *entries])


def _path(module: str, name: str) -> str:
    return "roomier.Plan" if name == "Plan" else f"{module}.{name}"


def _entry(path: str, **options: str) -> str:
    lines = [f"::: {path}", *(["    options:"] if options else [])]
    return "\n".join([*lines, *(f"      {name}: {value}" for name, value in options.items())]) + "\n"


def _summary(module: str, name: str) -> str:
    return markdown(_first_sentence(getattr(import_module(module), name)))


def _first_sentence(documented: Any) -> str:
    paragraph = (documented.__doc__ or "").strip().partition("\n\n")[0]
    text = " ".join(paragraph.split())
    return re.split(r"(?<!al)\. ", text)[0].rstrip(".") + "."
