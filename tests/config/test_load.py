from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from ingot.base.environment import RESOLVED_VARIABLE
from ingot.base.errors import WrongInput
from ingot.config.load import dump_recipe, load_recipe, read_recipe
from ingot.config.recipe import Recipe
from ingot.config.values import Values, set_value

GOOD = "name: a\ndata:\n  train:\n    - {source: x.jsonl}\n"


def load(
    folder: Path,
    text: str,
    *overrides: str,
    environ: dict[str, str] | None = None,
    dotenv: str | None = None,
) -> Recipe:
    (folder / "r.yaml").write_text(text, encoding="utf-8")
    if dotenv is not None:
        (folder / ".env").write_text(dotenv, encoding="utf-8")
    return load_recipe(
        [folder / "r.yaml"], overrides, environ=environ or {}, dotenv=folder / ".env"
    )


def said(folder: Path, text: str, *overrides: str, environ: dict[str, str] | None = None) -> str:
    """The error, with paths as seen from the recipe's folder."""
    with pytest.raises(WrongInput) as error:
        load(folder, text, *overrides, environ=environ)
    assert error.value.exit_code == 2
    return str(error.value).replace(f"{folder}/", "")


BAD = {
    # what is wrong: (what follows `name` and `data`, the line that a person gets)
    "unknown knob": (
        "train: {stepz: 3}",
        "r.yaml:5: unknown knob `train.stepz`; did you mean `train.steps`?",
    ),
    "unknown section": (
        "trian:\n  steps: 3",
        "r.yaml:5: unknown knob `trian`; did you mean `train`?",
    ),
    "unknown knob of a variant": (
        "train:\n  optimizer:\n    learning_rate: 3",
        (
            "r.yaml:7: unknown knob `train.optimizer.learning_rate`; did you mean"
            " `train.optimizer.lr`?"
        ),
    ),
    "knob of another variant": (
        "train:\n  optimizer: {kind: adamw, momentum: 0.9}",
        (
            "r.yaml:6: `train.optimizer.momentum` is for kind sgd and muon only; remove it, or set"
            " `train.optimizer.kind`"
        ),
    ),
    "unknown variant": (
        "train:\n  optimizer: {kind: lion}",
        (
            "r.yaml:6: `train.optimizer.kind` is 'lion'; it should be one of 'adamw', 'sgd', 'muon' (see"
            " `ingot explain train.optimizer.kind`)"
        ),
    ),
    "wrong type": (
        "train:\n  steps: abc",
        (
            "r.yaml:6: `train.steps` is 'abc'; it should be a valid integer (see `ingot explain"
            " train.steps`)"
        ),
    ),
    "text for a section": (
        "train: fast",
        (
            "r.yaml:5: `train` is 'fast'; it should be a section, that is a mapping of knobs (see"
            " `ingot explain train`)"
        ),
    ),
    "truth for a number": (
        "train: {steps: yes}",
        "r.yaml:5: `train.steps` is true, which this knob does not take; write a value of its type",
    ),
    "out of range": (
        "train:\n\n  steps: -3",
        (
            "r.yaml:7: `train.steps` is -3; it should be greater than 0 (see `ingot explain"
            " train.steps`)"
        ),
    ),
    "not finite": (
        "train: {optimizer: {lr: .inf}}",
        (
            "r.yaml:5: `train.optimizer.lr` is inf; it should be a finite number (see `ingot"
            " explain train.optimizer.lr`)"
        ),
    ),
    "not one of": (
        "precision: {compute: fp8}",
        (
            "r.yaml:5: `precision.compute` is 'fp8'; it should be 'auto', 'fp32' or 'bf16' (see"
            " `ingot explain precision.compute`)"
        ),
    ),
    "not one of them either": (
        "parallel: {schedule: 2f2b}",
        (
            "r.yaml:5: `parallel.schedule` is '2f2b'; it should be 'auto', 'gpipe', '1f1b',"
            " 'interleaved' or 'zero_bubble' (see `ingot explain parallel.schedule`)"
        ),
    ),
    "two types, neither": (
        "parallel: {replicate: x}",
        (
            "r.yaml:5: `parallel.replicate` is 'x'; it should be a valid integer, or be 'auto' (see"
            " `ingot explain parallel.replicate`)"
        ),
    ),
    "number for text": (
        "output: 3",
        (
            "r.yaml:5: `output` is 3; it should be text: put quotes around it (see `ingot explain"
            " output`)"
        ),
    ),
    "date in a configuration": (
        "model: {config: {a: 2024-01-01}}",
        (
            "r.yaml:5: `model.config.a` is datetime.date(2024, 1, 1); it should be text, a number,"
            " a list or a mapping (see `ingot explain model.config`)"
        ),
    ),
    "two lengths": (
        "train:\n  steps: 3\n  tokens: 5",
        "r.yaml:6: train.steps and train.tokens both say how long to train; keep one of them",
    ),
    "early stop alone": (
        "train:\n  early_stop: {}",
        "r.yaml:6: train.early_stop needs train.evaluate_every; set it to a number of steps",
    ),
    "metric that no task has": (
        "train: {evaluate_every: 3, evaluate_tasks: [loss]}\ncheckpoint: {best: loss/perplexityy}",
        (
            "r.yaml:6: checkpoint.best loss/perplexityy is not measured while training, which is"
            " loss, loss/loss, loss/perplexity, loss/bits_per_byte; choose one of these, or name"
            " its task in train.evaluate_tasks"
        ),
    ),
    "vocabulary of a tokenizer that is not trained": (
        "tokenizer:\n  source: hf:a/b\n  vocab_size: 300",
        (
            "r.yaml:7: tokenizer.vocab_size is for `tokenizer.source: train`; remove it, or train a"
            " tokenizer"
        ),
    ),
    "two tasks of one name": (
        "evaluate:\n  tasks: [{kind: loss}, {kind: loss}]",
        (
            "r.yaml:6: evaluate.tasks: two tasks share a name among ['loss', 'loss']; give each its"
            " own `name`"
        ),
    ),
    "a reward in the place of the mean": (
        "evaluate:\n  tasks: [{kind: reward, rewards: [{kind: exact, name: mean}, {kind: numeric}]}]",
        (
            "r.yaml:6: evaluate.tasks, reward: a reward is called mean, as another metric of the"
            " task is; give it another `name`"
        ),
    ),
    "remote output": (
        "output: gs://x/y",
        (
            "r.yaml:5: output gs://x/y is not a local folder, and this version keeps runs on a"
            " disk; give a path"
        ),
    ),
    "a home folder": (
        "output: ~/runs",
        "r.yaml:5: output ~/runs would be a folder called ~; write the whole path",
    ),
    "secret in the recipe": (
        "serve: {api_key: sk-1}",
        "r.yaml:5: `serve.api_key` must be a reference such as env:NAME, not the key itself",
    ),
    "a key twice": (
        "train: {steps: 3, steps: 4}",
        "r.yaml:5: `steps` stands twice in the same section; keep one",
    ),
    "a key twice in a list": (
        "evaluate: {tasks: [{name: a, name: b}]}",
        "r.yaml:5: `name` stands twice in the same section; keep one",
    ),
    "name of a registry that is a path": (
        "registry: {name: ../up}",
        (
            "r.yaml:5: `registry.name` is '../up'; it should match pattern"
            " '^[A-Za-z0-9][A-Za-z0-9._-]*$' (see `ingot explain registry.name`)"
        ),
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_recipe_gives_one_line_with_thing_value_place_and_what_to_do(
    tmp_path: Path, what: str
) -> None:
    more, line = BAD[what]
    assert said(tmp_path, f"{GOOD}{more}\n") == line


ALIASES = "\n".join(
    f"k{level}: &a{level} [{', '.join([f'*a{level - 1}' if level else 'x'] * 10)}]"
    for level in range(9)
)
"""A billion values in half a kilobyte."""
BAD_WHOLE = {
    "no data": ("name: a", "r.yaml: `data` is missing; add it (Documents in, rows of tokens out)"),
    "no sources": (
        "name: a\ndata: {}",
        "r.yaml:2: `data.train` is missing; add it (The sources that are trained on)",
    ),
    "empty sources": (
        "name: a\ndata: {train: []}",
        (
            "r.yaml:2: data.train has no source; add one, such as `data: {train: [{source:"
            " texts.jsonl}]}`"
        ),
    ),
    "null sources": (
        "name: a\ndata: {train: null}",
        (
            "r.yaml:2: `data.train` is null; it should be a valid list (see `ingot explain"
            " data.train`)"
        ),
    ),
    "one source, no list": (
        "name: a\ndata: {train: {source: x}}",
        (
            "r.yaml:2: `data.train` is a section; it should be a valid list (see `ingot explain"
            " data.train`)"
        ),
    ),
    "unknown knob of a kind among others": (
        "name: a\ndata: {train: [{source: x}]}\nobjective:\n  kind: grpo\n  rewards:\n    - {kind: length, max: 5}",
        (
            "r.yaml:6: unknown knob `objective.rewards.0.max`; kind length has name, weight,"
            " on_failure, timeout, retries, at_once, unit, least, most, margin"
        ),
    ),
    "a name much like that of another section's knob": (
        "name: a\ndata: {train: [{source: x}]}\nobjective:\n  kind: grpo\n  rewards:\n    - {kind: length, target: 5}",
        (
            "r.yaml:6: unknown knob `objective.rewards.0.target`; kind length has name, weight,"
            " on_failure, timeout, retries, at_once, unit, least, most, margin"
        ),
    ),
    "misspelt knob of a kind": (
        "name: a\ndata: {train: [{source: x}]}\nobjective:\n  kind: grpo\n  rewards:\n    - {kind: length, moast: 5}",
        (
            "r.yaml:6: unknown knob `objective.rewards.0.moast`; did you mean"
            " `objective.rewards.0.most`?"
        ),
    ),
    "sources and a share": (
        "name: a\ndata:\n  train: [{source: x}]\n  validation: {source: y, fraction: 0.1}",
        (
            "r.yaml:4: data.validation is either a list of sources, `[{source: PATH}]`, or a share"
            " of the documents, `{fraction: 0.01}`; give one of the two"
        ),
    ),
    "unknown knob in a list": (
        "name: a\ndata:\n  train:\n    - {source: x}\n    - source: y\n      wieght: 3",
        "r.yaml:6: unknown knob `data.train.1.wieght`; did you mean `data.train.1.weight`?",
    ),
    "neither sources nor a share": (
        "name: a\ndata:\n  train: [{source: x}]\n  validation: {fraction: 2}",
        (
            "r.yaml:4: `data.validation.fraction` is 2; it should be less than 1 (see `ingot"
            " explain data.validation.fraction`)"
        ),
    ),
    "a name that is a path": (
        "name: a/b\ndata: {train: [{source: x}]}",
        (
            "r.yaml:1: `name` is 'a/b'; it should match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$' (see"
            " `ingot explain name`)"
        ),
    ),
    "no mapping": (
        "- a",
        "r.yaml:1: a recipe is a mapping of sections; start with a line such as `name: my-run`",
    ),
    "broken YAML": (
        "name: a\ndata: [",
        (
            "r.yaml:3: not valid YAML (expected the node content, but found '<stream end>'); mend"
            " that line"
        ),
    ),
    "an impossible date": (
        "name: 2001-99-99",
        "r.yaml:1: not valid YAML (month must be in 1..12); mend that line",
    ),
    "an alias that holds itself": (
        "a: &x {b: *x}",
        "r.yaml: nested too deeply, or an alias that holds itself; write it out flat",
    ),
    "aliases of aliases": (
        ALIASES,
        "r.yaml:5: not valid YAML (aliases that stand for 111,111 values); mend that line",
    ),
}


@pytest.mark.parametrize("what", BAD_WHOLE)
def test_a_bad_file_gives_one_line(tmp_path: Path, what: str) -> None:
    text, line = BAD_WHOLE[what]
    assert said(tmp_path, f"{text}\n") == line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "train.optimzer.lr=3",
            (
                "`train.optimzer.lr=3` on the command line: unknown knob `train.optimzer`; did you"
                " mean `train.optimizer`?"
            ),
        ),
        (
            "train.steps",
            "`train.steps` on the command line is neither a recipe file that exists nor key=value",
        ),
        ("=3", "`=3` on the command line is neither a recipe file that exists nor key=value"),
        (
            "data.train.fraction=0.1",
            (
                "`data.train.fraction=0.1` on the command line: `data.train` is a list of 1; give"
                " an index below that"
            ),
        ),
        (
            "data.train.3.source=x",
            (
                "`data.train.3.source=x` on the command line: `data.train` is a list of 1; give an"
                " index below that"
            ),
        ),
        (
            "train.steps=[",
            "`train.steps=[` on the command line: the value is not YAML; put quotes around it",
        ),
        (
            "train.steps=2001-99-99",
            (
                "`train.steps=2001-99-99` on the command line: the value is not YAML; put quotes"
                " around it"
            ),
        ),
        (
            "name.x=1",
            (
                "`name.x=1` on the command line: `name` is a section; it should be a valid string"
                " (see `ingot explain name`)"
            ),
        ),
        (
            "train.7=0",
            "`train.7=0` on the command line: unknown knob `train.7`; did you mean `train`?",
        ),
        (
            "train.steps=0",
            (
                "`train.steps=0` on the command line: `train.steps` is 0; it should be greater than"
                " 0 (see `ingot explain train.steps`)"
            ),
        ),
    ],
)
def test_a_bad_override_is_named_as_it_was_typed(tmp_path: Path, override: str, line: str) -> None:
    assert said(tmp_path, GOOD, override) == line


