"""The recipes of the Collect page: the picker, notes on the chosen ones, and the editor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import streamlit as st

from binade.app.formatting import plain
from binade.app.jobs import recipe_table
from binade.collector import jobs
from binade.collector.recipes.files import label, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe, RecipeError
from binade.collector.training.config import FORM_LAYERS
from binade.data.access import ReadOnlyError
from binade.data.runs import resolve_root
from binade.quant.formats import FORMATS

CHOOSE = "recipe_to_choose"  # in the picker, when the page is drawn again
HELP = (
    "One job per recipe. FA_… rounds QKᵀ and not PV, linear_… rounds the three GEMMs of the linear layers, and a bare "
    "format rounds everything. You can also type a name that is not listed, such as nvfp4(block=16x16) or "
    "nvidia_nvfp4(without=rounding), or the path to a .toml or .yaml file"
)
SAVE = ":material/save:"
COLUMNS = {
    "operand": st.column_config.TextColumn(
        "Operand", width=236, pinned=True, disabled=True, help="Rounded along the axis that its GEMM contracts"
    ),
    "rounded": st.column_config.CheckboxColumn(
        "Rounded",
        width=96,
        help="Round the operand’s rounded forward value instead of the original. Only for backward operands that "
        "also enter the forward GEMM",
    ),
    "spec": st.column_config.TextColumn(
        "Spec",
        width=370,
        help="A format, with or without options: nvfp4(block=16x16). bf16: not quantized. With "
        "stochastic rounding, clipped values make the result biased unless the scale leaves headroom: 16over17 for "
        "nvfp4, rceil for MX formats",
    ),
}
STAGES = {
    "from": st.column_config.TextColumn(
        "From", width=90, pinned=True, help="An iteration, or a share of the iterations: 9000, 90%"
    ),
    "changes": st.column_config.TextColumn(
        "Changes to",
        help="A recipe, or what changes: linear.forward = bf16; linear.wgrad.input = mxfp8. It applies until the next "
        "row",
    ),
}


def _options(chosen: Sequence[str]) -> list[str]:
    """Formats first: else "mxfp4" and Enter would choose FA_mxfp4, which contains it."""
    names = sorted(jobs.recipes(), key=lambda name: name not in ("bf16", *FORMATS))
    return list(dict.fromkeys([*names, *recipe_table.saved(resolve_root()), *chosen]))


def picker(key: str) -> None:
    """Choose recipes, or type them."""
    state = st.session_state
    if path := state.pop(CHOOSE, None):
        state[key] = list(dict.fromkeys([*state[key], path]))
    st.multiselect(
        "Recipes", _options(state[key]), key=key, help=HELP, format_func=label, accept_new_options=True,
        placeholder="choose or type recipes", filter_mode="contains", select_all=False,
    )  # fmt: skip


def about(chosen: Sequence[str]) -> None:
    """Notes on the chosen recipes: the title and the warnings of each; the rest is shown on request."""
    known = {}
    for name in chosen:
        try:
            recipe = parse_recipe(name)
        except recipe_table.REFUSED:
            continue  # the summary shows the error
        if recipe.about.title or recipe_table.warnings_of(recipe):
            known[name] = recipe
    if not known:
        return
    st.markdown("  \n".join(_headline(label(name), recipe) for name, recipe in known.items()))
    with st.popover("Sources and what is left out", icon=":material/info:", type="tertiary"):
        for name, recipe in known.items():
            st.markdown("\n".join([f"**{plain(label(name))}**\n", *_details(recipe)]))


def _details(recipe: Recipe) -> list[str]:
    return [
        f"- {title}\n" + "\n".join(f"    - {plain(item)}" for item in items)
        for title, items in recipe_table.details(recipe).items()
    ]


def _headline(name: str, recipe: Recipe) -> str:
    badges = " ".join(f":orange-badge[{warning}]" for warning in recipe_table.warnings_of(recipe))
    return f":small[**{plain(name)}** {plain(recipe.about.title)} {badges}]"


def editor(picked: str, modules: Sequence[str]) -> None:
    """Change the operands of a recipe, see its file and save it. `picked` is the picker's key, modules are those of the
    model that have linear layers."""
    state = st.session_state
    if not st.toggle("Edit a recipe", key="collect_edit"):
        return
    state.setdefault("collect_start", next(iter(state[picked]), "bf16"))
    left, right = st.columns(2)
    options = _options([state["collect_start"]])
    start = left.selectbox("Start from", options, key="collect_start", format_func=label, accept_new_options=True)
    try:
        _begin(start)
    except recipe_table.REFUSED as error:
        _refuse(error)
        return
    right.text_input("Layers kept in bf16", key="collect_keep", placeholder="none", help=FORM_LAYERS)
    table = _operands(modules)
    st.markdown(":small[Schedule: changes during the run]")
    stages = _edited("stages", STAGES, num_rows="dynamic", height="content")
    name_place, *places = st.columns([3, 1, 1], vertical_alignment="bottom")
    hint = "letters, digits, - and _"
    name = name_place.text_input("Name", key="collect_name", placeholder=hint, max_chars=64).strip()
    path = recipe = None
    try:
        path = recipe_table.path_of(resolve_root(), name) if name else None
        recipe = recipe_table.recipe_of(table, stages, state["collect_keep"], state["recipe_start"], name or "unnamed")
    except recipe_table.REFUSED as error:
        _refuse(error)
    if path and path.exists():
        _delete(places[1], path, picked)
    if path and recipe:
        _save(places[0], path, recipe)
    else:
        places[0].button("Save", icon=SAVE, disabled=True, width="stretch", key="save_refused")
    if recipe is None:
        return
    st.markdown(_headline(f"{name}.toml" if name else "Unnamed", recipe))
    if biased := recipe_table.biased_specs(recipe):
        st.caption(plain(f"{', '.join(biased)}: {recipe_table.BIASED}."))
    st.code(to_toml(recipe), language="toml", wrap_lines=True)


def _refuse(error: Exception) -> None:
    st.error(plain(f"{error}."), icon=":material/edit:")


def _begin(start: str) -> None:
    """Fill the fields from a recipe, if another one was chosen."""
    state = st.session_state
    if state.get("recipe_started") != start:
        recipe = parse_recipe(start)
        state["recipe_started"], state["recipe_start"], state["collect_keep"] = start, recipe, recipe.keep
        state["recipe_operands"] = recipe_table.table_of(recipe)
        state["recipe_stages"] = recipe_table.schedule_of(recipe)
        state["collect_own"] = recipe_table.modules_of(state["recipe_operands"])
        state["collect_name"] = Path(start).stem if start in recipe_table.saved(resolve_root()) else ""
        state["recipe_count"] = state.get("recipe_count", 0) + 1


def _operands(modules: Sequence[str]) -> pd.DataFrame:
    """The edited table of operands, with rows for the modules chosen above it."""
    state = st.session_state
    chosen = st.multiselect(
        "Modules with their own formats", list(dict.fromkeys([*modules, *state["collect_own"]])), key="collect_own",
        placeholder="none: the same for all linear layers", accept_new_options=True,
        help="Linear layers that get their own rows", filter_mode="contains", select_all=False,
    )  # fmt: skip
    if chosen != recipe_table.modules_of(state["recipe_operands"]):
        state["recipe_operands"] = recipe_table.with_modules(state["recipe_operands"], chosen)
        state["recipe_count"] += 1
    return _edited("operands", COLUMNS, height=402)


def _edited(name: str, columns: Mapping[str, Any], **settings: Any) -> pd.DataFrame:
    """The edited table."""
    state = st.session_state
    key = f"recipe_{name}_{state['recipe_count']}"
    if key not in state:  # a new table, or one that was hidden for a while, whose edits Streamlit has dropped
        state[f"recipe_{name}_first"] = state[f"recipe_{name}"]
    table: pd.DataFrame = st.data_editor(
        state[f"recipe_{name}_first"], key=key, hide_index=True, column_order=list(columns), column_config=columns,
        **settings,
    )  # fmt: skip
    state[f"recipe_{name}"] = table
    return table


def _delete(place: Any, path: Path, picked: str) -> None:
    with place.popover("Delete", icon=":material/delete:", width="stretch"):
        st.markdown(plain(f"Delete {path}? This cannot be undone. Queued jobs that use it will fail."))
        st.button("Delete recipe", type="primary", key="recipe_delete", on_click=_deleted, args=(path, picked))


def _deleted(path: Path, picked: str) -> None:
    """Delete a recipe and remove it from the chosen ones."""
    state = st.session_state
    try:
        recipe_table.delete(path)
    except (ReadOnlyError, OSError) as error:
        st.toast(plain(f"The recipe was not deleted: {error}."), icon=":material/error:", duration="long")
        return
    state[picked] = [recipe for recipe in state[picked] if not recipe.startswith(str(path))]
    if state["collect_start"] == str(path):
        state["collect_start"] = next(iter(state[picked]), "bf16")
    st.toast("Deleted", icon=":material/check:")


def _save(place: Any, path: Path, recipe: Recipe) -> None:
    """The button that saves the recipe, with a warning if that replaces a file."""
    exists = path.exists()
    done = False
    with suppress(OSError):
        done = path.read_bytes() == to_toml(recipe).encode()
    if exists:
        st.caption(plain(f"Saved as {path}." if done else f"{path} exists: Replace overwrites it."))
    word = "Saved" if done else "Replace" if exists else "Save"
    if not place.button(word, icon=SAVE, disabled=done, width="stretch", key=f"recipe_{word}"):
        return
    try:
        recipe_table.save(path, recipe, replace=exists)
    except (RecipeError, ReadOnlyError, OSError) as error:
        st.error(plain(f"The recipe was not saved: {error}."), icon=":material/error:")
        return
    st.session_state[CHOOSE] = str(path)
    st.rerun()
