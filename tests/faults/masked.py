"""Faults of models that are asked for what is hidden of a text: what is hidden, what is asked for,
what it counts.
"""

from __future__ import annotations

from tests.faults.fault import Fault

MASKING = "ingot/data/batches/masking.py"
HIDING = "ingot/data/batches/hiding.py"
LOADER = "ingot/data/batches/loader.py"
SPANS = "ingot/data/batches/spans.py"
PLANNING = "ingot/data/packing/planning.py"
BY = "tests/data/batches/test_masking.py"
BY_SPANS = "tests/data/batches/test_spans.py"
BY_PACKED = "tests/models/hf/test_side_by_side.py"

FAULTS = [
    Fault(
        "masks-by-place-in-batch",
        LOADER,
        "places = [self._order.place(sample) for sample in samples]",
        "places = list(range(self._plan.per_rank))",
        "masks depend on the row of a batch, so that ranks and layouts see others",
        BY,
    ),
    Fault(
        "masks-the-same-in-each-pass",
        LOADER,
        "places = [self._order.place(sample) for sample in samples]",
        "places = indices.tolist()",
        "a text is masked alike each time that it is read",
        BY,
    ),
    Fault(
        "special-tokens-masked",
        MASKING,
        " & ~np.isin(ids, self.special)",
        "",
        "the frame of a text is hidden and asked for",
        BY,
    ),
    Fault(
        "unmasked-tokens-asked-for",
        MASKING,
        "return tokens, np.where(chosen, ids, IGNORE)",
        "return tokens, ids",
        "labels of tokens that were not chosen count: the model learns to copy",
        BY,
    ),
    Fault(
        "held-out-masks-by-seed",
        HIDING,
        "self.of_content(ids) if place is None",
        "self.of_sample(0) if place is None",
        "held-out texts are masked otherwise in another run, whose loss then does not compare",
        BY,
    ),
    Fault(
        "end-of-text-lost",
        PLANNING,
        "number = -(-lengths // self.seq_len) *",
        "number = lengths // self.seq_len *",
        "the last piece of each text is not trained on",
        BY,
    ),
    Fault(
        "masked-loss-per-micro-batch",
        "ingot/models/hf/models.py",
        "index_put((asked,), values).view(labels.shape)",
        "index_put((asked,), values / len(asked)).view(labels.shape)",
        "the loss of masked tokens is the mean of each rank and micro-batch",
        "tests/objectives/test_every_way.py",
    ),
    Fault(
        "embedding-exported-as-head",
        "ingot/models/hf/loading.py",
        'if places.get(tied.get(name, "")) is tensor:',
        "if False:",
        "an exported masked model has its embedding under the name of its head, where a classifier"
        " does not look for it",
        "tests/models/hf/test_types.py",
    ),
    Fault(
        "sentinels-in-another-order",
        SPANS,
        "number = self.sentinels[np.cumsum(begins & hidden) - 1]",
        "number = self.sentinels[::-1][np.cumsum(begins & hidden) - 1]",
        "the source has other sentinels than the target: which span is which cannot be learnt",
        BY_SPANS,
    ),
    Fault(
        "sentinels-sorted-by-id",
        "ingot/tokenizers/sentinels.py",
        "return tuple(found)",
        "return tuple(sorted(found))",
        "the first hidden span of a T5 is its last sentinel, another task than it was pretrained on",
        BY_SPANS,
    ),
    Fault(
        "spans-without-an-end",
        SPANS,
        "np.concatenate((before, target, after))",
        "np.concatenate((before, target))",
        "targets of hidden spans have no EOS, so that a served model never stops",
        BY_SPANS,
    ),
    Fault(
        "source-of-spans-without-a-frame",
        SPANS,
        "return self.framed(source), ",
        "return source, ",
        "the encoder reads no EOS, which it is given when it is served",
        BY_SPANS,
    ),
    Fault(
        "kept-and-hidden-spans-cut-alike",
        SPANS,
        "mix(key ^ np.uint64(2 * GOLDEN % CIRCLE))",
        "mix(key ^ np.uint64(GOLDEN))",
        "the sizes of kept and hidden spans depend on each other: few ways to cut a text are left",
        BY_SPANS,
    ),
    Fault(
        "last-span-lost",
        SPANS,
        'np.argsort(chance, kind="stable")[: count - 1]',
        'np.argsort(chance, kind="stable")[: count - 2]',
        "a text has fewer spans than its length and the figures say",
        BY_SPANS,
    ),
    Fault(
        "last-token-lost",
        PLANNING,
        "pieces[:, 2] += lacking",
        "pieces[:, 2] += 0",
        "a token is lost where the last piece of a text takes one from the piece before it",
        BY_SPANS,
    ),
    Fault(
        "pieces-as-long-as-the-source",
        PLANNING,
        "return room if spans is None else spans.longest(room)",
        "return room",
        "texts become shorter than data.seq_len once their spans are hidden: a tenth is padding",
        BY_SPANS,
    ),
    Fault(
        "whole-text-for-each-piece",
        "ingot/data/batches/samples.py",
        "column[record][begin : begin + size]",
        "column[record][begin:]",
        "a piece of a text is all that follows it too",
        BY_SPANS,
    ),
    Fault(
        "sentinels-left-out-of-answers",
        "ingot/tokenizers/sentinels.py",
        "if sentinels.isdisjoint(source):",
        "if True:",
        "a served model writes the spans without telling which is which",
        BY_SPANS,
    ),
    Fault(
        "words-masked-in-part",
        MASKING,
        "mix(key + self._words(ids) * np.uint64(GOLDEN))",
        "each",
        "objective.whole_word_mask does nothing",
        BY,
    ),
    Fault(
        "words-found-by-spaces-alone",
        "ingot/tokenizers/words.py",
        "cut = library.pre_tokenizer.pre_tokenize_str(text)",
        "cut = tokenizers.pre_tokenizers.WhitespaceSplit().pre_tokenize_str(text)",
        "words of byte-level tokenizers are found at other places than where the library cuts",
        BY,
    ),
    Fault(
        "masked-texts-see-each-other",
        "ingot/models/hf/models.py",
        "mask = (segments[:, :, None] == segments[:, None, :])[:, None]",
        "mask = (segments[:, :, None] * segments[:, None, :] >= 0)[:, None]",
        "masked texts side by side in a row see each other",
        BY_PACKED,
    ),
    Fault(
        "masked-texts-go-on-counting",
        "ingot/data/batches/samples.py",
        "[np.concatenate([np.arange(size) for size in row]) for row in sizes]",
        "[np.arange(sum(row)) for row in sizes]",
        "positions of a text depend on what stands before it in the row",
        BY_PACKED,
    ),
    Fault(
        "pieces-of-a-row-masked-alike",
        HIDING,
        "key = mix(key + np.uint64(number))",
        "key = mix(key)",
        "all texts of a row but the first are masked at the same places",
        BY_PACKED,
    ),
    Fault(
        "frames-of-pieces-not-counted",
        PLANNING,
        "best_fit(pieces[:, 2] + framing, self.seq_len + framing)",
        "best_fit(pieces[:, 2], self.seq_len)",
        "rows of several masked texts are longer than data.seq_len",
        BY_PACKED,
    ),
    Fault(
        "all-hidden-but-one",
        "ingot/data/batches/masking.py",
        "np.uint64(round(min(share, 1.0) * 2**53))",
        "np.uint64(round(min(share, 1.0 - 1e-3) * 2**53))",
        "of tokens that are all to become the mask token, one in a thousand stays to be copied",
    ),
    Fault(
        "a-word-hidden-in-one-way",
        "ingot/data/batches/masking.py",
        "how = mix(each ^ np.uint64(GOLDEN))",
        "how = mix(chance ^ np.uint64(GOLDEN))",
        "all tokens of a word are masked, replaced by one and the same token, or kept together",
        "tests/data/batches/test_masking.py",
    ),
]
