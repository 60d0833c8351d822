"""The documentation and the examples: they say what the program declares, and links lead somewhere."""

from __future__ import annotations

import json
import pkgutil
import re
import runpy
from collections.abc import Iterator

import click
import duckdb
import pytest
import yaml

from binade.cli import build
from binade.collector.cli.options import parse
from binade.data.index.tables import INDEX_TABLES
from tests.conftest import PROJECT

PAGES = [PROJECT / "README.md", PROJECT / "CONTRIBUTING.md", *sorted((PROJECT / "docs").glob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and Python-Markdown make them."""
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context := click.Context(group)):
        command = group.get_command(context, name)
        assert command
        if command.hidden:
            continue
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def test_the_objects_of_the_api_exist():
    names = re.findall(r"^::: (\S+)$", (PROJECT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert names and all(pkgutil.resolve_name(name) for name in names)


def test_the_reference_is_printed_by_its_program():
    docs = PROJECT / "docs"
    assert (docs / "reference.md").read_text() == runpy.run_path(str(docs / "generate.py"))["page"]()


def test_the_table_of_loss_logs_is_printed_by_its_program():
    table = runpy.run_path(str(PROJECT / "docs" / "generate.py"))["loss_logs"]()
    assert table in (PROJECT / "docs" / "importing.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        found = {"gh-light-mode-only", "gh-dark-mode-only"} if path.endswith(".png") else anchors(target.read_text())
        assert not anchor or anchor in found, (path, anchor)


def test_a_page_with_pictures_has_one_for_each_theme():
    text = "".join((PROJECT / "docs" / page).read_text() for page in ("tutorial.md", "recipes.md"))
    light, dark = (re.findall(rf"\((.*)-{theme}\.png#gh-{theme}-mode-only\)", text) for theme in ("light", "dark"))
    assert (
        light == dark == [f"tutorial/{name}" for name in runpy.run_path(str(PROJECT / "docs/tutorial.py"))["PICTURES"]]
    )


def test_no_picture_is_older_than_its_page():
    """If this fails, the page looks different: take the pictures again with docs/tutorial.py."""
    tutorial = runpy.run_path(str(PROJECT / "docs/tutorial.py"))
    assert json.loads(tutorial["MANIFEST"].read_text()) == tutorial["sources"]()


def test_every_page_is_in_the_navigation():
    site = yaml.load((PROJECT / "mkdocs.yml").read_text(), yaml.SafeLoader)
    listed = re.findall(r"'(\w+)\.md'", str(site["nav"]))
    assert sorted(listed) == [page.stem for page in PAGES[2:]]


def test_every_command_and_option_is_documented():
    """In the reference, where those of `binade run` stand for its relatives and one command's filter for all."""
    reference = (PROJECT / "docs" / "reference.md").read_text()
    missing = [
        (words, param.opts)
        for words, command in commands(build(), "binade")
        for param in command.params
        if isinstance(param, click.Option) and not re.search(rf"`{param.opts[0]}[` ]", reference)
    ]
    assert not missing
    for words, _ in commands(build(), "binade"):
        assert f"### {words}\n" in reference


def test_the_index_schema_is_documented():
    """Every column that DuckDB makes of the schema."""
    reference = (PROJECT / "docs" / "reference.md").read_text()
    opened = duckdb.connect()
    for table in INDEX_TABLES.values():
        opened.execute(table.sql)
    for table in INDEX_TABLES:
        section = reference.partition(f"### {table}\n")[2].partition("\n#")[0]
        columns = [row[0] for row in opened.execute(f"DESCRIBE {table}").fetchall()]
        assert re.findall(r"^\| `(\w+)` \|", section, re.M) == columns


def test_the_readme_is_short_and_names_every_page():
    readme = (PROJECT / "README.md").read_text()
    assert len(readme.split()) <= 800
    reached = {"index", *re.findall(r"\(docs/(\w+)\.md\)", readme)}
    for page in PAGES[2:]:
        reached |= set(re.findall(r"\]\((\w+)\.md", page.read_text()))
    assert {page.stem for page in PAGES[2:]} <= reached


def test_the_pytorchjob_has_what_its_definition_requires():
    """kubeflow.org/v1: the fields that the CustomResourceDefinition requires, and the operator's names."""
    job = yaml.safe_load((PROJECT / "examples" / "pytorchjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob") and job["metadata"]["name"]
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["image"] and replica["restartPolicy"] == "Never"
        volumes = {volume["name"] for volume in pod["volumes"] if volume["persistentVolumeClaim"]["claimName"]}
        assert volumes == {mount["name"] for mount in container["volumeMounts"] if mount["mountPath"]}
        assert all(isinstance(word, str) for word in container["command"])
        request = parse(container["command"][3:])  # after python -m binade
        assert request.runs[0].world_size == sum(each["replicas"] for each in replicas.values())
