"""`ingot show mask`: the first examples as the model will see them, what is trained set off, and what usually goes wrong counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ingot.base.errors import EXIT_DONE, WrongInput
from ingot.base.markers import read_marker
from ingot.base.storage import open_read
from ingot.cli.arguments import read_recipe
from ingot.cli.look import console
from ingot.config.recipe import Recipe
from ingot.data.chats import Message, from_messages
from ingot.data.documents import Shares
from ingot.data.items import Item
from ingot.data.ranges import ranges, read_range
from ingot.data.raw import MANIFEST, open_raw
from ingot.data.readers import read_items
from ingot.data.records import encode_documents
from ingot.data.sources import find_source, is_local
from ingot.data.wanted import Wanted
from ingot.tokenizers.chat import encode_chats, end_of_turn
from ingot.tokenizers.load import load_tokenizer, resolve_tokenizer
from ingot.tokenizers.templates import find_template, with_template
from ingot.tokenizers.tokenizer import Tokenizer

EXAMPLES = 3
AUDITED = 1000
BEGIN, END = "⟦", "⟧"
Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.uint8]


def show_mask(arguments: Sequence[str], examples: int = EXAMPLES) -> int:
    """Print `examples` examples of a recipe's training data with what is trained set off, then the audit of the first AUDITED.

    Raises:
        WrongInput: there is no tokenizer or template yet, or the sources cannot be read without `ingot ingest`.
    """
    recipe = read_recipe(arguments)
    tokenizer, out = _tokenizer(recipe), console()
    texts = list(islice(_texts(recipe), AUDITED))
    if not texts:
        raise WrongInput("the first sources of data.train hold no document that can be read; run `ingot ingest`, which says why")
    chats = recipe.objective.kind == "sft"
    audit = audit_chats(tokenizer, [from_messages(text) for text in texts]) if chats else audit_documents(tokenizer, texts)
    for number, example in enumerate(audit.examples[:examples], 1):
        out.print(Text(f"--- example {number}, {len(example.ids):,} tokens", "bold"))
        out.print(in_words(tokenizer, example, plain=not out.is_terminal or out.no_color), soft_wrap=True)
    _legend(out)
    out.print(table(audit, tokenizer, recipe.data.seq_len, chats=chats))
    for reason, count in audit.refused.items():
        out.print(Text(f"{count:,} refused: {reason}", "red"), soft_wrap=True)
    return EXIT_DONE


@dataclass(frozen=True)
class Example:
    """One chat or document. `turns`: how often the assistant speaks in it."""

    ids: Ids
    mask: Mask
    turns: int = 0


@dataclass(frozen=True)
class Audit:
    """Examples, and those that the template refused, by reason."""

    examples: list[Example]
    refused: Counter[str] = field(default_factory=Counter)

    def leading(self, token: int | None) -> Counter[int]:
        """How many times `token` stands at the very beginning -> in how many examples."""
        return Counter(next((place for place, found in enumerate(example.ids) if found != token), len(example.ids)) for example in self.examples)

    def ended(self, token: int | None) -> int:
        """How often `token` is trained."""
        return sum(int(((example.ids == token) & (example.mask == 1)).sum()) for example in self.examples)

    def without_targets(self, seq_len: int | None = None) -> int:
        """Examples of which nothing is trained, cut to `seq_len`; the first token is never predicted."""
        return sum(not example.mask[1:seq_len].any() for example in self.examples)


def audit_chats(tokenizer: Tokenizer, chats: Sequence[Sequence[Message]]) -> Audit:
    """Encode chats; those that cannot be are counted by reason."""
    try:
        flat, mask, lengths = encode_chats(tokenizer, chats, tokenizer.encode_batch)
    except WrongInput as error:
        if len(chats) == 1:
            return Audit([], Counter([str(error)]))
        if tokenizer.template is None:
            raise
        each = [audit_chats(tokenizer, [chat]) for chat in chats]
        return Audit([example for audit in each for example in audit.examples], sum((audit.refused for audit in each), Counter[str]()))
    turns = [sum(message["role"] == "assistant" for message in chat) for chat in chats]
    return Audit([Example(ids, trained, count) for ids, trained, count in zip(*_cut(lengths, flat, mask), turns, strict=True)])


def audit_documents(tokenizer: Tokenizer, texts: Sequence[str]) -> Audit:
    """Encode documents as pretraining does: all of it is trained."""
    flat, lengths = encode_documents(tokenizer, texts)
    return Audit([Example(ids, np.ones(len(ids), np.uint8)) for ids in _cut(lengths, flat)[0]])


def _cut(lengths: npt.NDArray[np.int64], *columns: npt.NDArray[Any]) -> list[list[npt.NDArray[Any]]]:
    ends = np.cumsum(lengths)[:-1]
    return [np.split(column, ends) for column in columns]


def _tokenizer(recipe: Recipe) -> Tokenizer:
    """The recipe's tokenizer with its template; a trained one is there when `prepare` has run."""
    if recipe.trains_tokenizer:
        if not (recipe.folder.tokenizer / "tokenizer.json").is_file():
            raise WrongInput(f"the tokenizer is trained by `ingot prepare`, and {recipe.folder.tokenizer} holds none yet; run that first")
        return load_tokenizer(recipe.folder.tokenizer)
    tokenizer, template = load_tokenizer(resolve_tokenizer(recipe)), recipe.tokenizer.template
    return tokenizer if template is None else with_template(tokenizer, find_template(template))


