"""Values that the host reports, and the limits of a container."""

import psutil
import pytest

from roomier.planner.hardware import host
from roomier.planner.hardware.host import available_memory_bytes, container_limits, threads_of_rank, total_memory_bytes

GIB = 2**30


def limited(folder, limit, used, inactive=0):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used}\ninactive_file {inactive}\n")


def test_every_group_above_a_process_limits_it(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("1:cpu:/elsewhere\n0::/slice/service\n")
    root = tmp_path / "fs"
    limited(root / "slice" / "service", "max", 5 * GIB)
    limited(root / "slice", 8 * GIB, 6 * GIB, inactive=GIB)
    assert list(container_limits(root, own)) == [(8 * GIB, 5 * GIB)]


def test_inside_a_container_its_group_is_the_root(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/../../docker/abc\n")
    limited(tmp_path / "fs", 2 * GIB, GIB)
    assert (2 * GIB, GIB) in list(container_limits(tmp_path / "fs", own))


@pytest.mark.parametrize("text", ["", "7:memory:/old\n"])
def test_without_such_groups_there_is_no_limit(text, tmp_path):
    own = tmp_path / "cgroup"
    own.write_text(text)
    assert list(container_limits(tmp_path / "fs", own)) == []
    assert list(container_limits(tmp_path / "fs", tmp_path / "none")) == []


def test_memory_is_what_the_smallest_limit_leaves(monkeypatch):
    monkeypatch.setattr(host, "container_limits", lambda: iter([(2 * GIB, GIB), (GIB, 3 * GIB // 4)]))
    assert total_memory_bytes() == GIB
    assert available_memory_bytes() == GIB // 4
    monkeypatch.setattr(host, "container_limits", lambda: iter([]))
    assert total_memory_bytes() == psutil.virtual_memory().total
    assert 0 < available_memory_bytes() < total_memory_bytes()


def test_ranks_share_the_cores_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr(host, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_of_rank(count) for count in (1, 2, 3, 16)] == [8, 4, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads_of_rank(2) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_of_rank(2) == 4