def test_a_value_that_is_no_text_here_is_not_sent_for_quotes(tmp_path: Path) -> None:
    """Bytes of Latin-1, or of UTF-8 where the locale is C: no quotes would help."""
    told = "has bytes that are not UTF-8, or that the locale does not read so; give UTF-8"
    typed = os.fsdecode(b"output=caf\xe9")
    assert f"on the command line: the value {told}" in said(tmp_path, GOOD, typed)
    with pytest.raises(WrongInput, match=told):
        load(tmp_path, GOOD, environ={"INGOT_OUTPUT": os.fsdecode(b"caf\xe9")})


def test_keys_of_a_mapping_in_a_variable_have_the_case_that_is_meant(tmp_path: Path) -> None:
    """Names of variables as they are; others as well, unless they are written as a knob may be."""
    environ = {
        "INGOT_LAUNCH__ENVIRONMENT__NCCL_DEBUG": "INFO",
        "INGOT_CLOUD__SECRETS__HF_TOKEN": "secret:hf-token",
        "INGOT_LAUNCH__SLURM__OPTIONS__QOS": "high",
        "INGOT_MODEL__CONFIG__ROPE_SCALING__Factor": "2",
        "INGOT_DATA__TRAIN__0__COLUMNS__text": "Body",
        "INGOT_PIPELINE__STEPS__TRAIN__NODES": "2",
    }
    recipe = load(tmp_path, GOOD, environ=environ)
    assert recipe.launch.environment == {"NCCL_DEBUG": "INFO"}
    assert recipe.cloud.secrets == {"HF_TOKEN": "secret:hf-token"}
    assert recipe.launch.slurm.options == {"qos": "high"}
    assert recipe.model.config == {"rope_scaling": {"Factor": 2}}
    assert recipe.data.train[0].columns == {"text": "Body"}
    assert recipe.pipeline.steps["train"].nodes == 2
    dotenv = "INGOT_CLOUD__PRICES__a2-highgpu-1g=3.5\n"
    assert load(tmp_path, GOOD, dotenv=dotenv).cloud.prices == {"a2-highgpu-1g": 3.5}


