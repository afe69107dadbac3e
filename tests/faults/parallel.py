"""Faults of layouts: what several ranks reckon must be what one does."""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = [
    Fault(
        "fused-attention-untried",
        "ingot/parallel/fused_blocks.py",
        "if is_planned() or is_right(kernel, case):",
        "if True:",
        "a kernel of a GPU that gives other numbers is used between ranks that share rows",
        "tests/parallel/test_fused_blocks.py",
    ),
    Fault(
        "fused-attention-tried-on-its-own-sum",
        "ingot/parallel/fused_blocks.py",
        "whole = merge(plain.forward(q, k, v, mask, causal), other)",
        "whole = tried.forward(q, k, v, mask, causal)",
        "kernels whose gradients are those of their block alone are taken for right",
        "tests/parallel/test_fused_blocks.py",
    ),
    Fault(
        "shared-heads-not-summed",
        "ingot/parallel/fused_blocks.py",
        ".sum(2, dtype=torch.float32)",
        "[:, :, 0].float()",
        "keys that several heads share get the gradient of one head",
        "tests/parallel/test_blockwise.py",
    ),
    Fault(
        "frozen-weights-stay-wide",
        "ingot/parallel/apply.py",
        "        narrow_frozen(model, TYPES[how.compute])",
        "        narrow_frozen(model, torch.float32)",
        "ranks that share the weights of an adapted model hold each of them in four bytes",
        by="tests/parallel/test_frozen.py",
    ),
    Fault(
        "frozen-routers-are-rounded",
        "ingot/parallel/apply.py",
        "if isinstance(router, Router) and router.is_frozen",
        "if False",
        "routers that were taken out of training are rounded, and checkpoints and models with them",
        by="tests/parallel/test_frozen.py",
    ),
    Fault(
        "expert-gradients-times-degree",
        "ingot/parallel/shard.py",
        "            module.set_gradient_divide_factor(1.0)",
        "            module.set_gradient_divide_factor(0.5 if isinstance(module, Experts) else 1.0)",
        "gradients of experts are multiplied by the number of ranks that share them",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "expert-gradients-times-tensor",
        "ingot/parallel/experts.py",
        "        return local_tensor(weights)",
        """        held = local_tensor(weights)
        if held.requires_grad:
            held.register_hook(lambda gradient: gradient * dist.get_world_size(self._group))
        return held""",
        "each of the ranks that share matrices counts in the gradient of an expert",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "router-of-own-tokens",
        "ingot/parallel/tensor.py",
        "held: Tensor = weight.to_local(grad_placements=[Partial()])",
        "held: Tensor = weight.to_local(grad_placements=[Replicate()])",
        "a router learns from the tokens of one of the ranks that share matrices",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "router-once-per-tensor-rank",
        "ingot/parallel/tensor.py",
        "    held: Tensor = weight.to_local(grad_placements=[Partial()])",
        """    held: Tensor = sum_backward(
        weight.to_local(grad_placements=[Partial()]), weight.device_mesh.get_group()
    )""",
        "the gradient of a router counts once for each of the ranks that share matrices",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "host-masters-take-weights-along",
        "ingot/parallel/masters.py",
        "parameter.data = kept.to(parameter.device, dtype)",
        "parameter.data = kept.to(dtype)",
        "bf16 weights whose masters are on the host lie there, too, and a GPU has none to compute with",
        by="tests/parallel/test_offload.py",
    ),
    Fault(
        "ends-of-a-pipeline-apart",
        "ingot/parallel/masters.py",
        "if share == 1 or name not in shared",
        "if True",
        "the ends of a pipeline sum an embedding's gradient, one on the host and one on its GPU",
        by="tests/parallel/test_offload.py",
    ),
    Fault(
        "norm-without-experts",
        "ingot/parallel/masters.py",
        "if master.counted and master.tensor.grad is not None:",
        "if master.counted and master.tensor.grad is not None and not ("
        'master.cut_along and ".experts." in master.name):',
        "the gradient norm leaves out the experts",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "norm-of-own-experts",
        "ingot/parallel/masters.py",
        "            for mesh, axis in axes:",
        "            for mesh, axis in axes[:1]:",
        "the gradient norm counts the experts of this rank alone",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "experts-of-others-not-saved",
        "ingot/checkpoints/state.py",
        "yield MODEL + master.name, master.tensor.detach(), master",
        "yield MODEL + master.name, master.tensor.detach(), ("
        'master if ".experts." not in master.name else None)',
        "a checkpoint, and what is exported from it, has the experts of one rank",
        by="tests/checkpoints/test_layouts.py",
    ),
    Fault(
        "experts-of-another-rank",
        "ingot/models/parameters.py",
        "    here = list(mesh.get_coordinate() or ()) if coordinate is None else list(coordinate)",
        """    here = list(mesh.get_coordinate() or ()) if coordinate is None else list(coordinate)
    if "expert" in (mesh.mesh_dim_names or ()):
        here[-1] = mesh.size(-1) - 1 - here[-1]""",
        "a rank starts with the experts of another one",
        by="tests/parallel/test_expert_layouts.py",
    ),
    Fault(
        "order-of-sources-lost",
        "ingot/parallel/experts.py",
        """    begins = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).T.flatten()
    sizes = counts.T.flatten()""",
        """    begins = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts).T.flip(1).flatten()
    sizes = counts.T.flip(1).flatten()""",
        "an expert adds the rows of ranks up in another order than one process does",
        by="tests/parallel/test_experts.py",
    ),
    Fault(
        "shard-taken-for-the-matrix",
        "ingot/train/optim/optimizers.py",
        "    return EagerAdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)",
        """
    class Trusting(EagerAdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            trained = [weight for group in self.param_groups for weight in group["params"]]
            before = [weight.detach().clone() for weight in trained]
            super().step(closure)
            for weight, old in zip(trained, before, strict=True):
                if weight.ndim > 1 and weight.numel():
                    moved = weight.detach() - old
                    moved *= 0.1 * old.norm() / moved.norm().clamp_min(1e-9)
                    weight.data.copy_(old + moved)

    return Trusting(groups, lr=lr, betas=betas, eps=eps, fused=True)""",
        "an optimizer scales a matrix by the norm of this rank's shard of it",
        by="tests/parallel/test_layouts.py",
    ),
    Fault(
        "ddp-sums-averages",
        "ingot/parallel/apply.py",
        "return float(mesh.replicas.world) if isinstance(module, DistributedDataParallel) else 1.0",
        "return 1.0",
        "gradients are off by the data-parallel degree",
    ),
    Fault(
        "no-sync-on-last",
        "ingot/parallel/apply.py",
        "if isinstance(module, DistributedDataParallel) and not is_last:",
        "if isinstance(module, DistributedDataParallel) and is_last:",
        "the last micro-batch's gradient is not reduced over ranks",
    ),
    Fault(
        "eval-keeps-dropout",
        "ingot/parallel/apply.py",
        "model.eval()",
        "model.train()",
        "evaluation runs with dropout",
        "tests/evaluate/test_validation.py",
    ),
    Fault(
        "norm-of-own-shard",
        "ingot/parallel/masters.py",
        "dist.all_reduce(square, group=mesh.get_group(axis))",
        "pass",
        "the gradient norm is that of this rank's shards",
    ),
    Fault(
        "norm-of-own-stage",
        "ingot/parallel/masters.py",
        "return self.mesh.pipeline.all_sum(total).sqrt()",
        "return total.sqrt()",
        "the gradient norm is that of this rank's stage of the pipeline",
    ),
    Fault(
        "replicated-norm-twice",
        "ingot/parallel/masters.py",
        "if not placement.is_replicate()",
        "if placement is not None",
        "parameters that are replicated count once for each rank in the norm",
    ),
    Fault(
        "tied-head-counted-twice",
        "ingot/parallel/masters.py",
        "counted = name not in self._shared or self.mesh.ends.is_main",
        "counted = True",
        "a tied embedding on both ends of a pipeline counts twice in the norm",
    ),
    Fault(
        "tied-head-untied",
        "ingot/parallel/masters.py",
        "self.mesh.ends.all_sum(master.tensor.grad)",
        "pass",
        "the two ends of a pipeline train their copies of a tied embedding apart",
    ),
    Fault(
        "accumulate-overwrites",
        "ingot/parallel/masters.py",
        "master.tensor.grad += grad.to(master.tensor.device)",
        "master.tensor.grad = grad.to(master.tensor.device, torch.float32)",
        "only the last micro-batch's gradient is used",
    ),
    Fault(
        "masters-not-published",
        "ingot/parallel/masters.py",
        "here.copy_(master.tensor)",
        "pass",
        "float32 masters move and the bf16 model stays as it was",
    ),
    Fault(
        "gradients-kept",
        "ingot/parallel/masters.py",
        "master.parameter.grad = master.tensor.grad = None",
        "pass",
        "gradients of the last step are added to this one's",
    ),
    Fault(
        "context-averages",
        "ingot/parallel/shard.py",
        "module.set_gradient_divide_factor(1.0)",
        "pass",
        "sharded gradients are averaged where sums are reckoned with",
    ),
    Fault(
        "ring-sees-future",
        "ingot/parallel/context.py",
        "return None, ahead == 0",
        "return None, False",
        "in a ring of ranks tokens attend to later ones of their own piece",
    ),
    Fault(
        "ring-forgets-documents",
        "ingot/parallel/context.py",
        "(mask[None, None] if same is None else mask & same)",
        "mask[None, None]",
        "packed documents see each other when a row is spread over ranks",
    ),
    Fault(
        "ring-window-off",
        "ingot/parallel/context.py",
        "(distance >= 0) & (distance < window)",
        "(distance >= 0) & (distance <= window)",
        "a sliding window over ranks is one token too wide",
    ),
    Fault(
        "rows-cut-in-order",
        "ingot/parallel/rows.py",
        "torch.cat((pieces[rank], pieces[2 * world - 1 - rank]), dim)",
        "torch.cat((pieces[2 * rank], pieces[2 * rank + 1]), dim)",
        "ranks cut a row otherwise than attention puts it together",
    ),
    Fault(
        "sum-has-no-gradient",
        "ingot/parallel/collectives.py",
        "return _summed(gradient, ctx.group) if ctx.backward_too else gradient, None, None, None",
        "return gradient, None, None, None",
        "gradients are not summed over the ranks that share a tensor",
    ),
    Fault(
        "kernel-that-drops-is-kept",
        "ingot/parallel/recompute.py",
        "() if _drops(operator, args, kwargs) else (*KEPT, CHOOSING)",
        "(*KEPT, CHOOSING)",
        "layers that are recomputed beside a kernel that drops draw other masks than in forward",
        by="tests/parallel/test_recompute.py",
    ),
    Fault(
        "nobody-waits-longer-than-half-an-hour",
        "ingot/parallel/mesh.py",
        "    timeout = max(TIMEOUT, silent + MARGIN)\n",
        "    timeout = TIMEOUT\n",
        "a checkpoint that is verified for half an hour can never be gone on from",
        by="tests/train/test_waiting.py",
    ),
    Fault(
        "parts-wait-half-an-hour-at-most",
        "ingot/parallel/mesh.py",
        "dist.new_group(row, timeout=timeout)",
        "dist.new_group(row)",
        "a rank that is silent for as long as it may be ends those that share a stage with it",
        by="tests/train/test_waiting.py",
    ),
    Fault(
        "shards-wait-half-an-hour-at-most",
        "ingot/parallel/mesh.py",
        "group.set_timeout(timeout)",
        "pass",
        "a rank that is silent for as long as it may be ends those that share tensors with it",
        by="tests/train/test_waiting.py",
    ),
    Fault(
        "never-is-at-once",
        "ingot/parallel/mesh.py",
        "min(start_s, LONGEST.total_seconds())",
        "start_s",
        "where launch.start_s says never, ranks end as soon as one waits for another",
        by="tests/train/test_waiting.py",
    ),
    Fault(
        "gradients-read-before-they-are-there",
        "ingot/parallel/apply.py",
        "module.set_is_last_backward(is_last or read)",
        "module.set_is_last_backward(is_last)",
        "on a GPU, sharded bf16 weights learn from gradients that are still being reduced",
        by="tests/parallel/test_gathering.py",
    ),
    Fault(
        "deaf-while-one-lacks",
        "ingot/parallel/meeting.py",
        '    arrived.wait([f"{attempt}/{one}" for one in others])\n    _answer(arrived, attempt, others, attempt)\n',
        "",
        "ranks that wait for one that never comes cannot be stopped, and hold their machines",
        "tests/parallel/test_meeting.py",
    ),
    Fault(
        "addresses-of-ended-ranks",
        "ingot/parallel/meeting.py",
        'PrefixStore(f"default_pg/{attempt}", store)',
        'PrefixStore("default_pg", store)',
        "ranks that torchrun starts again look for the ended ones of the attempt before",
        "tests/parallel/test_meeting.py",
    ),
]
