#!/usr/bin/env bash
# Everything that needs a GPU, in one command and under nine minutes: see docs/gpu.md.
cd "$(dirname "$0")/../.." || exit 1
exec "${PYTHON:-python3}" -m tests.gpu.all "$@"
