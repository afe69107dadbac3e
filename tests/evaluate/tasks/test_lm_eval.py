"""Tasks of lm-evaluation-harness on our model, against the harness on its own Hugging Face
model.
"""

from __future__ import annotations

import importlib
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ingot.base.errors import Failed, WrongInput
from ingot.base.reports import Metric
from ingot.config.recipe import Recipe
from ingot.config.sections.evaluation import LMEvalTask
from ingot.evaluate.likelihood import ScoredSpan, encode_spans, log_likelihoods
from ingot.evaluate.subject import TaskResult
from ingot.evaluate.tasks import check, measure
from ingot.evaluate.tasks.lm_eval import HarnessModel, report, sample_interval, windows
from ingot.models.generation.generator import Generator
from ingot.models.generation.request import Request, TextStream
from ingot.parallel.mesh import running_mesh
from ingot.tokenizers.load import load_tokenizer
from tests import tolerances
from tests.evaluate.lm_eval_harness import evaluated, likelihoods, local_hellaswag
from tests.evaluate.small_models import hellaswag_lines, subject_in, with_model, write_lines
from tests.ranks import run_ranks
from tests.serve.running import running
from tests.tokenizers.small import chatty

ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
"""
WRITING = """
task: local_writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{text[:20]}}}}"
doc_to_target: "{{{{text[20:40]}}}}"
generation_kwargs: {{until: ["a"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def place_tasks(folder: Path) -> Path:
    """Three tasks without the hub: choices, the likelihood of texts longer than the model's
    positions, and writing.
    """
    folder.mkdir()
    generator = random.Random(0)
    texts = [
        {"text": " ".join(generator.choices(["copper", "melts", "für", "the ingot"], k=size))}
        for size in (3, 20, 60, 200)
    ]
    path = write_lines(folder / "texts.jsonl", texts)
    (folder / "local_text.yaml").write_text(ROLLING.format(path=path))
    (folder / "local_writing.yaml").write_text(WRITING.format(path=path))
    return local_hellaswag(folder, write_lines(folder / "items.jsonl", hellaswag_lines(10)))


def measured(recipe: Recipe, folder: Path, *tasks: str, **knobs: Any) -> TaskResult:
    with running_mesh() as mesh:
        task = LMEvalTask(
            kind="lm_eval", name="theirs", tasks=list(tasks), include=str(folder), **knobs
        )
        return measure(task, subject_in(recipe.folder.model, recipe, mesh))


def test_choices_texts_and_writing_as_the_harness_has_them(root: Path, tmp_path: Path) -> None:
    recipe, folder = with_model(root), place_tasks(tmp_path / "tasks")
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found = measured(recipe, folder, "local_hellaswag", "local_text", "local_writing")
    assert torch.equal(torch.get_rng_state(), before), "a training run draws from it"
    keys = [
        "local_hellaswag.acc",
        "local_hellaswag.acc_norm",
        "local_text.word_perplexity",
        "local_text.byte_perplexity",
        "local_text.bits_per_byte",
        "local_writing.exact_match",
    ]
    assert set(found.metrics) == {f"theirs/{key}" for key in keys}
    names = ("local_hellaswag", "local_text", "local_writing")
    results = evaluated(recipe.folder.model, folder, *names)
    for name in names:
        for key, value in results["results"][name].items():
            metric = key.removesuffix(",none")
            if f"theirs/{name}.{metric}" in found.metrics and key != metric:
                ours = found.metrics[f"theirs/{name}.{metric}"]
                assert ours.value == pytest.approx(value, rel=tolerances.NLL_FP32 * 10)
                if ours.interval:
                    assert ours.ci_low <= ours.value <= ours.ci_high
        if name == "local_writing":
            theirs = [
                sample["filtered_resps"]
                for sample in sorted(results["samples"][name], key=lambda sample: sample["doc_id"])
            ]
            ours = [
                example["answer"] for example in found.examples if example["id"].startswith(name)
            ]
            # A character whose last bytes were not written any more is none here.
            assert [answer.replace("\ufffd", "") for answer in ours] == [
                str(answer).replace("\ufffd", "") for answer in theirs
            ]
    assert found.metrics["theirs/local_hellaswag.acc"].direction == "higher"
    assert found.metrics["theirs/local_text.bits_per_byte"].direction == "lower"
    assert (
        found.metrics["theirs/local_text.bits_per_byte"].ci_low
        < found.metrics["theirs/local_text.bits_per_byte"].value
    )
    assert found.metrics["theirs/local_hellaswag.acc"].n == 10


def test_likelihoods_of_single_requests(root: Path, tmp_path: Path) -> None:
    """Not only who wins: the numbers, through the harness's own log of samples."""
    recipe, folder = with_model(root), place_tasks(tmp_path / "tasks")
    found = measured(recipe, folder, "local_hellaswag", limit=4, shots=2)
    results = evaluated(recipe.folder.model, folder, "local_hellaswag", limit=4, num_fewshot=2)
    theirs = likelihoods(results, "local_hellaswag")
    ours = [
        [float(number) for number in re.findall(r"\((-?[\d.]+)", example["answer"])]
        for example in found.examples
    ]
    assert len(ours) == len(theirs) == 4
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=tolerances.NLL_FP32, abs=tolerances.NLL_FP32)


def test_greedy_decoding_writes_a_continuation_or_does_not(root: Path) -> None:
    """Every token of it is the likeliest, or it is not what would be written."""
    recipe, context = with_model(root), [5, 6, 7]
    with running_mesh() as mesh:
        subject = subject_in(recipe.folder.model, recipe, mesh)
        (written,) = Generator(subject.decoder).run([Request(context, 3)])
        ids = [token.id for token in written.tokens]
        first, last = ([token + (place == at) for place, token in enumerate(ids)] for at in (0, 2))
        spans = [ScoredSpan(context, continuation) for continuation in (ids, first, last)]
        assert log_likelihoods(subject, spans, "greedy", greedy=True)[:, 1].tolist() == [1, 0, 0]


def test_spaces_at_the_end_of_a_context_are_the_continuations(root: Path) -> None:
    """As the harness has it: a token is seldom a space alone."""
    tokenizer = load_tokenizer(with_model(root).folder.model)
    wanted = encode_spans(tokenizer, [("the ingot", " melts")])
    assert encode_spans(tokenizer, [("the ingot ", "melts")]) == wanted
    assert len(wanted[0].continuation) > 0


def test_writing_ends_at_a_special_token_as_the_harness_has_it() -> None:
    """Its tasks name `<|im_end|>`, with which not every model ends that writes it."""
    tokenizer = chatty()
    subject: Any = SimpleNamespace(
        tokenizer=tokenizer, info=SimpleNamespace(positions=64), where="the model"
    )
    settings = {"until": ["Question:", "<|im_end|>"], "max_gen_toks": 8}
    request = HarnessModel(subject)._request(0, "copper", settings)
    stream = TextStream(tokenizer.decode, request.prompt, request.stop, special=request.special)
    written = [*tokenizer.encode(" melts"), tokenizer.special_ids["<|im_end|>"]]
    assert "".join(map(stream.push, written)) == " melts"
    assert stream.stopped


@pytest.mark.drawn("an evaluation by two ranks")
def test_two_ranks_find_what_one_does(root: Path, tmp_path: Path) -> None:
    recipe, folder = with_model(root), place_tasks(tmp_path / "tasks")
    alone = measured(recipe, folder, "local_hellaswag", "local_writing")
    for other in run_ranks(
        2, measured, recipe, folder, "local_hellaswag", "local_writing", timeout_s=120
    ):
        assert other.metrics == alone.metrics
        assert [example["id"] for example in other.examples] == [
            example["id"] for example in alone.examples
        ]


def test_a_long_text_is_cut_into_windows_in_which_every_token_is_scored_once() -> None:
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    for length in (0, 1, 7, 8, 9, 16, 17, 30):
        tokens = list(range(100, 100 + length))
        theirs = [make_disjoint_window(pair) for pair in get_rolling_token_windows(tokens, 1, 8, 1)]
        assert [(span.context, span.continuation) for span in windows(tokens, 1, 8)] == [
            (list(context), list(rest)) for context, rest in theirs
        ]


def test_only_what_is_made_of_samples_has_an_interval() -> None:
    low, high = sample_interval(0.5, [0.0, 1.0] * 20)
    assert low < 0.5 < high
    assert sample_interval(0.4, [0.0, 1.0] * 20) == (None, None), "not their mean"
    assert sample_interval(3.0, []) == (None, None)
    assert sample_interval(3.0, ["a", "b"]) == (None, None)


def test_a_group_is_of_what_its_parts_asked() -> None:
    """Also of those in groups of groups, each once; of other items it is another set."""

    def found(last: str = "b") -> dict[str, Metric]:
        results = {
            "results": {name: {"acc,none": 0.5} for name in ("all", "group")},
            "samples": {
                "one": [{"doc_hash": "a", "acc": 1.0}],
                "two": [{"doc_hash": last, "acc": 0.0}],
            },
            "group_subtasks": {"all": ["group", "one", "unknown"], "group": ["one", "two"]},
            "n-samples": {"one": {"effective": 3}, "two": {"effective": 4}},
        }
        for samples in results["samples"].values():
            for number, sample in enumerate(samples):
                sample |= {"doc_id": number}
        return report("harness", results).metrics

    metrics, others = found(), found("c")
    assert [metrics[f"harness/{name}.acc"].n for name in ("all", "group")] == [7, 7]
    for name, metric in metrics.items():
        assert metric.value == 0.5
        assert metric.set_fingerprint != others[name].set_fingerprint


def test_unknown_tasks_and_missing_data_are_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    recipe, folder = with_model(root), place_tasks(tmp_path / "tasks")
    real, searched = lm_eval.tasks.TaskManager, list[bool]()

    def without_the_thousands(include_path: str | None, include_defaults: bool = True) -> Any:
        """Reading the package's own tasks takes most of a minute; the slow test does it."""
        searched.append(include_defaults)
        return real(include_path=include_path or str(folder), include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", without_the_thousands)
    with running_mesh() as mesh:
        about = subject_in(recipe.folder.model, recipe, mesh).info
        with pytest.raises(WrongInput, match="lm_eval knows no task no_such_task"):
            check(LMEvalTask(kind="lm_eval", tasks=["no_such_task"]), about)
        assert searched == [True], "the package's own tasks are searched too"
        (folder / "texts.jsonl").unlink()
        with pytest.raises(Failed, match="local_text cannot be loaded"):
            check(LMEvalTask(kind="lm_eval", tasks=["local_text"], include=str(folder)), about)
        assert searched == [True, False], "nothing but the folder is searched where that suffices"


@pytest.mark.slow
def test_a_task_that_the_package_does_not_have(root: Path) -> None:
    with running_mesh() as mesh:
        recipe = with_model(root)
        info = subject_in(recipe.folder.model, recipe, mesh).info
        with pytest.raises(WrongInput, match="lm_eval knows no task no_such_task"):
            check(LMEvalTask(kind="lm_eval", tasks=["no_such_task"]), info)


def test_without_the_package_the_way_to_get_it_is_told(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = with_model(root)
    importlib.import_module("lm_eval")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with running_mesh() as mesh, pytest.raises(WrongInput, match=r"pip install 'ingot\[lm-eval\]'"):
        check(
            LMEvalTask(kind="lm_eval", tasks=["hellaswag"]),
            subject_in(recipe.folder.model, recipe, mesh),
        )


@pytest.mark.slow
def test_against_the_served_model_the_harness_finds_the_same(root: Path, tmp_path: Path) -> None:
    """Its `local-completions` reads `echo` with `logprobs` of `ingot serve`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    recipe, folder = with_model(root), place_tasks(tmp_path / "tasks")
    found = measured(recipe, folder, "local_hellaswag")
    with running(recipe.folder.model) as server:
        api = LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            tokenizer_backend="huggingface",
            model="tiny",
            tokenizer=str(recipe.folder.model),
            batch_size=4,
            add_bos_token=True,  # as every text of this tokenizer begins
        )
        served = simple_evaluate(
            model=api,
            tasks=["local_hellaswag"],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
    assert served is not None
    theirs = likelihoods(dict(served), "local_hellaswag")
    ours = [
        [float(number) for number in re.findall(r"\((-?[\d.]+)", example["answer"])]
        for example in found.examples
    ]
    assert len(ours) == len(theirs) == 10
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, rel=tolerances.NLL_FP32, abs=tolerances.NLL_FP32)
    for name in ("acc", "acc_norm"):
        value = served["results"]["local_hellaswag"][f"{name},none"]
        assert found.metrics[f"theirs/local_hellaswag.{name}"].value == pytest.approx(value)
