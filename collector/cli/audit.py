"""binade audit."""

from __future__ import annotations

import click

from binade.collector.cli.console import console
from binade.terminal import FAILED, CliOption, Command, line_of, one_line, print_text, resolve_root, root_option


@click.pass_context
def _audit(context: click.Context, checkpoint: str, against: str | None, root: str | None) -> int:
    """Say how each weight of a quantized checkpoint is stored.

    CHECKPOINT is the directory of a Hugging Face model with safetensors, or a GGUF file. The report lists the format of
    each weight, the rule that leaves a weight out, names in the configuration that match nothing, and scales that are
    zero, negative, huge, NaN or of another layout. With --against, the error of each weight and the spec that makes it
    from the original. The audit is written as a run: the app shows it, and binade diff compares two.

    Exit status: 0 if there are no findings, else 1.
    """
    from binade.collector.audit.run import audit as run

    with console("audit", "weight") as shown:
        command = line_of(context.find_root().obj)
        found = run(checkpoint, against, resolve_root(root), command=command, progress=shown.progress)
    print_text("\n".join(map(one_line, str(found).splitlines())))
    return FAILED if found.findings else 0


audit = Command(
    "audit",
    params=[
        click.Argument(["checkpoint"], metavar="CHECKPOINT"),
        CliOption(["--against"], metavar="CHECKPOINT", help="The original, not quantized"),
        root_option(),
    ],
    callback=_audit,
    cancelled="cancelled: not every weight was read",
    failed="the checkpoint cannot be audited",
)
