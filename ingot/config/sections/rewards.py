"""The knobs of a reward: one section for each kind, used wherever a recipe lists rewards."""

# ruff: noqa: RUF012 (pydantic copies a mutable default for each section)

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ingot.config.doors import REWARDS
from ingot.config.section import ByKind, FreeValues, KindSettings, Positive

Seconds = Annotated[float, Field(gt=0, le=3600)]


class RewardSettings(KindSettings):
    """What every reward says of itself beside its knobs.

    `implementation(settings)` returns a function of an `ingot.rewards.protocol.Sample` that gives
    its value, or of a list of them where `batched` is set. If the implementation has an attribute
    `check`, `check(settings)` is called before a training starts and raises WrongInput for what
    cannot work on this machine.
    """

    where: ClassVar[Literal["here", "threads", "process"]] = "process"
    """Where it computes: `here`, if it is fast, cannot hang and cannot crash; in `threads`, if it
    waits for something else and keeps `timeout` itself; else in a `process` of its own, which is
    killed at `timeout`.
    """
    batched: ClassVar[bool] = False
    """Whether it is given the samples of a batch together; `here` only."""
    kind: str
    """Which reward."""
    name: str | None = None
    """Its name in logs; the kind if empty."""
    weight: float = 1.0
    """What its value is multiplied by in the sum of all rewards; may be negative."""
    on_failure: float = 0.0
    """What counts as its value where it fails, before the weight."""
    timeout: Seconds = 10.0
    """Seconds that one try may take."""
    retries: Annotated[int, Field(ge=0, le=20)] = 0
    """How often it is tried again on a sample where that may help: its process died, or a server
    does not answer.
    """
    at_once: Positive = 4
    """How many samples are scored at the same time, each in a process or thread of its own."""

    @model_validator(mode="after")
    def _elsewhere(self) -> RewardSettings:
        """Refuse bounds of a process or thread, and tries after its failure, for what is computed
        without one. A package's reward may ask for another try wherever it is computed.
        """
        bounds = ("timeout", "at_once", *["retries"] * (self.kind in REWARDS.built_in))
        for knob in bounds if self.where == "here" else ():
            if getattr(self, knob) != type(self).model_fields[knob].default:
                raise ValueError(
                    f"{knob} {getattr(self, knob):g} is for rewards that a process or thread of"
                    f" their own computes, and {self.kind} is computed where training is; remove it"
                )
        return self

    @property
    def label(self) -> str:
        """Its name in logs."""
        return self.name or self.kind

    @property
    def needs_reference(self) -> bool:
        """Whether it needs a reference: what the last trained assistant turn of a chat says."""
        return False

    @property
    def reads_reference(self) -> bool:
        """Whether its value may depend on the reference, needed or not."""
        return True

    @property
    def files(self) -> list[str]:
        """The files and model folders that decide about its value beside its knobs."""
        return []


class ExactReward(RewardSettings):
    """1 if the answer is the reference, else 0. Both are normalised in the same way, in the order
    of the knobs.
    """

    implementation = "ingot.rewards.text:Exact"
    where = "here"

    kind: Literal["exact"]
    """Which reward."""
    after: Annotated[str, Field(min_length=1)] | None = None
    """Compare what follows the last occurrence of this text, such as `####` or `Answer:`. An answer
    without it has the value 0; a reference without it counts whole.
    """
    unicode: Literal["none", "NFC", "NFKC"] = "NFC"
    """Unicode normalisation: NFC makes equal what looks equal, NFKC also what means the same."""
    ignore_case: bool = False
    """Compare without case."""
    ignore_punctuation: bool = False
    """Leave out ASCII punctuation."""
    ignore_articles: bool = False
    """Leave out the words a, an and the, as SQuAD's exact match does."""
    whitespace: Literal["keep", "strip", "collapse"] = "strip"
    """`strip` it at both ends; `collapse` also makes each run of it one space."""

    @property
    def needs_reference(self) -> bool:
        return True


