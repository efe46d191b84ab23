"""Text of ``--help`` (the most common options and a list of topics) and of ``--help=TOPIC`` (the options in full).

jsonargparse would print the descriptions of all options, which take more than 300 lines for ``roomier fit``.
"""

from __future__ import annotations

import re
import textwrap
from argparse import SUPPRESS, Action
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import docstring_parser
from jsonargparse import ArgumentParser

from roomier.core.errors import RoomierError, did_you_mean
from roomier.plan.choices import CHOICES
from roomier.plan.levers import LEVERS
from roomier.plan.parts import FIELDS, PARTS, SETTINGS_OF_STRATEGY

_WIDTH = 100
_TRAINER = "trainer."


@dataclass(frozen=True)
class Topic:
    """Options with a common purpose.

    Attributes:
        about: description of the topic in a few words.
        names: names of the options, separated by spaces. ``trainer.`` is omitted.
    """

    about: str
    names: str


_LEVERS = " ".join(lever.keyword for lever in LEVERS)
TOPICS = {
    "run": Topic(
        "the model, its data and its configuration",
        "model data config print_config ckpt_path seed_everything optimizer lr_scheduler",
    ),
    "plan": Topic(
        "the plans that `roomier plan` compares, and its output",
        "hardware nodes strategy deepspeed memory_budget hf batch_size seq_len input what_if json html",
    ),
    "ranks": Topic("the strategy and the devices", "strategy accelerator devices num_nodes hang_timeout plan"),
    "length": Topic(
        "the end of the run, and limits on the training data",
        "max_epochs min_epochs max_steps min_steps max_time limit_train_batches overfit_batches fast_dev_run",
    ),
    "optimizer": Topic(
        "the optimizer and its step",
        "optimizer learning_rate lr_schedule accumulate_grad_batches gradient_clip_val gradient_clip_algorithm "
        "auto_lr_find",
    ),
    "memory": Topic(
        "techniques that reduce memory",
        f"memory_budget offload activation_checkpointing {_LEVERS} lora auto_scale_batch_size",
    ),
    "speed": Topic(
        "number formats and kernels", "precision matmul_precision attention compile benchmark inference_mode"
    ),
    "validation": Topic(
        "validation during a fit, tests and predictions",
        "val_check_interval check_val_every_n_epoch num_sanity_val_steps limit_val_batches limit_test_batches "
        "limit_predict_batches reload_dataloaders_every_n_epochs",
    ),
    "output": Topic(
        "callbacks, logs and files",
        "callbacks logger log_every_n_steps default_root_dir upload_errors enable_checkpointing "
        "enable_progress_bar enable_model_summary enable_plan_table",
    ),
    "debugging": Topic("errors, slow code and random numbers", "detect_anomaly deterministic seeding profiler"),
}

_OWN_OF_PLAN = ("strategy", "memory_budget")  # options of `roomier plan` that are also keywords of the Trainer
_MOST_USED = {
    "": "model data config ckpt_path max_epochs strategy devices precision learning_rate accumulate_grad_batches "
    "offload callbacks",
    "plan": "model hf data config hardware batch_size seq_len strategy trainer.precision trainer.offload json",
}


def _other_fields(section: str, main: str) -> str:
    return " ".join(name for name in FIELDS[section] if name != main)


FIELDS_OF: dict[str, tuple[str, str]] = {
    "strategy": ("parallel.strategy", " ".join(SETTINGS_OF_STRATEGY)),
    "accelerator": ("parallel.accelerator", ""),
    "precision": ("precision.mode", ""),
    "matmul_precision": ("precision.matmul", ""),
    "gradient_clip_algorithm": ("batch.gradient_clip_algorithm", ""),
    "seeding": ("batch.seeding", ""),
    "optimizer": ("optimizer.name", "lr weight_decay options weight_rounding"),
    "lr_schedule": ("optimizer.schedule", "warmup_steps min_lr_ratio log_warmup decay_steps"),
    "activation_checkpointing": ("activation.policy", "every_n"),
    "offload": ("offload.optimizer_states", _other_fields("offload", "optimizer_states")),
    "attention": ("attention.kernel", ""),
    "lora": ("adapter.lora_rank", _other_fields("adapter", "lora_rank")),
    "compile": ("compile.enabled", _other_fields("compile", "enabled")),
    **{lever.keyword: (lever.field, "") for lever in LEVERS},
}
"""Mapping from keywords of the Trainer to the field of the Plan that the keyword sets, and to the fields of the same
section that a dict can set."""


def first_screen(parser: ArgumentParser) -> str:
    """Return the most common options of ``parser`` and its topics."""
    options, verb = _options(parser), parser.prog.split()[-1]
    used = [_find(options, name) for name in _MOST_USED.get(verb, _MOST_USED[""]).split()]
    lines = [
        f"usage: {parser.prog} --model CLASS [--data CLASS] [--OPTION VALUE] ...",
        "",
        *_wrapped(_plain(parser.description), ""),
    ]
    lines += ["", "Most common options:"]
    for name in filter(None, used):
        first = re.split(r"(?<=[a-z)\]])[.;] ", _plain(options[name].help))[0].rstrip(".")
        values = _values(name)
        text = f"{first}: {values}" if values and len(values) < 90 else first
        lines += _entry(f"--{name}", text, 34)
    about = (
        f"Topics. `{parser.prog} --help=TOPIC` describes the options of a topic, --help=OPTION one "
        "option, and --help=all all options. Add the prefix --trainer. to names without --, as in --trainer.max_epochs:"
    )
    lines += ["", *_wrapped(about, "")]
    for topic in TOPICS:
        names = list(_in_topic(options, topic))
        if names:
            shown = ", ".join(each.removeprefix(_TRAINER) if _TRAINER in each else f"--{each}" for each in names)
            lines += _entry(topic, shown, 14)
    return "\n".join(
        [*lines, "", "--model.help CLASS lists the arguments of a model class, which --model.ARGUMENT sets."]
    )


