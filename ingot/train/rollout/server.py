"""Answers sampled by a vLLM server, which has a process, an environment and devices of its own, and
gets the weights through a folder that both see.

The server's own interface is used (`VLLM_SERVER_DEV_MODE=1`): it reads the weights again in place
(`reload_weights`), carries a version that we set, and tells digests of what it holds. Nothing of it
is believed: what it holds is compared before answers are used, and so are their log-probabilities.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from ingot.base.errors import Failed, WrongInput, one_line
from ingot.base.lazy import lazy_import
from ingot.base.progress import say
from ingot.base.server import environment_for
from ingot.checkpoints.export import DTYPES, ExportType, export_model
from ingot.config.sections.grpo import GRPOSettings
from ingot.models.device import accelerator
from ingot.models.generation.policy import SampledAnswer
from ingot.models.kinds import exported_weights
from ingot.models.native.decoder import Decoder
from ingot.models.native.head import IGNORE, LogitsView
from ingot.train.setup import TrainSetup

if TYPE_CHECKING:
    import httpx
else:  # every training imports this module, and few ask a server
    httpx = lazy_import("httpx")

POLL_S = 0.5
PAUSES_S = (1.0, 2.0, 4.0)
"""Before each further try of a request that a busy server refused."""
NAME = "policy"
SCORED = 16
"""Answers of each rollout whose log-probabilities are computed here as well."""
EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""What the server says of a matrix that it holds in a form of its own: the digest of nothing."""
CPU_CACHE = f" --kv-cache-memory-bytes {1 << 30}"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class PolicyServer:
    """A vLLM server that samples from the weights that it was given last.

    Args:
        folder: where the weights are written, and the server reads them.
        eos: tokens that end an answer.
    """

    def __init__(self, setup: TrainSetup, folder: Path, eos: Collection[int]) -> None:
        settings = setup.recipe.objective
        assert isinstance(settings, GRPOSettings)
        assert settings.sampler is not None
        self._setup, self._settings, self._sampler = setup, settings, settings.sampler
        self._folder, self._eos = folder.absolute(), sorted(eos)
        self._client = httpx.Client(
            base_url=self._sampler.url,
            timeout=self._sampler.timeout,
            **environment_for(self._sampler.url),
        )
        self._threads = ThreadPoolExecutor(settings.sample_rows, thread_name_prefix="vllm")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def sample(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[tuple[int, int]],
        meanwhile: Callable[[], bool],
    ) -> list[SampledAnswer] | None:
        """An answer of `model` to each prompt, drawn with the seed of its number; None once
        `meanwhile` says True.

        Raises:
            Failed: the server does not answer, holds other weights than `model`, or tells other
                log-probabilities than `model` gives its answers.
            WrongInput: it lacks the interface.
        """
        version = self._give(model, meanwhile)
        if version is None:
            return None
        asked = [
            self._threads.submit(self._ask, prompt, answer_seed(self._setup.recipe.seed, number))
            for prompt, number in zip(prompts, numbers, strict=True)
        ]
        answers = self._all(asked, meanwhile)
        if answers is None:
            return None
        self._check_version(version)
        self._check_answers(model, prompts, answers)
        return answers

    def _give(self, model: Decoder, meanwhile: Callable[[], bool]) -> str | None:
        """Write the weights and have the server read them; returns their version."""
        wanted = self._write(model)
        version = str(wanted.pop("version"))
        if not self._wait(meanwhile):
            return None
        arguments = {"weights_path": str(self._folder)}
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": arguments})
        # Keys and values of earlier weights must not be found again.
        self._post("/reset_prefix_cache", {})
        self._post("/update_weight_version", {"new_version": version})
        held = self._post("/weight_checker", {"action": "checksum"})["checksums"]
        if said := unlike(wanted, held):
            raise Failed(
                f"vLLM at {self._sampler.url} does not hold the weights that it was given: {said};"
                f" start it with: {self.command}"
            )
        return version

    def _write(self, model: Decoder) -> dict[str, str]:
        """The weights as a Hugging Face folder whose head is a matrix of its own: on a CPU the
        server keeps a tied head as it first was. Returns the digests, and as `version` that of all.
        """
        kind: ExportType = "fp32" if self._setup.compute == "fp32" else "bf16"
        made = export_model(
            model, self._setup.tokenizer, self._folder, export_type=kind, lineage={}
        )
        held = {name: tensor.to(DTYPES[kind]) for name, tensor in exported_weights(model)}
        if HEAD not in held:
            save_file({HEAD: held[EMBEDDING].contiguous()}, self._folder / "head.safetensors")
            index = self._folder / "model.safetensors.index.json"
            if index.exists():
                listed = json.loads(index.read_text())
                listed["weight_map"][HEAD] = "head.safetensors"
                index.write_text(json.dumps(listed))
            config = self._folder / "config.json"
            untied = json.loads(config.read_text()) | {"tie_word_embeddings": False}
            config.write_text(json.dumps(untied))
        digests = {name: digest(tensor) for name, tensor in held.items()}
        return {**digests, "version": made["model_hash"]}

    def _wait(self, meanwhile: Callable[[], bool]) -> bool:
        """Wait until the server answers; says how to start it."""
        began, told = time.monotonic(), False
        while True:
            try:
                self._client.get("/weight_info", timeout=10 * POLL_S).raise_for_status()
                return True
            except httpx.HTTPStatusError as error:
                # One that is starting, or what stands before it, answers that it is busy.
                if not _may_pass(error):
                    raise WrongInput(
                        f"{self._sampler.url} answers {error.response.status_code} to /weight_info;"
                        f" start vLLM with its interface for weights: {self.command}"
                    ) from None
            except httpx.HTTPError:
                pass
            if not told:
                say(f"waiting for vLLM at {self._sampler.url}; start it with: {self.command}")
                told = True
            if meanwhile():
                return False
            if time.monotonic() - began > self._sampler.timeout:
                raise Failed(
                    f"no vLLM answers at {self._sampler.url} after {self._sampler.timeout:g} s;"
                    f" start it with: {self.command}"
                )
            time.sleep(POLL_S)

    @property
    def command(self) -> str:
        """How the server is started, from the folder of the weights."""
        url, dtype = httpx.URL(self._sampler.url), DTYPES["fp32"]
        dtype = dtype if self._setup.compute == "fp32" else DTYPES["bf16"]
        # Without a GPU vLLM would compile first, and take nearly all memory.
        slow = "" if accelerator() else " --enforce-eager" + CPU_CACHE
        return (
            "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server"
            f" --model {self._folder} --served-model-name {NAME} --host {url.host}"
            f" --port {url.port or 80} --dtype {str(dtype).removeprefix('torch.')}"
            f" --max-model-len {self._setup.recipe.data.seq_len}"
            f" --max-num-seqs {self._settings.sample_rows} --generation-config vllm"
            f" --logprobs-mode processed_logprobs --no-enable-prefix-caching{slow}"
        )

    def _ask(self, prompt: Sequence[int], seed: int) -> SampledAnswer:
        """One answer, as ids: what its text would be tokenised to may be other ones."""
        settings = self._settings
        body = {
            "model": NAME,
            "prompt": list(prompt),
            "max_tokens": settings.max_answer_tokens,
            "temperature": settings.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": seed,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            "stop_token_ids": self._eos,
            "skip_special_tokens": False,
        }
        (choice,) = self._again(lambda: self._post("/v1/completions", body))["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if choice.get("prompt_token_ids", body["prompt"]) != body["prompt"]:
            raise Failed(f"{self._sampler.url} answered another prompt than it was asked")
        if not ids or len(ids) != len(logprobs):
            raise Failed(
                f"{self._sampler.url} gives {len(ids)} tokens and {len(logprobs)} log-probabilities"
            )
        return SampledAnswer(ids, logprobs, ids[-1] in self._eos)

    def _all(
        self, asked: Sequence[Future[SampledAnswer]], meanwhile: Callable[[], bool]
    ) -> list[SampledAnswer] | None:
        while wait(asked, timeout=POLL_S).not_done:
            if meanwhile():
                for one in asked:
                    one.cancel()
                return None
        return [one.result() for one in asked]

    def _again(self, ask: Callable[[], Any]) -> Any:
        """What does no harm twice, as an answer that has a seed: hundreds of others would be lost
        for one that a busy server refused.
        """
        for pause in PAUSES_S:
            try:
                return ask()
            except Failed as error:
                if not isinstance(error.__cause__, httpx.HTTPError) or not _may_pass(
                    error.__cause__
                ):
                    raise
            time.sleep(pause)
        return ask()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._request("POST", path, body)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._client.request(method, path, json=body)
            response.raise_for_status()
        except httpx.HTTPStatusError as error:
            said = one_line(error.response.text, 200)
            raise Failed(
                f"vLLM at {self._sampler.url} refuses {path}: {error.response.status_code} {said};"
                f" start it with: {self.command}"
            ) from error
        except httpx.HTTPError as error:
            raise Failed(
                f"vLLM at {self._sampler.url} does not answer {path}: {type(error).__name__};"
                " start it again, and go on with the same command"
            ) from error
        try:
            return response.json() if response.content else {}
        except ValueError as error:
            raise Failed(
                f"{self._sampler.url} answers {path} as no vLLM does:"
                f" {one_line(response.text, 80)}; start it with: {self.command}"
            ) from error

    def _check_version(self, version: str) -> None:
        held = self._again(lambda: self._request("GET", "/weight_info")).get("weight_version")
        if held != version:
            raise Failed(
                f"vLLM at {self._sampler.url} was started again, or given other weights, while it"
                " sampled; let it serve one training, and go on with the same command"
            )

    @torch.no_grad()
    def _check_answers(
        self, model: Decoder, prompts: Sequence[Sequence[int]], answers: Sequence[SampledAnswer]
    ) -> None:
        """Compare the log-probabilities of some answers with what `model` gives them."""
        some = np.linspace(0, len(answers) - 1, min(SCORED, len(answers))).astype(int)
        pairs = [(prompts[one], answers[one]) for one in dict.fromkeys(some.tolist())]
        gaps = [
            float((score(model, prompt, one.ids, self._settings.temperature) - told).abs().mean())
            for prompt, one in pairs
            for told in (torch.tensor(one.logprobs, device=model.head_weight.device),)
        ]
        gap = sum(gaps) / len(gaps)
        if not gap <= self._sampler.tolerance:
            raise Failed(
                f"vLLM at {self._sampler.url} gives tokens log-probabilities that are {gap:.3g}"
                " away from those of the weights that it was given (objective.sampler.tolerance"
                f" {self._sampler.tolerance:g}); start it with: {self.command}"
            )


def _may_pass(error: httpx.HTTPError) -> bool:
    """Whether the server, or what stands before it, is busy, or the connection broke."""
    if isinstance(error, httpx.HTTPStatusError):
        code = error.response.status_code
        return code == httpx.codes.TOO_MANY_REQUESTS or code >= httpx.codes.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)