def test_a_variable_that_names_no_knob_is_an_error(tmp_path: Path) -> None:
    assert (
        said(tmp_path, GOOD, environ={"INGOT_TRAIN__STEPZ": "3"})
        == "$INGOT_TRAIN__STEPZ: unknown knob `train.stepz`; did you mean `train.steps`?"
    )
    (tmp_path / ".env").write_text("INGOT_SEEED=3\n")
    assert said(tmp_path, GOOD) == ".env: INGOT_SEEED: unknown knob `seeed`; did you mean `seed`?"


def test_a_key_in_the_environment_never_stands_in_the_error(tmp_path: Path) -> None:
    line = said(tmp_path, GOOD, environ={"INGOT_SERVE__API_KEY": "sk-secret"})
    assert "sk-secret" not in line
    assert line.startswith("$INGOT_SERVE__API_KEY: `serve.api_key` must be a reference")


def test_every_fault_is_told_in_its_own_line(tmp_path: Path) -> None:
    lines = said(
        tmp_path, f"{GOOD}train: {{stepz: 3}}\nseed: -1\nprecision: {{compute: fp8}}\n"
    ).splitlines()
    assert sorted(line.split(":")[1] for line in lines) == ["5", "6", "7"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WrongInput, match=r"recipe .*none\.yaml does not exist; check the path"):
        load_recipe([tmp_path / "none.yaml"], environ={}, dotenv=None)
    with pytest.raises(WrongInput, match=r"is a folder; give the recipe\.yaml in it"):
        load_recipe([tmp_path], environ={}, dotenv=None)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe4\n")
    with pytest.raises(WrongInput, match=r"latin\.yaml is not UTF-8 \(byte 6\); save it as UTF-8"):
        load_recipe([tmp_path / "latin.yaml"], environ={}, dotenv=None)


