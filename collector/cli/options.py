"""The options of run, batch and quick, made from their declarations, and the runs that a command line describes.

No torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from binade.collector.capture.watching import WATCH
from binade.collector.errors import ConfigError, raising
from binade.collector.recipes.recipe import TEN_RECIPES
from binade.collector.settings import QUEUEABLE, Declared, OptionGroup, Size, declared
from binade.collector.training.config import FORMAT, LENGTH, OVERRIDES, RECORD, WHERE, RunConfig, defaults
from binade.collector.training.plan import Plan, plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.terminal import CliOption, Command, names, root_option, usage_message

if TYPE_CHECKING:
    from binade.data.run.directory import RunInfo

COMMANDS = ("run", "batch", "quick")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def numbers(text: str) -> tuple[int, ...]:
    """The items of a list of whole numbers that is separated by commas."""
    try:
        return tuple(int(name) for name in names(text))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers: write numbers from 0, such as 0,2") from None


def size(text: str) -> int:
    """A number of bytes: 500M, 4G, 1073741824."""
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    try:
        return int(float(number) * unit)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a size: write 500M, 4G or a number of bytes") from None


def click_option(field: Declared, default: Any) -> CliOption:
    """Click's option for a declaration, with its default in the help. Without a value it is None, or () for a list."""
    declaration, settings = field.option, dict[str, Any]()
    if field.kind is bool:
        settings = {"is_flag": True, "flag_value": not field.default, "type": bool}
    elif declaration.unit == "bytes":
        settings = {"type": size}
    elif field.is_list:
        settings = {"type": numbers if field.kind is int else names, "multiple": True}
    else:
        settings = {"type": field.kind}
    text, shown = declaration.help, declaration.default_help
    if declaration.allowed is not None and not all(name in text for name in declaration.allowed):
        text += f". {'Any' if field.is_list else 'One'} of {', '.join(declaration.allowed)}"
    if not shown and field.kind is not bool and default not in (None, (), ""):
        shown = field.text(default)
    return CliOption(
        [field.flag, field.name],
        title=declaration.group.title,
        about=declaration.group.about,
        help=f"{text}  [default: {shown}]" if shown else text,
        metavar=declaration.metavar,
        default=None,
        shell_complete=lambda ctx, param, start: _complete(field, start),
        **settings,
    )


def _complete(field: Declared, start: str) -> list[CompletionItem]:
    before, comma, word = start.rpartition(",") if field.is_list else ("", "", start)
    completions = [
        CompletionItem(before + comma + name) for name in field.option.allowed or () if name.startswith(word)
    ]
    return completions or [CompletionItem(start, type="file")] * ("PATH" in (field.option.metavar or ""))


def training_params(command: str) -> list[click.Parameter]:
    """The parameters of run, batch or quick. Each command has its own defaults for the recipes."""
    what = "Recipes, separated by commas; each" if command == "batch" else "Recipe:"
    recipes = {"type": names, "metavar": "A,B,..." if command == "batch" else "RECIPE"}
    default = {"run": "  [default: bf16]", "batch": "  [default: the ten of `binade list`]", "quick": ""}[command]
    preset = "fast" if command == "quick" else "standard"
    # Options that are not fields of RunConfig come before the field that they belong to.
    others = {
        "recipe": [
            _option(FORMAT, "--quantization", "--recipe", "quantization", **recipes,
                    help=f"{what} a name from `binade list`, or the path to a .toml or .yaml file{default}"),
            _option(FORMAT, "--quant-type", help="Old name of --quantization", **recipes),
        ],
        "train_iters": [
            _option(LENGTH, "--training-config", type=click.Choice(("standard", "fast")),
                    help=f"fast: a quarter of the tokens  [default: {preset}]"),
        ],
        "save_tensors": [
            _option(RECORD, "--save-tensors", "record_tensors", is_flag=True, default=None,
                    help="Accepted for compatibility; recording is the default"),
        ],
        "micro_batches": [
            _option(LENGTH, "--resume", metavar="RUN",
                    help="Continue a run, for example one that was killed, from its last checkpoint, with the options "
                        "that it was started with. With --recipe A,B,..., branch it instead: a new run per recipe goes "
                        "on from the last checkpoint with something left to train, on the same data. Branches may have "
                        "another --train-iters, --checkpoint-every and --evaluate-every, and record something else"),
            _option(LENGTH, "--config", metavar="FILE",
                    help="Read the configuration from a JSON file, such as the run.json of a run. It cannot be "
                        "combined with other options of the run"),
        ] if command == "run" else [],
    }  # fmt: skip
    shown = defaults(command)
    params: list[click.Parameter] = []
    if command == "quick":
        params.append(click.Argument(["recipe"], required=False, metavar="[RECIPE]"))
    for field in sorted(declared(RunConfig).values(), key=lambda field: field.option.group is WATCH):  # that group last
        params += others.get(field.name, [])
        if field.name != "recipe":
            params.append(click_option(field, getattr(shown, field.name)))
    start = (click_option(field, field.default) for field in declared(SlurmOptions).values())
    return [*params, root_option(WHERE.title), *start]


