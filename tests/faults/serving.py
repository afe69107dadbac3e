"""Faults in what the server answers with beside text: calls of tools, embeddings, log-probabilities
of prompts.
"""

from __future__ import annotations

from tests.faults.fault import Fault

FAULTS = [
    Fault(
        "forced-schema-ignored",
        "ingot/serve/http/service.py",
        "functions_of(tools, strict=not body.must_call)",
        "functions_of(tools, strict=True)",
        "a forced call is held to any object, not to its function's schema",
        "tests/serve/http/test_tools.py",
    ),
    Fault(
        "arguments-twice",
        "ingot/serve/native/toolcalls.py",
        "        self._fresh.clear()\n",
        "",
        "a stream repeats the arguments of a call",
        "tests/serve/native/test_toolcalls.py",
    ),
    Fault(
        "template-kwargs-not-in-the-prompt",
        "ingot/serve/http/service.py",
        "            chat.tools,\n            body.chat_template_kwargs,\n",
        "            chat.tools,\n",
        "a server accepts chat_template_kwargs and does not heed them",
        "tests/serve/http/test_tools.py",
    ),
    Fault(
        "thoughts-not-in-the-prompt",
        "ingot/serve/http/chat.py",
        '"content": content, **given, **self.thoughts}',
        '"content": content, **given}',
        "after a call the model does not see the thought that it called from",
        "tests/serve/http/test_tools.py",
    ),
    Fault(
        "tools-not-in-the-prompt",
        "ingot/tokenizers/chats/render.py",
        '"tools": None if tools is None else list(tools),',
        '"tools": None,',
        "the model never sees the tools that it may call",
        "tests/serve/http/test_tools.py",
    ),
    Fault(
        "padding-pooled-in",
        "ingot/serve/native/embedding.py",
        "_pooled(row[seen], pooling.mode)",
        "_pooled(row, pooling.mode)",
        "the vector of a text depends on how long its neighbours are",
        "tests/serve/http/test_embeddings.py",
    ),
    Fault(
        "vectors-in-the-order-of-lengths",
        "ingot/serve/http/embeddings.py",
        "vectors[place] = piece.vector",
        "vectors[len(vectors)] = piece.vector",
        "vectors of one request belong to other texts of it",
        "tests/serve/http/test_embeddings.py",
    ),
    Fault(
        "sources-of-other-requests",
        "ingot/models/generation/crossrows.py",
        "sources = self.sources[chosen]",
        "sources = self.sources[: len(rows)]",
        "once an answer is finished, others see as much of their sources as another request's mask says",
        "tests/models/generation/test_seq2seq_generator.py",
    ),
    Fault(
        "finished-answers-stay-cached",
        "ingot/models/generation/crossrows.py",
        "layer.keys.shape[2] - max(self.lengths), None)",
        "None)",
        "places of finished answers stay in the cache, which others are then read with",
        "tests/models/generation/test_seq2seq_generator.py",
    ),
    Fault(
        "positions-of-the-longest-answer",
        "ingot/models/generation/crossrows.py",
        "table[torch.tensor(positions, device=table.device)]",
        "table[torch.full_like(tokens[:, 0], max(positions))]",
        "an answer that joins goes on at the position of the longest running one",
        "tests/models/generation/test_seq2seq_generator.py",
    ),
    Fault(
        "padding-of-answers-seen",
        "ingot/models/generation/crossrows.py",
        "if self._model.config.model_type in UNMASKED:",
        "if False:",
        "LED's answers that run beside longer ones see padding as if it had been said",
        "tests/models/generation/test_seq2seq_generator.py",
    ),
    Fault(
        "usage-of-embeddings-forgotten",
        "ingot/serve/http/embeddings.py",
        "range(len(read))], sum(map(len, read))",
        "range(len(read))], len(read)",
        "texts are counted in place of the tokens that were read",
        "tests/serve/http/test_embeddings.py",
    ),
    Fault(
        "prompt-logprobs-shifted",
        "ingot/models/generation/generator.py",
        "targets = prompt[job.read + 1 : job.read + 1 + len(states)]",
        "targets = prompt[job.read : job.read + len(states)]",
        "each token of a prompt is scored by what the model says behind it",
        "tests/serve/http/test_prompt_logprobs.py",
    ),
    Fault(
        "last-token-of-the-prompt-lost",
        "ingot/models/generation/loop.py",
        "if self.request.prompt_logprobs is not None:",
        "if False:",
        "where the answer ends at once, a harness that drops its token drops one of the prompt's",
        "tests/serve/http/test_prompt_logprobs.py",
    ),
]