def test_later_files_then_dotenv_then_environment_then_command_line_win(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(
        f"{GOOD}train: {{steps: 1, global_batch: 1, micro_batch: 1, evaluate_every: 1,"
        " evaluate_rows: 1}\n"
    )
    (tmp_path / "two.yaml").write_text(
        "train: {global_batch: 2, micro_batch: 2, evaluate_every: 2, evaluate_rows: 2}\n"
    )
    (tmp_path / ".env").write_text(
        "INGOT_TRAIN__MICRO_BATCH=3\nINGOT_TRAIN__EVALUATE_EVERY=3\nINGOT_TRAIN__EVALUATE_ROWS=3\nOTHER=x\n"
    )
    environ = {
        "INGOT_TRAIN__EVALUATE_EVERY": "4",
        "INGOT_TRAIN__EVALUATE_ROWS": "4",
        "PATH": "/bin",
    }
    train = load_recipe(
        [tmp_path / "one.yaml", tmp_path / "two.yaml"],
        ["train.evaluate_rows=5"],
        environ=environ,
        dotenv=tmp_path / ".env",
    ).train
    assert (
        train.steps,
        train.global_batch,
        train.micro_batch,
        train.evaluate_every,
        train.evaluate_rows,
    ) == (1, 2, 3, 4, 5)


def test_a_whole_section_in_a_variable_goes_before_its_knobs_and_the_environment_before_dotenv(
    tmp_path: Path,
) -> None:
    environ = {"INGOT_TRAIN__STEPS": "7", "INGOT_TRAIN": "{steps: 1, global_batch: 2}"}
    train = load(tmp_path, GOOD, environ=environ).train
    assert (train.steps, train.global_batch) == (7, 2)
    assert (
        load(
            tmp_path, GOOD, environ={"INGOT_TRAIN": "{steps: 5}"}, dotenv="INGOT_TRAIN__STEPS=1\n"
        ).train.steps
        == 5
    )


def test_what_was_typed_over_the_environment_is_not_overridden_where_the_recipe_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INGOT_TRAIN__STEPS", "8")
    Path(".env").write_text("INGOT_NAME=other\nINGOT_SEED=9\n", encoding="utf-8")
    Path("r.yaml").write_text(f"{GOOD}train: {{steps: 1}}\n", encoding="utf-8")
    typed = read_recipe(["r.yaml", "name=mine", "seed=3"])
    assert (typed.name, typed.seed, typed.train.steps) == ("mine", 3, 8)
    Path("resolved.yaml").write_text(dump_recipe(typed), encoding="utf-8")
    monkeypatch.setenv(RESOLVED_VARIABLE, "1")
    monkeypatch.setenv("INGOT_TRAIN__STEPS", "9")
    assert read_recipe(["resolved.yaml", "serve.port=0"]).seed == 3
    for again in (read_recipe(["resolved.yaml"]), load_recipe(["resolved.yaml"])):
        assert again == typed


def test_overrides_reach_into_lists_and_are_yaml(tmp_path: Path) -> None:
    overrides = [
        "data.train.0.weight=2.5",
        "train.optimizer={kind: sgd, lr: 1e-2}",
        "gate.metric=[a, b]",
        "train.clip_norm=null",
        "model.config.num_hidden_layers=2",
    ]
    recipe = load(tmp_path, GOOD, *overrides)
    assert recipe.data.train[0].weight == 2.5
    assert (recipe.train.optimizer.kind, recipe.train.optimizer.lr) == ("sgd", 0.01)
    assert recipe.gate.metric == ["a", "b"]
    assert recipe.train.clip_norm is None
    assert recipe.model.config == {"num_hidden_layers": 2}


def test_a_hash_is_part_of_a_value_wherever_it_is_typed(tmp_path: Path) -> None:
    """In a file of YAML, and in a `.env` behind a space, it begins a comment."""
    assert load(tmp_path, GOOD, "output=/data/run #3").output == "/data/run #3"
    assert load(tmp_path, GOOD, environ={"INGOT_OUTPUT": "#3"}).output == "#3"
    dotenv = 'INGOT_OUTPUT="/data/run #3"\nINGOT_NAME=a # mine\n'
    recipe = load(tmp_path, f"{GOOD}seed: 3 # three\n", dotenv=dotenv)
    assert (recipe.output, recipe.name, recipe.seed) == ("/data/run #3", "a", 3)
    assert "the value is not YAML; put quotes around it" in said(
        tmp_path, GOOD, "gate.metric=[a] #b"
    )


def test_numbers_of_free_settings_are_numbers_and_texts_stay_texts(tmp_path: Path) -> None:
    """Else `config.json` would hold the text "1e-5", which transformers refuses."""
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: 7e10\ndata: {train: [{source: x}]}\ntrain: {optimizer: {lr: 1e-3}}\n"
        "model: {config: {rms_norm_eps: 1e-5, rope_scaling: {factor: 1e1}}, revision: 1e5}\n"
    )
    recipe = load_recipe([file], ["tokenizer.template_kwargs={a: 2e-1}"], environ={}, dotenv=None)
    assert recipe.model.config == {"rms_norm_eps": 1e-5, "rope_scaling": {"factor": 10.0}}
    assert recipe.tokenizer.template_kwargs == {"a": 0.2}
    assert (recipe.name, recipe.model.revision, recipe.train.optimizer.lr) == ("7e10", "1e5", 1e-3)
    again = tmp_path / "again.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe([again], environ={}, dotenv=None) == recipe