def _texts(recipe: Recipe) -> Iterator[str]:
    """Training documents as ingested; where nothing is yet, straight from the sources."""
    if read_marker(recipe.folder.raw, MANIFEST) is not None:
        raw, shares = open_raw(recipe), Shares.of(recipe.data)
        for task in (task for task in ranges(raw) if task.split == "train" and task.kind != "tokens"):
            for documents in read_range(raw.folder, task):
                for doc_id, text in zip(documents.column("doc_id").to_pylist(), documents.column("text").to_pylist(), strict=True):
                    if shares.split(task.split, doc_id) == "train":
                        yield text
        return
    for number, source in enumerate(recipe.data.train):
        if not is_local(source) or source.source.startswith("megatron:"):
            raise WrongInput(f"data.train[{number}] {source.source} is not a file here; run `ingot ingest` first")
        wanted = Wanted.of(source, chat=recipe.objective.kind == "sft")
        for file in find_source(source, f"data.train[{number}]"):
            with open_read(file.path) as stream:
                yield from (item.text for item in read_items(stream, file.path, file.format, wanted) if isinstance(item, Item))


def in_words(tokenizer: Tokenizer, example: Example, *, plain: bool) -> Text:
    """An example as text: special tokens visible, trained tokens in colour, or between brackets where there is none."""
    special, text = set(tokenizer.special_ids.values()), Text()
    pairs = [(int(token), bool(trained)) for token, trained in zip(example.ids, example.mask, strict=True)]
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        text.append(BEGIN if plain and trained else "")
        for is_special, tokens in groupby((token for token, _ in run), key=lambda token: token in special):
            style = ("green" if trained else "") if not is_special else ("bold green" if trained else "magenta")
            text.append(tokenizer.decode(list(tokens), skip_special=False), style)
        text.append(END if plain and trained else "")
    return text


def _legend(out: Console) -> None:
    if out.is_terminal and not out.no_color:
        out.print(Text.assemble("--- ", ("trained", "green"), ", not trained, ", ("special tokens", "magenta"), " ", ("and trained ones", "bold green")))
    else:
        out.print(f"--- {BEGIN}trained{END}, not trained")


def table(audit: Audit, tokenizer: Tokenizer, seq_len: int, *, chats: bool) -> Table:
    """The audit: what was looked at, and in red what is wrong."""
    made = Table("what", "found", title="audit", title_justify="left")
    examples, tokens = audit.examples, sum(len(example.ids) for example in audit.examples)
    trained = sum(int(example.mask.sum()) for example in examples)
    made.add_row("looked at", f"{len(examples):,} {'chats' if chats else 'documents'}, {tokens:,} tokens")
    made.add_row("tokenizer", Text(f"{tokenizer.identity()}, {tokenizer.where}"))
    made.add_row("template", tokenizer.template_identity or "none")
    made.add_row("BOS at the beginning", _bos(audit, tokenizer))
    made.add_row(*(_end_of_turn if chats else _end_of_document)(audit, tokenizer))
    made.add_row("trained", f"{trained / max(1, tokens):.1%} of the tokens")
    empty, long = audit.without_targets(), [example for example in examples if len(example.ids) > seq_len]
    made.add_row("without anything trained", Text(f"{empty:,}", "red" if empty else ""))
    if chats:
        lost = audit.without_targets(seq_len) - empty
        told = f"{len(long):,} of {len(examples):,}; of these {lost:,} lose all that is trained"
        made.add_row(f"longer than data.seq_len={seq_len:,}", Text(told, "red" if lost else "yellow" if long else ""))
    return made


def _bos(audit: Audit, tokenizer: Tokenizer) -> Text:
    if tokenizer.special.bos is None:
        return Text("the tokenizer has no BOS")
    counts = audit.leading(tokenizer.special.bos)
    double = sum(count for times, count in counts.items() if times > 1)
    words = [f"{name} in {count:,}" for name, count in (("none", counts[0]), ("one", counts[1]), ("two or more", double)) if count]
    return Text(", ".join(words), "red" if double else "")


def _end_of_document(audit: Audit, tokenizer: Tokenizer) -> tuple[str, Text]:
    ended = sum(bool(len(example.ids)) and int(example.ids[-1]) == tokenizer.special.eos for example in audit.examples)
    return "EOS at the end", Text(f"trained in {ended:,} of {len(audit.examples):,} documents", "red" if ended < len(audit.examples) else "green")


def _end_of_turn(audit: Audit, tokenizer: Tokenizer) -> tuple[str, Text]:
    end, turns = end_of_turn(tokenizer), sum(example.turns for example in audit.examples)
    if end is None:
        return "end-of-turn token", Text("none: the template writes no special token after what the assistant says, so a model does not learn to stop", "red")
    ended = audit.ended(tokenizer.special_ids[end])
    told = f"{end} trained in {ended:,} of {turns:,} assistant turns"
    if tokenizer.special_ids[end] != tokenizer.special.eos:
        told += f"; it is not the tokenizer's EOS ({tokenizer.named.get('eos_token', 'none')}), so generation must be told to stop at it"
    return "end-of-turn token", Text(told, "red" if ended < turns else "yellow" if "must be told" in told else "green")
