"""Context parallelism: several ranks share each row, and all that they have to tell each other is
attention.

Rows are cut by `ingot.parallel.rows`; the decoder is given an attention that sees the whole row.
Nothing else in it looks at two tokens.
"""

from __future__ import annotations

from typing import Literal

from torch.distributed import ProcessGroup

from ingot.models.attention import Attention, dense
from ingot.parallel.ring import RingAttention
from ingot.parallel.ulysses import UlyssesAttention


def context_attention(
    kind: Literal["ring", "ulysses"], group: ProcessGroup | None, rank: int, world: int
) -> Attention:
    """What stands for `dense` in a decoder whose rows are shared by the `world` ranks of `group`;
    `rank` is counted in it.

    `ring` hands keys and values around, and works for any number of heads; `ulysses` trades tokens
    for heads, which must divide.
    """
    if group is None or world == 1:
        return dense
    return RingAttention(group, rank, world) if kind == "ring" else UlyssesAttention(group, world)
