"""A small server with OpenAI's API around a real model: it renders and generates, with any planted fault."""
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig

THINK = "<think>\n"


@dataclass
class Stub:
    "How the server works, and its faults"
    model: object
    tokenizer: object                # its tokenizer
    api: str = "vLLM"                # vLLM, llama.cpp, or plain, which only reports token counts
    template: str | None = None      # another chat template
    bos_twice: bool = False
    system: str = ""                 # a system prompt added if none is given
    keeps: object = None             # messages -> those that it keeps; None: all
    thinks: bool = False             # begins each answer with reasoning
    cut: int | None = None           # truncate prompts to this many tokens, from the left
    context: int = 2048              # reject longer prompts
    tells_context: bool = True
    ends: list = field(default_factory=lambda: [2])
    temperature: float = 0.          # used if none is sent
    logprobs: bool = True
    name: str = "tiny"
    adapters: dict = field(default_factory=dict)   # name -> model, served in addition to their base `model`
    root: str = ""                   # the folder that it claims to serve
    key: str = ""                    # the API key that it requires
    requests: int = 0

    def text(self, body: dict) -> str:
        if "prompt" in body: return body["prompt"]
        messages = body["messages"] if self.keeps is None else self.keeps(body["messages"])
        if self.system and messages[0]["role"] != "system":
            messages = [dict(role="system", content=self.system), *messages]
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=self.template,
            **body.get("chat_template_kwargs", {}))
        return text + (THINK if self.thinks else "")

    def ids(self, text: str) -> list[int]:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if self.bos_twice: ids = [self.tokenizer.bos_token_id, *ids]
        return ids[-self.cut:] if self.cut else ids

    @torch.no_grad()
    def answer(self, body: dict) -> dict:
        ids = self.ids(self.text(body))
        n = body.get("max_tokens", 16)
        if len(ids) + n > self.context: raise TooLong(f"{len(ids)} tokens exceed the context length {self.context}")
        hot = body.get("temperature", self.temperature)
        how = GenerationConfig(do_sample=hot > 0, temperature=hot or None, max_new_tokens=n, pad_token_id=3,
                               eos_token_id=self.ends or [9999], repetition_penalty=1.)
        given = torch.tensor([ids])
        model = self.adapters.get(body["model"], self.model)
        out = model.generate(input_ids=given, attention_mask=torch.ones_like(given), generation_config=how)[0]
        new = out[len(ids):].tolist()
        ended = new[-1] in self.ends
        choice = dict(index=0, finish_reason="stop" if ended else "length")
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        choice |= dict(message=dict(role="assistant", content=text)) if "messages" in body else dict(text=text)
        if body.get("logprobs"): choice["logprobs"] = dict(content=self.places(out[None], new))
        return dict(object="chat.completion", model=self.name, choices=[choice],
                    usage=dict(prompt_tokens=len(ids), completion_tokens=len(new)))

    def places(self, out, new: list[int]) -> list[dict]:
        logits = self.model(out, logits_to_keep=len(new) + 1).logits[0, :-1].float().log_softmax(-1)
        shown = []
        for at, token in zip(logits, new):
            best = at.topk(5)
            top = [self.shown(i, v) for i, v in zip(best.indices.tolist(), best.values.tolist())]
            shown.append(self.shown(token, at[token].item()) | dict(top_logprobs=top))
        return shown

    def shown(self, token: int, value: float) -> dict:
        number = dict(id=token) if self.api == "llama.cpp" else {}
        return dict(token=self.tokenizer.decode([token]), logprob=value) | number

    def get(self, path: str) -> dict:
        model = dict(id=self.name, object="model")
        if self.root: model["root"] = self.root
        if self.api == "vLLM" and self.tells_context: model["max_model_len"] = self.context
        beside = [dict(id=name, object="model", parent=self.name) for name in self.adapters]
        if path == "/v1/models": return dict(object="list", data=[model, *beside])
        if path == "/props" and self.api == "llama.cpp":
            settings = dict(params=dict(temperature=self.temperature))
            if self.tells_context: settings["n_ctx"] = self.context
            return dict(default_generation_settings=settings)
        raise KeyError(path)

    def post(self, path: str, body: dict) -> dict:
        if path in ("/v1/chat/completions", "/v1/completions"):
            if body.get("logprobs") and not self.logprobs: raise ValueError("logprobs is not supported")
            return self.answer(body)
        if path == "/tokenize" and self.api == "vLLM":
            text = body.get("prompt") if "prompt" in body else None
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else self.ids(self.text(body))
            return dict(count=len(ids), tokens=ids, max_model_len=self.context)
        if path == "/tokenize" and self.api == "llama.cpp":
            whole = self.ids if body.get("add_special") else (
                lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"])
            return dict(tokens=whole(body["content"]))
        if path == "/apply-template" and self.api == "llama.cpp": return dict(prompt=self.text(body))
        raise KeyError(path)


class TooLong(Exception): ...


def handler(stub: Stub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def reply(self, f):
            stub.requests += 1
            if stub.key and self.headers.get("Authorization") != f"Bearer {stub.key}":
                return self.say(401, dict(error=dict(message="Invalid key")))
            try: self.say(200, f())
            except (TooLong, TemplateError) as e: self.say(400, dict(error=dict(message=str(e))))
            except ValueError as e: self.say(422, dict(detail=str(e)))
            except KeyError: self.say(404, dict(detail="Not Found"))

        def say(self, code, said):
            data = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self): self.reply(lambda: stub.get(self.path))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(lambda: stub.post(self.path, body))

        def log_message(self, *args): ...
    return Handler


@contextmanager
def listening(stub: Stub):
    "A context in which the server runs on a free port; yields its address"
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(stub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs=dict(poll_interval=.02), daemon=True)
    thread.start()
    try: yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
