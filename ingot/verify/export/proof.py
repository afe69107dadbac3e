"""`ingot verify export`: proves that the exported model is the trained one for every tool that
reads it: files, weights, logits of each token.

The trainer's model is compared with transformers on the exported folder, and that with PEFT on the
adapter and with the server.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ingot.base.errors import Failed, WrongInput, some_of
from ingot.base.progress import Progress
from ingot.config.models.weights import hash_model
from ingot.config.recipe import Recipe
from ingot.data.columns.manifest import prefix_of, prepared_for
from ingot.models.adapters.lora import adapter_tensors
from ingot.models.adapters.peft import load_adapter
from ingot.models.adapters.peft_config import read_adapter_config
from ingot.models.device import pick_device
from ingot.models.hf.config import HFConfig
from ingot.models.native.decoder import Decoder
from ingot.models.spec import ModelSpec
from ingot.serve.native.compute import serving_compute
from ingot.tokenizers.load import load_tokenizer
from ingot.train.finish import changed_config
from ingot.verify.export.logits import (
    LOGPROB_TOLERANCE,
    computed_bound,
    logit_bound,
    logit_difference,
    merged_bound,
    prompt_prefixes,
    training_logits,
    transformers_logits,
)
from ingot.verify.export.server import (
    DOCUMENTS,
    NEW_TOKENS,
    check_decoder,
    check_encoder,
    check_masks,
    check_scores,
    check_seq2seq,
    held_out_chats,
    held_out_texts,
    server,
)
from ingot.verify.export.server import SERVER as SERVER
from ingot.verify.export.trained import (
    TRAIN_AGAIN,
    ExportedRun,
    RebuiltModel,
    base_model,
    compare_bases,
    compare_weights,
    differing_tensors,
    open_export,
    rebuild,
)
from ingot.verify.export.transformers import CHAT_TEMPLATE as CHATS
from ingot.verify.export.transformers import (
    CannotOpen,
    TransformersModel,
    check_chats,
    open_adapter,
    open_transformers,
)
from ingot.verify.proof import Check, Proof

LONGEST_PROMPT = 64
REPAIR = "put back what was exported, or " + TRAIN_AGAIN


def verify_export(recipe: Recipe) -> Proof:
    """Check a trained run's `model/` (and `adapter/`) against its checkpoint, transformers, PEFT
    and the server.

    Raises:
        WrongInput: the run was not trained, or with another recipe.
    """
    export = open_export(recipe)
    found: list[Check] = []
    with Progress("verify export", total=None, unit="checks") as progress:

        def add(following: str, *checks: Check) -> None:
            found.extend(checks)
            progress.update(len(found), now=following)

        add("weights", _check_hash(export), _check_tokenizer(export))
        trained, why = _rebuild_or_reason(export)
        add("logits", _check_weights(export, trained, why))
        read, check = _check_logits(export, trained, why)
        add("adapter" if recipe.model.lora is not None else "server", check)
        if recipe.model.lora is not None:
            add("server", *_check_adapter(export, trained, read))
        add("chats", _check_server(export, trained, read))
        add("done", _check_chat_template(export))
    return Proof(f"Export of {recipe.name}, step {export.step:,}, {export.type}", found)


def _check_hash(export: ExportedRun) -> Check:
    """Whether config.json and the weights are unchanged since the export."""
    what, recorded = "files: weights and configuration", export.lineage["model_hash"]
    try:
        now = hash_model(export.recipe.folder.model)
    except WrongInput as error:
        return Check(what, False, str(error))
    if now != recorded:
        return Check(
            what,
            False,
            f"config.json or the weights changed since they were exported: their hash is {now},"
            f" ingot.json says {recorded}; {REPAIR}",
        )
    return Check(what, True, f"hash {now}, as in ingot.json")


def _check_tokenizer(export: ExportedRun) -> Check:
    what, lineage = "files: tokenizer and template", export.lineage
    try:
        tokenizer = load_tokenizer(export.recipe.folder.model, check=False)
    except WrongInput as error:
        return Check(what, False, str(error))
    identity, template = tokenizer.identity(), tokenizer.template_identity
    if template != lineage.get("template"):
        return Check(
            what,
            False,
            f"the chat template is {template or 'none'}, ingot.json says"
            f" {lineage.get('template') or 'none'}; {REPAIR}",
        )
    recorded = {"ingot.json": lineage["tokenizer"]} | (
        {}
        if export.found is None
        else {"the checkpoint": export.found.commit["identity"]["tokenizer"]}
    )
    for where, other in recorded.items():
        if identity != other:
            return Check(
                what,
                False,
                f"the tokenizer is {identity}, {where} says {other}: other vocabulary, merges or"
                f" special tokens; {REPAIR}",
            )
    return Check(
        what,
        True,
        f"tokenizer {identity}, template {template or 'none'}, as in {' and '.join(recorded)}",
    )


def _rebuild_or_reason(export: ExportedRun) -> tuple[RebuiltModel | None, str]:
    """The trainer's model, or the reason why there is none."""
    try:
        return rebuild(export), export.missing_reason
    except WrongInput as error:
        return None, str(error)


