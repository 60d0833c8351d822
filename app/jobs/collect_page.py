"""Collect: choose what is to be recorded, see what it will take, and queue it."""

from __future__ import annotations

from typing import Any

import streamlit as st

from binade.app.address import plain
from binade.app.formatting import bytes_text
from binade.app.jobs import collecting
from binade.app.jobs.collecting import duration_text, wrapped
from binade.collector import jobs
from binade.collector.jobs import JobError
from binade.collector.training.config import (
    BACKENDS,
    DATASETS,
    DEVICES,
    MODELS,
    SIZES,
    ConfigError,
    RunConfig,
)
from binade.data.access import ReadOnlyError, read_only
from binade.data.runs import RunError, resolve_root
from binade.data.tensor_kinds import tensor_names
from binade.quant.formats import FORMATS

PREFIX = "collect_"
MOST = {
    **dict.fromkeys(("micro_batch_size", "micro_batches", "collect_micro_batches"), 4096),
    **dict.fromkeys(("warmup_iterations", "control_iter", "capture_every", "train_iters"), 1_000_000),
    **{"tp": 64, "dp": 64, "learning_rate": 10.0, "seed": 2**53 - 1, "budget": 1 << 30},
}  # that a field takes
COMMAND = 38  # letters of a line of the command
REFUSED = (ConfigError, ValueError)  # RecipeError and UnknownFormatError are ValueErrors
FAILED = (JobError, ReadOnlyError, RunError, OSError)


def page() -> None:
    st.title("Collect", anchor=False)
    if read_only():
        st.info("Runs can only be looked at here: the app was started read-only.", icon=":material/lock:")
        st.stop()
    st.session_state["page"] = "collect"
    st.html("<style>.st-key-collect_summary{position:sticky;top:4.5rem}</style>")
    _begin()
    _presets()
    form, summary = st.columns([1.75, 1], gap="large")
    with form:
        _fields()
    with summary, st.container(key="collect_summary"):
        _summary()


def _begin() -> None:
    """Fill the fields: from the job that the address names, else as they were left, else from the quick preset."""
    state = st.session_state
    asked = st.query_params.get("from")
    if asked and state.get("collect_from") != asked:
        state["collect_from"] = asked
        try:
            if not (asked.isdecimal() and len(asked) < 10):
                raise JobError("a job's number was expected")
            job = jobs.find(resolve_root(), int(asked))
            config = jobs.parse_runs(job.arguments)[0]
        except (*REFUSED, *FAILED) as error:
            st.warning(plain(f"Job {asked[:20]} cannot be cloned: {error}."), icon=":material/warning:")
        else:
            _fill(config, (config.recipe,), title=job.title, tags=", ".join(job.tags))
            return
    if f"{PREFIX}model" not in state:
        preset = collecting.presets()["quick"]
        _fill(preset.config, preset.recipes)
    for name in state:
        if str(name).startswith(PREFIX):
            state[name] = state[name]  # or it would be lost while another page is shown


def _fill(config: RunConfig, recipes: tuple[str, ...], title: str = "", tags: str = "") -> None:
    """Set every field; beyond what the form takes, to the most that it does, and say so."""
    state, beyond = st.session_state, []
    for name, value in collecting.widgets_of(config).items():
        if name in MOST and value is not None and value > MOST[name]:
            beyond.append(f"{name.replace('_', ' ')} {value}: {MOST[name]} here")
            value = MOST[name]
        state[f"{PREFIX}{name}"] = value
    if beyond:
        st.warning(
            plain(f"The form takes less than the job had ({'; '.join(beyond)}): the command line takes all."),
            icon=":material/warning:",
        )
    state[f"{PREFIX}recipes"] = list(recipes)
    state[f"{PREFIX}title"], state[f"{PREFIX}tags"] = title, tags
    state[f"{PREFIX}base"] = config


def _choose_preset(name: str) -> None:
    preset = collecting.presets()[name]
    _fill(preset.config, preset.recipes)
    st.query_params.clear()


