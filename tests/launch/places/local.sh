#!/bin/sh
# train-1
cd HERE
export SEEN='a b'
PYTHON -P -m ingot.launch.limit 90 PYTHON -P -m ingot train 'my recipe.yaml' &
job=$!
trap "kill -TERM $job" INT TERM HUP
wait $job
code=$?
while kill -0 $job 2>/dev/null; do wait $job; code=$?; done
echo $code > HERE/run/jobs/train-1.exit.partial && mv HERE/run/jobs/train-1.exit.partial HERE/run/jobs/train-1.exit