def _check_weights(export: ExportedRun, trained: RebuiltModel | None, why: str) -> Check:
    what = "weights"
    if trained is None:
        return Check(what, False, why)
    compared = trained.compared
    if compared is None:
        return Check(what, None, f"{why}; keep more with checkpoint.keep")
    if compared.wrong:
        return Check(what, False, f"{compared.summary}; {REPAIR}")
    last = (
        f"; {compared.folded:,} of folded-in layers are off by their last bit, as sums on another"
        " device are"
        if compared.folded
        else ""
    )
    return Check(
        what,
        True,
        f"{compared.tensors:,} tensors, {compared.weights:,} weights, each the trained one rounded"
        f" to {export.type}{last}",
    )


@dataclass(frozen=True)
class _TransformersLogits:
    """The exported folder opened by transformers, and its logits on the held-out records."""

    model: TransformersModel
    logits: torch.Tensor


def _check_logits(
    export: ExportedRun, trained: RebuiltModel | None, why: str
) -> tuple[_TransformersLogits | None, Check]:
    """Compare transformers' logits, if it opens the folder, with the trainer's."""
    what, held = "logits: trainer and transformers", export.held_out
    try:
        model = open_transformers(export.recipe.folder.model, export.setup.model_spec.kind)
        read = _TransformersLogits(model, transformers_logits(model, held))
    except CannotOpen as error:
        return None, Check(what, False, f"{error}; {REPAIR}")
    exported_logits = read.logits
    if trained is None:
        return read, Check(what, False, why)
    if exported_logits.shape != trained.logits.shape:
        return read, Check(
            what,
            False,
            f"transformers has {exported_logits.shape[1]:,} logits for each token, the trainer"
            f" {trained.logits.shape[1]:,}; {REPAIR}",
        )
    gap = logit_difference(trained.logits, exported_logits)
    most = logit_bound(gap.size)
    places = f"{len(exported_logits):,} places of {len(held.records)} held-out records"
    detail = (
        f"{places}: largest difference {gap.largest:.1e} (bound {most:.1e}) of logits up to"
        f" {gap.size:.1f}"
    )
    if gap.largest > most:
        return read, Check(
            what, False, f"{detail}, at {held.place(gap.at, export.setup.tokenizer)}; {REPAIR}"
        )
    rounding = (
        ""
        if trained.unrounded is None
        else (
            f"; rounding to {export.type} moves them by up to"
            f" {logit_difference(trained.unrounded, exported_logits).largest:.1e}"
        )
    )
    own = "; weights as exported, since the checkpoint is gone" if trained.compared is None else ""
    return read, Check(what, True, f"{detail}{rounding}{own}")


def _check_adapter(
    export: ExportedRun, trained: RebuiltModel | None, read: _TransformersLogits | None
) -> list[Check]:
    """Check the adapter's folder on its base: its matrices, the logits with them, and the same by
    PEFT.
    """
    what, folder = "adapter", export.recipe.folder.adapter
    if trained is None or read is None:
        return [Check(what, False, f"there is no merged model to compare {folder} with; see above")]
    beside = base_model(export.setup)
    try:
        load_adapter(beside, folder)
    except WrongInput as error:
        return [Check(what, False, str(error))]
    matrices = adapter_tensors(beside)
    wrong = (
        differing_tensors(matrices, trained.adapter, sorted(trained.adapter))
        if trained.adapter
        else []
    )
    adapter_logits = training_logits(beside, export.held_out)
    others = [_check_peft(export, adapter_logits)]
    if export.recipe.model.quantize is not None:
        adapter_logits, told = compare_bases(export, beside, adapter_logits)
        others.append(told)
    merged = compare_weights(beside, export.recipe.folder.model, export.dtype)
    folded, rounded_to = read.logits, export.type
    if isinstance(beside, Decoder) and beside.config.experts is not None:
        # Rounding sends tokens to other experts, which no bound holds for: compared before it.
        folded, rounded_to = training_logits(beside, export.held_out), "fp32"
    gap = logit_difference(adapter_logits, folded)
    most = merged_bound(rounded_to, trained.products)
    detail = (
        f"{len(matrices)} matrices; beside the base and folded into it their logits differ by"
        f" {gap.relative:.1e} in norm (bound {most:.1e})"
    )
    if wrong:
        return [
            Check(
                what,
                False,
                f"{some_of(wrong)} in {folder} are not as trained; {REPAIR}",
            ),
            *others,
        ]
    if merged.wrong or not gap.relative <= most:
        return [
            Check(
                what,
                False,
                f"{folder} folded into its base is not {export.recipe.folder.model}:"
                f" {merged.summary or detail}; {REPAIR}",
            ),
            *others,
        ]
    return [Check(what, True, detail), *others]


