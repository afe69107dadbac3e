"""`predict`: the same completion from a folder and from a server."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from ingot.base.errors import Failed, WrongInput
from ingot.models.generation.sampling import Sampling
from ingot.serve.native.model import LoadedModel
from ingot.serve.predict import predict
from tests.serve.http.test_openai import expected
from tests.serve.running import Running
from tests.serve.tiny import make_folder


def test_a_folder_and_a_server_say_the_same(
    folder: Path, server: Running, loaded: LoadedModel
) -> None:
    prompt = loaded.tokenizer.encode_prompt("the dog")
    wanted = expected(loaded, prompt, 64).text
    for target in (folder, server.url, f"{server.url}/v1/"):
        assert predict(target, "the dog") == wanted
        assert (
            predict(target, "the dog", max_tokens=20, stop=[wanted[7:9]])
            == wanted[: wanted.find(wanted[7:9])]
        )
        assert (
            predict(target, "the dog", temperature=1.0, top_p=0.8, seed=6)
            == expected(loaded, prompt, 64, Sampling(1.0, 0.8, 6)).text
        )
        assert (
            predict(target, "fox", chat=True)
            == expected(
                loaded, loaded.tokenizer.encode_chat([{"role": "user", "content": "fox"}]), 64
            ).text
        )


def test_a_stop_string_may_be_a_special_token_which_texts_do_not_show(
    folder: Path, server: Running, loaded: LoadedModel
) -> None:
    """Of a model that does not end with it: text goes on behind it."""
    end, tokenizer = loaded.tokenizer.special.eos, loaded.tokenizer
    assert end is not None
    prompt, sampling = tokenizer.encode_prompt("the"), Sampling(2.0, seed=12)
    tokens = [one.id for one in expected(loaded, prompt, 40, sampling).tokens]
    cut = tokens.index(end)
    options = {"max_tokens": 40, "temperature": 2.0, "seed": 12}
    for target in (folder, server.url):
        found = predict(target, "the", stop=[str(tokenizer.token(end))], **options)
        assert found == predict(target, "the", **{**options, "max_tokens": cut})
        assert len(found) < len(predict(target, "the", **options))


def test_it_stops_at_the_end_of_text(tmp_path: Path, folder: Path, loaded: LoadedModel) -> None:
    tokens = [
        token.id for token in expected(loaded, loaded.tokenizer.encode_prompt("the"), 40).tokens
    ]
    place = next(place for place in range(4, 40) if tokens[place] not in tokens[:place])
    ending = make_folder(tmp_path / "ending", eos=[tokens[place]])
    assert predict(ending, "the", max_tokens=40) == predict(folder, "the", max_tokens=place)


def test_a_key_is_sent(strict: Running) -> None:
    assert predict(strict.url, "the", max_tokens=3, api_key=strict.key) is not None
    with pytest.raises(WrongInput, match="refuses with 401: the API key is missing"):
        predict(strict.url, "the")


def test_what_is_refused(folder: Path, server: Running, tmp_path: Path) -> None:
    with pytest.raises(
        WrongInput, match="refuses with 400: max_tokens 9000 is over this server's limit"
    ):
        predict(server.url, "the", max_tokens=9000)
    with pytest.raises(WrongInput, match="8,192 positions"):
        predict(folder, "fox " * 9000)
    with pytest.raises(WrongInput, match="is an empty folder"):
        predict(tmp_path, "the")
    with pytest.raises(WrongInput, match="no chat template"):
        predict(make_folder(tmp_path / "plain", chat=False), "the", chat=True)


def test_servers_that_are_none(server: Running) -> None:
    with pytest.raises(
        Failed,
        match=r"http://127.0.0.1:9 does not answer \(.*refused.*\); start it with `ingot serve`",
    ):
        predict("http://127.0.0.1:9", "the")
    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        with pytest.raises(Failed, match="does not answer as an OpenAI server does"):
            predict(f"http://127.0.0.1:{stranger.server_port}", "the")
        stranger.shutdown()
    with pytest.raises(WrongInput, match="refuses with 404"):
        predict(f"{server.url}/elsewhere", "the")


class Stranger(http.server.BaseHTTPRequestHandler):
    """A web server that knows nothing of models."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, *arguments: object) -> None:
        pass