def _option(group: OptionGroup, *names: str, **settings: Any) -> CliOption:
    return CliOption(names, title=group.title, about=group.about, **settings)


@dataclass(frozen=True)
class Branches:
    """The branches that --resume RUN --recipe A,B asks for.

    recipes  of which each branch has one
    changes  the other fields of RunConfig that were given
    config   a run from the start with these options, which is continued if it is the run that --resume names
    """

    recipes: tuple[str, ...]
    changes: Mapping[str, Any]
    config: RunConfig

    def plans(self, run: RunInfo) -> list[Plan]:
        """The plans of the branches of a run. Raises RunError, ConfigError."""
        from binade.collector.training.checkpoints import branch_of

        branch = branch_of(run, self.changes)
        options = declared(RunConfig)
        for name in (*(f"{name}_quant" for name in (*OVERRIDES, "operand")), "softmax"):
            if getattr(branch.config, name) != options[name].default:
                raise ConfigError(
                    f"{run.run_id} was started with {options[name].flag}, which would change the recipe of each "
                    "branch: branch a run whose formats are all in its recipe"
                )
        return [
            replace(plan(replace(branch.config, recipe=recipe, **self.changes)), branch=branch)
            for recipe in self.recipes
        ]


@dataclass(frozen=True)
class Request:
    """The request of a command line of run, batch or quick. plans is empty where `resume` names a run to be continued
    with its own configuration, or to be branched."""

    plans: list[Plan]
    start: SlurmOptions
    root: str | None
    resume: str | None = None
    branches: Branches | None = None

    @property
    def runs(self) -> list[RunConfig]:
        return [plan.config for plan in self.plans]

    def plans_in(self, root: Path) -> list[Plan]:
        """The plans of the runs in this root. Raises RunError for a run that cannot be resumed or branched, ConfigError
        if it was started with other options."""
        if not self.resume:
            return self.plans
        from binade.collector.training.checkpoints import last  # pydantic, as in `read_configs`
        from binade.data.run.directory import check_names, read_run

        check_names(root, [name := Path(self.resume).name])
        run = read_run(root / name)
        given = self.branches.config if self.branches else next(iter(self.runs), None)
        if given and run.config.get("run_config") != json.loads(json.dumps(asdict(given))):
            if self.branches:
                return self.branches.plans(run)
            raise ConfigError(
                f"{run.run_id} was started with other options: to continue it, leave out all options but --resume and "
                "--tensor-save-dir; to branch it, give --recipe and only options in which branches may differ"
            )
        _, positions = last(run)
        return [plan(positions[0].config)]


def parse(line: Sequence[str]) -> Request:
    """The request of a command line of run, batch or quick, for a job.

    Raises ConfigError for what cannot be run or queued: another command, --dry-run.
    """
    if not line or line[0] not in COMMANDS:
        known = ", ".join((*COMMANDS, *QUEUEABLE))
        raise ConfigError(f"a job is a command line of {known}, such as: run --quantization mxfp8")
    command = Command(line[0], params=training_params(line[0]))
    try:
        request = request_of(line[0], command.make_context(f"binade {line[0]}", list(line[1:])).params)
    except click.UsageError as error:
        raise ConfigError(usage_message(error)) from None
    if request.start.dry_run:
        raise ConfigError("--dry-run runs nothing: leave it out, or call binade with it directly")
    return request


def read_configs(path: str) -> list[Plan]:
    """The plans of the configurations in a JSON file: one, or a list for the same ranks and device. The run.json of a
    run and the job.json of a job have one as an entry. Raises ConfigError."""
    from binade.data.run.json_files import MOST_BYTES, parse_json  # pydantic, for which --help does not wait
    from binade.data.run.store import read_file

    with raising(ConfigError, f"--config {path} cannot be read", OSError, ValueError, RecursionError):
        content = json.loads(read_file(Path(path), MOST_BYTES))
        records = content if isinstance(content, list) else [content]
        inner = [
            record.get("run_config", record.get("config", record)) for record in records if isinstance(record, dict)
        ]
        configs = [parse_json(RunConfig, json.dumps(record).encode()) for record in inner]
    if not configs:
        raise ConfigError(f"--config {path} has no configuration of a run: give a run's run.json, or what it has there")
    if len({(config.tp, config.dp, config.device) for config in configs}) > 1:
        raise ConfigError(f"--config {path} has runs on different ranks or devices: give each a file of its own")
    return [plan(config) for config in configs]


