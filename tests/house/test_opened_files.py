"""``core/untrusted.py`` opens every file that the sources read. This test lists all other calls, with their reasons."""

import ast
from collections.abc import Iterator

from tests.house.sources import PACKAGE, tree_of

FUNCTIONS = {"open", "fdopen", "FileIO", "safe_open", "load_file", "memmap", "fromfile", "copy2", "copyfile", "mkstemp"}
METHODS = FUNCTIONS | {"read_text", "read_bytes", "write_text", "write_bytes", "is_zipfile", "ZipFile"}
METHODS |= {"NamedTemporaryFile"}
OF_MODULES = {"torch.load", "torch.save", "np.load", "numpy.load", "torch.export.load", "shutil.copy", "mmap.mmap"}
NEW = "creates a file in a folder that this process has just created"
OF_USER = "writes to a path that the user names"
ALLOWED = {
    ("checkpoint/commit.py", "os.open"): "opens a folder, to flush its entries",
    ("checkpoint/lightning.py", "torch.load"): "needs the path for memory mapping; open_regular has checked the file",
    ("checkpoint/lightning.py", "zipfile.is_zipfile"): "its argument is a file of open_regular, or a checked path",
    ("checkpoint/lightning.py", "zipfile.ZipFile"): "its argument is a file of open_regular",
    ("checkpoint/record.py", "open"): NEW,
    ("checkpoint/saving.py", "(folder / README_NAME).write_text"): NEW,
    ("checkpoint/snapshots.py", "(aside / name).open"): NEW,
    ("checkpoint/snapshots.py", "(folder / file.name).open"): NEW,
    ("checkpoint/tensor_file.py", "path.open"): "creates a new file (mode x)",
    ("checkpoint/uploads.py", "shutil.copyfile"): "a file that this process has just committed",
    ("cli/export_verb.py", "torch.load"): "check_regular has checked the file",
    ("cli/plan_verb.py", "path.write_text"): OF_USER,
    ("cli/report_verb.py", "path.write_text"): OF_USER,
    ("core/replacing.py", "aside.open"): "creates a new file (mode x)",
    ("core/replacing.py", "os.open"): "flushes a file that this process has just written",
    ("core/untrusted.py", "FileIO"): "the reader",
    ("core/untrusted.py", "os.fdopen"): "the reader",
    ("core/untrusted.py", "os.open"): "the reader",
    ("data/tokens.py", "np.memmap"): "its argument is a file of open_regular",
    ("data/tokens.py", "aside.open"): NEW,
    ("checkpoint/export/hugging_face.py", "shutil.copy2"): "_processor_files accepts only regular files",
    ("checkpoint/export/lightning_file.py", "torch.save"): NEW,
    ("checkpoint/export/onnx.py", "target.read_bytes"): NEW,
    ("checkpoint/export/output_file.py", "path.open"): NEW,
    ("checkpoint/export/safetensors.py", "path.open"): NEW,
    ("checkpoint/export/torch_export.py", "torch.export.load"): NEW,
    ("callbacks/on_exception_checkpoint.py", "torch.save"): OF_USER,
    ("callbacks/prediction_writer.py", "torch.save"): OF_USER,
    ("launch/notebook.py", "os.fdopen"): "the end of a pipe",
    ("launch/preemption.py", "opener.open"): "opens a page of a metadata service, not a file",
    ("launch/pickled.py", "open"): "the null device",
    ("loggers/files.py", "aside.write_bytes"): NEW,
    ("planner/hardware/host.py", "Path('/proc/cpuinfo').read_text"): "a file of the kernel",
    ("planner/hardware/host.py", "(folder / 'memory.current').read_text"): "a file of the kernel",
    ("planner/hardware/host.py", "(folder / 'memory.max').read_text"): "a file of the kernel",
    ("planner/hardware/host.py", "(folder / 'memory.stat').read_text"): "a file of the kernel",
    ("planner/hardware/host.py", "own.read_text"): "a file of the kernel",
    ("planner/hardware/measuring.py", "(scratch / f'rank-{rank}.err').open"): NEW,
    ("planner/hardware/measuring.py", "(scratch / f'rank-{rank}.err').read_text"): NEW,
    ("planner/hardware/measuring.py", "result.read_text"): NEW,
    ("planner/hardware/rank_worker.py", "Path(settings['result']).write_text"): NEW,
    ("techniques/parallel/pages.py", "page.open"): "opens a page of a parameter, not a file",
    ("techniques/parallel/pages.py", "self.open"): "opens a page of a parameter, not a file",
    ("prepared/accelerator.py", "torch.save"): OF_USER,
    ("sweeps.py", "aside.write_bytes"): NEW,
    ("techniques/tiers/buffers.py", "mmap.mmap"): "anonymous memory",
    ("techniques/tiers/folder.py", "mounts.read_text"): "a file of the kernel",
    (
        "techniques/tiers/folder.py",
        "os.open",
    ): "opens an abandoned scratch file, to lock and remove it; nothing is read",
    ("techniques/tiers/scratch.py", "mmap.mmap"): "maps the scratch file of this process",
    ("techniques/tiers/scratch.py", "os.open"): "creates the scratch file of this process",
}


def opening_calls(tree: ast.Module) -> Iterator[str]:
    """Yield the function of each call that opens a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            is_method = isinstance(node.func, ast.Attribute)
            if function in OF_MODULES or function.rpartition(".")[2] in (METHODS if is_method else FUNCTIONS):
                yield function


def test_calls_that_open_files_are_found() -> None:
    tree = ast.parse(
        "open(p); p.open(); os.open(p, 0); p.read_text(); torch.load(p); shutil.copy(a, b)\nx.copy(); read_text(p)"
    )
    expected = ["open", "p.open", "os.open", "p.read_text", "torch.load", "shutil.copy"]
    assert list(opening_calls(tree)) == expected


def test_only_the_validating_reader_opens_files() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        found |= {(name, call) for call in opening_calls(tree_of(path))}
    unlisted, unused = sorted(found - ALLOWED.keys()), sorted(ALLOWED.keys() - found)
    assert not unlisted, "Read files with core/untrusted.py and replace files with core/replacing.py"
    assert not unused
