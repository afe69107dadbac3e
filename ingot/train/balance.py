"""The load of experts in training: what is measured of it, the losses that a router learns beside
the objective, and the correction bias that balances it without a loss.

Everything is a sum over the tokens of the global batch or made of integer counts, so that it is the
same for every layout and every division into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ingot.config.models.experts import ExpertsConfig
from ingot.config.sections.loop import RouterSettings
from ingot.data.batches.loader import Batch
from ingot.models.native.config import DecoderConfig
from ingot.models.native.decoder import Decoder
from ingot.models.native.experts import Router, Routing
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import local_stages
from ingot.parallel.rows import row_sharing, tensor_part


@dataclass(frozen=True)
class ExpertLoad:
    """What the routers did in one step, still on the device; L layers, of which only those in
    `layers` have experts.
    """

    counts: Tensor
    """How often each expert was chosen, int64 `[L, N]`."""
    sums: Tensor
    """As `RouterSums.sums`, float32 `[L, 3]`."""
    layers: Sequence[int]
    chosen: int
    settings: RouterSettings

    def metrics(self) -> dict[str, float]:
        """By name, of each layer: the load of the busiest expert as a multiple of the mean, the
        share of experts without a token, and the entropy of the scores in nats; over all layers,
        the losses. Synchronises with the device.
        """
        counts, sums = self.counts.tolist(), self.sums.tolist()
        found: dict[str, float] = {}
        losses = [0.0, 0.0]
        for layer in self.layers:
            loads, (entropy, *own) = counts[layer], sums[layer]
            total = max(1, sum(loads))
            tokens = total / self.chosen
            found[f"experts/layer{layer}_max"] = max(loads) * len(loads) / total
            found[f"experts/layer{layer}_idle"] = loads.count(0) / len(loads)
            found[f"experts/layer{layer}_entropy"] = entropy / tokens
            losses = [loss + one / tokens for loss, one in zip(losses, own, strict=True)]
        for name, loss in zip(("aux_loss", "z_loss"), losses, strict=True):
            if factor := getattr(self.settings, name):
                found[f"experts/{name}"] = factor * loss
        return found


class LoadBalance:
    """Tells the routers of a mixture what they need in each micro-batch, adds up what they leave,
    and moves their correction biases once a step.
    """

    def __init__(
        self, model: Decoder, experts: ExpertsConfig, settings: RouterSettings, mesh: Mesh
    ) -> None:
        self._experts, self._settings, self._mesh = experts, settings, mesh
        self._sharing = row_sharing(mesh)
        self._stages = [stage for stage in local_stages(model) if isinstance(stage, Decoder)]
        self._routers = routers(model)
        self._sparse = model.config.sparse
        self._routings: list[Routing] = []
        self._factor = 0.0

    def begin_step(self, batches: Sequence[Batch], targets: int) -> None:
        """Called before the first micro-batch, with those of this rank and the number of targets
        of the global batch, by which all gradients will be divided. A host collective if routers
        have losses, which are means over tokens.
        """
        self._routings = []
        if self._settings.aux_loss or self._settings.z_loss:
            mesh = self._mesh
            (count,) = mesh.agree(sum(int((batch.segments > 0).sum()) for batch in batches))
            # Ranks that share rows have all counted the same tokens.
            self._factor = targets / max(1.0, count * mesh.data.world / mesh.world)

    def begin_micro_batch(self, batch: Batch) -> None:
        """Called before a micro-batch, still on the host with whole rows, is computed."""
        sequences, lengths = sequences_of(batch.segments, apart=self._settings.aux_loss > 0)
        over_parts = None
        if self._sharing is not None:
            sequences = self._sharing.share(sequences, len(lengths) - 1)
            sequences = tensor_part(sequences, self._mesh)
            over_parts = self._over_parts
        device = self._mesh.device
        routing = Routing(
            sequences.flatten().to(device, non_blocking=True),
            lengths.to(device, non_blocking=True),
            self._settings.aux_loss * self._factor,
            self._settings.z_loss * self._factor,
            over_parts,
        )
        self._routings.append(routing)
        for stage in self._stages:
            stage.routing = routing

    def _over_parts(self, counts: Tensor) -> Tensor:
        whole = counts.clone()
        dist.all_reduce(whole, group=self._mesh.rows.group)
        return whole

    @torch.no_grad()
    def end_step(self, skipped: Tensor) -> ExpertLoad:
        """Called after the update: adds up over micro-batches and ranks, and moves the correction
        biases, unless the step was `skipped` (1.0). A collective that no host waits for.
        """
        count, device = self._experts.count, self._mesh.device
        counts = torch.zeros(len(self._sparse), count, dtype=torch.int64, device=device)
        sums = torch.zeros(len(self._sparse), 3, device=device)
        for routing in self._routings:
            for layer, one in routing.layers.items():
                if one.found is not None:
                    counts[layer] += one.found.counts
                    sums[layer] += one.found.sums
            routing.layers.clear()  # each refers to the other, which would wait for the collector
        self._routings = []
        for stage in self._stages:
            stage.routing = None
        # Ranks that share a row's matrices have other tokens of it each before the experts.
        self._mesh.all_sum(counts)
        self._mesh.all_sum(sums)
        rate = self._settings.bias_rate
        if rate:
            for router in self._routers:
                assert router.e_score_correction_bias is not None
                load = counts[router.layer]
                # In integers: that of an expert with exactly the mean load does not move.
                direction = (load.sum() - count * load).sign()
                router.e_score_correction_bias += rate * direction * (1 - skipped)
        layers = [layer for layer, sparse in enumerate(self._sparse) if sparse]
        return ExpertLoad(counts, sums, layers, self._experts.chosen, self._settings)


def sequences_of(segments: Tensor, *, apart: bool) -> tuple[Tensor, Tensor]:
    """For each token of `segments` `[B, T]` (of each row numbered from 1 on, 0 for padding) the
    number of its sequence, and the number of tokens of each, float32 `[Q + 1]`; the last bin is for
    padding. Not `apart`: all tokens are one sequence. On the host.
    """
    real = segments > 0
    if not apart:
        return (~real).long(), torch.ones(2)
    rows = segments.max(dim=1).values  # sequences of each row
    count = int(rows.sum())
    first = rows.cumsum(0) - rows
    sequences = torch.where(real, first[:, None] + segments - 1, count)
    lengths = sequences.flatten().bincount(minlength=count + 1)
    return sequences, lengths.clamp(min=1).float()


def routers(model: nn.Module) -> list[Router]:
    """The routers of the layers that this rank holds."""
    return [module for module in model.modules() if isinstance(module, Router)]


def freeze_routers(model: nn.Module) -> None:
    """Take the routers out of training."""
    for router in routers(model):
        router.is_frozen = True
        router.weight.requires_grad_(False)


def make_balance(model: nn.Module, settings: RouterSettings, mesh: Mesh) -> LoadBalance | None:
    """None for a model without experts."""
    if not isinstance(model, Decoder) or not isinstance(model.config, DecoderConfig):
        return None
    experts = model.config.experts
    return None if experts is None else LoadBalance(model, experts, settings, mesh)