def request_of(command: str, params: Mapping[str, Any]) -> Request:
    """The runs for the parameters of a command, checked. Raises ConfigError."""
    given = {name: value for name, value in params.items() if value is not None}
    for name, field in declared(RunConfig).items():
        if field.is_list and not given[name]:
            del given[name]
        elif field.is_list:  # an option that is given twice extends its list
            given[name] = tuple(item for items in given[name] for item in items)
    _check_recording(given)
    base = defaults(command, given.get("training_config"))
    base = replace(base, **{name: given[name] for name in declared(RunConfig) if name in given and name != "recipe"})
    if base.has_path and "size" not in given:
        base = replace(base, size=Size.FULL)
    if "micro_batches" not in given:
        base = replace(base, micro_batches=max(1, base.collect_micro_batches))
    start = SlurmOptions(**{name: given[name] for name in declared(SlurmOptions) if name in given})
    others = [name for name in given if name not in {"config", "root", "resume", *declared(SlurmOptions)}]
    if path := given.get("config"):
        if others:
            flags = {param.name: param.opts[0] for param in training_params("run")}
            raise ConfigError(f"--config has all options of the run: leave {flags[others[0]]} out")
        plans = read_configs(path)
        if given.get("resume") and len(plans) > 1:
            raise ConfigError(f"--resume continues one run, but --config {path} has {len(plans)}")
    elif given.get("resume") and not others:
        plans = []
    elif given.get("resume") and {"quantization", "quant_type"} & set(others):
        if branches := _branches(given, others, base):
            return Request([], start, given.get("root"), given["resume"], branches)
        plans = [plan(replace(base, recipe=recipe)) for recipe in _recipes(command, given)]
    else:
        plans = [plan(replace(base, recipe=recipe)) for recipe in _recipes(command, given)]
    return Request(plans, start, given.get("root"), given.get("resume"))


def _branches(given: Mapping[str, Any], others: Sequence[str], base: RunConfig) -> Branches | None:
    """The branches that --resume with --recipe asks for; None for options that a branch cannot have, which may be those
    that the run was started with. Raises ConfigError for several recipes with such options."""
    options = declared(RunConfig)
    may = {name for name, field in options.items() if field.option.group in (RECORD, WATCH)}
    may |= {
        "train_iters",
        "checkpoint_every",
        "evaluate_every",
        "quantization",
        "quant_type",
        "record_tensors",
    }
    recipes = _recipes("batch", given)
    if wrong := [name for name in others if name not in may]:
        if len(recipes) == 1:
            return None
        flag = options[wrong[0]].flag if wrong[0] in options else f"--{wrong[0].replace('_', '-')}"
        raise ConfigError(
            f"{flag} is that of {given['resume']}: leave it out. Branches may differ in --recipe, --train-iters, "
            "--checkpoint-every and what is recorded"
        )
    changes = {name: given[name] for name in others if name in options and name != "recipe"}
    return Branches(recipes, changes, replace(base, recipe=recipes[0]))


def _check_recording(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for options that contradict each other."""
    nothing = "save_tensors" in given
    if nothing and given.get("record_tensors"):
        raise ConfigError("--save-tensors and --no-save-tensors contradict each other: give one")
    chosen = [
        name
        for name in ("tensors", "modules", "capture_layers", "ranks", "twin", "watch", "trigger", "ring", "find_nan")
        if given.get(name)
    ]
    if nothing and chosen:
        flag = declared(RunConfig)[chosen[0]].flag
        raise ConfigError(f"{flag} has no effect with --no-save-tensors: leave one of them out")
    if "max_bytes" in given and (nothing or "raw" in given):
        flag = "--no-save-tensors" if nothing else "--no-raw"
        raise ConfigError(f"--max-bytes has no effect with {flag}: leave one of them out")


def _recipes(command: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """The recipes, by any of their spellings."""
    spellings = {"RECIPE": "recipe", "--quantization": "quantization", "--quant-type": "quant_type"}
    chosen = {spelling: given[name] for spelling, name in spellings.items() if name in given}
    if "RECIPE" in chosen:
        chosen["RECIPE"] = names(chosen["RECIPE"])
    if len(set(chosen.values())) > 1:
        raise ConfigError(f"{' and '.join(chosen)} name different recipes: give one of them")
    usual: dict[str, tuple[str, ...]] = {"run": ("bf16",), "batch": TEN_RECIPES, "quick": ()}
    recipes: tuple[str, ...] = next(iter(chosen.values()), usual[command])
    if not recipes:
        raise ConfigError(f"{command} needs a recipe: a name from `binade list`")
    if len(recipes) > 1 and command != "batch":
        raise ConfigError(f"{command} takes one recipe, not {len(recipes)}: use batch for several")
    return recipes
