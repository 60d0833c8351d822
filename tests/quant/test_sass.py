"""bench_sass counts instructions, and the kernels issue few of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.bench.bench_sass import find_nvdisasm, parse, shortest
from tests.conftest import PROJECT

BY_HAND = """
kernel:
        /*0000*/                   S2R R2, SR_TID.X ;
        /*0010*/                   FCHK P0, R4, R5 ;
        /*0020*/              @!P0 BRA `(.L_x_0) ;
        /*0030*/                   MOV R10, 0x50 ;
        /*0040*/                   CALL.REL.NOINC `($division) ;
        /*0050*/                   NOP ;
.L_x_0:
        /*0060*/                   LDG.E.128 R8, desc[UR4][R12.64+0x800] ;
        /*0070*/               @P0 BRA `(.L_x_0) ;
        /*0080*/               @P0 EXIT ;
        /*0090*/                   STG.E.U16 desc[UR4][R2.64], R4 ;
        /*00a0*/                   EXIT ;
.L_x_1:
        /*00b0*/                   BRA `(.L_x_1);
$division:
        /*00c0*/                   MUFU.RCP R0, R1 ;
        /*00d0*/                   RET.REL.NODEC R6 `(kernel) ;
"""


def test_shortest_path_by_hand():
    """Past the division, and on over the predicated EXIT: 0, 10, 20, 60, 70, 80, 90, a0."""
    code = parse(BY_HAND)
    path, length = shortest(code, 0, None)
    assert [code[index].address for index in reversed(path)] == [0, 0x10, 0x20, 0x60, 0x70, 0x80, 0x90, 0xA0]
    assert length == 8
    assert [code[index].bytes for index in (6, 9)] == [16, 2]


def test_a_call_costs_its_subroutine():
    code = parse(BY_HAND.replace("@!P0 BRA `(.L_x_0)", "NOP"))
    assert shortest(code, 0, None)[1] == 11 + 2


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.skipif(find_nvdisasm() is None, reason="triton or its nvdisasm is not installed")
@pytest.mark.parametrize(
    "limits",
    [
        {"nvfp4(scale=nvfp4_row)": (16, 16), "hifp8(rounding=stochastic)": (24, 24)},
        pytest.param({"hif4": (16, 16), "fp8_e4m3(block=row)": (16, 17)}, marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_few_instructions_per_value(limits):
    """The limits are a little above what the kernels reached (tests/bench/RESULTS.md); nothing is timed."""
    asked = ("--dtype=bf16", *(f"--spec={spec}" for spec in limits))
    command = [sys.executable, "-m", "tests.bench.bench_sass", *asked]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [re.split(r" *\| *", line.strip("| ")) for line in done.stdout.splitlines() if line.startswith("| ")]
    counts = {row[0]: (float(row[1]), float(row[3])) for row in rows[1:]}  # last axis, first axis
    assert counts.keys() == limits.keys()
    for spec, found in counts.items():
        assert all(5 < count <= limit for count, limit in zip(found, limits[spec], strict=True)), (spec, found)