def topic_text(parser: ArgumentParser, topic: str) -> str:
    """Return the options of a topic with their descriptions.

    Args:
        topic: name of a topic, ``"all"``, or the name of an option.

    Raises:
        RoomierError: ``topic`` is neither a topic nor an option.
    """
    options = _options(parser)
    topics = {name: list(_in_topic(options, name)) for name in TOPICS}
    if topic == "all":
        chosen = {name: names for name, names in topics.items() if names}
    elif topics.get(topic):
        chosen = {topic: topics[topic]}
    else:
        name = _find(options, topic.removeprefix("--"))
        if name is None:
            known = ["all", *filter(topics.get, topics), *(each.removeprefix(_TRAINER) for each in options)]
            raise RoomierError("--help", topic, "is neither a topic nor an option", did_you_mean(topic, known))
        chosen = {"": [name]}
    lines: list[str] = []
    for title, names in chosen.items():
        lines += [f"{title}: {TOPICS[title].about}", ""] if title else []
        for name in names:
            lines += [*_described(name, options[name]), ""]
    return "\n".join(lines).rstrip()


def _options(parser: ArgumentParser) -> dict[str, Action]:
    """Return the options that are shown, by name without ``--``."""
    names = {text.removeprefix("--"): each for each in parser._actions for text in each.option_strings}
    hidden = {"-h", "help", "trainer"}
    return {
        name: each
        for name, each in names.items()
        if name not in hidden and not name.endswith((".help", "+")) and each.help is not SUPPRESS
    }


def _in_topic(options: dict[str, Action], topic: str) -> Iterator[str]:
    classes = [name for name in options if name.startswith(("model.", "data."))] if topic == "run" else []
    for name in (*TOPICS[topic].names.split(), *classes):
        full = name if topic in ("run", "plan") else _TRAINER + name
        if full in options and (topic != "plan" or "hardware" in options):
            yield full


def _find(options: dict[str, Action], name: str) -> str | None:
    """Return the full name of an option. Keywords of the Trainer take precedence over options of the same name."""
    is_plan = "hardware" in options and name in _OWN_OF_PLAN
    names = (name, _TRAINER + name) if is_plan else (_TRAINER + name, name)
    return next((each for each in names if each in options), None)


def _described(name: str, option: Action) -> list[str]:
    """Return the lines that describe an option: its text, its values, and the settings of its dict."""
    fields = FIELDS_OF.get(name.removeprefix(_TRAINER)) if name.startswith(_TRAINER) else None
    texts = [_plain(option.help), _type_of(option)]
    settings: list[str] = []
    if fields is not None:
        section, _, main = fields[0].partition(".")
        documented = {
            each.arg_name: str(each.description) for each in docstring_parser.parse(PARTS[section].__doc__ or "").params
        }
        values = _values(name)
        texts.insert(1, f"Value: {_plain(documented[main])}" + (f" Values: {values}." if values else ""))
        for each in fields[1].split():
            shown = each.removeprefix("lora_").replace("frozen_base", "base")
            settings += _entry(f"  {shown}", _plain(documented[each]), 28)
        settings[:0] = ["    Settings of the dict:"] if settings else []
    return [f"--{name}", *_wrapped(" ".join(filter(None, texts)), "    "), *settings]


def _values(name: str) -> str:
    """Return the values of an option with a fixed set of values."""
    fields = FIELDS_OF.get(name.removeprefix(_TRAINER))
    return ", ".join(CHOICES.get(fields[0], ())) if fields is not None else ""


def _type_of(option: Action) -> str:
    """Return the types and the default of an option, such as ``"(int or null; default: null)"``."""
    hint = getattr(option, "_typehint", None)
    if hint is None:
        return ""
    kinds = [_KINDS.get(getattr(each, "__name__", ""), "") for each in get_args(hint) or (hint,)]
    types = " or ".join(filter(None, kinds)) if all(kinds) else ""
    own = option.default
    shown = "null" if own is None else str(own).lower() if isinstance(own, bool) else own
    default = "" if "default" in str(option.help) else f"default: {shown}"
    both = "; ".join(filter(None, (types, default)))
    return f"({both})" if both else ""


_KINDS = {"str": "text", "bool": "true or false", "NoneType": "null", "Path": "path"} | {
    name: name for name in ("int", "float", "dict")
}


def _plain(text: Any) -> str:
    """Return ``text`` in one line, without the markup of docstrings and references to classes of the Plan."""
    line = " ".join(str(text or "").split())
    line = re.sub(r" \((?:``\w+Plan``(?:, )?)+\)", "", line)
    line = re.sub(r":\w+:`~?([^`]+)`", r"\1", line).replace("``", "").replace("%%", "%")
    return re.sub(r"%\(\w+\)s", "", line)


def _entry(name: str, text: str, column: int) -> list[str]:
    first, *others = _wrapped(text, " " * column) or [""]
    if len(name) + 4 > column:
        return [f"  {name}", first, *others]
    return [f"  {name:{column - 2}}{first.strip()}", *others]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def requested_topic(arguments: Sequence[str]) -> str | None:
    """Return the topic in ``--help=TOPIC``, an empty string for ``--help`` and ``-h``, or None without either."""
    for word in arguments:
        option, _, topic = word.partition("=")
        if option in ("-h", "--help"):
            return topic
    return None