@pytest.mark.parametrize(
    ("knob", "text", "value"),
    [
        ("train.steps", "1e3", 1000),
        ("train.tokens", "1e9", 10**9),
        ("train.evaluate_every", "1e3", 1000),
        ("train.optimizer.betas", "[9e-1, 99e-2]", (0.9, 0.99)),
        ("train.optimizer.lr", "1e-5", 1e-5),
        ("launch.slurm.time", "1e3", 1000.0),
        ("gate.floor", "1e-1", 0.1),
        ("gate.floor", "'1e-1'", "1e-1"),
        ("gate.floor", "bigram", "bigram"),
        ("data.skip", "[[1e1, 1e3]]", [(10, 1000)]),
    ],
)
def test_an_exponent_is_a_number_for_each_knob_that_takes_numbers(
    knob: str, text: str, value: object, tmp_path: Path
) -> None:
    """Else a floor of 1e-1 would be the name of a baseline."""
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ndata: {train: [{source: x}]}\n", encoding="utf-8")
    found: Any = load_recipe([path], [f"{knob}={text}"], environ={}, dotenv=None)
    for name in knob.split("."):
        found = getattr(found, name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["1.5e0", "1e-1", "1e999"])
def test_an_exponent_that_is_no_whole_number_is_no_number_of_steps(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("name: a\ndata: {train: [{source: x}]}\n", encoding="utf-8")
    with pytest.raises(WrongInput, match=r"train\.steps"):
        load_recipe([path], [f"train.steps={text}"], environ={}, dotenv=None)


@pytest.mark.parametrize("value", ["2020-01-01", ".inf", "{1: 2}", "!!set {a, b}"])
def test_what_a_resolved_recipe_would_hold_otherwise_is_no_argument_of_a_reward(
    value: str, tmp_path: Path
) -> None:
    """Nodes read the resolved one: there infinity would be nothing, and a date a text."""
    path = tmp_path / "r.yaml"
    path.write_text(
        "name: a\ndata: {train: [{source: x}]}\nobjective: {kind: grpo, rewards:"
        f" [{{kind: python, function: 'm:f', arguments: {{given: {value}}}}}]}}\n",
        encoding="utf-8",
    )
    with pytest.raises(WrongInput, match=r"arguments\.given"):
        load_recipe([path], environ={}, dotenv=None)


def test_anchors_and_merge_keys_are_understood(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        f"{GOOD}train: &t {{steps: 3, optimizer: &o {{lr: 0.5, eps: 1.0e-6}}}}\nserve: {{port:"
        " 1}\n",
        "train.micro_batch=2",
    )
    assert (recipe.train.steps, recipe.train.micro_batch) == (3, 2)
    merged = load(
        tmp_path, f"{GOOD}model: {{config: {{a: &a {{x: 1, y: 2}}, b: {{<<: *a, y: 3}}}}}}\n"
    )
    assert merged.model.config == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    "more",
    [
        "",
        "tokenizer: {source: train, vocab_size: 300}",
        "tokenizer: {source: hf:a/b}",
        "model: {source: some/folder, config: {rope_scaling: {factor: 2.0}, x: [1, null]}}",
        "data:\n  validation: [{source: y, fraction: 0.5}]",
        (
            "train: {tokens: 100, optimizer: {kind: sgd}, early_stop: {}, evaluate_every: 3,"
            " clip_norm: null}"
        ),
        "gate: {metric: [a, b], direction: higher, margin: 0.5, override: keep}",
        "track: {wandb: {}}",
        'serve: {prompt: "a: {b}\\n\\u00e4 \\t\'"}',
    ],
)
def test_a_dumped_recipe_loads_as_the_same_recipe(tmp_path: Path, more: str) -> None:
    (tmp_path / "more.yaml").write_text(more)
    (tmp_path / "r.yaml").write_text(GOOD)
    recipe = load_recipe([tmp_path / "r.yaml", tmp_path / "more.yaml"], environ={}, dotenv=None)
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    again = load_recipe([tmp_path / "dumped.yaml"], environ={}, dotenv=None)
    assert again == recipe
    assert dump_recipe(again) == dump_recipe(recipe)
    assert set(yaml.safe_load(dump_recipe(recipe))) == set(Recipe.model_fields)