def _presets() -> None:
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.markdown("Start from")
        for name, preset in collecting.presets().items():
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
    with st.container(border=True):
        st.markdown("**What is trained**")
        a, b, c = st.columns([1.3, 1, 1.3])
        a.selectbox("Model", list(MODELS), key=_key("model"))
        b.selectbox(
            "Size",
            SIZES,
            key=_key("size"),
            help="tiny: the same architecture, narrow enough for a CPU; full: the published dimensions",
        )
        shape = MODELS[_value("model")][_value("size")]
        c.selectbox(
            "Dataset",
            list(dict.fromkeys([*DATASETS, _value("dataset")])),
            key=_key("dataset"),
            accept_new_options=True,
            help="One of these, or the path of a .jsonl, .jsonl.gz or .parquet file, or of Megatron’s .bin/.idx",
        )
        _limit("layers", shape.layers)
        a, b, c, d = st.columns(4)
        every = f"all {shape.layers}"
        a.number_input("Layers", 1, shape.layers, None, key=_key("layers"), placeholder=every, help="The first so many")
        _limit("sequence_length", shape.max_sequence)
        b.number_input("Sequence length", 1, shape.max_sequence, key=_key("sequence_length"), help="Tokens")
        c.number_input(
            "Micro-batch size",
            1,
            MOST["micro_batch_size"],
            key=_key("micro_batch_size"),
            help="Sequences in a micro-batch",
        )
        d.number_input("Micro-batches", 1, MOST["micro_batches"], key=_key("micro_batches"), help="Of an iteration")
    with st.container(border=True):
        st.markdown("**What is quantized**")
        st.multiselect(
            "Recipes",
            list(dict.fromkeys([*jobs.recipes(), *_value("recipes")])),
            key=_key("recipes"),
            help="A job for each. FA: QKᵀ; linear: the linear layers’ three GEMMs; a bare format: everything",
        )
        st.text_input(
            "Keep in bf16",
            key=_key("skip_layers"),
            placeholder="nothing",
            help="Layers: first, last, 3, 2-4, or a regular expression searched in names such as layer1.qkv",
        )
    with st.container(border=True):
        st.markdown("**How long**")
        a, b, c, d = st.columns(4)
        a.number_input(
            "Warm-up iterations", 0, MOST["warmup_iterations"], key=_key("warmup_iterations"), help="In bf16, before"
        )
        b.number_input(
            "Recorded iterations",
            0,
            MOST["control_iter"],
            key=_key("control_iter"),
            help="0: every one that is trained",
        )
        c.number_input(
            "Record one in",
            1,
            MOST["capture_every"],
            key=_key("capture_every"),
            help="Iterations; the first is taken",
        )
        d.number_input(
            "Iterations trained",
            1,
            MOST["train_iters"],
            None,
            key=_key("train_iters"),
            placeholder="as needed",
            help="Under the recipe; as needed: until the last one is recorded",
        )
    with st.container(border=True):
        st.markdown("**What is recorded**")
        config = collecting.config_of({name: _value(name) for name in ("model", "size", "layers")}, RunConfig())
        modules = jobs.modules_of(config)
        st.session_state[_key("modules")] = [name for name in _value("modules") if name in modules]
        a, b, c = st.columns([1.2, 1.2, 1])
        a.multiselect("Tensors", tensor_names(), key=_key("tensors"), placeholder="all")
        b.multiselect("Modules", modules, key=_key("modules"), placeholder="all")
        c.text_input(
            "Of layers",
            key=_key("capture_layers"),
            placeholder="all",
            help="first, last, 3, 2-4, or a regular expression searched in names such as layer1.qkv",
        )
        st.multiselect(
            "Scored in",
            list(FORMATS),
            key=_key("scores"),
            placeholder="no format",
            help="What each of these formats would do to every operand; takes time, hardly any space",
        )
        a, b, c = st.columns([1, 1, 1.2], vertical_alignment="bottom")
        a.number_input(
            "Of micro-batches",
            0,
            MOST["collect_micro_batches"],
            key=_key("collect_micro_batches"),
            help="The first so many; 0: all",
        )
        raw = _value("raw")
        b.number_input(
            "Byte budget (MiB)", 1, MOST["budget"], key=_key("budget"), disabled=not raw, help="Of a run’s tensor files"
        )
        c.toggle("Keep values", key=_key("raw"), help="Else statistics, sketches and scores only")
    with st.expander("Device, ranks, optimizer"):
        a, b, c, d = st.columns(4, vertical_alignment="bottom")
        a.selectbox("Device", DEVICES, key=_key("device"))
        b.selectbox(
            "Quantized by",
            BACKENDS,
            key=_key("backend"),
            help="On a CPU Triton’s kernels are interpreted: torch rounds to the same bits, sooner",
        )
        c.number_input("Tensor-parallel ranks", 1, MOST["tp"], key=_key("tp"))
        d.number_input(
            "Replicas", 1, MOST["dp"], key=_key("dp"), help="Data-parallel ranks, with micro-batches of their own"
        )
        a, b, c = st.columns([1, 1, 2], vertical_alignment="bottom")
        a.number_input("Learning rate", 0.0, MOST["learning_rate"], key=_key("learning_rate"), format="%g", step=1e-4)
        b.number_input("Seed", 0, MOST["seed"], key=_key("seed"), help="Of weights and data")
        c.toggle("Split sequences among tensor-parallel ranks", key=_key("sequence_parallel"))