class NumericReward(RewardSettings):
    """1 if the answer's number is the reference's, else 0: the figure of lm-evaluation-harness'
    task gsm8k, whose filters and comparison these are.
    """

    implementation = "ingot.rewards.text:Numeric"
    where = "here"

    kind: Literal["numeric"]
    """Which reward."""
    extract: Literal["strict", "flexible"] = "strict"
    """`strict`: the first number after `#### `. `flexible`: the last number of the answer, wherever
    it stands.
    """
    tolerance: Annotated[float, Field(ge=0)] | None = None
    """Compare as numbers, which may differ by so much; 0: 42 is 42.0. Empty: as texts without
    commas, `$` and a full stop at the end, as the harness does.
    """

    @property
    def needs_reference(self) -> bool:
        return True


class RegexReward(RewardSettings):
    """1 if a regular expression (Python's `re`) matches the answer, else 0; with `group`, if what
    the group matched is the reference. A pattern that takes too long is stopped.
    """

    implementation = "ingot.rewards.isolated:Regex"

    kind: Literal["regex"]
    """Which reward."""
    pattern: str
    """The regular expression, such as `<think>.*</think>\\s*<answer>(.*)</answer>`."""
    match: Literal["search", "whole"] = "search"
    """Whether it matches somewhere in the answer, or the `whole` of it without whitespace at its
    ends.
    """
    flags: list[Literal["ignore_case", "multiline", "dotall"]] = ["dotall"]
    """`ignore_case`; `multiline`: ^ and $ match at lines; `dotall`: a dot matches line breaks."""
    group: Annotated[int, Field(ge=0)] | str | None = None
    """Number or name of the group that is compared with the reference, both without whitespace at
    their ends. Empty: that it matches is enough.
    """
    timeout: Seconds = 2.0
    """Seconds that one answer may take."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"is no regular expression ({error}); mend it") from None
        return pattern

    @model_validator(mode="after")
    def _has_group(self) -> RegexReward:
        compiled = re.compile(self.pattern)
        groups = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in groups:
            raise ValueError(
                f"group {self.group!r} is not in the pattern, which has"
                f" {', '.join(map(str, groups))}; name one of them"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.group is not None

    @property
    def reads_reference(self) -> bool:
        return self.needs_reference


class JsonSchemaReward(RewardSettings):
    """1 if the answer is JSON that a JSON Schema allows, else 0; needs `ingot[json-schema]`."""

    implementation = "ingot.rewards.isolated:JsonSchema"

    kind: Literal["json_schema"]
    """Which reward."""
    file: str | None = None
    """JSON file with the schema; empty: each sample's reference is its schema. References to other
    files or addresses are not followed.
    """
    block: bool = False
    """Whether the JSON is the answer's last fenced code block without a language or with `json`,
    rather than the whole answer; an answer without one has the value 0.
    """
    timeout: Seconds = 5.0
    """Seconds that one answer may take: a schema may have patterns."""

    @property
    def needs_reference(self) -> bool:
        return self.file is None

    @property
    def reads_reference(self) -> bool:
        return self.needs_reference

    @property
    def files(self) -> list[str]:
        return [self.file] if self.file else []


class PythonReward(RewardSettings):
    """A function of yours. It runs in processes of its own, with your environment and rights: it is
    trusted, and only kept from hanging or ending the training.
    """

    implementation = "ingot.rewards.isolated:Python"

    kind: Literal["python"]
    """Which reward."""
    function: Annotated[str, Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")]
    """`package.module:name` or `path/to/file.py:name`. It is called with an
    `ingot.rewards.protocol.Sample` (`prompt`, `answer`, `reference`, `finished`, `alone`) and
    returns a number.
    """
    arguments: FreeValues = {}
    """Further arguments by name: what JSON can hold, so that it is the same on every machine."""
    retries: Annotated[int, Field(ge=0, le=20)] = 1
    """How often it is tried again on a sample where its process died."""

    @property
    def files(self) -> list[str]:
        place = self.function.rpartition(":")[0]
        return [place] if place.endswith(".py") else []


class HttpReward(RewardSettings):
    """What a server answers to `POST` of the sample as JSON: `{"prompt", "answer", "reference",
    "finished", "alone"}` in, a number or an object with one out.
    """

    implementation = "ingot.rewards.http:Http"
    where = "threads"

    kind: Literal["http"]
    """Which reward."""
    url: Annotated[str, Field(pattern=r"^https?://[^\s]+$")]
    """The server's address."""
    field: str = "reward"
    """The key of the number where the server answers with an object."""
    key_variable: str | None = None
    """Environment variable with a key, which is sent as `Authorization: Bearer KEY`."""
    timeout: Seconds = 30.0
    """Seconds that one request may take, from connecting to the last byte."""
    retries: Annotated[int, Field(ge=0, le=20)] = 3
    """How often a request is sent again, after 0.5, 1, 2, ... seconds, where the server does not
    answer, is busy (408, 425, 429) or fails (5xx). Any other status is final, 3xx too: no redirect
    is followed.
    """
    at_once: Positive = 16
    """Requests under way at the same time."""


