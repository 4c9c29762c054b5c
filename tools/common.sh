# Shared by demo.sh and test.sh: a virtual environment with imp installed from this checkout.
# IMP_VENV chooses the folder (default .venv).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${IMP_VENV:-.venv}

install_imp() {  # install_imp EXTRAS
  if [ ! -x "$venv/bin/python" ]; then
    python3 -m venv "$venv" || {
      echo "python3 -m venv failed: on Debian and Ubuntu, apt-get install python3-venv python3-dev g++" >&2
      exit 1
    }
  fi
  "$venv/bin/python" -m pip install --quiet --upgrade pip
  "$venv/bin/python" -m pip install --quiet ".$1"
  export PATH="$PWD/$venv/bin:$PATH"
}