PLACED = f"""{GOOD}launch: {{kind: vertex, nodes: 4, processes: 8}}
pipeline:
  steps:
    prepare: {{launch: dataproc}}
    evaluate: {{launch: vertex, nodes: 1, processes: 1, machine: {{type: a2-highgpu-1g}}}}
"""


def placed(folder: Path, verb: str, *overrides: str, environ: dict[str, str] | None = None) -> Any:
    (folder / "r.yaml").write_text(PLACED, encoding="utf-8")
    recipe = load_recipe(
        [folder / "r.yaml"], overrides, environ=environ or {}, dotenv=None, verb=verb
    )
    return recipe.at(verb).launch


def test_what_is_typed_last_of_a_place_wins_over_the_place_of_the_step(tmp_path: Path) -> None:
    assert placed(tmp_path, "prepare").kind == "dataproc"
    assert placed(tmp_path, "prepare", "launch.kind=dataflow").kind == "dataflow"
    assert placed(tmp_path, "prepare", "launch={kind: dataflow}").kind == "dataflow"
    assert placed(tmp_path, "prepare", environ={"INGOT_LAUNCH__KIND": "gce"}).kind == "gce"
    twice = ("launch.kind=dataflow", "pipeline.steps.prepare.launch=gce")
    assert placed(tmp_path, "prepare", *twice).kind == "gce"
    assert placed(tmp_path, "prepare", *twice[::-1]).kind == "dataflow"
    evaluated = placed(
        tmp_path,
        "evaluate",
        "launch.machine.type=g2-standard-24",
        "launch.nodes=2",
        "launch.processes=2",
    )
    assert (evaluated.machine.type, evaluated.nodes, evaluated.processes) == (
        "g2-standard-24",
        2,
        2,
    )
    assert placed(tmp_path, "train", "launch.nodes=2").nodes == 2


