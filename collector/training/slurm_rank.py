"""binade as one task of a Slurm job: told its place by Slurm, it passes it on as torchrun would."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from submitit.helpers import TorchDistributedEnvironment

from binade.collector.cli.main import main


def run_rank(argv: Sequence[str]) -> int:
    """The exit status of the command."""
    if "SLURM_PROCID" not in os.environ:
        print("binade: slurm_rank is for tasks of srun: use binade --launcher slurm", file=sys.stderr)
        return 2
    os.environ["SUBMITIT_EXECUTOR"] = "slurm"  # where submitit looks; set by its scripts, not by a srun by hand
    place = TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    # What a task may use, one core unless the job asked for more; torch would take all that it sees.
    os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
    if place.local_world_size == place.world_size:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no other machine takes part
    return main(argv)


if __name__ == "__main__":
    sys.exit(run_rank(sys.argv[1:]))
