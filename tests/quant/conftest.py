"""Kernels for the CPU are built once a session, in a directory of the session's own, for all its workers, with flags
that compile them faster. Triton's interpreter prepares its language once per launch. Small tensors need one thread."""

from __future__ import annotations

import functools
import inspect
import os

import pytest
import torch
from filelock import FileLock

from binade.quant.backends import native

# Vectorized too. Strict IEEE arithmetic has the same bits at every level; test_cpu.test_as_users_build_it takes -O3.
FAST_TO_BUILD = ("-O1", "-ftree-vectorize")


@pytest.fixture(scope="module", autouse=True)
def builds(tmp_path_factory):
    """For these tests alone: another test, or a process that it starts, must not find other builds than a user's."""
    own = tmp_path_factory.getbasetemp()
    place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "builds"
    build = native._build

    def build_once(unit: native.Unit) -> None:
        """Whichever worker comes first builds; the others wait."""
        with FileLock(f"{unit.path}.lock"):
            if not unit.path.exists():
                build(unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BINADE_CACHE_DIR", str(place))
        patch.setattr(native, "FLAGS", (*(flag for flag in native.FLAGS if flag != "-O3"), *FAST_TO_BUILD))
        patch.setattr(native, "_build", build_once)
        patch.setattr(native, "_loaded", {})
        patch.setattr(native, "_worked", {})
        _forget()
        yield
    _forget()


def _forget() -> None:
    """Where builds are, and their names: both depend on what `builds` sets."""
    native.directory.cache_clear()
    native._stamp.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def language_patched_once():
    """Triton's interpreter searches triton.language for what to replace at each launch and at each call of a function
    within it, which takes half of its time. Here it searches once, and replaces each module once in a launch."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_lang, language = interpreter._patch_lang, interpreter.tl
    launch = []  # while a kernel runs: its scope, and the modules that are replaced

    @functools.cache
    def builtins(package):
        return [(name, member) for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]

    def patch_builtins(package, builder, scope):
        for name, member in builtins(package):
            interpreter._patch_attr(package, name, member, builder, scope)

    def patch_once(fn):
        modules = {id(value) for value in fn.__globals__.values() if value is language or value is language.core}
        if launch:
            scope, replaced = launch
            if not modules <= replaced:
                replaced |= modules
                patch_lang(fn)
            return scope
        scope = patch_lang(fn)
        restore = scope.restore
        scope.restore = lambda: (launch.clear(), restore())
        launch[:] = scope, modules
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        patch.setattr(interpreter, "_patch_builtin", patch_builtins)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that spin for work cost more than these small tensors do, on a machine that does anything else."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