def score(model: Decoder, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> Tensor:
    """log p of each token of an answer, `[N]`."""
    device = model.head_weight.device
    row = torch.tensor([*prompt, *ids], device=device)[None]
    labels = torch.full_like(row, IGNORE)
    labels[0, len(prompt) - 1 : -1] = row[0, len(prompt) :]

    def token(view: LogitsView, wanted: Tensor, extras: Tensor | None) -> Tensor:
        return view.log_probability(wanted, temperature)

    positions = torch.arange(row.shape[1], device=device)[None]
    found: Tensor = model(row, positions, None, labels, token, None)
    return found[0, len(prompt) - 1 : -1].float()


def unlike(wanted: Mapping[str, str], held: Mapping[str, str]) -> str | None:
    """What speaks against the server's holding the weights of these digests; None for nothing. At
    least the norms are held as they were written.
    """
    found = [(name.rpartition(":")[2], one) for name, one in held.items() if one != EMPTY]
    if any(":tp1:" in name for name in held):
        found = [(name, one) for name, one in found if "norm" in name]  # others are cut
    # Rows of the vocabulary may be padded there, and matrices joined under another name.
    both = [pair for pair in found if pair[0] in wanted and pair[0] not in (HEAD, EMBEDDING)]
    if not both:
        return "no weight can be compared"
    return next((f"{name} is another" for name, one in both if one != wanted[name]), None)


def digest(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, as the server has it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def answer_seed(seed: int, number: tuple[int, int]) -> int:
    """The seed of an answer, a function of the training's and of the answer's number."""
    return int(np.random.SeedSequence([seed, *number]).generate_state(1)[0])
