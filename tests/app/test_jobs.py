"""The Collect and Jobs pages: what a form makes of what is chosen, and what is shown of each end of a job."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from binade.app.frame import state
from binade.app.jobs import collecting, summary
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.jobs import directory, processes, queue, runner
from binade.collector.jobs.command_line import describe
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.collector.training.slurm_options import SlurmOptions
from binade.collector.training.targets import CONFIG
from binade.data.index.catalog import Catalog
from binade.data.run.access import ReadOnlyError
from binade.data.run.directory import list_runs
from binade.data.run.json_files import write_json
from binade.data.run.run_writer import RUN_VARIABLE
from binade.quant.formats import FORMATS
from tests.app import roots
from tests.app.test_cost import of_recipes
from tests.app.test_pages import Visit, metrics, rerun, words
from tests.collector.test_jobs import SHORT, end_all
from tests.conftest import until
from tests.data.experiments import save_parity


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "runs"
    yield place
    end_all(place)


def chosen(at: AppTest) -> list[RunConfig]:
    """The runs of the command that the page shows, as the collector reads it."""
    lines = at.code[0].value.replace("\\\n", " ").splitlines()
    return [run for line in lines for run in parse(shlex.split(line)[1:]).runs]


def started(at: AppTest) -> SlurmOptions:
    """How the runs of the command that the page shows are started."""
    return parse(shlex.split(at.code[0].value.replace("\\\n", " "))[1:]).start


def form_of_job(root: Path) -> str:
    """The parameter of the address that *Clone and change* of the only job opens."""
    (job,) = queue.read_jobs(root)
    return collecting.Form.of_job(job.config, job).to_address()


def press(at: AppTest, key: str) -> AppTest:
    at.button(key=key).click()
    return rerun(at)


class TestForm:
    @pytest.mark.parametrize("name", ["quick", "ten", "sweep", "ablation"])
    def test_presets_make_what_the_page_then_shows(self, name):
        preset = collecting.PRESETS[name].form
        values = collecting.widgets_of(preset.config)
        runs = [each.config for each in collecting.runs_of(values, list(preset.recipes), preset.config)]
        assert [run.recipe for run in runs] == list(preset.recipes)
        if name == "quick":
            assert runs == parse(["quick", "mxfp8"]).runs
        if name == "sweep":
            assert {run.skip_layers for run in runs} == {"!layer1[.]fc1$"} and len(runs) == len(FORMATS)

    def test_a_path_is_a_model(self, visit: Visit, root: Path, tmp_path: Path):
        """Its size is its own, and a path without a model is said to be one."""
        settings = {
            "model_type": "llama", "num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 128,
            "rope_theta": 1e4, "num_attention_heads": 4, "vocab_size": 320, "max_position_embeddings": 96,
            "rms_norm_eps": 1e-5,
        }  # fmt: skip
        model = tmp_path / "a model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(settings))
        (model / "tokenizer.json").touch()
        add_line(root, ["run", "--model", str(model), "--sequence-length", "64"])
        at = visit(root, "collect", form=form_of_job(root))
        assert "Size" not in [box.label for box in at.selectbox]
        (run,) = chosen(at)
        assert (run.model, run.size, plan(run).shape.layers) == (str(model), "full", 5)
        at.number_input(key="collect_sequence_length").set_value(97)
        assert (
            "sequence-length is 97" in words(rerun(at)).replace("\\", "") and at.button(key="launch_refused").disabled
        )
        (model / "config.json").unlink()
        assert "has no config.json" in words(rerun(at))

    def test_what_has_no_field_is_kept(self):
        base = parse(["run", "--operand-quant", "qk.forward.key=mxfp4", "--seed", "7", "--layers", "1"]).runs[0]
        (again,) = [each.config for each in collecting.runs_of(collecting.widgets_of(base), [base.recipe], base)]
        assert again == base

    def test_a_wrapped_command_is_the_same_command(self):
        odd = ["--skip-layers", "!a --b|layer1[.]fc1"]
        line = jobs.command_line(parse(["batch", "--seed", "7", "--layers", "1", *odd]).runs)
        broken = collecting.wrapped(line, 30)
        assert broken.count("\n") >= 2 and shlex.split(broken.replace("\\\n", "")) == shlex.split(line)


class TestCollect:
    def test_starts_with_the_smallest_useful_run(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        assert chosen(at) == parse(["quick", "mxfp8"]).runs
        assert "No similar run yet" in words(at) and metrics(at)["Tensors"] == "70"
        assert not root.exists()  # looking changes nothing

    def test_presets_and_fields_change_the_command(self, visit: Visit, root: Path):
        at = press(visit(root, "collect"), "preset_ten")
        assert [run.recipe for run in chosen(at)] == list(jobs.TEN_RECIPES)
        at.selectbox(key="collect_model").set_value("deepseek2_lite")
        at.multiselect(key="collect_recipes").set_value(["FA_nvfp4"])
        rerun(at)
        at.multiselect(key="collect_modules").set_value(["kv_up"])
        at.number_input(key="collect_layers").set_value(1)
        rerun(at)
        (run,) = chosen(at)
        assert (run.model, run.recipe, run.modules, run.layers) == ("deepseek2_lite", "FA_nvfp4", ("kv_up",), 1)

    def test_a_target_is_chosen_and_refusals_of_this_machine_do_not_count(self, visit, root, tmp_path, monkeypatch):
        assert "Where" not in [each.label for each in visit(root, "collect").selectbox]
        monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
        (tmp_path / "binade.toml").write_text('[targets.gpu]\nlauncher = "slurm"\nranks_per_node = 1\n')
        at = visit(root, "collect")
        at.selectbox(key="collect_model").set_value("llama31-8b")
        at.selectbox(key="collect_size").set_value("full")
        at.toggle(key="collect_raw").set_value(False)
        rerun(at)
        assert at.button(key="launch").disabled
        at.selectbox(key="collect_target").set_value("gpu")
        rerun(at)
        assert not at.button(key="launch").disabled and at.code[0].value.endswith("--target gpu")
        (tmp_path / "binade.toml").write_text("[targets.gpu")
        assert "binade.toml" in rerun(at).error[0].value and at.button(key="launch_refused").disabled

    def test_a_clone_starts_where_and_as_the_job_did(self, visit, root, tmp_path, monkeypatch):
        monkeypatch.setenv(CONFIG, str(tmp_path / "binade.toml"))
        targets = tmp_path / "binade.toml"
        targets.write_text('[targets.gpu]\nlauncher = "slurm"\n')
        path = directory.directory_of(root, add_line(root, SHORT)[0]) / "job.json"
        job = json.loads(path.read_text())
        for start in (["--launcher", "slurm", "--time", "90"], ["--target", "gpu", "--time", "90"]):
            path.write_text(json.dumps(job | {"start": asdict(parse([*SHORT, *start]).start)}))
            at = visit(root, "collect", form=form_of_job(root))
            assert started(at) == parse([*SHORT, *start]).start
        targets.write_text('[targets.other]\nlauncher = "slurm"\n')
        at = visit(root, "collect", form=form_of_job(root))
        assert "has no target gpu: choose where to run" in at.error[0].value.replace("\\", "")
        assert at.button(key="launch_refused").disabled
        at.selectbox(key="collect_target").set_value("other")
        rerun(at)
        assert not at.button(key="launch").disabled and started(at) == SlurmOptions(target="other", time="90")
        at.selectbox(key="collect_target").set_value("")
        assert started(rerun(at)) == SlurmOptions()

    def test_an_ablation_is_of_the_chosen_recipe(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        at.multiselect(key="collect_recipes").set_value(["bf16", "linear_mxfp4"])
        rerun(at)
        press(at, "preset_ablation")
        at.number_input(key="collect_seeds").set_value(2)
        rerun(at)
        rungs = ("bf16", "linear_mxfp4(without=dgrad+wgrad)", "linear_mxfp4(without=wgrad)", "linear_mxfp4")
        assert [(run.seed, run.recipe) for run in chosen(at)] == [(s, rung) for s in (1234, 1235) for rung in rungs]
        runs = chosen(press(at, "preset_ablation"))  # of several: te_nvfp4's
        assert runs[3].recipe == "te_nvfp4" and len(runs) == 3 * 7 and len({run.iterations for run in runs}) == 1

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("learning_rate", -1.0, "--learning-rate is -1.0: it must be 0 or more"),
            ("layers", 99, "--layers is 99: expected 1 to 16 for llama32-1b tiny"),
            ("micro_batches", 0, "--micro-batches is 0: it must be 1 or more"),
            ("dp", 1 << 30, "--dp is 1073741824: it must be at most 65536"),
            ("seeds", 21, "Seeds is 21: expected 1 to 20"),
        ],
    )
    def test_a_number_outside_its_limits_is_not_launched(
        self, visit: Visit, root: Path, name: str, value: float, words: str
    ):
        at = visit(root, "collect")
        at.number_input(key=f"collect_{name}").set_value(value)
        rerun(at)
        assert [each.value.replace("\\", "") for each in at.error] == [f"{words}."]
        assert at.button(key="launch_refused").disabled and not at.code
        assert at.number_input(key=f"collect_{name}").value == value

    def test_what_cannot_run_is_named_and_not_launched(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        at.text_input(key="collect_skip_layers").set_value("layer7")
        rerun(at)
        assert at.error[0].value.startswith("\\-\\-skip\\-layers") and at.button(key="launch_refused").disabled
        at.text_input(key="collect_skip_layers").set_value("")
        at.selectbox(key="collect_model").set_value("llama31-8b")
        at.selectbox(key="collect_size").set_value("full")
        rerun(at)
        assert "for weights, gradients and optimizer" in at.error[0].value and at.button(key="launch").disabled

    def test_any_recipe_and_any_spec_may_be_typed(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        at.multiselect(key="collect_recipes").set_value(["nvfp4(block=16x16, rounding=stochastic)", "nvidia_nvfp4"])
        at.multiselect(key="collect_scores").set_value(["nvfp4(scale=4over6, error=mae)"])
        rerun(at)
        runs = chosen(at)
        assert [run.recipe for run in runs] == ["nvfp4(block=16x16, rounding=stochastic)", "nvidia_nvfp4"]
        assert runs[0].scores == ("nvfp4(scale=4over6, error=mae)",)
        badge = "badge[stochastic rounding is biased, because values are clipped]"
        assert sum(each.value.count(badge) for each in at.markdown) == 2
        assert "NVIDIA NVFP4 pre-training" in words(at) and "partly uncertain" in words(at)
        assert "arXiv 2509.25149 (excerpt)" in words(at)  # in the popover, as --dry-run prints it
        assert describe(plan(runs[1]), root) in words(at)
        at.multiselect(key="collect_scores").set_value(["nvfp4(scale=best)"])
        rerun(at)
        assert "scale=best is not possible for nvfp4" in at.error[0].value.replace("\\", "")
        assert at.button(key="launch_refused").disabled

    @pytest.mark.thorough
    def test_a_recipe_is_edited_saved_and_chosen(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        at.toggle(key="collect_edit").set_value(True)
        rerun(at)
        assert at.selectbox(key="collect_start").value == "mxfp8" and at.button(key="recipe_Save").disabled
        at.selectbox(key="collect_start").set_value("te_nvfp4")
        rerun(at)
        text = at.text_area(key="collect_toml").value
        assert text.startswith('title = "Transformer Engine NVFP4BlockScaling, edited"') and not at.error
        text = text.replace("[linear]", '[keep]\nlayers = "last"\n\n[linear]')
        at.text_area(key="collect_toml").set_value(text.replace("[linear]", "[liner]"))
        at.text_input(key="collect_name").set_value("mine")
        rerun(at)
        line = text.splitlines().index("[linear]") + 1
        assert (
            f"line {line}: unknown key 'liner'" in at.error[0].value.replace("\\", "")
            and at.button(key="recipe_Save").disabled
        )
        at.text_area(key="collect_toml").set_value(text)
        at.text_input(key="collect_name").set_value("../mine")
        rerun(at)
        assert "is not a valid name for a recipe" in at.error[0].value and at.button(key="recipe_Save").disabled
        at.text_input(key="collect_name").set_value("mine")
        rerun(at)
        assert not at.error and not root.exists()  # looking changes nothing
        press(at, "recipe_Save")
        path = root / ".recipes" / "mine.toml"
        assert path.read_text() == text
        assert at.multiselect(key="collect_recipes").value == ["mxfp8", str(path)]
        (command,) = (code.value for code in at.code if code.value.startswith("binade"))
        run = parse(shlex.split(command.replace("\\\n", " "))[1:]).runs[1]
        assert run.recipe == str(path) and plan(run).recipe.keep == "last"
        assert at.button(key="recipe_Saved").disabled
        at.text_area(key="collect_toml").set_value(changed := text.replace('"last"', '"first"  # of ours'))
        rerun(at)
        assert "exists: Replace overwrites it" in words(at) and path.read_text() == text
        press(at, "recipe_Replace")
        assert path.read_text() == changed
        at.selectbox(key="collect_start").set_value("bf16")
        rerun(at)
        assert at.text_input(key="collect_name").value == ""
        at.selectbox(key="collect_start").set_value(str(path))
        rerun(at)
        assert at.text_input(key="collect_name").value == "mine" and at.text_area(key="collect_toml").value == changed
        press(at, "recipe_delete")
        assert not path.exists() and not at.error
        assert at.selectbox(key="collect_start").value == "mxfp8"
        assert at.multiselect(key="collect_recipes").value == ["mxfp8"]

    def test_a_start_that_is_no_recipe_is_named(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        at.multiselect(key="collect_recipes").set_value(["mxfp9"])
        at.toggle(key="collect_edit").set_value(True)
        rerun(at)
        for said in at.error:  # by the editor, and by the summary
            assert "unknown recipe 'mxfp9'" in said.value.lower()
        assert len(at.error) == 2 and at.button(key="launch_refused").disabled

    def test_launch_queues_what_is_shown(self, visit: Visit, root: Path):
        at = visit(root, "collect")
        at.number_input(key="collect_layers").set_value(1)
        at.multiselect(key="collect_recipes").set_value(["bf16", "mxfp4"])
        at.text_input(key="collect_title").set_value("mine")
        at.text_input(key="collect_tags").set_value("a, b")
        rerun(at)
        wanted = chosen(at)
        at.button(key="launch").click().run()
        first, second = queue.read_jobs(root)
        assert [job.title for job in (first, second)] == ["mine · bf16", "mine · mxfp4"]
        assert first.tags == second.tags == ("a", "b")
        assert [job.config for job in (first, second)] == wanted
        jobs.cancel(root, second.id)
        jobs.cancel(root, first.id)
        until(lambda: not any(view.active for view in jobs.listing(root)), "the jobs to end")

    def test_clones_a_job(self, visit: Visit, root: Path):
        line = [*SHORT, "--operand-quant", "qk.forward.key=mxfp4"]
        (job,) = jobs.add_runs(root, parse(line).plans, titles=["an old one"])
        jobs.cancel(root, job.id)
        at = visit(root, "collect", form=form_of_job(root))
        assert chosen(at) == [job.config]
        assert at.text_input(key="collect_title").value == "an old one"
        assert "--operand-quant qk.forward.key=mxfp4" in words(at)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("abc", "Invalid JSON"),
            ("[1]", "Input should be an object"),
            ('{"seedz":1}', "seedz is 1"),
            ('{"config":{"layers":"2"}}', "config.layers is"),
            ('{"config":{"layers":-1}}', "--layers is -1"),
            ('{"seeds":"9"}', "seeds is"),
        ],
    )
    def test_what_is_no_form_is_said(self, visit: Visit, root: Path, text: str, said: str):
        at = visit(root, "collect", form=text)
        warning = at.warning[0].value.replace("\\", "")
        assert "The address has no form that can be used" in warning and said in warning
        assert chosen(at) == parse(["quick", "mxfp8"]).runs

    def test_the_address_has_what_the_fields_say(self, visit: Visit, root: Path):
        """So a copied address, a reload and Back show the same form; the one that the page opens with adds nothing."""
        at = visit(root, "collect")
        assert "form" not in at.query_params
        at.multiselect(key="collect_recipes").set_value(["bf16", "linear_mxfp4(without=wgrad)", "hifp8"])
        at.number_input(key="collect_seeds").set_value(3)
        at.number_input(key="collect_layers").set_value(1)
        at.text_input(key="collect_title").set_value('größer & "mehr"')
        rerun(at)
        text = at.query_params["form"]
        assert json.loads(text)["config"]["layers"] == 1
        copy = visit(root, "collect", form=text)
        assert chosen(copy) == chosen(at) and len(chosen(at)) == 9
        assert copy.text_input(key="collect_title").value == 'größer & "mehr"'
        press(copy, "preset_quick")
        copy.text_input(key="collect_title").set_value("")
        assert "form" not in rerun(copy).query_params
        copy.query_params["form"] = text  # Back
        assert chosen(rerun(copy)) == chosen(at)

    def test_every_preset_survives_its_address(self):
        for preset in collecting.PRESETS.values():
            form = replace(preset.form, title="a", tags="b, c", start=SlurmOptions(nodes=2))
            assert collecting.Form.of_address(form.to_address()) == form

    def test_what_a_browser_does_not_have_is_said(self, visit: Visit, root: Path):
        (job,) = add_line(root, [*SHORT, "--seed", str(2**60), "--micro-batches", "5000", "--no-raw"])
        jobs.cancel(root, job.id)
        at = visit(root, "collect", form=form_of_job(root))
        assert f"seed {2**60} is above the limit of this form" in at.warning[0].value
        (run,) = chosen(at)
        assert (run.micro_batches, run.seed) == (5000, 2**53 - 1)
        assert not rerun(at).warning

    def test_every_field_of_the_registry_is_in_the_form(self, visit: Visit, root: Path):
        """With its label: the page has no list of its own."""
        at = visit(root, "collect")
        widgets = (at.selectbox, at.multiselect, at.number_input, at.text_input, at.toggle)
        shown = {each.key: each.label for kind in widgets for each in kind}
        labels = {f"collect_{name}": collecting.OPTIONS[name].option.label for name in collecting.FIELDS}
        assert labels.items() <= shown.items()


def make_ended(root: Path, exit_status: int | None, log: str = "", boot: str | None = None) -> jobs.Job:
    """A job whose process is gone, as the runner leaves it."""
    (job,) = add_line(root, SHORT)
    (directory.directory_of(root, job) / directory.OUTPUT_FILE).write_text(log)
    launch = directory.Launch(processes.host(), boot or processes.boot(), job.created, 1 << 40)
    runner.Runner(root)._settle(job, launch, exit_status)
    return job


class TestJobs:
    def test_empty(self, visit: Visit, root: Path):
        assert "No jobs yet." in words(visit(root, "jobs"))

    @pytest.mark.parametrize(
        ("exit_status", "log", "boot", "state_shown", "said"),
        [
            (1, "binade: the run failed: No space left on device\n", None, "failed", "Free space"),
            (1, "torch.OutOfMemoryError: CUDA out of memory. Tried\n", None, "failed", "fewer layers"),
            (-9, "iteration 3\n", None, "crashed", "SIGKILL"),
            (-11, "", None, "crashed", "SIGSEGV"),
            (2, "binade: unknown dataset 'x': y\n", None, "failed", "unknown dataset 'x'"),
            (None, "", "another", "crashed", "machine was restarted"),
        ],
        ids=["disk", "memory", "killed", "crashed", "failed", "restarted"],
    )
    def test_each_end_is_shown_as_what_it_is(self, visit: Visit, root: Path, exit_status, log, boot, state_shown, said):
        job = make_ended(root, exit_status, log, boot)
        at = visit(root, "jobs")
        assert f" {state_shown}]" in words(at) and said in words(at)
        assert log.strip() in words(at) and "--sequence-length 64" in words(at)
        assert {button.key for button in at.button} >= {f"retry_{job.id}", f"clone_{job.id}", f"delete_{job.id}"}
        assert f"cancel_{job.id}" not in {button.key for button in at.button}

    def test_cancel_in_the_queue(self, visit: Visit, root: Path):
        (job,) = add_line(root, SHORT)
        me = processes.Process.of(os.getpid())
        queue.write_runner(root, me)  # the page need not start one: the job stays queued
        jobs.set_at_once(root, 12)
        at = visit(root, "jobs")
        assert "waiting for its turn" in words(at) and at.number_input(key="jobs_at_once").value == 12
        press(at, f"cancel_{job.id}")
        assert jobs.view_of(root, job).state == "cancelled" and "cancelled before it started" in words(at)
        (queue.folder(root) / "runner.json").unlink()

    def test_a_measurement_that_continues_another_run_leads_to_that(
        self, visit: Visit, root: Path, monkeypatch: pytest.MonkeyPatch
    ):
        """And to delete the job is not to delete that run."""
        measured = save_parity(root, "parity", {"measures": {}}, of_recipes())
        (job,) = jobs.add_runs(root, [("parity", "a run", "--rollout", "mxfp4")])
        with monkeypatch.context() as started:
            started.setenv(RUN_VARIABLE, str(root / job.run_id))
            assert save_parity(root, "parity", {"measures": {}}, of_recipes()) == measured
        launch = directory.Launch(processes.host(), processes.boot(), job.created)
        runner.Runner(root)._settle(job, launch, 0)
        at = visit(root, "jobs")
        assert " done]" in words(at) and f"continued run {measured}" in words(at).replace("\\", "")
        shown = [link.proto for link in at.get("page_link")]
        assert any(link.label == "Open in Cost" and f"measured={measured}" in link.query_string for link in shown)
        assert f"with_run_{job.id}" not in [box.key for box in at.checkbox]
        press(at, f"delete_{job.id}")
        assert [run.run_id for run in list_runs(root)[0]] == [measured] and not (root / job.run_id).exists()

    def test_delete_says_what_goes_and_takes_the_run(self, visit: Visit, root: Path, collected: Path):
        roots.copy(collected, root)
        run = list_runs(root)[0][0]
        (job,) = add_line(root, SHORT)
        write_json(run.directory / "job.json", replace(job, run_id=run.run_id))
        directory.write_launch(
            root, directory.read_job(run.directory), directory.Launch("a", "b", job.created, ended=job.created)
        )
        shutil.rmtree(directory.directory_of(root, job))
        at = visit(root, "jobs", job=str(job.id))
        assert f"{run.status.tensors:,} tensors" in words(at) and run.run_id in words(at)
        at.checkbox(key=f"with_run_{job.id}").check()
        rerun(at)
        at.button(key=f"delete_{job.id}").click().run()
        assert not run.directory.exists() and queue.read_jobs(root) == []
        assert len(list_runs(root)[0]) == len(list_runs(collected)[0]) - 1


class TestReadOnly:
    def test_no_launch_no_delete_no_sql(self, visit: Visit, root: Path, monkeypatch):
        job = make_ended(root, 1)
        monkeypatch.setenv("BINADE_READ_ONLY", "1")
        at = visit(root, "jobs")
        assert {button.key for button in at.button} == {f"open_{job.id}"} and not at.number_input
        at.run()
        assert at.segmented_control(key="page_part").options == ["Runs", "Recipes", "Cost", "Difference", "Jobs"]
        for part in ("collect", "sql"):
            at = visit(root, part)
            assert "read-only" in words(at) and not at.button and not at.code
        with Catalog.open(root) as catalog, pytest.raises(ReadOnlyError, match="SQL"):
            state.sandbox(catalog)
        monkeypatch.delenv("BINADE_READ_ONLY")


class TestBaseline:
    def test_it_is_added_with_one_click(self, visit: Visit, root: Path):
        at = press(visit(root, "collect"), "add_baseline")
        bf16, mxfp8 = chosen(at)
        assert [mxfp8] == parse(["quick", "mxfp8"]).runs and bf16 == replace(mxfp8, recipe="bf16")
        assert "add_baseline" not in [button.key for button in at.button]

    def test_only_a_bf16_run_on_the_same_data_and_weights_is_one(self, collected: Path):
        with Catalog.open(collected) as opened:
            runs = opened.runs()
            existing = [json.loads(config) for config in runs.loc[runs["recipe"] == "bf16", "config"]]
        fast = ["batch", "--training-config", "fast", "--warmup-iterations", "2", "--control-iter", "2"]
        for options, lacks in (
            ([], False), (["--train-iters", "30"], False), (["--seed", "7"], True), (["--layers", "1"], True),
            (["--warmup-iterations", "3"], True), (["--quantization", "bf16,mxfp4", "--seed", "7"], False),
            (["--quantization", "bf16", "--seed", "7"], False),
        ):  # fmt: skip
            planned = parse([*fast, "--quantization", "mxfp4", *options]).runs
            assert collecting.lacks_baseline(planned, existing) == lacks, options
            assert collecting.lacks_baseline(planned, []) == ("bf16" not in [run.recipe for run in planned])


def test_jobs_that_were_queued_together_are_compared_once_all_have_ended(collected: Path, tmp_path: Path):
    root = roots.copy(collected, tmp_path / "runs")
    runs, _ = list_runs(root)
    together = jobs.add_runs(root, parse(["batch", "--quantization", "bf16,mxfp8"]).plans)
    (other,) = jobs.add_runs(root, parse(["quick", "mxfp4"]).plans)
    assert len({job.created for job in together}) == 1 and other.created != together[0].created
    views = [
        replace(jobs.view_of(root, job), run=run, state=jobs.JobState.DONE, active=False)
        for job, run in zip(together, runs, strict=False)
    ]
    assert summary.runs_to_compare(views[::-1]) == [run.run_id for run in runs[:2]]
    assert summary.runs_to_compare(views[:1]) == []
    assert summary.runs_to_compare([*views, replace(views[0], active=True)]) == []
