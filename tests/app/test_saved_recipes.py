"""The recipes that users write in the app: the text that they start from, its check, the files, what is said."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from binade.app.jobs import saved_recipes
from binade.app.questions.what_if import question
from binade.collector import jobs
from binade.collector.cli.options import parse
from binade.collector.recipes.files import EXAMPLE, PUBLISHED, label, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.collector.recipes.recipe import RecipeError
from binade.collector.training.plan import plan
from binade.data.run.access import ReadOnlyError
from binade.data.run.directory import list_runs

OWN = """# of ours
[linear]
forward = "nvfp4"
dgrad.weight = { spec = "nvfp4", of = "rounded" }

[modules.fc2]
forward.input = "mxfp8"

[keep]
layers = "first"

[[schedule]]
from = "90%"
linear.forward = "bf16"
"""


@pytest.mark.parametrize("name", [*PUBLISHED, "bf16", "mxfp8", "FA_mxfp4", "nvidia_nvfp4(without=keep)"])
def test_an_edited_recipe_starts_as_the_recipe_and_does_not_pass_for_it(name: str):
    recipe, made = parse_recipe(name), saved_recipes.checked(saved_recipes.text_of(name), name)
    assert made.lines() == recipe.lines() and made.keep == recipe.keep
    assert made.about.title == f"{recipe.about.title or name}, edited"
    assert made.about.source == recipe.about.source and made.about.uncertain == recipe.about.uncertain


def test_a_file_starts_with_its_own_text(tmp_path: Path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    assert saved_recipes.text_of(str(path)) == OWN
    assert saved_recipes.text_of(f"{path}(without=keep)").startswith('title = "own(without=keep), edited"')


def test_the_example_shows_every_section():
    assert saved_recipes.checked(EXAMPLE, "example").quantized
    assert {"linear", "pv", "qk", "modules", "keep", "state", "kv_cache", "schedule"} <= tomllib.loads(EXAMPLE).keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('forward = "nvfp4"', 'forward = "mxfp9"', "line 3: linear.forward.input: unknown format 'mxfp9'"),
        ('forward = "nvfp4"', "forward = nvfp4", "line 3: is not TOML: "),
        ('forward = "nvfp4"', 'forward = "nvfp4', "line 3: is not TOML: "),
        ('forward = "nvfp4"', "forward = 4", "line 3: linear.forward must be a table, not 4"),
        ('forward = "nvfp4"', "foward = 4", "line 3: unknown key 'foward' in [linear]"),
        ('weight = { spec = "nvfp4",', 'grad_output = { spec = "nvfp4",', "line 4: linear.dgrad.grad_output: of = "),
        ("modules.fc2", "module.fc2", "line 6: unknown key 'module' in the recipe"),
        (
            'forward.input = "mxfp8"',
            'forward.input = "mxfp8"\nforward.weight = "nvfp4(hadamard=16)"',
            "line 8: modules.fc2: the operands of forward are rotated differently",
        ),
        ('"first"', '"("', "line 10: keep.layers: '('"),
        ('"90%"', "0", "line 13: [[schedule]] from = 0: expected an iteration from 1"),
        ('bf16"\n', 'bf16"\nlinear.forward = "mxfp8"\n', "line 15: is not TOML: Cannot overwrite a value"),
        ("# of ours\n", "", ""),
    ],
)
def test_a_wrong_line_is_named_in_one_line(old: str, new: str, message: str):
    assert old in OWN
    text = OWN.replace(old, new)
    if not message:
        assert saved_recipes.checked(text, "own") == saved_recipes.checked(OWN, "own")
        return
    with pytest.raises(RecipeError, match=f"^{re.escape(message)}") as caught:
        saved_recipes.checked(text, "own")
    assert "\n" not in str(caught.value)


def test_what_cannot_be_a_recipe_is_refused():
    with pytest.raises(RecipeError, match="has 20,001 characters: expected at most 20,000"):
        saved_recipes.checked("#" * 20_001, "own")
    with pytest.raises(RecipeError, match=r"^line 2: is a configuration of torchtitan, not a recipe: the nearest"):
        saved_recipes.checked("[float8]\nenable_float8_linear = true\n", "own")


class TestFiles:
    @pytest.mark.parametrize("name", ["../x", "a/b", ".x", "", "a b", "x.toml", "ü", "a" * 65, "x\n"])
    def test_a_name_that_is_no_name_is_refused(self, tmp_path: Path, name: str):
        with pytest.raises(RecipeError, match="letters, digits, - and _"):
            saved_recipes.path_of(tmp_path, name)

    @pytest.mark.parametrize("name", ["mxfp8", "FA_hifp8", "nvidia_nvfp4"])
    def test_a_name_of_binades_own_is_refused(self, tmp_path: Path, name: str):
        with pytest.raises(RecipeError, match=f"{name} is already the name of a built-in recipe"):
            saved_recipes.path_of(tmp_path, name)

    def test_a_root_with_a_comma_is_refused(self, tmp_path: Path):
        with pytest.raises(RecipeError, match="has a comma"):
            saved_recipes.path_of(tmp_path / "a,b", "mine")

    def test_saved_recipes_are_found_and_can_be_run(self, tmp_path: Path):
        root = tmp_path / "runs"
        assert saved_recipes.saved(root) == []
        path = saved_recipes.path_of(root, "mine")
        saved_recipes.save(path, to_toml(parse_recipe("quartet")))
        assert (
            saved_recipes.saved(root) == [str(path)] and label(f"{path}(without=dgrad)") == "mine.toml(without=dgrad)"
        )
        (run,) = parse(["quick", "--recipe", str(path)]).runs
        plan(run)
        assert plan(run).recipe.linear.formats == parse_recipe("quartet").linear.formats
        assert list_runs(root) == ([], []) and jobs.listing(root) == []  # not taken for a run or a job

    def test_a_file_is_replaced_only_on_request(self, tmp_path: Path):
        path = saved_recipes.path_of(tmp_path, "mine")
        saved_recipes.save(path, to_toml(parse_recipe("quartet")))
        with pytest.raises(RecipeError, match="exists"):
            saved_recipes.save(path, to_toml(parse_recipe("hif4")))
        assert path.read_text() == to_toml(parse_recipe("quartet"))
        saved_recipes.save(path, to_toml(parse_recipe("hif4")), replace=True)
        assert path.read_text() == to_toml(parse_recipe("hif4"))

    def test_read_only_saves_and_deletes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("BINADE_READ_ONLY", "1")
        with pytest.raises(ReadOnlyError, match="saving a recipe"):
            saved_recipes.save(saved_recipes.path_of(tmp_path, "mine"), OWN)
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "mine.toml").touch()
        with pytest.raises(ReadOnlyError, match="deleting a recipe"):
            saved_recipes.delete(tmp_path / "mine.toml")
        assert (tmp_path / "mine.toml").exists()


class TestWarnings:
    def test_what_is_recalled_uncertain_or_biased_is_said(self, tmp_path: Path):
        (tmp_path / "r.toml").write_text('read = "recalled"\nuncertain = ["which layers"]\nlinear.forward = "mxfp8"')
        recipe = parse_recipe(str(tmp_path / "r.toml"))
        assert saved_recipes.warnings_of(recipe) == ["from memory, not checked against the source", "partly uncertain"]
        assert saved_recipes.warnings_of(parse_recipe("quartet2")) == []
        assert saved_recipes.warnings_of(parse_recipe("te_nvfp4")) == [
            "stochastic rounding is biased, because values are clipped"
        ]

    def test_the_what_if_page_labels_it(self):
        (rounding,) = [control for control in question.CONTROLS if control.name == "rounding"]
        assert "biased in plain nvfp4" in rounding.titles["stochastic"]


def test_published_recipes_are_offered():
    assert set(PUBLISHED) <= set(jobs.recipes())
