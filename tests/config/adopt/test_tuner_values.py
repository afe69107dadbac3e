"""Values of tuners that mean something else here, or that are not given and have defaults there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.adopt.stand_ins import recipe_of

AXOLOTL = """\
base_model: org/ash-1b
sequence_len: 64
datasets:
  - path: org/rows
    type: chat_template
"""


@pytest.mark.parametrize(("mark", "lost"), [("train", False), ("keep", True)])
def test_a_mark_of_untrained_answers_with_another_name_is_told(
    tmp_path: Path, mark: str, lost: bool
) -> None:
    text = f"{AXOLOTL}    message_field_training: {mark}\n"
    notes = recipe_of(tmp_path, ash_yaml=text)[1]
    assert ("datasets[].message_field_training: an answer is left out by" in notes) == lost
