"""What counts as passed: honest code in every form, forged verdicts in every form."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ingot.config.sections.rewards import CodeReward
from ingot.rewards.code import PYTHON, Code, code_of, fenced_blocks
from ingot.rewards.protocol import RewardFailed, Sample
from ingot.rewards.sandbox.enclose import DESCRIPTORS, gaps
from ingot.rewards.sandbox.run import SandboxLimits, Verdict, run_trial
from tests.rewards.crowd import many_open_files
from tests.rewards.sandbox.kernel import kernel_isolates

if not kernel_isolates():
    pytest.skip("the kernel gives no namespaces; not root, or a container", allow_module_level=True)

HONEST = {
    "plain data": (
        "def f(x): return [x, (x, {1: 'a'}), {x}, None, True, 1.5, b'\\xff', 10**40, range(x)]",
        "assert f(2) == [2, (2, {1: 'a'}), {2}, None, True, 1.5, b'\\xff', 10**40, range(2)]\n"
        "assert isinstance(f(2)[1], tuple) and f(2)[4] is True",
    ),
    "numbers that JSON has not": (
        "def f(): return [float('nan'), float('inf'), 2j]",
        "import math\nn, i, c = f()\nassert math.isnan(n) and i == math.inf and c == 2j",
    ),
    "classes of the standard library": (
        "from collections import *\nfrom fractions import Fraction\nfrom decimal import Decimal\n"
        "P = namedtuple('P', 'x y')\n"
        "def f(): return [Counter('aa'), OrderedDict(b=1), P(1, 2), Fraction(1, 3), Decimal('0.1'),"
        " deque([1])]",
        "from fractions import Fraction\nfrom decimal import Decimal\nfrom collections import deque\n"
        "assert f() == [{'a': 2}, {'b': 1}, (1, 2), Fraction(1, 3), Decimal('0.1'), deque([1])]",
    ),
    "as many threads at once as there may be": (
        "import threading\n"
        "def meet(count):\n"
        "    met = threading.Barrier(count)\n"
        "    for _ in range(count - 1): threading.Thread(target=met.wait, daemon=True).start()\n"
        "    return met.wait() < count",
        f"assert meet({SandboxLimits().threads})",
    ),
    "an object with state": (
        "class Stack:\n"
        "    def __init__(self, *items): self.items = list(items)\n"
        "    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n"
        "    def __len__(self): return len(self.items)\n"
        "    def __eq__(self, other): return self.items == other.items\n"
        "    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self, key): return self.items[key]",
        "s = Stack(1)\ns.push(2)\nassert len(s) == 2 and s.items == [1, 2] and s[0] == 1\n"
        "assert s == Stack(1, 2) and s != Stack(1)\nassert list(s) == [1, 2] and 2 in s\n"
        "assert s.pop() == 2\nassert s.pop() == 1 and not s",
    ),
    "an exception": (
        "class Odd(Exception): pass\ndef f(x):\n    if x: raise ValueError('no')\n    raise Odd('x')",
        "def test_value():\n    try: f(1)\n    except ValueError as error: assert str(error) == 'no'\n"
        "    else: assert False\n"
        "def test_odd():\n    try: f(0)\n    except Odd: pass\n    else: assert False",
    ),
    "objects that point to each other": (
        "class Node:\n    def __init__(self, value, next=None): self.value, self.next = value, next\n"
        "def length(node):\n    count = 0\n    while node: count, node = count + 1, node.next\n"
        "    return count",
        "a = Node(1)\na.next = Node(2)\nassert length(a) == 2 and a.next is a.next\n"
        "a.value = 5\nassert a.value == 5\ndel a.value\nassert not hasattr(a, 'value')",
    ),
    "operators": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __repr__(self): return f'V({self.x})'\n"
        "    def __sub__(self, other): return V(self.x - other.x)\n"
        "    def __mul__(self, other): return self.x * other.x\n    def __neg__(self): return V(-self.x)\n"
        "    def __abs__(self): return abs(self.x)\n    def __int__(self): return self.x\n"
        "    def __le__(self, other): return self.x <= other.x\n    def __hash__(self): return self.x\n"
        "    def __lt__(self, other): return self.x < other.x\n"
        "    def __eq__(self, other): return self.x == other.x\n"
        "    def __format__(self, how): return how\n    def __delitem__(self, key): self.x = key\n"
        "    def __enter__(self): return self\n    def __exit__(self, *error): self.x = 0",
        "v = V(3)\nassert repr(v - V(1)) == 'V(2)' and v * V(2) == 6 and (-v).x == -3\n"
        "assert abs(V(-4)) == 4 and int(v) == 3 and V(1) <= v and f'{v:a}' == 'a' and v >= V(3)\n"
        "assert isinstance(v, V) and not isinstance(1, V) and len({V(1), V(1)}) == 1\n"
        "assert [each.x for each in sorted([V(2), V(1)])] == [1, 2]\ndel v[7]\nassert v.x == 7\n"
        "with v as same:\n    assert same.x == 7\nassert v.x == 0",
    ),
    "what is changed in place": (
        "class S:\n    def __init__(self): self.items, self.table = [], {}\n"
        "    def size(self): return len(self.items) + len(self.table)\n"
        "COUNT = [0]\nCALLS = 0\ndef f(a, reverse=False):\n    global CALLS\n    CALLS += 1\n"
        "    a.sort(reverse=reverse)\n    return COUNT[0]",
        "a = [2, 1]\nf(a=a)\nassert a == [1, 2] and CALLS == 1\nf(a, reverse=True)\n"
        "assert a == [2, 1] and CALLS == 2\ns = S()\ns.items.append(1)\ns.table['b'] = 2\n"
        "assert s.size() == 2\nCOUNT[0] = 9\nassert f([]) == 9",
    ),
    "exceptions of exceptions": (
        "class Z(ValueError): pass\nclass B(Z): pass\ndef f(): raise B('no')",
        "assert issubclass(B, Z) and issubclass(Z, ValueError)\ndef test_a():\n    try: f()\n    except ValueError: return\n"
        "    assert False",
    ),
    "names of the tests": (
        "total = 0\npatch = 0\ndef f(x):\n    global total\n    total += x\n    return x * x",
        "total = 0\nfor x in (2, 3):\n    total += f(x)\nassert total == 13\npatch = [1]\n"
        "assert patch[0] == 1",
    ),
    "what is changed meanwhile": (
        "CALLS = 0\ndef f():\n    global CALLS\n    CALLS += 1",
        "def test_calls():\n    f()\n    f()\n    assert CALLS == 2",
    ),
    "a long list of an object": (
        "class A:\n    def __init__(self): self.items = list(range(4000))\ndef f(x): return x",
        "count = 0\nitems = A().items\nfor x in items:\n    count += f(x) == x\nassert count == 4000",
    ),
    "an enumeration": (
        "import enum\nclass C(enum.Enum):\n    R = 1\ndef f(): return C.R",
        "assert f() is C.R and f() == C.R and f().value == 1",
    ),
    "a generator": ("def f():\n    yield 1\n    yield 2", "assert list(f()) == [1, 2]"),
    "a list that it changes": ("def f(a): a.sort()", "a = [2, 1]\nf(a)\nassert a == [1, 2]"),
    "HumanEval's form": (
        "def add(a, b): return a + b",
        "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    for n in range(9):"
        "\n        assert candidate(n, b=n) == 2 * n\ncheck(add)",
    ),
    "a constant": ("ANSWER = 42", "assert ANSWER == 42"),
    "a name of its own": ("def max(a): return 1\ndef f(a): return max(a)", "assert f([2]) == 1"),
    "an exit at its end": ("def f(): return 1\nimport sys\nsys.exit(0)", "assert f() == 1"),
    "modules": (
        "import re, json, math, random, hashlib, zlib, decimal, itertools, heapq, datetime, typing\n"
        "import statistics, dataclasses, enum, string, bisect, functools, asyncio, unittest\n"
        "def f(): return zlib.crc32(hashlib.sha256(b'a').digest())",
        "import hashlib, zlib\nassert f() == zlib.crc32(hashlib.sha256(b'a').digest())",
    ),
}


@pytest.mark.drawn(keep=7)
@pytest.mark.parametrize("name", HONEST)
def test_honest_code_passes(name: str) -> None:
    verdict = run_trial(*HONEST[name], SandboxLimits(timeout=120))
    assert verdict is not None
    assert verdict.whole
    assert verdict.passed == verdict.tests > 0


@pytest.mark.parametrize(
    ("program", "tests", "reason"),
    [
        (
            "def f(): print(1)",
            "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as"
            " out:\n    f()\nassert out.getvalue()",
            "redirect_stdout, which does not reach",
        ),
        ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1", "asyncio"),
        ("def f(): 'd'", "assert f.__doc__ == 'd'", "__doc__"),
        (
            "class V:\n    def __mul__(self, by): return by",
            "assert V() * 6 == 6",
            "__mul__ between plain data and an object",
        ),
        (
            "import collections\nP = collections.namedtuple('P', 'x')",
            "assert isinstance(P(1), P)",
            "the class of plain data",
        ),
    ],
)
def test_what_cannot_be_judged_is_no_wrong_answer(program: str, tests: str, reason: str) -> None:
    with pytest.raises(RewardFailed, match=reason):
        run_trial(program, tests, SandboxLimits(timeout=30))


def test_a_value_that_cannot_be_set_is_not_set() -> None:
    program = "class A:\n    @property\n    def limit(self): return 1"
    verdict = run_trial(
        program, "a = A()\na.limit = 5\nassert a.limit == 5", SandboxLimits(timeout=30)
    )
    assert verdict is not None
    assert not verdict.passed


FRAMES = """
import json, os, struct
def frame(message):
    data = json.dumps(message).encode()
    return struct.pack(">I", len(data)) + data