def _check_peft(export: ExportedRun, adapter_logits: torch.Tensor) -> Check:
    what, model_spec = "adapter in PEFT", export.setup.model_spec
    if model_spec.folder is None or model_spec.random:
        return Check(
            what,
            None,
            "the base is drawn at random, so there is no folder that PEFT could open it from",
        )
    changed, labels = changed_config(export.setup), labels_of(model_spec)
    adapter = export.recipe.folder.adapter
    try:
        held = read_adapter_config(adapter).heads
        base = open_transformers(
            model_spec.folder, model_spec.kind, labels=labels, changed=changed, held=held
        )
        model = open_adapter(base, adapter)
    except (CannotOpen, WrongInput) as error:
        return Check(what, False, f"{error}; {REPAIR}")
    if model is None:
        return Check(what, None, "PEFT is not installed; `pip install peft` to have it compared")
    gap = logit_difference(adapter_logits, transformers_logits(model, export.held_out))
    most, where = logit_bound(gap.size), export.held_out.place(gap.at, export.setup.tokenizer)
    told = f", beside its base with {', '.join(changed)} of model.config" if changed else ""
    detail = (
        f"largest difference {gap.largest:.1e} (bound {most:.1e}) of logits up to"
        f" {gap.size:.1f}{told}"
    )
    return Check(
        what,
        gap.largest <= most,
        detail if gap.largest <= most else f"{detail}, at {where}; {REPAIR}",
    )


def _check_server(
    export: ExportedRun, trained: RebuiltModel | None, read: _TransformersLogits | None
) -> Check:
    """Compare the server's answers with transformers, in the type in which the server computes
    here.
    """
    if read is None or trained is None:
        return Check(SERVER, None, "there is nothing to compare its answers with; see above")
    model, device, folder = read.model, pick_device(), export.recipe.folder.model
    serve = export.recipe.serve
    compute = serving_compute(serve.compute, folder, device, pack=serve.pack)
    if compute == "bf16":
        model = model.to(device, torch.bfloat16)
        most = computed_bound(trained.products, float(trained.logits.square().mean().sqrt()))
    else:
        most = LOGPROB_TOLERANCE + logit_bound(float(trained.logits.abs().max()))
    try:
        with server(folder, compute) as url:
            return _compare_answers(export, url, model, most)
    except Failed as error:
        return Check(SERVER, False, f"{error}; {REPAIR}")


def _compare_answers(export: ExportedRun, url: str, model: TransformersModel, most: float) -> Check:
    recipe, tokenizer = export.recipe, export.setup.tokenizer
    if model.kind == "decoder":
        room = min(
            LONGEST_PROMPT, export.setup.model_spec.config.max_position_embeddings - NEW_TOKENS
        )
        return check_decoder(
            url,
            model,
            tokenizer,
            prompt_prefixes(export.held_out, DOCUMENTS, max(1, room)),
            most,
        )
    try:
        if recipe.objective.scores_chats:
            chats = held_out_chats(recipe, tokenizer)
            return check_scores(url, model, tokenizer, chats, most)
        texts = held_out_texts(recipe, tokenizer)
    except WrongInput as error:
        return Check(SERVER, None, f"there are no held-out texts to ask about: {error}")
    if not texts:
        return Check(
            SERVER, None, f"no held-out document fits into data.seq_len={recipe.data.seq_len}"
        )
    if model.kind == "seq2seq":
        return check_seq2seq(url, model, tokenizer, texts, prefix_of(recipe))
    if model.kind == "masked":
        return check_masks(url, model, tokenizer, texts, most)
    return check_encoder(url, model, tokenizer, texts, most)


def _check_chat_template(export: ExportedRun) -> Check:
    try:
        return check_chats(export.recipe, prepared_for(export.recipe), export.setup.tokenizer)
    except WrongInput as error:
        return Check(CHATS, None, f"there are no held-out chats to write: {error}")


def labels_of(model_spec: ModelSpec) -> tuple[str, ...]:
    """The names of a classifier's outputs; none for other models."""
    return model_spec.config.labels if isinstance(model_spec.config, HFConfig) else ()
