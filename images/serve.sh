#!/bin/sh
# What a container of the serving image runs: ingot's server on $MODEL_FOLDER, or on what $AIP_STORAGE_URI names; arguments are knobs of it
# (`serve.max_batch=16`). The port is $AIP_HTTP_PORT. It also runs outside a container; $PYTHON is then the interpreter.
set -eu
exec "${PYTHON:-python}" -m ingot serve "${MODEL_FOLDER:-/ingot/model}" serve.host=0.0.0.0 "$@"
