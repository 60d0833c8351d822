"""An option is declared once: --help, job arguments, validation and the Collect form read the same declaration."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import asdict, fields, replace

import click
import pytest

from binade import cli
from binade.app.jobs import collecting
from binade.collector.cli.options import parse
from binade.collector.errors import ConfigError
from binade.collector.models.registry import MODELS
from binade.collector.settings import Declared, check_options, declared
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.collector.training.slurm_options import SlurmOptions
from tests.conftest import PROJECT

OPTIONS = declared(RunConfig)
# Values that differ from the default where the default plus one would not do.
OTHER = {
    "dataset": "dolma",
    "tokenizer": "byte",
    "layers": 1,
    "operand_quant": ("qk.forward.key=mxfp4", "qk.forward.query=bf16"),
    "skip_layers": "first",
    "capture_layers": "last",
    "modules": ("qkv", "core"),
    "ranks": (0,),
    "unmerged_ranks": (1,),
    "scores": (),
    "router_quant": "bf16",
    "softmax": "flash",
    "tensors": ("grad_key",),  # the last one is of Muon alone, which no model has
    "watch": "every 3 steps",
    "trigger": ("saturated > 1%", "nan"),
    "warn": ("saturated > 1%",),
}
TOGETHER = {
    "router_quant": {"model": "deepseek2_lite"},
    "collect_micro_batches": {"micro_batches": 2},
    "sequence_parallel": {"tp": 2},
    "unmerged_ranks": {"dp": 2, "merge_ranks": "on"},
}


def other(each: Declared) -> object:
    """A value that is not the default."""
    if each.name in OTHER:
        return OTHER[each.name]
    if each.kind is bool:
        return not each.default
    if each.option.allowed is not None:
        last = [*each.option.allowed][-1]
        return (last,) if each.is_list else last
    if each.kind is str:
        return "mxfp4"
    return (each.default or 1) * 2


def commands(group: click.Group, path: str = "binade") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name="binade")
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


COMMANDS = dict(commands(cli.build()))


def test_every_field_declares_its_option():
    assert set(OPTIONS) == {each.name for each in fields(RunConfig)}


@pytest.mark.sampled(42)
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "recipe"])
def test_a_field_alone_makes_an_option(name):
    """The recipe has three spellings, and tests of its own."""
    each = OPTIONS[name]
    config = replace(RunConfig(), **TOGETHER.get(name, {}), **{name: other(each)})
    plan(config)
    line = config.arguments()
    assert each.flag in line and parse(line).runs == [config]


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if each.option.minimum is not None])
def test_limits_are_those_of_the_declaration(name):
    each = OPTIONS[name]
    for value in (each.option.minimum - 1, each.option.maximum * 2 + 1):
        with pytest.raises(ConfigError, match=re.escape(f"{each.flag} is {value}")):
            check_options(replace(RunConfig(), **{name: value}))


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if each.option.allowed is not None])
def test_choices_are_those_of_the_declaration(name):
    each = OPTIONS[name]
    with pytest.raises(ConfigError, match=f"{each.flag} 'nope': expected one of"):
        check_options(replace(RunConfig(), **{name: ("nope",) if each.is_list else "nope"}))


def test_the_form_has_the_options_with_a_label():
    labelled = {name for name, each in OPTIONS.items() if each.option.label}
    assert set(collecting.FIELDS) == labelled


@pytest.mark.parametrize("path", COMMANDS)
def test_help_names_every_option(path):
    command = COMMANDS[path]
    text = command.get_help(click.Context(command, info_name=path))
    for param in command.params:
        if isinstance(param, click.Option):
            assert param.help and re.search(rf"(?<![\w-]){param.opts[0]}(?![\w-])", text), param.opts
    assert command.help and max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("command", ["run", "batch", "quick"])
def test_training_commands_have_every_declared_option(command):
    flags = {flag for param in COMMANDS[f"binade {command}"].params for flag in param.opts}
    assert {each.flag for kind in (RunConfig, SlurmOptions) for each in declared(kind).values()} <= flags


def test_help_of_binade_fits_one_screen(capsys):
    assert cli.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40 and all(
        any(f"  {name} " in line for line in lines) for group in cli.COMMANDS.values() for name in group
    )


@pytest.mark.parametrize("shown", ["alone", "in run.json", "in a list"])
def test_a_configuration_is_read_from_json(tmp_path, shown: str):
    config = RunConfig(recipe="mxfp8", layers=1, scores=(), raw=False, seed=7)
    record = {"alone": asdict(config), "in run.json": {"run_config": asdict(config)}, "in a list": [asdict(config)]}
    (tmp_path / "c.json").write_text(json.dumps(record[shown]))
    assert parse(["run", "--config", str(tmp_path / "c.json")]).runs == [config]


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, (), "cannot be read: no such file"),
        ("[" * 100_000, (), "cannot be read"),
        ("[]", (), "has no configuration"),
        ('{"layerz": 1}', (), "layerz is 1: Unexpected keyword argument"),
        ('{"layers": "1"}', (), 'layers is "1": Input should be a valid integer'),
        ('{"layers": 17}', (), "--layers is 17: expected 1 to 16"),
        ('[{"tp": 2}, {}]', (), "different ranks"),
        *(("{}", line, f"leave {line[0]} out") for line in (("--no-raw",), ("--seed", "0"), ("--scores", ""))),
        ("{}", ("--save-tensors",), "leave --save-tensors out"),
        ("{}", ("--recipe", "mxfp8"), "leave --quantization out"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_one_line(tmp_path, command, capsys, content, options, message: str):
    if content is not None:
        (tmp_path / "c.json").write_text(content)
    assert command("run", "--config", str(tmp_path / "c.json"), *options, "--dry-run") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("binade: ") and message in err and err.count("\n") == 1


@pytest.mark.parametrize("model", MODELS)
def test_a_tiny_model_has_as_many_layers_as_requested_up_to_those_of_the_full_one(model):
    most = MODELS[model]["full"].layers
    assert plan(RunConfig(model=model, layers=most)).shape.layers == most
    assert plan(RunConfig(model=model)).shape.layers == 2
    with pytest.raises(ConfigError, match=f"--layers is {most + 1}: expected 1 to {most}"):
        plan(RunConfig(model=model, layers=most + 1))


def test_options_are_not_abbreviated():
    with pytest.raises(ConfigError, match="--quantiz"):
        parse(["run", "--quantiz", "mxfp8"])


def examples() -> list[str]:
    """The commands in the README and the documentation, without comments, continued lines joined."""
    pages = [PROJECT / "README.md", *(page for page in (PROJECT / "docs").glob("*.md") if page.stem != "reference")]
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    lines = re.findall(r"^ {4}(?:\S+=\S+ )*(?:\.venv/bin/)?(binade .*)$", text, re.M)
    return sorted({shlex.join(shlex.split(line, comments=True)) for line in lines})


@pytest.mark.parametrize("line", examples())
def test_the_documentation_has_commands_that_parse(line):
    _, *words = shlex.split(line)
    group: click.Command = cli.build()
    path = ["binade"]
    while isinstance(group, click.Group) and words:
        found = group.get_command(click.Context(group), words[0])
        assert found, line
        path.append(words.pop(0))
        group = found
    group.make_context(" ".join(path), words)
