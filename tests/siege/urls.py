"""URLs that nobody would type, and patterns that take forever in other regex engines."""

from __future__ import annotations

import json
import time
from pathlib import Path

from binade.app.pages.registry import PAGES
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.jobs import directory, runner
from tests.app import roots
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import LINE, VALUES, command, show

NAMES = (
    "model", "size", "dataset", "recipe", "quant_type", "layer_type", "layer_index", "module", "component",
    "operation",
    "phase", "tensor_name", "iteration", "micro_batch", "rank", "run_id", "tensor", "axis", "by", "format", "formats",
    "metric", "versus", "across", "experts", "cell", "measure", "view", "of", "session", "version", "job", "from", "q",
    "part", "gemm", "x", "color", "page", "embed",
)  # fmt: skip
WORDS = (
    "mxfp8", "bf16", "mxfp4", "1", "2", "0", "-1", "forward", "attention", "input", "log2", "linear", "sqnr_db",
    "loss",
    "1e999", "NaN", "99999999999999999999", "9" * 300, "", " ", "a\nb", "'; DROP TABLE run; --", "../../etc/passwd",
    "<script>alert(1)</script>", "![x](http://a/b.png)", ":material/delete:", ":red[x]", "$x^2$", "`", "\x00",
    "\ud7ff",
    "\u202e", "\U0001f600" * 50, "%s%n", "{0}", "null", "[1]", '{"a":1}', "x" * 5000, "nvfp4(block=16x16)", "mxfp8(",
    "(.|.)*!",
    "SELECT 1", "SELECT * FROM tensor", "FROM test_all_types()", "SELECT repeat('x', 99999999)",
)  # fmt: skip


def _open_root(attempt: Attempt) -> Path:
    def make(root: Path) -> None:
        roots.copy(attempt.root, root)
        (job,) = add_line(root, LINE)
        jobs.cancel(root, job.id)

    return attempt.once("root", make)


@attack("The page is drawn; nothing in a URL is executed or raises an exception", tries=2000, share=6.0)
def urls(attempt: Attempt) -> None:
    chance = attempt.random
    page = attempt.choose([*PAGES])
    words = [*WORDS, *(str(value) for value in VALUES if isinstance(value, str | int))]
    query = {
        name: [chance.choice(words) for _ in range(chance.choice([1, 1, 1, 2, 30]))]
        for name in chance.sample(NAMES, chance.randrange(1, 6))
    }
    attempt.case = f"{page}?{ascii(query)[:200]}"
    show(_open_root(attempt), page, **query)


PATTERNS = (
    "(.|.|.|.|.|.|.|.)*!", "(a+)+$", "(a|aa)+$", "(a|a?)+$", "(.*a){30}", "([a-z]+)*[0-9]",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(x+x+)+y", "(?:l+a*y*e*r*)+!", "((((((.*)*)*)*)*)*)*!", ".{1,1000}" * 50, "(a?){1000}a{1000}", "(" * 5000,
    "a" * 100_000,
    "[" * 1000, "\\1" * 100, "(?=a)" * 100, "(?<!a)", "(?P<x>a)(?P=x)", "\\p{L}+" * 100, "(?i)(?s)(?m)" * 100, "\x00",
    "*",
    "{1000}" * 50, "(((a{100}){100}){100})", "9" * 300, "first 99999999", "2-1", "!" * 5000, "\ud800",
    "layer1," * 5000,
)  # fmt: skip
OPTIONS = ("--skip-layers", "--capture-layers")


@attack(
    "The page answers within seconds; a refused pattern gets a one-sentence error",
    tries=2 * len(PATTERNS),
    seconds=60,
)
def slow_patterns(attempt: Attempt) -> None:
    option, pattern = attempt.choose([(option, pattern) for option in OPTIONS for pattern in PATTERNS])
    attempt.case = f"{option} {pattern[:60]!a}"
    start = time.process_time()
    try:
        parse([*LINE, option, pattern])
    except ValueError as error:
        check_sentence(str(error)[:2000])  # it repeats the pattern
    assert time.process_time() - start < 10


TEXTS = ("--help", "--version", "-x", "\n", "a\nb", "$(touch {new})", "; touch {new}", "| touch {new}",
"`touch {new}`",
         "--tensor-save-dir", "--tensor-save-dir={new}", "&& id", "a\0b", "'", '"', "\\", "%PATH%", "*", "~", "-",
         "--",
         "\u202e", "@{new}", "file://{new}", "x" * 2000)  # fmt: skip
FLAGS = ("--quantization", "--dataset", "--model", "--skip-layers", "--capture-layers", "--operand-quant", "--modules",
         "--tensors", "--scores", "--seed", "--max-bytes", "--layers", "--device", "--backend")  # fmt: skip


@attack("The text is always treated as the option's value: used unchanged, or refused in one sentence", tries=350)
def options_of_jobs(attempt: Attempt) -> None:
    flag, text = attempt.choose([(flag, text) for flag in FLAGS for text in TEXTS])
    new = attempt.place / "new"
    text = text.replace("{new}", str(new))
    attempt.case = f"{flag} {text[:40]!a}"
    root = attempt.place / "runs"
    try:
        added = add_line(root, [*LINE, flag, text])
    except ValueError as error:
        check_sentence(error)
        assert not root.exists() or not jobs.listing(root)
    else:
        (job,) = added
        assert parse([*LINE, flag, text]).runs == [job.config]
        assert command(root, "jobs", "cancel", "1")[0] == 0
    assert not new.exists()


@attack("A job file that names another command or root counts as damaged: it is reported and never started", tries=12)
def lines_of_jobs(attempt: Attempt) -> None:
    new, root = attempt.place / "new", attempt.place / "runs"
    lines = (
        ["serve", "--host", "0.0.0.0"], ["jobs", "delete", "1"],
        ["import", "/etc", "--tensor-save-dir", str(new)], ["report", "--output", str(new)],
        [*LINE, "--tensor-save-dir", str(new)], [*LINE, f"--tensor-save-dir={new}"], [*LINE, "--dry-run"],
        ["--help"], [], ["run", "--seed"], ["run", "--", "--seed", "1"], ["batch", "--quantization", "bf16,mxfp8"],
    )  # fmt: skip
    line = attempt.choose(lines)
    attempt.case = str(line)
    (job,) = add_line(root, LINE)
    path = directory.directory_of(root, job) / "job.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": None, "command": line}))
    worker = runner.Runner(root)
    worker.turn()
    assert not worker.children and jobs.listing(root) == [] and not new.exists()
    (problem,) = jobs.problems(root)
    assert problem.startswith(f"the job of run {job.run_id} ") and "\n" not in problem
