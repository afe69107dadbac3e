#!/bin/sh
# What a container of the training image runs: a verb of ingot and what stands after it (`train recipe.yaml`), a module of Python (`-m ...`), or a
# program (`python ...`, `bash ...`, `/path/to/it ...`). It also runs outside a container; $PYTHON is then the interpreter.
set -eu
python="${PYTHON:-python}"
case "${1:-}" in
  "") exec "$python" -m ingot --help ;;
  -m) exec "$python" "$@" ;;
  python | python3 | bash | sh | /*) exec "$@" ;;
  *) exec "$python" -m ingot "$@" ;;
esac