def _limit(name: str, most: int) -> None:
    """A number that another choice has made too large."""
    if (_value(name) or 0) > most:
        st.session_state[_key(name)] = most


def _summary() -> None:
    """The estimate, the command and the button, for what is chosen."""
    root = resolve_root()
    values = {name: _value(name) for name in (*collecting.FIELDS, "budget")}
    base = st.session_state[_key("base")]
    try:
        runs = collecting.runs_of(values, _value("recipes"), base)
    except REFUSED as error:
        st.error(plain(f"{str(error)[:1].upper()}{str(error)[1:]}."), icon=":material/edit:")
        st.button("Launch", type="primary", disabled=True, width="stretch", key="launch_refused")
        return
    found = jobs.estimate(runs, root)
    with st.container(border=True):
        count = len(runs)
        st.markdown(f"**{count} job{'s' * (count != 1)}**, one run each" if count > 1 else "**One job**, one run")
        a, b = st.columns(2)
        a.metric("Time" if found.measured else "Time, roughly", duration_text(found.seconds))
        b.metric("Tensors", f"{found.tensors:,}")
        free = "" if found.memory_free is None else f"; {bytes_text(found.memory_free)} are free"
        a.metric("Memory", bytes_text(found.memory), help=f"Weights, gradients, optimizer, activations{free}")
        b.metric("Disk", bytes_text(found.disk), help=f"Of {bytes_text(found.disk_free)} free")
        st.caption(plain(found.basis))
        if not found.within_budget:
            st.caption(
                "The values of all tensors would exceed the byte budget: those beyond it keep statistics, sketch and "
                "scores only."
            )
        for refusal in found.refusals:
            st.error(plain(refusal), icon=":material/block:")
        st.text_input("Title", key=_key("title"), placeholder="recipe and model", max_chars=120)
        st.text_input("Tags", key=_key("tags"), placeholder="separated by commas")
        if st.button(
            f"Launch {count} jobs" if count > 1 else "Launch",
            type="primary",
            icon=":material/play_arrow:",
            width="stretch",
            key="launch",
            disabled=bool(found.refusals),
        ):
            _launch(runs)
    st.caption("The same from a terminal:")
    commands = [wrapped(line, COMMAND) for line in jobs.command_line(runs).splitlines()]
    st.code("\n".join(commands), language="shell", wrap_lines=True)
    if kept := collecting.kept_beside(base):
        st.caption(plain(f"Kept from the job that was cloned: {' '.join(kept)}"))
    st.caption(f"Into `{root}`.")


def _launch(runs: list[RunConfig]) -> None:
    root = resolve_root()
    title, tags = _value("title"), _value("tags").split(",")
    try:
        made = [
            job
            for run in runs
            for job in jobs.add(root, jobs.arguments_of(run), title=collecting.title_of(title, run, runs), tags=tags)
        ]
        jobs.start_runner(root)
    except (*REFUSED, *FAILED) as error:
        st.error(plain(f"Nothing was launched: {error}."), icon=":material/error:")
        return
    st.session_state["collect_from"] = None
    st.switch_page(st.session_state["pages"]["jobs"], query_params={"job": str(made[0].id)})