class ClassifierReward(RewardSettings):
    """How probable a classifier thinks a class: a model that ingot trained with `objective.kind:
    classify`, or any that `ingot serve` opens as one. Or the score of a reward model
    (`objective.kind: reward`), which reads prompt and answer as a chat by its own template.
    """

    implementation = "ingot.serve.native.reward:ClassifierScore"
    where = "here"
    batched = True

    kind: Literal["classifier"]
    """Which reward."""
    model: str
    """Model folder, or the folder of the run that made it."""
    class_name: str | None = None
    """The class whose probability, from 0 to 1, is the value; empty for a reward model, whose score
    is the value as it is.
    """
    reads: Literal["answer", "prompt and answer"] = "answer"
    """What a classifier is shown; a prompt is followed by an empty line. A reward model always
    reads both.
    """
    batch: Positive = 16
    """Texts that are classified together."""

    @property
    def reads_reference(self) -> bool:
        return False

    @property
    def files(self) -> list[str]:
        return [self.model]


class LengthReward(RewardSettings):
    """1 if the answer is neither too short nor too long, else 0, with a slope between if wanted."""

    implementation = "ingot.rewards.text:Length"
    where = "here"

    kind: Literal["length"]
    """Which reward."""
    unit: Literal["characters", "words"] = "words"
    """What is counted; words are what whitespace divides."""
    least: Annotated[int, Field(ge=0)] = 0
    """The fewest that have the value 1."""
    most: Annotated[int, Field(ge=0)] | None = None
    """The most that have the value 1; empty: no limit."""
    margin: Annotated[int, Field(ge=0)] = 0
    """With so many fewer or more the value is still above 0, to which it falls in a straight line:
    with 2 by 2/3, 1/3 and 0.
    """

    @model_validator(mode="after")
    def _some_length_is_right(self) -> LengthReward:
        if self.most is not None and self.least > self.most:
            raise ValueError(
                f"least {self.least} is more than most {self.most}, so that no answer can have the"
                " value 1; swap them, or remove one"
            )
        return self

    @property
    def reads_reference(self) -> bool:
        return False


class CodeReward(RewardSettings):
    """1 if the answer's Python code passes the tests of the reference, else 0.

    The tests are Python too: `assert` statements, calls such as `check(f)`, functions `test_...`;
    they may use the standard library. Code and tests run in two sandboxes (namespaces, seccomp,
    limits; no network, files, environment or other processes), and what the tests want of the code
    is asked of its sandbox, so that it can forge no verdict. Code that does not end in time is a
    wrong answer. Linux only: where the kernel gives no sandbox, a training is refused.
    """

    implementation = "ingot.rewards.code:Code"
    where = "threads"

    kind: Literal["code"]
    """Which reward."""
    block: Literal["first", "last", "all", "none"] = "last"
    """Which fenced code blocks of the answer run; an answer without any has the value 0. `none`:
    the whole answer is code.
    """
    partial: bool = False
    """Give the share of the tests that hold, rather than 1 for all and 0 for less."""
    memory_mib: Annotated[int, Field(ge=64)] = 256
    """Memory of the code, and of the tests, in MiB."""
    disk_mib: Annotated[int, Field(ge=1)] = 16
    """What the code may write into its `/tmp`, in MiB."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 16
    """Threads that the code may have. It can start no process."""
    retries: Annotated[int, Field(ge=0, le=20)] = 2
    """How often it is tried again where the sandbox did not start."""

    @property
    def needs_reference(self) -> bool:
        return True


Reward = Annotated[RewardSettings, ByKind(REWARDS, "exact")]
