"""``roomier launch RUN.YAML --to LAUNCHER``: print the manifest of a job that trains with the options of a file, or
submit the job to Ray."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from roomier import checkpoint
from roomier.checkpoint.record import read_record
from roomier.cli import trainer_verbs
from roomier.cli.config_files import options_in
from roomier.cli.options import parse
from roomier.cli.plain_parser import PlainParser
from roomier.cli.plan_verb import PLAN_OPTIONS, plan_parser, planned
from roomier.cli.trainer_verbs import current_folder_importable
from roomier.core.errors import RoomierError
from roomier.core.log import notice
from roomier.engines import ray
from roomier.engines.manifests import TARGETS, ClusterJob, Nodes, grace_s, manifest
from roomier.planner.choice import Choice
from roomier.planner.forecast import SHARE_OF_DISK, SHARE_OF_HOST, Forecast
from roomier.storage.address import is_remote

_RAY = "ray"
_OF_LAUNCH = ("hardware", "input")  # options of `roomier plan` that describe a node and a batch
_ONLY_OF_PLAN = {*PLAN_OPTIONS, "what_if", "json"} - {*_OF_LAUNCH, "seed_everything", "ckpt_path"}
_PROCESS_BYTES = 4 * 2**30  # of each rank: Python, torch, and the context of the device
_BYTES_PER_PARAMETER = 12  # of a checkpoint, in float32: the weight, and the two states of AdamW


def run(verb: str, arguments: Sequence[str]) -> int:
    """Print the manifest, or run the job with Ray.

    Raises:
        RoomierError: an option is invalid, no plan fits the nodes, or Ray cannot run the job.
    """
    own, others = _parser(verb).parse_known_args(list(arguments))
    words = ["--config", own.config, *others]
    for name in ("image", "command") if own.to == _RAY else ():
        if (value := getattr(own, name)) is not None:
            problem = "is not supported with ray, whose workers call `roomier fit` in their own Python"
            raise RoomierError(f"--{name}", value, problem, f"Remove --{name}")
    options = options_in(words)
    for option in options:
        if option.field in _ONLY_OF_PLAN:
            action = "Use the options of `roomier fit`, such as --trainer.strategy"
            raise RoomierError(f"--{option.field}", option.value, "is an option of `roomier plan` only", action)
    nodes = None if own.nodes is None else Nodes.of(own.nodes)
    with current_folder_importable(), contextlib.redirect_stdout(sys.stderr):
        parser = plan_parser(None)
        config = parse(parser, words)
        found: list[tuple[Choice, int]] = []
        for number in {None} if nodes is None else {nodes.least, nodes.most}:
            at_number = config.clone()
            at_number.nodes = number
            asked, _, choice, _ = planned(parser, at_number, words, as_fit=True)
            found.append((choice, asked.workload.num_parameters))
    forecasts = [_fitting(choice) for choice, _ in found]
    save_s = max(_save_s(own.measured, choice, number) for choice, number in found)
    nodes = nodes or Nodes(forecasts[0].machine.num_nodes, forecasts[0].machine.num_nodes)
    fit = ["roomier", "fit", *(word for each in options if each.field not in _OF_LAUNCH for word in each.words)]
    command = shlex.split(own.command) if own.command else [*fit, *_ranks(own.to, forecasts[0], nodes)]
    root = config.trainer.default_root_dir
    _check_root(own.to, root)
    if own.to == _RAY:
        root = root if root is None or is_remote(root) else os.path.abspath(root)
        command.append("--trainer.default_root_dir=null")  # the run folder is in Ray's storage, which is `root`
    name = own.name or re.sub(r"[^a-z0-9]+", "-", Path(own.config).stem.lower()).strip("-")
    job = _job(name, command, nodes, forecasts, save_s, own.image)
    if own.to == _RAY:
        ray.submit(job, _fit, root)
    else:
        print(manifest(own.to, job), end="")
    return 0


def _fit(command: Sequence[str]) -> None:
    """Run ``roomier fit`` in a worker of Ray."""
    trainer_verbs.run(command[1], command[2:])


def _parser(verb: str) -> PlainParser:
    parser = PlainParser(
        prog=f"roomier {verb}",
        description="Print the manifest of a job that runs `roomier fit --config RUN.YAML` on a cluster, or run "
        "the job on the Ray cluster at RAY_ADDRESS. The planner forecasts the memory that each node needs. After a "
        "restart, the job resumes from its last checkpoint.",
        epilog="All other options, such as --trainer.max_steps 100, are options of `roomier fit`. --hardware h100:8 "
        "describes a node, and --input a batch, as in `roomier plan`.",
    )
    parser.add_argument("config", metavar="RUN.YAML", help="file with the options of `roomier fit`")
    parser.add_argument("--to", required=True, choices=(*TARGETS, _RAY), help="launcher that runs the job")
    parser.add_argument("--image", help="container image that contains your code and its packages")
    parser.add_argument("--name", help="name of the job; default: the name of RUN.YAML")
    parser.add_argument(
        "--nodes", help="number of nodes; with slurm and ray also a range such as 1:4; default: num_nodes"
    )
    parser.add_argument("--command", help="command that each process runs instead of `roomier fit`")
    about = "run folder or checkpoint whose measured save time determines the grace period"
    parser.add_argument("--measured", metavar="RUN", help=about)
    return parser


def _fitting(choice: Choice) -> Forecast:
    """Return the forecast of the chosen plan.

    Raises:
        RoomierError: no plan fits.
    """
    if choice.chosen is not None:
        return choice.chosen
    machine, best = choice.machine, choice.considered[0]
    devices = f"{machine.devices_per_node} x {machine.device.name} in each node"
    problem = f"{best.plan.parallel.strategy} on {devices} {best.reason}"
    action = "Use more nodes, a strategy that needs less memory, or --trainer.strategy auto. See `roomier plan`"
    raise RoomierError("--nodes", machine.num_nodes, problem, action)


def _save_s(measured: str | None, choice: Choice, num_parameters: int) -> float:
    """Return the duration of a save: the measured one, or a forecast from the rate of a node's disk.

    Raises:
        RoomierError: the measured run has no checkpoint with a duration.
    """
    if measured is None:
        return num_parameters * _BYTES_PER_PARAMETER / choice.machine.disk_write.bytes_per_s
    path = checkpoint.find_last(measured)
    milliseconds = 0 if path is None else read_record(path).write_ms
    if not milliseconds:
        action = "Pass the folder of a run that has saved a checkpoint, or omit the option"
        raise RoomierError("--measured", measured, "contains no checkpoint with a measured save time", action)
    return milliseconds / 1000


def _ranks(target: str, forecast: Forecast, nodes: Nodes) -> list[str]:
    """Return the options that set the number of ranks. In SLURM and Ray, the number of nodes can change at a
    restart."""
    devices, number = ("auto", "auto") if target in ("slurm", _RAY) else (forecast.machine.devices_per_node, nodes.most)
    return [f"--trainer.devices={devices}", f"--trainer.num_nodes={number}"]


def _check_root(target: str, root: str | None) -> None:
    if target != "slurm" and not is_remote(root):
        notice(
            f"default_root_dir={root!r} must be in storage that all nodes share, and that outlives them. Otherwise, a "
            "restarted job starts at step 0. Use an address such as s3://bucket/runs, or mount a volume"
        )


def _job(
    name: str,
    command: Sequence[str],
    nodes: Nodes,
    forecasts: Sequence[Forecast],
    save_s: float,
    image: str | None,
) -> ClusterJob:
    """Return the job with the largest resources of ``forecasts``."""
    machine = forecasts[0].machine
    has_own = machine.device.has_own_memory
    host_bytes = max(each.host_bytes + (0 if has_own else each.peak_bytes) for each in forecasts)
    whole_bytes = machine.devices_per_node * (_PROCESS_BYTES + host_bytes) / SHARE_OF_HOST
    return ClusterJob(
        name,
        tuple(command),
        nodes,
        machine.devices_per_node,
        machine.device.kind,
        machine.device.name,
        memory_bytes=int(min(whole_bytes, machine.host_memory_bytes)),
        disk_bytes=int(machine.devices_per_node * max(each.disk_bytes for each in forecasts) / SHARE_OF_DISK),
        grace_s=grace_s(max(each.time.total_s if each.time else 0.0 for each in forecasts), save_s),
        image=image,
    )
