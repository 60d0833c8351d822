"""The recipes of the Collect page: the picker, notes on the chosen ones, and the editor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import streamlit as st

from binade.app.draw.formatting import plain
from binade.app.jobs import saved_recipes
from binade.collector import jobs
from binade.collector.recipes.files import EXAMPLE, label
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Recipe, RecipeError
from binade.data.run.access import ReadOnlyError
from binade.data.run.directory import resolve_root
from binade.quant.formats import FORMATS

CHOOSE = "recipe_to_choose"  # in the picker, when the page is drawn again
HELP = (
    "One job per recipe. FA_… rounds QKᵀ and not PV, linear_… rounds the three GEMMs of the linear layers, and a bare "
    "format rounds everything. You can also type a name that is not listed, such as nvfp4(block=16x16) or "
    "nvidia_nvfp4(without=rounding), or the path to a .toml or .yaml file"
)
FORMAT = (
    "An operand that is not named stays in bf16. Every spec is literal: here, mxfp8 means E4M3 for gradients, too. A "
    "table [modules.NAME] differs from [linear] in one module, [[schedule]] from an iteration on. Stochastic rounding "
    "is biased where values are clipped, unless the scale leaves headroom: 16over17 for nvfp4, rceil for MX formats."
)


def _options(chosen: Sequence[str]) -> list[str]:
    """Formats first: else "mxfp4" and Enter would choose FA_mxfp4, which contains it."""
    names = sorted(jobs.recipes(), key=lambda name: name not in ("bf16", *FORMATS))
    return list(dict.fromkeys([*names, *saved_recipes.saved(resolve_root()), *chosen]))


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
    """The title and the warnings of each recipe that has any; the summary shows the rest on request."""
    lines = []
    for name in chosen:
        try:
            recipe = parse_recipe(name)
        except saved_recipes.REFUSED:
            continue  # the summary shows the error
        names_gradients = any(part.text != part.quant_type for part in recipe.every_part())
        if recipe.about.title or names_gradients or saved_recipes.warnings_of(recipe):
            lines.append(_headline(label(name), recipe))
    if lines:
        st.markdown("  \n".join(lines))


def _headline(name: str, recipe: Recipe) -> str:
    badges = " ".join(f":orange-badge[{warning}]" for warning in saved_recipes.warnings_of(recipe))
    return f":small[**{plain(name)}** {plain(recipe.about.title or recipe.describe())} {badges}]"


@st.cache_resource
def _live() -> Callable[..., Any]:
    js = Path(__file__).with_name("live_text.js").read_text(encoding="utf-8")
    return st.components.v2.component("binade_live_text", html="<i></i>", js=js)


def editor(picked: str, modules: Sequence[str]) -> None:
    """Write a recipe as TOML, starting from another one, and save it. The text is checked while it is written. `picked`
    is the picker's key, modules are those of the model that have linear layers."""
    state = st.session_state
    if not st.toggle("Edit a recipe", key="collect_edit"):
        return
    state.setdefault("collect_start", next(iter(state[picked]), "bf16"))
    left, right = st.columns(2)
    options = _options([state["collect_start"]])
    start = left.selectbox("Start from", options, key="collect_start", format_func=label, accept_new_options=True)
    try:
        _begin(start)
    except (*saved_recipes.REFUSED, OSError) as error:
        _refuse(error)
        return
    name = right.text_input("Name", key="collect_name", placeholder="letters, digits, - and _", max_chars=64).strip()
    text = st.text_area("Recipe as TOML", key="collect_toml", height=360)
    _live()(key="live_text", data={"label": "Recipe as TOML"}, height=1)
    path = recipe = None
    try:
        recipe = saved_recipes.checked(text, name or "unnamed")
        path = saved_recipes.path_of(resolve_root(), name) if name else None
    except RecipeError as error:
        _refuse(error)
    places = st.columns(4, vertical_alignment="bottom")
    with places[0].popover("Operands", icon=":material/list:", width="stretch", disabled=recipe is None):
        st.code("\n".join(recipe.lines() if recipe else ()), language=None)
    with places[1].popover("Example", icon=":material/help:", width="stretch"):
        st.markdown(plain(f"{FORMAT} Modules of this model: {', '.join(modules) or 'unknown'}."))
        st.code(EXAMPLE, language="toml")
    if path and path.exists():
        _delete(places[3], path, picked)
    _save(places[2], path if recipe else None, text)
    if recipe:
        st.markdown(_headline(f"{name}.toml" if name else "Unnamed", recipe))
        if biased := saved_recipes.biased_specs(recipe):
            st.caption(plain(f"{', '.join(biased)}: {saved_recipes.BIASED}."))


def _refuse(error: Exception) -> None:
    st.error(plain(f"{error}."), icon=":material/edit:")


def _begin(start: str) -> None:
    """Fill the fields from a recipe, if another one was chosen."""
    state = st.session_state
    if state.get("collect_started") != start:
        state["collect_toml"], state["collect_started"] = saved_recipes.text_of(start), start
        state["collect_name"] = Path(start).stem if start in saved_recipes.saved(resolve_root()) else ""


def _delete(place: Any, path: Path, picked: str) -> None:
    with place.popover("Delete", icon=":material/delete:", width="stretch"):
        st.markdown(plain(f"Delete {path}? This cannot be undone. Queued jobs that use it will fail."))
        st.button("Delete recipe", type="primary", key="recipe_delete", on_click=_deleted, args=(path, picked))


def _deleted(path: Path, picked: str) -> None:
    """Delete a recipe and remove it from the chosen ones."""
    state = st.session_state
    try:
        saved_recipes.delete(path)
    except (ReadOnlyError, OSError) as error:
        st.toast(plain(f"The recipe was not deleted: {error}."), icon=":material/error:", duration="long")
        return
    state[picked] = [recipe for recipe in state[picked] if not recipe.startswith(str(path))]
    if state["collect_start"] == str(path):
        state["collect_start"] = next(iter(state[picked]), "bf16")
    st.toast("Deleted", icon=":material/check:")


def _save(place: Any, path: Path | None, text: str) -> None:
    """The button that saves the recipe, with a warning if that replaces a file. path: None if it cannot be saved."""
    exists, done = path is not None and path.exists(), False
    if path and exists:
        with suppress(OSError):
            done = path.read_bytes() == text.encode()
        st.caption(plain(f"Saved as {path}." if done else f"{path} exists: Replace overwrites it."))
    word = "Saved" if done else "Replace" if exists else "Save"
    disabled = done or path is None
    if not place.button(word, icon=":material/save:", disabled=disabled, width="stretch", key=f"recipe_{word}"):
        return
    assert path
    try:
        saved_recipes.save(path, text, replace=exists)
    except (RecipeError, ReadOnlyError, OSError) as error:
        st.error(plain(f"The recipe was not saved: {error}."), icon=":material/error:")
        return
    st.session_state[CHOOSE] = str(path)
    st.rerun()
