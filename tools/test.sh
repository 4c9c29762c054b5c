#!/usr/bin/env bash
# All checks: install, C++ unit tests (plain and under sanitizers), Python tests, style and types.
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
install_imp "[dev]"
python -m pip install --quiet "cmake>=3.28" ninja nanobind

if [ -e /usr/include/doctest/doctest.h ]; then
  cmake --preset debug >/dev/null
  cmake --build --preset debug
  ctest --test-dir build/debug --output-on-failure
else
  echo "skipped: C++ unit tests (doctest is not installed; on Debian, apt-get install doctest-dev)"
fi
ruff check python tests tools
ruff format --check python tests tools
mypy
python -m pytest -n auto --maxprocesses 4
