"""The text of the project: rates of habits that make English hard to read, and required docstrings."""

import ast
import doctest
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import roomier
from tests.covering import few
from tests.house.sources import ROOT, tree_of

SOURCES = sorted(path for folder in ("src/roomier", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
CODE = re.compile(r"```.*?```|``[^`]*``|`[^`]*`|:\w+:|https?://\S+", re.DOTALL)
SENTENCE_END = re.compile(r"(?<=[.:!?]) +")

# Each row: a habit, the largest rate per 1,000 words, and the pattern. The limits are several times the rates in the
# sources of PyTorch and Lightning. The check only indicates problems. If the check fails, rewrite the sentence so that
# its meaning is clear.
HABITS: list[tuple[str, float, str]] = [
    ("what", 1.5, r"\bwhat(ever)?\b"),
    ("a sentence that opens with a question word or Of", 1.5, r"^(what|of|whether|where|how|from)\b"),
    ("tell", 0.3, r"\bt(ell(s|ing)?|old)\b"),
    ("beside", 0.1, r"\bbesides?\b"),
    ("cut in the sense of shard", 0.3, r"\bcuts?\b(?! off)"),
    ("go on", 0.1, r"\b(go(es|ing|ne)?|went) on\b"),
    ("is there", 0.2, r"\b(is|are|was|were|be) there\b"),
    ("stand, lie", 0.15, r"\b(stands?|stood|lies|lay)\b(?! (in )?for)"),
    ("of its own", 0.2, r"\bof (its|their|one's|ours|his|your|my) own\b"),
    ("as such", 0.1, r"\b((as|and) such|such a one)\b"),
    ("that of", 0.5, r"\b(that|those|the one) of\b"),
    ("there is no ... to", 0.2, r"\b(it|there) is (no|nothing|none) (to|that)\b"),
    ("by name", 0.3, r"\bby (its |their )?names?\b"),
    ("nobody, nothing", 0.4, r"\b(nobody|somebody|nothing)\b"),
]


def text_of_code(path: Path) -> Iterator[str]:
    """Yield the docstrings, the other strings that look like text, and the blocks of comments of a file."""
    source = path.read_text()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(WORD.findall(node.value)) >= 5:
            yield node.value
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] > last + 1 and block:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    yield " ".join(block)


def text_of(path: Path) -> Iterator[str]:
    """Yield the pieces of text of a file, without code."""
    if path.suffix == ".md":
        pieces = iter(re.split(r"\n\s*\n", CODE.sub(" ", path.read_text())))
    else:
        pieces = (CODE.sub(" ", piece) for piece in text_of_code(path))
    for piece in pieces:
        if len(WORD.findall(piece)) >= 4:
            yield " ".join(piece.split())


def files_of(group: str) -> list[Path]:
    if group == "docs":
        return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [path for path in (ROOT / group).rglob("*.py") if path != Path(__file__)]


@pytest.mark.parametrize("group", few(["docs", "src", "benchmarks", "tests", "examples"], 2))
def test_habits_are_rare(group: str) -> None:
    texts = [(path, piece) for path in files_of(group) for piece in text_of(path)]
    sentences = [(path, sentence) for path, piece in texts for sentence in SENTENCE_END.split(piece)]
    num_words = sum(len(WORD.findall(sentence)) for _, sentence in sentences)
    assert num_words > 500
    over = []
    for habit, limit, pattern in HABITS:
        found = [(path, each) for path, each in sentences if re.search(pattern, each, re.IGNORECASE)]
        rate = 1000 * len(found) / num_words
        # A group with few words may contain one such sentence.
        if rate > limit and len(found) > 1:
            examples = [f"{path.relative_to(ROOT)}: {each[:90]}" for path, each in found[:5]]
            over.append(f"{habit}: {rate:.2f} per 1,000 words, limit {limit}, for example {examples}")
    assert not over, "\n".join(over)


def methods_of_protocols() -> set[str]:
    """Return the names of the methods that a Protocol of roomier documents."""
    classes = [node for path in SOURCES for node in ast.walk(tree_of(path)) if is_protocol(node)]
    return {each.name for node in classes for each in ast.walk(node) if isinstance(each, ast.FunctionDef)}


def is_protocol(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)


def public_symbols_without_docstring(path: Path, documented: set[str]) -> Iterator[str]:
    """Yield the public modules, classes, functions and methods that have no docstring.

    Overloads, methods of classes with bases and methods named in ``documented`` are exempt: an implementation has the
    contract of the base class or the Protocol.
    """
    tree = tree_of(path)
    name = path.relative_to(ROOT).as_posix()
    if tree.body and ast.get_docstring(tree) is None:
        yield name
    scopes: list[tuple[str, list[ast.stmt], bool]] = [("", tree.body, False)]
    while scopes:
        prefix, body, has_bases = scopes.pop()
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            decorators = {ast.unparse(each) for each in node.decorator_list}
            is_method = bool(prefix) and not isinstance(node, ast.ClassDef)
            is_override = is_method and (has_bases or node.name in documented)
            is_exempt = is_override or any(each.endswith((".setter", "overload", "override")) for each in decorators)
            if ast.get_docstring(node) is None and not is_exempt:
                yield f"{name}:{node.lineno} {prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(each).split("[")[0] for each in node.bases}
                scopes.append((f"{prefix}{node.name}.", node.body, bool(bases - {"Protocol", "Generic", "object"})))


def test_public_symbols_have_docstrings() -> None:
    documented = methods_of_protocols()
    missing = [each for path in SOURCES for each in public_symbols_without_docstring(path, documented)]
    assert not missing, "\n".join(missing)


FIRST_MET: list[Any] = [
    roomier.Callback,
    roomier.DataModule,
    roomier.Logger,
    roomier.Module,
    roomier.Module.load_from_checkpoint,
    roomier.Module.log,
    roomier.Module.save_hyperparameters,
    roomier.Plan,
    roomier.Trainer,
    roomier.callbacks.EarlyStopping,
    roomier.callbacks.LearningRateMonitor,
    roomier.callbacks.MemoryForecast,
    roomier.callbacks.ModelCheckpoint,
    roomier.data.CombinedLoader,
    roomier.data.TokenDataset,
    roomier.loggers.CSVLogger,
    roomier.loggers.TensorBoardLogger,
    roomier.loggers.WandbLogger,
    roomier.memory.anatomy,
    roomier.prepare,
]


@pytest.mark.parametrize("symbol", FIRST_MET, ids=lambda symbol: symbol.__qualname__)
def test_symbols_that_users_meet_first_have_an_example(symbol: Any) -> None:
    examples = doctest.DocTestParser().get_examples(symbol.__doc__)
    assert examples
    for example in examples:
        compile(example.source, symbol.__qualname__, "single")
