"""A server may answer anything, at any pace: each call ends in time, with a usable result or a one-line error."""
import copy
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sft_nb.config.load import load_config
from sft_nb.base.report import SftError
from sft_nb.extras import openai_client as serving# the module
from sft_nb.extras.openai_client import Server
from sft_nb.tokens.tokenizer import load_tokenizer

HELLO = [dict(role="user", content="Hello")]
ODD = [None, True, -1, 2.5, 1e400, 10**30, "", "x", "\ud800", "token_id:x", [], [[]], ["x"], {}, float("nan"), "9" * 50]
RAW = [b"", b"[" * 200_000, b"\xff\xfe", b'{"a":' * 100_000, b"<html>", b"null", b"1" * 10_000]
PLACE = dict(token="Hello", logprob=-.1, id=4, top_logprobs=[dict(token="Hello", logprob=-.1)])
MESSAGE = dict(content="Hello", reasoning="hm", tool_calls=[dict(function=dict(name="f", arguments="{}"))])
CHOICE = dict(message=MESSAGE, finish_reason="stop", logprobs=dict(content=[PLACE]))
GOOD = {
    "/v1/models": dict(data=[dict(id="a", parent="b", root="/x", max_model_len=64, meta=dict(n_ctx=5))]),
    "/props": dict(default_generation_settings=dict(n_ctx=512, params=dict(temperature=.5)), model_ftype="q8"),
    "/tokenize": dict(tokens=[1, 2, 3]), "/apply-template": dict(prompt="user: Hello"),
    "/v1/chat/completions": dict(choices=[CHOICE], usage=dict(prompt_tokens=9, completion_tokens=1))}


class Page(BaseHTTPRequestHandler):
    odd = {}       # path -> code and bytes
    slow = ""      # headers or body: a byte every .1 seconds
    dripped = 0    # bytes sent in this way
    def do_GET(self):
        code, said = self.odd.get(self.path, (200, json.dumps(GOOD.get(self.path, {})).encode()))
        try:
            if self.slow == "headers": self.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 500)
            self.send_response(code)
            self.end_headers()
            if self.slow: self.drip(b" " * 500)
            self.wfile.write(said)
        except OSError: pass
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()
    def drip(self, said):
        for k in range(len(said)):
            self.wfile.write(said[k:k + 1])
            self.wfile.flush()
            Page.dripped = k
            time.sleep(.1)
    def log_message(self, *args): pass


@pytest.fixture
def url():
    page = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    page.daemon_threads = True
    threading.Thread(target=page.serve_forever, daemon=True).start()
    Page.odd, Page.slow = {}, ""
    yield f"http://127.0.0.1:{page.server_address[1]}"
    Page.odd, Page.slow = {}, ""
    page.shutdown()
    page.server_close()


def places(said, path=()):
    "Every path in an answer"
    yield path
    for key in said if isinstance(said, dict) else range(len(said)) if isinstance(said, list) else ():
        yield from places(said[key], (*path, key))


def with_odd(said, path, value):
    if not path: return value
    said = copy.deepcopy(said)
    at = said
    for key in path[:-1]: at = at[key]
    at[path[-1]] = value
    return said


def test_odd_answers_end_in_a_sentence(url):
    "a sample of those that were tried by hand: any value at any place, and what is no JSON at all"
    r, tok = random.Random(7), load_tokenizer(load_config())
    answers = [(path, raw) for path in GOOD for raw in RAW[:3]]
    for _ in range(60):
        path = r.choice([*GOOD])
        odd = with_odd(GOOD[path], r.choice([*places(GOOD[path])]), r.choice(ODD))
        answers.append((path, json.dumps(odd).encode()))
    for path, said in answers:
        Page.odd = {path: (r.choice((200, 200, 200, 500)), said)}
        server = Server(url, tok, timeout=120)
        for ask in (lambda s: s.name, lambda s: s.context_tokens, lambda s: s.rendered(HELLO), lambda s: s.chat(HELLO),
                    lambda s: s.tokens("Hello")):
            try: repr(ask(server)).encode()
            except SftError as e: assert str(e).startswith("server http"), said[:100]


def test_a_server_that_sends_a_byte_now_and_then_holds_nobody(url):
    for slow in ("headers", "body"):
        Page.slow, Page.dripped = slow, 0
        with pytest.raises(SftError, match="there is no answer within 0.5 seconds"):
            Server(url, None, timeout=.5).request("/props")
        assert Page.dripped < 400   # of 500, which take 50 seconds


def test_an_answer_without_end_is_not_read(url, monkeypatch):
    monkeypatch.setattr(serving, "_MAX_RESPONSE_BYTES", 1000)
    Page.odd = {"/props": (200, b'"' + b"x" * 5000)}
    with pytest.raises(SftError, match="its answer has more than 0 MB"): Server(url, None).request("/props")
