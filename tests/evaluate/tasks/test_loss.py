"""The loss of preferences, pairs and labelled texts against transformers on each sample alone, and
the same however the work is split.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ingot.base.errors import WrongInput
from ingot.base.reports import EvaluationReport
from ingot.config.recipe import Recipe
from ingot.config.sections.deployment import MetricGate
from ingot.config.sections.evaluation import LOSS_METRICS, LossTask
from ingot.data.batches.rows import open_rows
from ingot.data.batches.samples import Samples
from ingot.data.columns.manifest import PreparedSource
from ingot.data.ingest import ingest
from ingot.data.prepare import prepare
from ingot.evaluate.sources import source_names
from ingot.evaluate.subject import TaskResult
from ingot.evaluate.tasks import check, measure, open_task
from ingot.parallel.mesh import running_mesh
from ingot.registry.gate import decide
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.small_models import place_model, subject_in, with_model, write_lines
from tests.evaluate.small_runs import place, prepared, recipe_of, records, said
from tests.ranks import run_ranks
from tests.small import small_recipe

KINDS = ("preference", "rated", "pair", "labelled")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recipe]:
    """One run of each kind for all tests, made when first asked for; read only."""
    found: dict[str, Recipe] = {}

    def of(documents: str) -> Recipe:
        if documents not in found:
            found[documents] = prepared(tmp_path_factory.mktemp(documents), documents)
        return found[documents]

    return of


def measured(recipe: Recipe, folder: Path | None = None) -> TaskResult:
    with running_mesh() as mesh:
        return measure(LossTask(), subject_in(folder or recipe.folder.model, recipe, mesh))


def samples(recipe: Recipe) -> Samples:
    rows = open_rows(
        recipe.folder.columns,
        "validation",
        recipe.data.seq_len,
        pack="none",
        pad_last=True,
        target_len=recipe.data.target_len,
    )
    assert isinstance(rows, Samples)
    return rows


def nats(logits: Tensor, labels: Tensor) -> float:
    return float(
        torch.nn.functional.cross_entropy(
            logits.double(), labels, reduction="sum", ignore_index=-100
        )
    )


def close(values: Any) -> Any:
    return pytest.approx(values, rel=tolerances.NLL_FP32, abs=tolerances.NLL_FP32)


@torch.no_grad()
def test_pairs_as_transformers_has_them(made: Callable[[str], Recipe]) -> None:
    from transformers import AutoModelForSeq2SeqLM

    recipe = made("pair")
    rows, tokenizer = samples(recipe), load_tokenizer(recipe.folder.model)
    reference = AutoModelForSeq2SeqLM.from_pretrained(recipe.folder.model)
    expected, targets, size = [], 0, 0
    for number in range(len(rows)):
        fields = rows.fields([number])
        tokens, labels = (
            torch.from_numpy(fields.tokens[fields.segments == 1])[None],
            torch.from_numpy(fields.labels[fields.labels != -100])[None],
        )
        expected.append(nats(reference(input_ids=tokens, labels=labels).logits[0], labels[0]))
        targets += labels.numel()
        size += len(tokenizer.decode(labels[0].numpy()).encode())
    found = measured(recipe)
    assert [example["nats"] for example in found.examples] == close(expected)
    loss = sum(expected) / targets
    assert found.metrics["loss/loss"].value == pytest.approx(loss, rel=tolerances.LOSS_FP32)
    assert found.metrics["loss/perplexity"].value == pytest.approx(
        math.exp(loss), rel=tolerances.LOSS_FP32 * 10
    )
    assert found.metrics["loss/bits_per_byte"].value == pytest.approx(
        sum(expected) / math.log(2) / size, rel=tolerances.LOSS_FP32
    )
    assert found.metrics["loss/loss"].n == len(rows)


@torch.no_grad()
def test_labelled_texts_as_transformers_has_them(made: Callable[[str], Recipe]) -> None:
    from transformers import AutoModelForSequenceClassification

    recipe = made("labelled")
    rows = samples(recipe)
    reference = AutoModelForSequenceClassification.from_pretrained(recipe.folder.model)
    expected = []
    for number in range(len(rows)):
        fields = rows.fields([number])
        logits = reference(
            input_ids=torch.from_numpy(fields.tokens[fields.segments == 1])[None]
        ).logits
        expected.append(nats(logits, torch.from_numpy(fields.labels)))
    found = measured(recipe)
    assert set(found.metrics) == {"loss/loss"}
    assert [example["nats"] for example in found.examples] == close(expected)
    assert found.metrics["loss/loss"].value == pytest.approx(
        np.mean(expected), rel=tolerances.LOSS_FP32
    )


@torch.no_grad()
def test_preferences_as_transformers_has_them(made: Callable[[str], Recipe]) -> None:
    from transformers import AutoModelForCausalLM

    recipe = made("preference")
    rows, reference = samples(recipe), AutoModelForCausalLM.from_pretrained(recipe.folder.model)
    sides: list[tuple[float, float]] = []
    for number in range(len(rows)):
        fields = rows.fields([number])
        one, other = (
            nats(
                reference(
                    input_ids=torch.from_numpy(fields.tokens[side][fields.segments[side] == 1])[
                        None
                    ]
                ).logits[0],
                torch.from_numpy(fields.labels[side][fields.segments[side] == 1]),
            )
            for side in range(2)
        )
        sides.append((one, other))
    chosen, rejected = np.array(sides).T
    found = measured(recipe)
    assert [example["nats"] for example in found.examples] == close(chosen.tolist())
    assert [example["margin"] for example in found.examples] == pytest.approx(
        (rejected - chosen).tolist(), rel=tolerances.NLL_FP32, abs=tolerances.LOGPROB
    )
    assert found.metrics["loss/accuracy"].value == pytest.approx(float((rejected > chosen).mean()))
    assert 0 < found.metrics["loss/accuracy"].value < 1
    assert set(found.metrics) == {f"loss/{name}" for name in LOSS_METRICS["preference"]}
    assert found.metrics["loss/margin"].value == pytest.approx(
        float((rejected - chosen).mean()), rel=tolerances.NLL_FP32, abs=tolerances.LOGPROB
    )
    assert [found.metrics[f"loss/{name}"].direction for name in ("loss", "accuracy", "margin")] == [
        "lower",
        "higher",
        "higher",
    ]
    targets = sum(example["targets"] for example in found.examples)
    assert found.metrics["loss/loss"].value == pytest.approx(
        chosen.sum() / targets, rel=tolerances.LOSS_FP32
    ), "of the chosen answers alone"


def test_good_answers_are_counted_and_compared_with_bad_ones(
    made: Callable[[str], Recipe],
) -> None:
    """The loss is that of the good ones, the accuracy the share of pairs of a good and a bad one
    whose good one is likelier per token.
    """
    found = measured(made("rated"))
    good, bad = (
        [-one["nats"] / one["targets"] for one in found.examples if one["good"] is rated]
        for rated in (True, False)
    )
    assert len(good) > 2
    assert len(bad) > 2
    above = [float(one > other) + 0.5 * (one == other) for one in good for other in bad]
    assert found.metrics["loss/accuracy"].value == pytest.approx(sum(above) / len(above))
    assert found.metrics["loss/accuracy"].n == len(good) + len(bad)
    liked = [one for one in found.examples if one["good"]]
    assert found.metrics["loss/loss"].value == pytest.approx(
        sum(one["nats"] for one in liked) / sum(one["targets"] for one in liked)
    )


@pytest.mark.parametrize("documents", KINDS)
def test_what_is_measured_of_each_kind_of_document_is_known_before(
    documents: str, made: Callable[[str], Recipe]
) -> None:
    """By that a gate is refused whose metric nothing could give."""
    recipe = made(documents)
    names = LossTask().metrics_with(recipe.objective)
    assert set(measured(recipe).metrics) == {f"loss/{name}" for name in names}


@pytest.mark.parametrize("good", [True, False])
def test_answers_of_one_rating_tell_what_they_can(good: bool, tmp_path: Path) -> None:
    """And the gate says why it keeps the live model, which may be missed weeks later."""
    alike = [one | {"label": good} for one in records("rated", 12)]
    write_lines(tmp_path / "rated.jsonl", alike)
    recipe = recipe_of(tmp_path, "rated")
    ingest(recipe)
    prepare(recipe)
    place(recipe, recipe.folder.model)
    found = measured(recipe)
    told = ("loss", "perplexity", "bits_per_byte") if good else ()
    assert set(found.metrics) == {f"loss/{name}" for name in told}
    assert "loss/accuracy" in found.missing
    assert not set(found.metrics) & set(found.missing)
    report = EvaluationReport("m", "t", found.metrics, missing=dict(found.missing))
    kept = decide(report, None, MetricGate(metric="accuracy"))
    assert kept.decision == "keep"
    assert f"{'all' if good else 'none'} of the {len(samples(recipe))} held-out" in kept.reason


@pytest.mark.drawn
@pytest.mark.parametrize("documents", KINDS)
def test_no_split_of_the_work_shows(documents: str, made: Callable[[str], Recipe]) -> None:
    recipe = made(documents)
    alone = measured(recipe)
    one, two = run_ranks(2, measured, recipe)
    assert one == two
    root = recipe.folder.root.parent.parent
    for other in (
        one,
        measured(recipe_of(root, documents, evaluate__micro_batch=1)),
        measured(recipe_of(root, documents, evaluate__micro_batch=64)),
    ):
        assert [example["document"] for example in other.examples] == list(
            range(len(alone.examples))
        )
        assert [example["nats"] for example in other.examples] == close(
            [example["nats"] for example in alone.examples]
        )
        for key, metric in alone.metrics.items():
            assert other.metrics[key].set_fingerprint == metric.set_fingerprint
            assert other.metrics[key].value == pytest.approx(
                metric.value, rel=tolerances.SPLIT_LOSS, abs=tolerances.SPLIT_LOSS
            )


def test_the_first_rows_of_a_stream_are_measured_to_the_end_of_their_last_document(
    root: Path,
) -> None:
    """Rows cut documents; what is left of one that was not read to its end does not count."""
    recipe = with_model(root)
    whole = measured(recipe)
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        some = open_task(LossTask(), subject.info, 4).measure(subject)
    count = len(some.examples)
    assert 1 < count < len(whole.examples)
    for one, other in zip(some.examples, whole.examples, strict=False):
        assert one["nats"] == close(other["nats"])
        assert (one["targets"], one["bytes"]) == (other["targets"], other["bytes"])
    nll, targets = (
        sum(example[name] for example in whole.examples[:count]) for name in ("nats", "targets")
    )
    assert some.metrics["loss/loss"].value == pytest.approx(nll / targets, rel=tolerances.LOSS_FP32)
    assert some.metrics["loss/loss"].set_fingerprint != whole.metrics["loss/loss"].set_fingerprint


def test_each_source_of_texts_has_bits_of_its_own(tmp_path: Path) -> None:
    """The two add up to the whole, and each is what a run that holds out that source alone has."""
    held = {
        "words": [said(random.Random(seed), 5, 40) for seed in range(12)],
        "digits": [" ".join(map(str, range(seed, seed + 30))) for seed in range(7)],
    }
    files = {
        name: write_lines(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
        for name, texts in held.items()
    }

    def run(name: str, *sources: Path) -> Recipe:
        recipe = small_recipe(
            tmp_path,
            name=name,
            data__train=[{"source": str(files["words"])}],
            data__validation=[{"source": str(source)} for source in sources],
            data__validation__fraction=None,
        )
        ingest(recipe)
        prepare(recipe)
        place_model(recipe, recipe.folder.model)
        return recipe

    both = measured(run("both", *files.values())).metrics
    of = {name: both[f"loss/bits_per_byte/{name}.jsonl"] for name in held}
    assert [metric.n for metric in of.values()] == [12, 7]
    for name, metric in of.items():
        alone = measured(run(name, files[name])).metrics
        assert f"loss/bits_per_byte/{name}.jsonl" not in alone
        assert metric.value == close(alone["loss/bits_per_byte"].value)
        assert metric.set_fingerprint == alone["loss/bits_per_byte"].set_fingerprint
    sizes = [sum(len(text.encode()) for text in texts) for texts in held.values()]
    bits = [metric.value * size for metric, size in zip(of.values(), sizes, strict=True)]
    assert sum(bits) / sum(sizes) == close(both["loss/bits_per_byte"].value)


@pytest.mark.drawn(keep=2)
@pytest.mark.parametrize(
    ("documents", "names"),
    [
        ("chat", ["bits_per_byte"]),
        ("preference", ["bits_per_byte", "accuracy"]),
        ("rated", ["bits_per_byte"]),
        ("pair", ["bits_per_byte"]),
        ("labelled", ["loss"]),
    ],
)
def test_each_source_of_other_documents_has_figures_of_its_own(
    documents: str, names: list[str], tmp_path: Path
) -> None:
    """They are those of a run that holds out that source alone."""
    lines = records(documents)
    train = write_lines(tmp_path / "train.jsonl", lines[:40])
    held = {"one": lines[40:47], "other": lines[47:]}
    files = {name: write_lines(tmp_path / f"{name}.jsonl", some) for name, some in held.items()}

    def run(name: str, *sources: Path) -> Recipe:
        recipe = recipe_of(
            tmp_path,
            documents,
            name=name,
            data__train=[{"source": str(train)}],
            data__validation=[{"source": str(source)} for source in sources],
            data__validation__fraction=None,
        )
        ingest(recipe)
        prepare(recipe)
        place(recipe, recipe.folder.model)
        return recipe

    both = measured(run("both", *files.values())).metrics
    for source in held:
        alone = measured(run(source, files[source])).metrics
        of = {key: one for key, one in both.items() if key.endswith(f"/{source}.jsonl")}
        assert list(of) == [f"loss/{name}/{source}.jsonl" for name in names]
        for name in names:
            found, wanted = of[f"loss/{name}/{source}.jsonl"], alone[f"loss/{name}"]
            assert found.value == close(wanted.value)
            assert (found.n, found.direction) == (wanted.n, wanted.direction)
            assert found.set_fingerprint == wanted.set_fingerprint


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["a/x.jsonl", "b/y/"], ["x.jsonl", "y"]),
        (["a/x.jsonl", "b/x.jsonl", "c"], ["1", "2", "c"]),
        (["bigquery:SELECT text FROM a.b WHERE length(text) > 100", "a"], ["1", "a"]),
        (["shards/2", f"{'a' * 41}", "2026"], ["1", "2", "2026"]),
        (["https://a.org/x.jsonl?sig=5ecret", "y"], ["x.jsonl", "y"]),
    ],
)
def test_sources_are_called_by_what_tells_them_apart(sources: list[str], names: list[str]) -> None:
    prepared = [PreparedSource(source, 1.0, 1, 1, 1, []) for source in sources]
    assert source_names(prepared) == names


def test_another_kind_of_model_is_refused(made: Callable[[str], Recipe], tmp_path: Path) -> None:
    recipe = made("pair")
    place_model(recipe, tmp_path / "decoder")
    with (
        running_mesh() as mesh,
        pytest.raises(WrongInput, match="the loss of pair documents is for models of kind seq2seq"),
    ):
        check(LossTask(), subject_in(tmp_path / "decoder", recipe, mesh))
