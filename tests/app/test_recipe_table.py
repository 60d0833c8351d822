"""The recipe editor without its page: the table of operands, what is refused, the user's own files, what is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from binade.app.jobs import recipe_table
from binade.app.questions.what_if import question
from binade.collector import jobs
from binade.collector.cli.options import parse
from binade.collector.recipes.files import PUBLISHED, label, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import Communication, Recipe, RecipeError, StateRounding
from binade.collector.training.plan import plan
from binade.data.access import ReadOnlyError
from binade.data.runs import list_runs
from binade.quant.specs import Spec, SpecError

OWN = """
[linear]
forward = "nvfp4"
dgrad.weight = { spec = "nvfp4", of = "rounded" }
[modules.fc2]
forward.input = "mxfp8"
[router]
forward = "mxfp8"
[keep]
layers = "first"
[[schedule]]
from = "90%"
linear.forward = "bf16"
"""


def again(table: pd.DataFrame, start: Recipe, name: str = "mine", keep: str | None = None) -> Recipe:
    schedule = recipe_table.schedule_of(start)
    return recipe_table.recipe_of(table, schedule, start.keep if keep is None else keep, start, name)


def scheduled(start: Recipe, *stages: tuple[str, str]) -> Recipe:
    """With a schedule of these rows."""
    schedule = pd.DataFrame(stages, columns=["from", "changes"])
    return recipe_table.recipe_of(recipe_table.table_of(start), schedule, start.keep, start, "mine")


def cell(table: pd.DataFrame, operand: str) -> int:
    """The row of an operand such as linear.forward.input."""
    return table.index[table["operand"] == operand].item()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_recipe_survives_the_table_and_its_file(name: str, tmp_path: Path):
    recipe = parse_recipe(name)
    made = again(recipe_table.table_of(recipe), recipe, name)
    assert made == recipe
    path = tmp_path / f"{name}.toml"
    recipe_table.save(path, made)
    assert parse_recipe(str(path)) == recipe


def test_a_recipe_with_modules_a_router_and_a_schedule_survives(tmp_path: Path):
    (tmp_path / "own.toml").write_text(OWN + """modules."*.linear_qkv".wgrad = "mxfp8"\n""")
    recipe = parse_recipe(str(tmp_path / "own.toml"))
    assert again(recipe_table.table_of(recipe), recipe, "own") == recipe


def test_an_edited_cell_changes_one_operand_and_what_the_schedule_leaves(tmp_path: Path):
    (tmp_path / "own.toml").write_text(OWN)
    recipe = parse_recipe(str(tmp_path / "own.toml"))
    table = recipe_table.table_of(recipe)
    table.loc[cell(table, "linear.dgrad.grad_output"), "spec"] = " mxfp8( scale = rceil ) "
    made = again(table, recipe)
    changed = [line for line in made.lines() if line not in recipe.lines()]
    assert [line.split() for line in changed] == [
        ["linear.dgrad.grad_output", "output", "size", "mxfp8(scale=rceil)"],
    ]
    ((_, last),) = made.schedule
    assert str(last.linear.formats.dgrad_grad) == "mxfp8(scale=rceil)" and last.linear.formats.forward_a is None


class TestModules:
    def test_rows_are_added_and_removed(self):
        recipe = parse_recipe("te_nvfp4")
        table = recipe_table.with_modules(recipe_table.table_of(recipe), ["fc2", "h.0"])
        assert recipe_table.modules_of(table) == ["fc2", "h.0"]
        assert table["operand"].str.startswith("modules.")[6:18].all() and len(table) == 30 + 12
        table.loc[cell(table, "modules.h.0.wgrad.input"), "spec"] = "nvfp4(block=16x16, hadamard=16, signs=fixed)"
        made = again(table, recipe)
        assert dict(made.modules)["fc2"].formats == recipe.linear.formats == made.linear.formats
        assert dict(made.modules)["h.0"].formats.wgrad_a.block.rows == 16
        table = recipe_table.with_modules(table, ["h.0"])
        assert recipe_table.modules_of(table) == ["h.0"]
        assert "16x16" in table.loc[cell(table, "modules.h.0.wgrad.input"), "spec"]
        assert again(recipe_table.with_modules(table, []), recipe, "te_nvfp4") == recipe

    def test_any_name_of_a_module_survives_the_file(self, tmp_path: Path):
        recipe = parse_recipe("te_nvfp4")
        made = again(recipe_table.with_modules(recipe_table.table_of(recipe), ['h.0 "x"']), recipe)
        recipe_table.save(tmp_path / "mine.toml", made)
        assert parse_recipe(str(tmp_path / "mine.toml")) == made


class TestSchedule:
    def test_changes_hold_from_their_iteration_on(self):
        changes = "linear.forward=bf16; qk.forward.key = mxfp8(scale=rceil)"
        made = scheduled(parse_recipe("quartet"), ("9000", changes), ("90%", "hif4"))
        (early, first), (late, last) = made.schedule
        assert (early, late) == ("9000", "90%")
        assert first.linear.formats.forward_a is None and str(first.qk.formats.forward_b) == "mxfp8(scale=rceil)"
        assert first.linear.formats.dgrad_grad == made.linear.formats.dgrad_grad
        other = parse_recipe("hif4")
        assert [last.by_name()[part].formats for part in other.by_name()] == [
            part.formats for part in other.by_name().values()
        ]

    def test_a_recipe_replaces_what_modules_have_of_their_own(self, tmp_path: Path):
        (tmp_path / "own.toml").write_text(OWN)
        made = scheduled(parse_recipe(str(tmp_path / "own.toml")), ("2", "bf16"))
        ((_, last),) = made.schedule
        assert made.quantized and not last.quantized and not dict(last.modules)["fc2"].formats.quantized

    def test_a_named_recipe_survives_its_file(self, tmp_path: Path):
        made = scheduled(parse_recipe("quartet"), ("90%", "te_mxfp8"))
        recipe_table.save(tmp_path / "mine.toml", made)
        read = parse_recipe(str(tmp_path / "mine.toml"))
        assert read == made and again(recipe_table.table_of(read), read) == read

    @pytest.mark.parametrize(
        ("start", "changes", "message"),
        [
            ("", "bf16", "row 1 of the schedule: .* an iteration from 1"),
            ("0", "bf16", "row 1 of the schedule: .* an iteration from 1"),
            ("90%", "", "row 1 of the schedule: the row changes nothing: enter a recipe"),
            ("90%", "mxfp9", "row 1 of the schedule: unknown recipe 'mxfp9'"),
            ("90%", "linear.forward = mxfp9", "row 1 of the schedule: linear.forward.input: unknown format 'mxfp9'"),
            ("90%", "linear.forward", "row 1 of the schedule: unknown recipe 'linear.forward'"),
            ("90%", "linear.forward = bf16; x y = 3", "enter changes such as linear.forward = bf16"),
            ("90%", "nvidia_nvfp4", r"has its own keep: write nvidia_nvfp4\(without=keep\)"),
        ],
    )
    def test_a_wrong_row_is_named_in_one_line(self, start: str, changes: str, message: str):
        with pytest.raises(RecipeError, match=message) as caught:
            scheduled(parse_recipe("te_nvfp4"), (start, changes))
        assert "\n" not in str(caught.value)

    def test_an_empty_row_is_none(self):
        assert scheduled(parse_recipe("te_nvfp4"), ("", " ")).schedule == ()


def test_an_edited_recipe_does_not_pass_for_the_published_one():
    recipe = parse_recipe("nvidia_nvfp4")
    made = again(recipe_table.table_of(recipe), recipe, keep="2-3")
    assert made.keep == "2-3" and made.about.title == "NVIDIA NVFP4 pre-training, edited"
    assert made.about.uncertain == recipe.about.uncertain
    assert again(recipe_table.table_of(made), made, keep="first").about.title == made.about.title


@pytest.mark.parametrize(
    ("operand", "column", "value", "message"),
    [
        ("linear.forward.input", "spec", "mxfp9", "linear.forward.input: unknown format 'mxfp9'"),
        ("linear.forward.input", "spec", None, "linear.forward.input: unknown format ''"),
        ("pv.dvalue.grad_output", "spec", "nvfp4(block=row)", "pv.dvalue.grad_output: block=row is not possible"),
        ("linear.forward.input", "rounded", True, "linear.forward.input: of = "),
        ("linear.wgrad.input", "spec", "nvfp4(hadamard=32)", "linear: the operands of wgrad are rotated differently"),
    ],
)
def test_a_wrong_cell_is_named_in_one_line(operand: str, column: str, value: object, message: str):
    recipe = parse_recipe("te_nvfp4")
    table = recipe_table.table_of(recipe)
    table.loc[cell(table, operand), column] = value
    with pytest.raises((RecipeError, SpecError)) as caught:
        again(table, recipe)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_wrong_layers_are_named():
    recipe = parse_recipe("te_nvfp4")
    with pytest.raises(RecipeError, match=r"keep.layers: '\('"):
        again(recipe_table.table_of(recipe), recipe, keep="(")


class TestFiles:
    @pytest.mark.parametrize("name", ["../x", "a/b", ".x", "", "a b", "x.toml", "ü", "a" * 65, "x\n"])
    def test_a_name_that_is_no_name_is_refused(self, tmp_path: Path, name: str):
        with pytest.raises(RecipeError, match="letters, digits, - and _"):
            recipe_table.path_of(tmp_path, name)

    @pytest.mark.parametrize("name", ["mxfp8", "FA_hifp8", "nvidia_nvfp4"])
    def test_a_name_of_binades_own_is_refused(self, tmp_path: Path, name: str):
        with pytest.raises(RecipeError, match=f"{name} is already the name of a built-in recipe"):
            recipe_table.path_of(tmp_path, name)

    def test_a_root_with_a_comma_is_refused(self, tmp_path: Path):
        with pytest.raises(RecipeError, match="has a comma"):
            recipe_table.path_of(tmp_path / "a,b", "mine")

    def test_saved_recipes_are_found_and_can_be_run(self, tmp_path: Path):
        root = tmp_path / "runs"
        assert recipe_table.saved(root) == []
        path = recipe_table.path_of(root, "mine")
        recipe_table.save(path, parse_recipe("quartet"))
        assert recipe_table.saved(root) == [str(path)] and label(f"{path}(without=dgrad)") == "mine.toml(without=dgrad)"
        (run,) = parse(["quick", "--recipe", str(path)]).runs
        plan(run)
        assert plan(run).recipe.linear.formats == parse_recipe("quartet").linear.formats
        assert list_runs(root) == ([], []) and jobs.listing(root) == []  # not taken for a run or a job

    def test_a_file_is_replaced_only_on_request(self, tmp_path: Path):
        path = recipe_table.path_of(tmp_path, "mine")
        recipe_table.save(path, parse_recipe("quartet"))
        with pytest.raises(RecipeError, match="exists"):
            recipe_table.save(path, parse_recipe("hif4"))
        assert path.read_text() == to_toml(parse_recipe("quartet"))
        recipe_table.save(path, parse_recipe("hif4"), replace=True)
        assert path.read_text() == to_toml(parse_recipe("hif4"))

    def test_read_only_saves_and_deletes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("BINADE_READ_ONLY", "1")
        with pytest.raises(ReadOnlyError, match="saving a recipe"):
            recipe_table.save(recipe_table.path_of(tmp_path, "mine"), parse_recipe("quartet"))
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "mine.toml").touch()
        with pytest.raises(ReadOnlyError, match="deleting a recipe"):
            recipe_table.delete(tmp_path / "mine.toml")
        assert (tmp_path / "mine.toml").exists()


class TestWarnings:
    def test_what_is_recalled_uncertain_or_biased_is_said(self, tmp_path: Path):
        (tmp_path / "r.toml").write_text('read = "recalled"\nuncertain = ["which layers"]\nlinear.forward = "mxfp8"')
        recipe = parse_recipe(str(tmp_path / "r.toml"))
        assert recipe_table.warnings_of(recipe) == ["from memory, not checked against the source", "partly uncertain"]
        assert recipe_table.details(recipe) == {"Uncertain": ("which layers",)}
        assert recipe_table.warnings_of(parse_recipe("quartet2")) == []
        assert recipe_table.warnings_of(parse_recipe("te_nvfp4")) == [
            "stochastic rounding is biased, because values are clipped"
        ]

    def test_the_what_if_page_labels_it(self):
        (rounding,) = [control for control in question.CONTROLS if control.name == "rounding"]
        assert "biased in plain nvfp4" in rounding.titles["stochastic"]


def test_published_recipes_are_offered():
    assert set(PUBLISHED) <= set(jobs.recipes())


def test_an_edited_recipe_keeps_its_softmax_state_and_communication():
    bf16 = Spec.of("bf16")
    recipe = parse_recipe("hifp8", softmax="flash(tile=64)")
    recipe = replace(recipe, state=StateRounding(exp_avg=bf16), communication=Communication(all_to_all=bf16))
    made = recipe_table.recipe_of(recipe_table.table_of(recipe), recipe_table.schedule_of(recipe), "", recipe, "mine")
    assert made.lines() == recipe.lines()
