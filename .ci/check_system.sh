# sh check_system.sh PYTHON CXX [venv]: names in one line what only the system's package manager can
# bring: an interpreter with its headers (and venv, if one is to be made), and a C++ compiler.
python=$1 cxx=$2 venv=$3 need=
if ! command -v "$python" >/dev/null; then
  need=" python3 python3-venv python3-dev"
elif ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
  echo "mixprec needs Python 3.10 or newer, $python is $("$python" -V 2>&1):" \
    "sudo apt-get install python3.12 python3.12-venv python3.12-dev," \
    "then add PYTHON3=python3.12 to the make command" >&2
  exit 1
else
  [ -z "$venv" ] || "$python" -c 'import ensurepip, venv' 2>/dev/null || need=" python3-venv"
  "$python" -c 'import os, sys, sysconfig as s
sys.exit(not os.path.exists(os.path.join(s.get_path("include"), "Python.h")))' || need="$need python3-dev"
fi
command -v "$cxx" >/dev/null || need="$need g++"
[ -z "$need" ] || { echo "missing:$need. Run: sudo apt-get install$need" >&2; exit 1; }