def test_a_step_that_keeps_its_own_place_is_named_where_all_steps_are_done(tmp_path: Path) -> None:
    for verb in ("run", "submit"):
        with pytest.raises(WrongInput) as error:
            placed(tmp_path, verb, "launch.kind=dataflow")
        assert str(error.value).replace(f"{tmp_path}/", "") == (
            "`launch.kind=dataflow` on the command line would not reach prepare, whose own"
            " pipeline.steps.prepare.launch is set by r.yaml:8; give"
            " pipeline.steps.prepare.launch after it, too"
        )
        with pytest.raises(WrongInput, match=r"would not reach evaluate.*machine\.spot after it"):
            placed(tmp_path, verb, "launch.machine.spot=true")
    with pytest.raises(WrongInput, match="would not reach evaluate"):
        placed(tmp_path, "run", "launch.kind=dataproc")
    said_of_all = (
        "pipeline.steps={prepare: {launch: gce}, evaluate: {launch: gce}}",
        "launch.kind=gce",
    )
    assert placed(tmp_path, "run", *said_of_all).kind == "gce"
    assert placed(tmp_path, "run", "launch.hang_s=40").hang_s == 40


@pytest.mark.parametrize(
    ("kind", "nodes"), [("gce", 1), ("vertex", 1), ("slurm", 4), ("ssh", 4), ("local", 4)]
)
def test_machines_that_are_made_for_an_evaluation_are_one(
    kind: str, nodes: int, tmp_path: Path
) -> None:
    recipe = load(tmp_path, f"{GOOD}launch: {{kind: {kind}, nodes: 4}}")
    assert recipe.at("evaluate").launch.nodes == nodes
    assert recipe.at("train").launch.nodes == 4
    typed = load_recipe(
        [tmp_path / "r.yaml"], ["launch.nodes=3"], environ={}, dotenv=None, verb="evaluate"
    )
    assert typed.at("evaluate").launch.nodes == 3
    by_step = load(tmp_path, f"{GOOD}launch: {{kind: {kind}, nodes: 4}}", STEP_OF_TWO)
    assert by_step.at("evaluate").launch.nodes == 2