"""
FORGED = {
    "it prints and exits": "print('passed')\nprint('1 passed in 0.01s')\nimport sys\nsys.exit(0)",
    "it ends the process": "import os\nos._exit(0)",
    "it ends when it is called": "import os\ndef f(x): os._exit(0)",
    "it raises SystemExit": "def f(x): raise SystemExit(0)",
    "an equal to everything": (
        "class Yes:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False"
        "\n    def __bool__(self): return True\n    def __sub__(self, other): return self\n"
        "    def __rsub__(self, other): return self\n    def __lt__(self, other): return True\n"
        "    def __abs__(self): return self\n    def __hash__(self): return hash(4)\n"
        "def f(x): return Yes()"
    ),
    "an integer that equals everything": (
        "class Yes(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 4\n"
        "def f(x): return Yes(1)"
    ),
    "its own abs": "def abs(x): return 0\ndef f(x): return 100",
    "a patched abs": "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 100",
    "its own math": (
        "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 100"
    ),
    "no AssertionError": "import builtins\nbuiltins.AssertionError = SystemExit\ndef f(x): return 5",
    "a trace function": (
        "import sys\nsys.settrace(lambda frame, *_: frame.f_globals.clear())\ndef f(x): return 5"
    ),
    "frames of who calls": (
        "import sys, gc\ndef f(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        for name in list(frame.f_globals):\n"
        "            if name in ('passed', 'tests', 'whole', 'run_judge', '_holds'):\n"
        "                frame.f_globals[name] = lambda *a: True\n        frame = frame.f_back\n"
        "    return 5"
    ),
    "a verdict to every descriptor": FRAMES
    + "for each in range(3, 64):\n    for message in ('started', {'passed': 9, 'tests': 9, 'whole':"
    " True}):\n        try: os.write(each, frame(message))\n        except OSError: pass\n"
    "os._exit(0)",
    "replies of its own": FRAMES
    + "for each in range(3, 64):\n    for message in [{'value': True}] * 9 + [{'value': {'h': 0}}] * 9:"
    "\n        try: os.write(each, frame(message))\n        except OSError: pass\nos._exit(0)",
    "handles and classes of its own": FRAMES
    + "for each in range(3, 64):\n    for message in [{'value': {'h': 0, 'exception': 'Exception'}}] *"
    " 9:\n        try: os.write(each, frame(message))\n        except OSError: pass\nos._exit(0)",
    "a message without an end": "import os\nfor each in range(3, 64):\n    try: os.write(each, b'\\xff"
    "\\xff\\xff\\xff' * 9)\n    except OSError: pass\nos._exit(0)",
    "a nest without an end": FRAMES
    + "for each in range(3, 64):\n    for message in ('[' * 99999, '[' * 900 + ']' * 900):\n"
    "        data = ('{\"value\": ' + message + '}').encode()\n"
    "        try: os.write(each, struct.pack('>I', len(data)) + data)\n"
    "        except OSError: pass\nos._exit(0)",
    "an item of everything": (
        "class Yes:\n    def __lt__(self, other): return True\n    def __gt__(self, other): return True\n"
        "    def __sub__(self, other): return 0\ndef f(x): return Yes()"
    ),
    "modules of the judge": (
        "import sys\nfor name, module in list(sys.modules.items()):\n"
        "    if 'judge' in name:\n        module._judge = lambda *a: {'passed': 9, 'tests': 9, 'whole':"
        " True}\n        module._holds = lambda *a: True\ndef f(x): return 5"
    ),
    "a file for the tests to import": (
        "for name in ('math', 'builtins', 'ast'):\n    open(f'/tmp/{name}.py', 'w').write('isclose ="
        " lambda *a: True')\ndef f(x): return 5"
    ),
}
TESTS = (
    "import math\nassert f(2) == 4\nassert abs(f(3) - 9) < 1e-9\nassert math.isclose(f(4), 16)\n"
)
TESTS += "assert f(5) in [25]\nassert f(6) in {36: 1}"


@pytest.mark.parametrize("name", FORGED)
def test_no_verdict_can_be_forged(name: str) -> None:
    verdicts = list(_verdicts(FORGED[name], TESTS))
    # Where one of them cannot be judged, which is no value either, no other may have passed.
    verdicts = verdicts or [
        verdict
        for test in TESTS.splitlines()[1:]
        for verdict in _verdicts(FORGED[name], f"import math\n{test}")
    ]
    assert all(not verdict.whole and verdict.passed == 0 for verdict in verdicts)


def _verdicts(answer: str, tests: str) -> Iterator[Verdict]:
    """The verdict, or none where the answer cannot be judged."""
    with contextlib.suppress(RewardFailed):
        verdict = run_trial(answer, tests, SandboxLimits(timeout=30))
        assert verdict is not None
        yield verdict


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        (
            "failures",
            "failures = 0\nfor x in (7, 8):\n    failures += f(x) != x * x\nassert failures == 0",
        ),
        ("good", "good = True\nfor x in (7, 8):\n    if f(x) != x * x: good = False\nassert good"),
        (
            "other",
            "try:\n    import math as other\nexcept ImportError: pass\nassert f(7) == 49 or other == 0",
        ),
    ],
)
def test_what_tests_count_is_their_own(name: str, tests: str) -> None:
    """An answer that has a name of theirs, and sets it while they run."""
    value = {"failures": 0, "good": True, "other": 0}[name]
    program = (
        f"import sys\n{name} = {value}\n"
        f"def spy(frame, event, arg): globals()['{name}'] = {value}\n"
        "sys.setprofile(spy)\ndef f(x): return -1"
    )
    verdict = run_trial(program, tests, SandboxLimits(timeout=30))
    assert verdict is not None
    assert not verdict.passed


def test_part_of_the_tests_is_a_share() -> None:
    found = run_trial("def f(x): return 4", "assert f(2) == 4\nassert f(3) == 9", SandboxLimits())
    assert found == Verdict(1, 2, whole=False)
    answer = "First:\n```python\ndef f(x): return 4\n```\nThat is it."
    sample = Sample("", answer, "assert f(2) == 4\nassert f(3) == 9")
    assert Code(CodeReward(kind="code"))(sample) == 0.0
    assert Code(CodeReward(kind="code", partial=True))(sample) == 0.5
    assert Code(CodeReward(kind="code"))(Sample("", "I cannot.", "assert f(2) == 4")) == 0.0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("assert (", "the tests are no Python"),
        ("def check(f): assert f(1)", "the tests test nothing"),
        ("assert 1 == 1", "the tests test nothing"),
        ("print(f(1))", "the tests test nothing"),
        ("import numpy\nassert f(1)", "the tests import numpy"),
        ("assert f(lambda x: x) == 1", "a test gives the answer a function"),
        ("class A(f): pass\nassert A()", "a test derives a class"),
    ],
)
def test_tests_that_prove_nothing_fail_and_do_not_pass(tests: str, reason: str) -> None:
    with pytest.raises(RewardFailed, match=reason):
        run_trial("class f:\n    def __init__(self, *a): pass", tests, SandboxLimits())


@pytest.mark.parametrize(
    ("answer", "block", "code"),
    [
        ("```python\na\n```\ntext\n```\nb\n```", "last", "b\n"),
        ("```python\na\n```\ntext\n```\nb\n```", "first", "a\n"),
        ("```py\na\n```\ntext\n```python3\nb\n```", "all", "a\n\nb\n"),
        ("```bash\nls\n```", "last", None),
        ("```json\n{}\n```\n```Python title=x\na\n```\n```text\nout\n```", "last", "a\n"),
        ("no code", "last", None),
        ("a = 1", "none", "a = 1"),
        ("```python\ncut off", "last", "cut off"),
        ("1. so:\n  ```python\n  a\n  ```\n", "last", "a\n"),
        ("so:\r\n```python\r\na\r\n```\r\nThat is it.", "last", "a\r\n"),
    ],
)
def test_code_blocks_are_found(answer: str, block: Any, code: str | None) -> None:
    assert code_of(answer, block) == code


@settings(max_examples=200, deadline=None)
@example("```\n" * 9)
@example("``` ```\n```py\n\t```")
@given(st.text(st.sampled_from("`pyton \n\ta=1~\r")))
def test_any_answer_has_code_or_none(answer: str) -> None:
    found = fenced_blocks(answer, PYTHON)
    assert all(line in answer for block in found for line in block.split())
    assert code_of(answer, "last") == (found[-1] if found else None)


def test_fences_without_end_take_linear_time() -> None:
    began = time.process_time()
    for piece in ("```\n", "```py\n", "` ", " ", "\n ", "```py\na\n  ```x\n"):
        fenced_blocks(piece * 40_000, PYTHON)
    assert time.process_time() - began < 10


def test_a_process_with_many_open_files_runs_tests() -> None:
    with many_open_files():
        assert run_trial("x = 1", "assert x == 1", SandboxLimits()) == Verdict(1, 1, whole=True)


def test_no_empty_range_of_descriptors_is_closed() -> None:
    """With pipes side by side above the sandbox's limit, 3.13 closed the second one as well."""
    assert gaps([0, 1, 2, 71, 70, 64]) == [(3, 64), (65, 70), (72, DESCRIPTORS)]
    assert gaps([0, 1, 2, 3, DESCRIPTORS + 5]) == [(4, DESCRIPTORS + 5)]


def test_a_limit_that_the_kernel_refuses_is_named() -> None:
    with pytest.raises(RewardFailed, match="OverflowError"):
        run_trial("x = 1", "assert x == 1", SandboxLimits(memory_mib=1 << 50))
