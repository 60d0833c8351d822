"""Collect: choose what to record, see the estimated cost, and queue the runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import streamlit as st

from binade.app.draw.formatting import bytes_text, duration_text, plain
from binade.app.frame import address
from binade.app.jobs import collecting, recipe_view
from binade.app.jobs.collecting import Form, wrapped
from binade.app.questions.shared.runs import every_run
from binade.app.view.view import Reading, View
from binade.collector import jobs
from binade.collector.datasets.inputs import DATASETS
from binade.collector.errors import ConfigError
from binade.collector.jobs import JobError, SubmissionError
from binade.collector.jobs.command_line import describe
from binade.collector.recipes.files import label
from binade.collector.recipes.recipe import BF16
from binade.collector.training.config import FORMAT, WHERE, RunConfig
from binade.collector.training.plan import Plan, model_of
from binade.collector.training.slurm_options import Launcher, SlurmOptions
from binade.collector.training.targets import read_targets
from binade.data.index.catalog import Catalog
from binade.data.run.access import ReadOnlyError, reason
from binade.data.run.directory import RunError, resolve_root
from binade.quant.formats import FORMATS

PREFIX = "collect_"
WRITTEN = "form_in_address"  # the text that the fields made, or were filled from
LEFT = "left_on_collect"  # a copy of the fields and of an edited recipe, which Streamlit drops on other pages
WIDEST = (1 << 53) - 1  # the largest whole number of a browser
SEEDS = "Number of runs per recipe, each with its own seed. Their spread shows which differences are due to chance"
TARGETS = "The targets of binade.toml. Jobs for a cluster are submitted as one array"
COMMAND = 31  # characters of a line of the command in a window of 1280 pixels
REFUSED = (ConfigError, ValueError)  # RecipeError and UnknownFormatError are ValueErrors
FAILED = (JobError, ReadOnlyError, RunError, SubmissionError, OSError)
HERE, CLUSTER = "", "--launcher slurm"  # the choices besides the targets: this machine, and a cluster without a target
PLACES = {HERE: "this machine", CLUSTER: "Slurm, without a target"}


def show(opened: Catalog, view: View, reading: Reading) -> None:
    if why := reason() or jobs.no_queue(resolve_root()):
        st.info(plain(f"Runs cannot be launched here: {why}."), icon=":material/lock:")
        return
    _begin(next(iter(view.params.get(collecting.ADDRESS, ())), ""))
    _presets()
    form, summary = st.columns([1.75, 1], gap="large")
    with form:
        _fields()
    with summary, st.container(key="collect_summary"):
        _summary(opened, view)
    st.session_state[LEFT] = {name: value for name, value in st.session_state.items() if str(name).startswith(PREFIX)}


def _begin(text: str) -> None:
    """Fill the fields from the form in the address, unless they made it."""
    state = st.session_state
    if state.get(WRITTEN) == text and LEFT in state:
        if _key("model") not in state:
            state.update(state[LEFT])
    else:
        state[WRITTEN] = text
        try:
            form = Form.of_address(text)
        except ValueError as error:
            st.warning(plain(f"The address has no form that can be used: {error}."), icon=":material/warning:")
            form = collecting.FIRST
        _fill(form)
    for name in state:
        if str(name).startswith(PREFIX):
            state[name] = state[name]  # otherwise Streamlit drops it if its widget is not drawn this time


def _fill(form: Form) -> None:
    """Set every field. A whole number that a browser does not have is lowered, with a warning."""
    state = st.session_state
    for name, value in collecting.widgets_of(form.config).items():
        if isinstance(value, int) and value > WIDEST:
            text = f"{name.replace('_', ' ')} {value} is above the limit of this form: use the command line instead."
            st.warning(plain(text), icon=":material/warning:")
            value = WIDEST
        state[_key(name)] = value
    state[_key("recipes")], state[_key("seeds")] = list(form.recipes), form.seeds
    state[_key("title")], state[_key("tags")] = form.title, form.tags
    state[_key("base")], state[_key("kept")] = form.config, form.start
    state[_key("target")] = form.start.target or (CLUSTER if form.start.launcher == Launcher.SLURM else HERE)


def _choose_preset(name: str) -> None:
    recipes, target = collecting.recipes_of(name, _value("recipes")), _value("target")
    kept = {"title": _value("title"), "tags": _value("tags"), "start": _value("kept")}
    _fill(replace(collecting.PRESETS[name].form, recipes=recipes, **kept))
    st.session_state[_key("target")] = target


def _presets() -> None:
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown("Start from")
        for name, preset in collecting.PRESETS.items():
            st.button(
                preset.title,
                icon=preset.icon,
                help=preset.help,
                key=f"preset_{name}",
                on_click=_choose_preset,
                args=(name,),
            )


def _key(name: str) -> str:
    return f"{PREFIX}{name}"


def _value(name: str) -> Any:
    return st.session_state[_key(name)]


def _fields() -> None:
    """The fields, in the groups and the order in which RunConfig declares them."""
    config = collecting.config_of({name: _value(name) for name in ("model", "size")}, RunConfig())
    try:
        shape, modules = model_of(config)
    except ConfigError:  # a path without a model: the summary shows the error
        shape, modules = None, ()
    special: dict[str, dict[str, Any]] = {
        "layers": {"placeholder": f"{shape.layers if shape else 'all'}"},
        "dataset": {"options": DATASETS},
        "modules": {"options": modules},
        "scores": {"options": FORMATS},
        "max_bytes": {"disabled": not _value("raw")},
        "learning_rate": {"format": "%g", "step": 1e-4},
    }
    for group in dict.fromkeys(collecting.OPTIONS[name].option.group for name in collecting.FIELDS):
        names = [name for name in collecting.FIELDS if collecting.OPTIONS[name].option.group is group]
        if config.has_path and "size" in names:
            names.remove("size")
        with st.expander(group.title) if group is WHERE else st.container(border=True):
            if group is not WHERE:
                st.markdown(f"**{group.title}**")
            if group is FORMAT:
                recipe_view.picker(_key("recipes"))
                recipe_view.about(_value("recipes"))
                st.number_input("Seeds", -WIDEST, WIDEST, key=_key("seeds"), help=SEEDS, width=160)
            for row in _rows(names):
                free = 4 - sum(map(_width, row))
                weights = [*map(_width, row), *([free] if free else [])]
                for column, name in zip(st.columns(weights, vertical_alignment="bottom"), row, strict=False):
                    _field(column, name, **special.get(name, {}))
            if group is FORMAT:
                linear = [name for name in modules if name not in ("core", "router")]
                recipe_view.editor(_key("recipes"), linear)


def _width(name: str) -> int:
    """The width of a field, in quarters of a row."""
    setting = collecting.OPTIONS[name]
    return 2 if setting.is_list or (setting.kind is str and setting.option.allowed is None) else 1


def _rows(names: Sequence[str]) -> list[list[str]]:
    """The names in rows of at most four quarters."""
    rows: list[list[str]] = [[]]
    for name in names:
        if sum(map(_width, [*rows[-1], name])) > 4:
            rows.append([])
        rows[-1].append(name)
    return rows


def _field(place: Any, name: str, **settings: Any) -> None:
    """The widget of an option, from its declaration."""
    setting = collecting.OPTIONS[name]
    option = setting.option
    help_text = option.help if option.form_help is None else option.form_help
    settings |= {"key": _key(name), "help": help_text or None}
    options = settings.pop("options", option.allowed)
    if option.placeholder:
        settings["placeholder"] = option.placeholder
    if setting.kind is bool:
        place.toggle(option.label, **settings)
    elif setting.kind in (int, float) and not setting.is_list:
        # No limits, which `plan` checks: a browser that knows them does not send a value beyond them.
        widest = setting.kind(WIDEST)
        place.number_input(
            option.label, -widest, widest, **settings | ({"value": None} if setting.default is None else {})
        )
    elif options is None:
        place.text_input(option.label, **settings)
    elif setting.is_list:
        listed = list(dict.fromkeys([*options, *_value(name)]))
        place.multiselect(option.label, listed, select_all=False, accept_new_options=True, **settings)
    else:
        known = options is option.allowed and not option.or_path
        listed = list(options) if known else list(dict.fromkeys([*options, _value(name)]))
        place.selectbox(option.label, listed, accept_new_options=not known, **settings)


def _summary(opened: Catalog, view: View) -> None:
    """The estimate, the command and the button for the chosen runs."""
    root = resolve_root()
    values = {name: _value(name) for name in collecting.FIELDS}
    base: RunConfig = _value("base")
    with st.container(border=True):
        try:
            plans = collecting.runs_of(values, _value("recipes"), base, _value("seeds"))
            start = _start()
            target = start.for_run(plans[0].config)
        except REFUSED as error:
            st.error(plain(f"{str(error)[:1].upper()}{str(error)[1:]}."), icon=":material/edit:")
            st.button("Launch", type="primary", disabled=True, width="stretch", key="launch_refused")
            return
        runs = [plan.config for plan in plans]
        count = len(runs)
        _propose_baseline(opened, runs)
        at_once = (target.at_once or count) if target else 1
        estimate = jobs.estimate(plans, root, start.target or "", at_once)
        st.markdown(f"**{count} job{'s' * (count != 1)}**, one run each" if count > 1 else "**One job**, one run")
        a, b = st.columns(2)
        a.metric("Time", duration_text(estimate.seconds))
        b.metric("Tensors", f"{estimate.tensors:,}")
        free = "" if estimate.memory_free is None else f"; {bytes_text(estimate.memory_free)} are free"
        a.metric("Memory", bytes_text(estimate.memory), help=f"Weights, gradients, optimizer, activations{free}")
        b.metric("Disk", bytes_text(estimate.disk), help=f"{bytes_text(estimate.disk_free)} are free")
        st.caption(plain(f"Quantized by {runs[0].quantized_by}. {estimate.basis}"))
        if not estimate.within_budget:
            st.caption(
                "The values of all tensors would exceed the byte budget: tensors beyond it are recorded without values."
            )
        for refusal in estimate.refusals:
            st.error(plain(refusal), icon=":material/block:")
        st.text_input("Title", key=_key("title"), placeholder="recipe and model", max_chars=120)
        st.text_input("Tags", key=_key("tags"), placeholder="separated by commas")
        rest = {name: _value(name) for name in ("seeds", "title", "tags")}
        _write(Form(replace(runs[0], recipe=base.recipe), tuple(_value("recipes")), start=start, **rest))
        if st.button(
            f"Launch {count} jobs" if count > 1 else "Launch",
            type="primary",
            icon=":material/play_arrow:",
            width="stretch",
            key="launch",
            disabled=bool(estimate.refusals),
        ):
            _launch(plans, start, view)
    st.caption("The same in a terminal:")
    commands = [wrapped(line, COMMAND) for line in jobs.command_line(runs, start).splitlines()]
    st.code("\n".join(commands), language="shell", wrap_lines=True)
    with st.popover("What each run does", icon=":material/info:", type="tertiary"):
        first = [plan for plan in plans if plan.config.seed == runs[0].seed]
        st.code("\n\n".join(describe(plan, root) for plan in first), language=None)
    st.caption(f"The runs are written to `{root}`.")


def _write(form: Form) -> None:
    """Have the address say what the fields do."""
    if (text := form.to_address()) != st.session_state[WRITTEN]:
        st.session_state[WRITTEN] = text
        address.change(**{collecting.ADDRESS: text or None})


def _propose_baseline(opened: Catalog, runs: list[RunConfig]) -> None:
    """Offer to add bf16 if the loss of a run could be compared with none."""
    table = every_run(opened)
    plain_runs = set(table.loc[(table["recipe"] == BF16) & ~table["quantized"], "run_id"])
    every = opened.runs()
    if collecting.lacks_baseline(runs, map(json.loads, every.loc[every["run_id"].isin(plain_runs), "config"])):
        st.caption("No bf16 run has the same data and settings, so there is no loss to compare with.")
        st.button("Add the bf16 baseline", icon=":material/add:", key="add_baseline", on_click=_add_baseline)


def _add_baseline() -> None:
    st.session_state[_key("recipes")] = [BF16, *_value("recipes")]


def _start() -> SlurmOptions:
    """How the runs are started. The field is shown if there is a choice. Raises ConfigError for a target that no longer
    exists."""
    kept: SlurmOptions = _value("kept")
    choices = [HERE, CLUSTER] if kept.launcher == Launcher.SLURM else [HERE]
    choices += read_targets()
    name = _value("target")
    if missing := name not in choices:
        choices.append(name)
    if len(choices) > 1:
        name = st.selectbox(
            "Where", choices, key=_key("target"), format_func=lambda name: PLACES.get(name, name), help=TARGETS
        )
    if missing:
        raise ConfigError(f"binade.toml has no target {name}: choose where to run")
    return SlurmOptions() if name == HERE else replace(kept, target=None if name == CLUSTER else name)


def _launch(plans: list[Plan], start: SlurmOptions, view: View) -> None:
    root = resolve_root()
    title, tags = _value("title").strip(), _value("tags").split(",")
    titles = [
        f"{title} · {label(plan.config.recipe)}{f' · seed {plan.config.seed}' * (_value('seeds') > 1)}"
        if title and len(plans) > 1
        else title
        for plan in plans
    ]
    try:
        made = jobs.add_runs(root, plans, start, titles, tags=tags)
        jobs.start_runner(root)
    except (*REFUSED, *FAILED) as error:
        st.error(plain(f"Nothing was launched: {error}."), icon=":material/error:")
        return
    address.go(view.at("runs", "jobs", job=made[0].id))