STEP_OF_TWO = "pipeline.steps={evaluate: {nodes: 2}}"


def test_names_for_megatron_are_for_texts(tmp_path: Path) -> None:
    named = f"{GOOD}  megatron_prefix: web\n"
    assert load(tmp_path, named).data.megatron_prefix == "web"
    with pytest.raises(WrongInput, match=r"data\.megatron_prefix web is for texts"):
        load(tmp_path, f"{named}objective: {{kind: sft}}\n")
    with pytest.raises(WrongInput, match="megatron_prefix"):
        load(tmp_path, f"{GOOD}  megatron_prefix: ../web\n")


@pytest.mark.parametrize(
    "setting",
    [
        "serve.api_key=sk-BARE",
        "serve={api_key: sk-BARE}",
        "serve={api_key: [sk-BARE]}",
        "serve.apikey=sk-BARE",
        'serve.api_key="sk-BARE',
        "cloud.secrets={HF_TOKEN: sk-BARE}",
        "cloud.secrets=sk-BARE",
        "cloud.secrets=[sk-BARE]",
        "launch.secrets=sk-BARE",
        "launch.environment={WANDB_API_KEY: [sk-BARE]}",
        "launch.environment.WANDB_API_KEY=[sk-BARE]",
    ],
)
def test_a_key_that_was_typed_bare_is_not_repeated(setting: str) -> None:
    with pytest.raises(WrongInput) as refused:
        load_recipe((), ["name=x", "data.train=[{source: y}]", setting], environ={}, dotenv=None)
    assert "BARE" not in str(refused.value)
    assert f"`{setting.partition('=')[0]}=...` on the command line" in str(refused.value)


def test_a_bucket_is_understood_by_its_address() -> None:
    given = ["name=x", "data.train=[{source: y}]", "cloud.bucket=gs://some-bucket/"]
    assert load_recipe((), given, environ={}, dotenv=None).cloud.bucket == "some-bucket"
    with pytest.raises(WrongInput, match=r"cloud\.bucket"):
        load_recipe((), [*given, "cloud.bucket=gs://b/folder"], environ={}, dotenv=None)


@pytest.mark.parametrize("key", ["2team", "_team", "Ärzte", ""])
def test_a_label_that_google_would_refuse_is_refused_as_it_is_read(key: str) -> None:
    given = ["name=x", "data.train=[{source: y}]"]
    labels = load_recipe((), [*given, "cloud.labels={team: a, Cost-2: b}"], environ={}, dotenv=None)
    assert labels.cloud.labels == {"team": "a", "Cost-2": "b"}
    with pytest.raises(WrongInput, match=f"key '{key}' must begin with a letter"):
        load_recipe((), [*given, f"cloud.labels={{'{key}': a}}"], environ={}, dotenv=None)


@pytest.mark.parametrize("value", [8, {}])
def test_a_section_that_is_replaced_leaves_no_origins_below(value: Any) -> None:
    values = Values()
    set_value(values, ("train", "optimizer", "lr"), 1.0, "a.yaml:3")
    set_value(values, ("train", "optimizer"), value, "b.yaml:7")
    assert values.origins[("train", "optimizer")] == "b.yaml:7"
    assert ("train", "optimizer", "lr") not in values.origins
    assert values.origin(("train", "optimizer", "lr")) == "b.yaml:7"


def test_a_share_in_place_of_sources_is_told_how_to_be_set() -> None:
    given = ["name=x", "data.train=[{source: y}]", "data.validation=[{source: z}]"]
    with pytest.raises(WrongInput, match=r"in its place: `data\.validation=\{fraction: 0\.1\}`"):
        load_recipe((), [*given, "data.validation.fraction=0.1"], environ={}, dotenv=None)
    whole = [*given, "data.validation={fraction: 0.1}"]
    assert load_recipe((), whole, environ={}, dotenv=None).data.validation.fraction == 0.1
