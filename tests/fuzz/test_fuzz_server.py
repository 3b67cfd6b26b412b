"Answers of a server with odd values, as damaged text and under odd codes: used, or refused in a sentence"
import json
import random

import pytest
from evaluation.test_odd_answers import GOOD, HELLO, Page, url   # noqa: F401 (a fixture)
from fuzzing import ends_well, mutate, NO_JSON, SEED

from sft_nb.config.load import load_config
from sft_nb.extras.openai_client import Server
from sft_nb.tokens.tokenizer import load_tokenizer

CALLS = [dict(id="1", type="function", function=dict(name="f", arguments='{"a": 1}'))]
ASKED = [lambda s: s.name, lambda s: s.kind, lambda s: s.context_tokens, lambda s: s.models, lambda s: s.chat(HELLO),
         lambda s: s.tokens("Hello"), lambda s: s.rendered(HELLO), lambda s: s.ids_by_text]


@pytest.fixture(scope="module")
def tokenizer(): return load_tokenizer(load_config("default", model="tiny"))


def ask(tmp_path, tokenizer, url, answers:dict[str,tuple[int,bytes]]):   # noqa: F811
    Page.odd = answers
    server = Server(url, tokenizer, timeout=120)   # a busy machine is no reason
    for question in ASKED: ends_well(lambda question=question: ascii(question(server)), tmp_path)


@pytest.mark.parametrize("part", range(4))
def test_answers(tmp_path, tokenizer, url, part):   # noqa: F811
    r = random.Random(f"{SEED} {part}")
    for _ in range(30):
        answers = {}
        for path in r.sample([*GOOD], 2):
            said = json.dumps(mutate(r, GOOD[path], words=["error", "object", "message", "n_ctx"])).encode()
            if r.random() < .2: said = said[:r.randrange(len(said))]
            if r.random() < .1: said = said.replace(b"1", r.choice(NO_JSON).encode(errors="surrogatepass"), 1)
            answers[path] = (r.choice((200, 200, 200, 200, 204, 301, 400, 404, 429, 500)), said)
        ask(tmp_path, tokenizer, url, answers)
