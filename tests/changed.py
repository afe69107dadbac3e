"""`python -m tests.changed [BASE]` prints the test files that what differs from BASE can make fail;
BASE is HEAD when left out.
"""

from __future__ import annotations

import subprocess
import sys

from tests.graph import PROJECT, tests_of


def differing(base: str) -> list[str]:
    def lines(*command: str) -> list[str]:
        done = subprocess.run(
            ["git", *command], cwd=PROJECT, capture_output=True, text=True, check=True
        )
        return done.stdout.splitlines()

    return sorted(
        {
            *lines("diff", "--name-only", "--no-renames", base, "--"),
            *lines("ls-files", "--others", "--exclude-standard"),
        }
    )


def main() -> None:
    print(*tests_of(differing(*sys.argv[1:2] or ["HEAD"])), sep="\n")


if __name__ == "__main__":
    main()
