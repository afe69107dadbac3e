"""How long tests wait for what must come. A test that passes never waits so long: the time ends one
that hangs, on a machine where everything else takes ten times as long too.
"""

import os

PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "240"))
