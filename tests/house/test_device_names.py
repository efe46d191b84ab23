"""Only the folder ``device`` names torch's modules for accelerators. Other code uses capabilities."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src" / "roomier"
CUDA_MODULE = re.compile(r"\btorch\.cuda\b|from torch import .*\bcuda\b|getattr\(torch, ['\"]cuda|\.is_cuda\b")


def lines_with_the_cuda_module(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if CUDA_MODULE.search(line)]


def test_the_search_finds_code_and_text() -> None:
    found = lines_with_the_cuda_module(
        """
import torch.cuda
from torch import cuda, nn
torch.cuda.synchronize()
'''Return ``torch.cuda.memory_allocated()``.'''
tensor.is_cuda
torch.backends.cuda, torch.accelerator.synchronize()
"""
    )
    assert len(found) == 5


def test_other_folders_do_not_name_the_cuda_module() -> None:
    outside = [path for path in sorted(ROOT.rglob("*.py")) if "device" not in path.relative_to(ROOT).parts[:1]]
    assert len(outside) > 300
    found = {str(path.relative_to(ROOT)): lines_with_the_cuda_module(path.read_text()) for path in outside}
    assert {path: lines for path, lines in found.items() if lines} == {}
