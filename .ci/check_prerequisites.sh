#!/bin/sh
# Finds the Python and the Java that sparkdl is built on.
#
# Runs before anything is installed. Prints the Python to use; says in one sentence on stderr what
# is missing and how to get it, and exits 1.
#   check_prerequisites.sh            both
#   check_prerequisites.sh python     Python only
set -u

fail() {
    echo "error: $1" >&2
    exit 1
}

good_python() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

find_python() {
    # PYTHON names one by hand: then no other is tried.
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON" >/dev/null 2>&1 ||
            fail "PYTHON=$PYTHON is not an executable; set it to a Python 3.11 or newer."
        good_python "$PYTHON" ||
            fail "PYTHON=$PYTHON is older than 3.11; set it to a Python 3.11 or newer."
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 && good_python "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    found=$(python3 --version 2>/dev/null || echo "none")
    fail "sparkdl needs Python 3.11 or newer (found: $found); install one, for example with 'apt-get install python3 python3-venv', or name it with PYTHON=/path/to/python."
}

check_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$1 cannot make virtual environments; install its venv module, for example with 'apt-get install python3-venv'."
}

check_java() {
    # Spark takes JAVA_HOME first, then the PATH; so do we.
    if [ -n "${JAVA_HOME:-}" ]; then
        java="$JAVA_HOME/bin/java"
        where="in JAVA_HOME=$JAVA_HOME"
    else
        java=java
        where="on the PATH"
    fi
    command -v "$java" >/dev/null 2>&1 ||
        fail "Spark needs Java 17 or newer and there is none $where; install one, for example with 'apt-get install openjdk-17-jre-headless', or set JAVA_HOME to it."
    version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9][0-9]*\).*/\1/p' | head -n 1)
    [ "${version:-0}" -ge 17 ] ||
        fail "Spark needs Java 17 or newer and the one $where is version ${version:-unknown}; install a newer one, for example with 'apt-get install openjdk-17-jre-headless', or set JAVA_HOME to it."
}

python=$(find_python) || exit 1
check_venv "$python"
[ "${1:-all}" = "python" ] || check_java
echo "$python"
