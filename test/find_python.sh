# shellcheck shell=bash
# Sourced: find_python prints the path of a Python that will do, or says what was found instead and returns 2.
find_python() {
    local candidate version found=""
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python}; do
        version="$("$candidate" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$candidate"
            return
        fi
        found="$found${found:+, }Python $version ($candidate)"
    done
    echo "needs Python 3.11 / torch 2.7, found ${found:-no Python${PYTHON:+ at PYTHON=$PYTHON}}" >&2
    return 2
}
