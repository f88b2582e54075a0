#!/usr/bin/env bash
# For benchmarks/gpu.py on a machine that has torch and reaches no package index. Run it where there
# is one, in the root of a checkout: PYTHON=.venv/bin/python bash benchmarks/gpu_wheels.sh
# .whl/: wheels for Python 3.12 on x86-64; on the machine: pip install --no-index --no-deps .whl/*.whl
# .gpu/: token files, and what `forgekit plan` predicts for the set-ups of part mfu (some minutes).
set -euo pipefail
python=${PYTHON:-python3}
rm -rf .whl
"$python" -m pip download -q --no-deps --only-binary=:all: -c constraints.txt --dest .whl \
    --python-version 3.12 --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 \
    tensordict torchdata cattrs attrs pyvers
"$python" -m pip wheel -q --no-deps --wheel-dir .whl .
[ -e .gpu/data ] || "$python" -m forgekit prepare stdlib --out .gpu/data --vocab 4096
rm -f .gpu/plans.jsonl
"$python" benchmarks/gpu.py plan --limit 3600 --out .gpu/plans.jsonl
du -sh .whl .gpu
