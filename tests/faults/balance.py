"""Faults of the balance of experts: each trains another model than the one asked for, and the loss
goes down all the same.
"""

from __future__ import annotations

from tests.faults.fault import Fault

NATIVE, BALANCE, RECOMPUTE = (
    "ingot/models/native/experts.py",
    "ingot/train/balance.py",
    "ingot/parallel/recompute.py",
)
HERE, LAYOUTS, RUNS = (
    "tests/train/test_balance.py",
    "tests/parallel/test_expert_layouts.py",
    "tests/train/test_experts.py",
)
FAULTS = [
    Fault(
        "aux-loss-dropped",
        NATIVE,
        "return gradient, gradient.new_ones(())",
        "return gradient, gradient.new_zeros(())",
        "the auxiliary loss is logged, and no gradient comes of it",
        by=HERE,
    ),
    Fault(
        "aux-loss-doubled",
        NATIVE,
        "return gradient, gradient.new_ones(())",
        "return gradient, gradient.new_full((), 2.0)",
        "the auxiliary loss counts twice in the gradient",
        by=HERE,
    ),
    Fault(
        "aux-loss-over-ranks",
        BALANCE,
        "self._factor = targets / max(1.0, count * mesh.data.world / mesh.world)",
        "self._factor = targets / max(1.0, count * mesh.data.world)",
        "the auxiliary loss is divided by the number of ranks",
        by=LAYOUTS,
    ),
    Fault(
        "aux-loss-by-micro-batch",
        BALANCE,
        "            self._settings.aux_loss * self._factor,",
        "            self._settings.aux_loss * int((batch.labels >= 0).sum())"
        " / max(1, int((batch.segments > 0).sum())),",
        "the auxiliary loss depends on how a batch is divided",
        by=HERE,
    ),
    Fault(
        "layers-pooled",
        NATIVE,
        "            shares = whole * (experts / k) / told.lengths[:, None]",
        """            for one in told.layers.values():
                whole = whole if one.found is None else whole + one.found.counts
            shares = whole * (experts / k) / told.lengths[:, None]""",
        "the load of all layers is added up before the product with the scores of one",
        by=HERE,
    ),
    Fault(
        "load-of-a-part",
        NATIVE,
        "whole = counts if told.over_parts is None else told.over_parts(counts)",
        "whole = counts",
        "the auxiliary loss of a sequence sees the load of this rank's part of it alone",
        by=LAYOUTS,
    ),
    Fault(
        "load-of-padding",
        BALANCE,
        "return (~real).long(), torch.ones(2)",
        "return torch.zeros_like(segments), torch.ones(2)",
        "padding counts in the load of experts",
        by=HERE,
    ),
    Fault(
        "load-counted-again",
        NATIVE,
        "        self.found = RouterSums(counts[:-1].sum(0), sums)",
        """        made = counts[:-1].sum(0)
        if self.found is not None:
            made = made + self.found.counts
        self.found = RouterSums(made, sums)""",
        "recomputation counts the load of experts twice",
        by=HERE,
    ),
    Fault(
        "choices-computed-again",
        RECOMPUTE,
        "return _policy(operator, (CHOOSING,))",
        "return _policy(operator, ())",
        "full recomputation chooses experts again, and a near tie flips",
        by=HERE,
    ),
    Fault(
        "choices-not-kept",
        RECOMPUTE,
        "else (*KEPT, CHOOSING))",
        "else KEPT)",
        "selective recomputation chooses experts again, and a near tie flips",
        by=HERE,
    ),
    Fault(
        "frozen-router-learns",
        BALANCE,
        "        router.weight.requires_grad_(False)",
        "        router.weight.requires_grad_(True)",
        "a frozen router is trained",
        by=HERE,
    ),
    Fault(
        "bias-not-saved",
        "ingot/checkpoints/state.py",
        "    yield from ((MODEL + name, buffer, None) for name, buffer in masters.buffers.items())",
        "    yield from ()",
        "the bias that balances experts is not in the checkpoint",
        by=RUNS,
    ),
    Fault(
        "bias-not-loaded",
        "ingot/checkpoints/reader.py",
        "read_tensors(found.folder, stored, tensors)",
        "read_tensors(found.folder, stored, {name: one for name, one in tensors.items() if"
        ' not name.endswith("correction_bias")})',
        "the bias that balances experts begins again at 0 when a run is resumed",
        by=RUNS,
    ),
    Fault(
        "load-of-a-tensor-rank",
        BALANCE,
        "        self._mesh.all_sum(counts)\n",
        "        self._mesh.losses.all_sum(counts)\n",
        "the bias that balances experts follows the tokens of one of the ranks that share matrices",
        by=LAYOUTS,
    ),
    Fault(
        "load-of-a-context-part",
        BALANCE,
        "dist.all_reduce(whole, group=self._mesh.rows.group)",
        "dist.all_reduce(whole, group=self._mesh.context.group)",
        "the auxiliary loss of a sequence sees the tokens of one of the ranks that share matrices",
        by=LAYOUTS,
    ),
    Fault(
        "bias-of-a-rank",
        BALANCE,
        "        self._mesh.all_sum(counts)\n",
        "",
        "the bias that balances experts follows the load of one rank",
        by=LAYOUTS,
    ),
    Fault(
        "bias-the-wrong-way",
        BALANCE,
        "direction = (load.sum() - count * load).sign()",
        "direction = (count * load - load.sum()).sign()",
        "the bias sends more tokens to the experts that have most",
        by=HERE,
    ),
    Fault(
        "bias-of-a-skipped-step",
        BALANCE,
        "rate * direction * (1 - skipped)",
        "rate * direction",
        "a step that is not taken moves the bias that balances experts",
        by=HERE,
    ),
    Fault(
        "bias-in-the-weights",
        NATIVE,
        "        weights = scores.gather(1, chosen)\n",
        "        if self.e_score_correction_bias is not None:\n"
        "            scores = scores + self.e_score_correction_bias\n"
        "        weights = scores.gather(1, chosen)\n",
        "the bias that balances experts changes their weights too",
        by="tests/models/native/test_family.py",
    ),
    Fault(
        "bias-in-bf16",
        NATIVE,
        "            self.e_score_correction_bias = bias.to(moved.device)",
        "            self.e_score_correction_bias = moved",
        "the bias that balances experts is rounded to bf16",
        by=HERE,
    ),
    Fault(
        "bias-exported-in-bf16",
        "ingot/checkpoints/export.py",
        "torch.float32 if name.endswith(CORRECTION) else dtype",
        "dtype",
        "the bias that balances experts is exported in bf16",
        by=RUNS,
    ),
    Fault(
        "bias-that-no-file-holds",
        "ingot/config/shape.py",
        "    if settings.bias_rate and not experts.corrected:",
        "    if False and settings.bias_rate and not experts.corrected:",
        "a model is trained with a bias that its export cannot hold",
        by=HERE,
    ),
    Fault(
        "idle-experts-skip-a-step",
        NATIVE,
        "        gate_up = self._product(",
        "        if not len(rows):\n            return rows\n        gate_up = self._product(",
        "the experts of a rank that nobody sent rows to have no gradient, and skip the step",
        by="tests/models/native/test_experts.py",
    ),
    Fault(
        "rows-beyond-the-last-offset",
        NATIVE,
        "offsets = counts.cumsum(0).to(torch.int32)",
        "offsets = (counts.cumsum(0) - 1).clamp(min=0).to(torch.int32)",
        "rows beyond the last offset of a grouped product are read, which nothing has written",
        by="tests/models/native/test_experts.py",
    ),
    Fault(
        "capacity",
        NATIVE,
        "        slots, k = chosen.flatten(), chosen.shape[1]",
        """        slots, k = chosen.flatten(), chosen.shape[1]
        place = (slots[:, None] == slots).tril(-1).sum(1)
        weights = weights * (place < 2 * len(slots) // self.count).view_as(weights)""",
        "an expert silently drops tokens beyond a capacity",
        by="tests/models/native/test_experts.py",
    ),
    Fault(
        "group-of-the-best-expert",
        "ingot/models/native/experts.py",
        "best = grouped.topk(2, dim=-1).values.sum(-1)",
        "best = grouped.topk(1, dim=-1).values.sum(-1)",
        "groups of experts are chosen by their best one, as the model was not trained",
        "tests/models/native/test_experts.py",
    ),
    Fault(
        "experts-ordered-by-logits",
        "ingot/models/native/experts.py",
        "chosen = self._order(scores.detach()).topk",
        "chosen = self._order(logits.detach()).topk",
        "a router's correction is added to logits, beside which it counts for nothing",
        "tests/models/native/test_experts.py",
    ),
    Fault(
        "scores-of-sigmoids-not-normalised",
        "ingot/models/native/experts.py",
        "probabilities = scores / scores.sum(dim=-1, keepdim=True)",
        "probabilities = scores",
        "the auxiliary loss of a router of sigmoids is of scores that add up to anything",
        "tests/train/test_balance.py",
    ),
]
