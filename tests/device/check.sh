#!/usr/bin/env bash
# Checks on the accelerator of this machine, or on its CPU where it has none. Needs python with torch >= 2.11 and numpy,
# nothing else; nothing is installed. At most 8 minutes; prints tables and one line of JSON, also to $OUT/device.json.
set -uo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
OUT=${OUT:-out/device}
mkdir -p "$OUT"
exec timeout --signal=INT --kill-after=10 480 "$PYTHON" -u tests/device/check.py --out "$OUT" "$@"
