"""`python -m ingot.launch.vertex_node ...`: `ingot.launch.node` in a worker of a custom job, which
tells its place in $CLUSTER_SPEC.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from ingot.base.errors import WrongInput
from ingot.base.progress import say
from ingot.launch import node

VARIABLE = "CLUSTER_SPEC"


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Torchrun's variables by the description of the cluster: the only worker of pool 0 is node 0,
    those of pool 1 follow, and so on.

    Raises:
        WrongInput: there is no such description, or it makes no sense.
    """
    try:
        about = json.loads(environ[VARIABLE])
        pools = {name: list(hosts) for name, hosts in sorted(about["cluster"].items())}
        pool, index = about["task"]["type"], int(about["task"]["index"])
        before = sum(len(hosts) for name, hosts in pools.items() if name < pool)
        host, _, port = pools["workerpool0"][0].rpartition(":")
        _ = pools[pool][index]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise WrongInput(
            f"${VARIABLE} does not say which worker this is ({type(error).__name__}: {error}); this"
            " is for custom jobs of Vertex AI"
        ) from None
    nodes = sum(len(hosts) for hosts in pools.values())
    return {
        "PET_NNODES": str(nodes),
        "PET_NODE_RANK": str(before + index),
        "PET_MASTER_ADDR": host,
        "PET_MASTER_PORT": port,
    }


def main() -> int:
    try:
        os.environ.update(torchrun_variables(os.environ))
    except WrongInput as error:
        say(f"error: {error}")
        return error.exit_code
    return node.main()


if __name__ == "__main__":
    sys.exit(main())
