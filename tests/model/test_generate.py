"""Batched decoding."""
import json
import shutil
from threading import Thread
from unittest.mock import patch

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoTokenizer, DeepseekV3Config, GPT2Config, LlamaConfig, MambaConfig, MistralConfig, Qwen3Config)

from sft_nb.base.report import ConfigError, SftError
from sft_nb.config.load import load_config
from sft_nb.tokens.tokenizer import load_tokenizer, model_path
from sft_nb.tokens.encode import encode, encode_prompts, end_ids
from sft_nb.extras import cuda_graphs
from sft_nb.model import generation
from sft_nb.model.generation import continue_tokens, Decoder, choose_decoding, generate, reads_padding
from sft_nb.batches.layout import rows_stay_apart
from sft_nb.model.attention import register_varlen
from sft_nb.model.load import load_base
from sft_nb.model.loss import head_of
from sft_nb.model.adapter import load_adapter


def ask(*questions): return [[dict(role="user", content=q)] for q in questions]


def test_half_a_character_is_no_prompt(tokenizer):
    with pytest.raises(SftError, match="prompt 2: it holds half a character"):
        encode_prompts(ask("a", "\udcff"), tokenizer)   # as a shell gives a byte that is not UTF-8


@pytest.mark.parametrize("given, says", [
    (dict(conversations=None), "prompts: they are None; a list of conversations"),
    (dict(conversations=ask("hi", "blue " * 3000)), "prompt 2: it is .* tokens long, and the model has posi.* for 2,0"),
    (dict(adapters=[]), "adapters: they are .*; for 1 prompt, a name for each: this model has no adapter. Fix"),
    (dict(adapters=["__base__"]), "adapters: they are .'__base__'.;"),
    (dict(adapters="default"), "they are 'default'")])
def test_what_generate_refuses(given, says, tokenizer):
    model = load_base(load_config(), tokenizer)
    with pytest.raises(SftError, match=says): generate(model, tokenizer, **dict(conversations=ask("hi")) | given)


def test_greedy_equals_transformers_on_a_single_prompt(tokenizer):
    base, talk = load_base(load_config(), tokenizer), ask("What is the opposite of big?")
    ids = torch.tensor(encode_prompts(talk, tokenizer))
    how = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20)
    theirs = base.generate(input_ids=ids, **how)[0, ids.shape[1]:]
    ours, = generate(base, tokenizer, talk, max_new_tokens=20)
    assert ours.text == tokenizer.decode(theirs, skip_special_tokens=True) and ours.ended


def test_weights_that_are_nan_are_asked_all_the_same(tokenizer):
    "torch refuses a tolerance that is NaN"
    base = load_base(load_config(), tokenizer)
    with torch.no_grad(): base.get_input_embeddings().weight.fill_(float("nan"))
    assert not reads_padding(base) and rows_stay_apart(base) and head_of(base) is not None
    assert len(generate(base, tokenizer, ask("2+2?", "What is the opposite of big?"), max_new_tokens=2)) == 2


def test_sampling_differs_and_greedy_does_not(tokenizer):
    base = load_base(load_config(), tokenizer)
    talk = ask("Tell me about Ada.") * 8
    assert len({g.text for g in generate(base, tokenizer, talk, max_new_tokens=30)}) == 1
    assert len({g.text for g in generate(base, tokenizer, talk, max_new_tokens=30, temperature=1.)}) > 1


def test_the_adapter_off_is_the_base(trained, tokenizer):
    questions = ask("What colour is the sky?", "Add 14 to 23.")
    model = load_adapter(trained.config, tokenizer, trained.adapter)
    with model.disable_adapter(): off = generate(model, tokenizer, questions, max_new_tokens=20)
    assert off == generate(load_base(trained.config, tokenizer), tokenizer, questions, max_new_tokens=20)


def test_generation_stops_at_the_templates_end_of_turn_when_eos_is_another(trained, tmp_path):
    "A base's eos is often not what ends a turn in its template; training ends answers with the latter, so both stop"
    shutil.copytree(model_path("tiny"), tmp_path/"base")
    tok = AutoTokenizer.from_pretrained(tmp_path/"base")
    tok.eos_token = "<|endoftext|>"
    tok.save_pretrained(tmp_path/"base")
    file = tmp_path/"base/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(eos_token_id=tok.eos_token_id)))
    cfg = load_config(model=str(tmp_path/"base"))
    tok = load_tokenizer(cfg)
    im_end = tok.convert_tokens_to_ids("<|im_end|>")
    assert end_ids(tok) == [im_end, tok.eos_token_id]
    (_, labels), = encode({"row": ask("Hi")[0] + [dict(role="assistant", content="Hello")]}, tok)
    assert labels[-1] == im_end
    answer, = generate(load_base(cfg, tok), tok, ask("What colour is the sky?"), max_new_tokens=30)
    assert answer.ended and "<" not in answer.text and answer.n_tokens < 12


def small_model(**shape):
    "Two layers with new weights, in float32"
    from transformers import AutoModelForCausalLM
    torch.manual_seed(0)
    kind = shape.pop("kind")
    size = dict(vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, head_dim=16)
    model = AutoModelForCausalLM.from_config(kind(**size | shape), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = 7
    return model


PROMPTS = [[k % 500 + 8 for k in range(a, a + n)] for a, n in ((0, 3), (40, 9), (90, 1), (130, 30), (7, 12), (200, 5))]


def alone(model, tokenizer, prompts, **how):
    return [continue_tokens(model, tokenizer, [p], **how)[0] for p in prompts]


@pytest.mark.parametrize("shape", [
    dict(kind=Qwen3Config),
    dict(kind=MistralConfig, sliding_window=8),
    dict(kind=GPT2Config, n_embd=32, n_layer=2, n_head=2),
], ids=["plain", "sliding window", "learned positions"])
def test_answers_do_not_depend_on_who_else_is_answered(shape, tokenizer):
    model = small_model(**shape)
    how = dict(max_new_tokens=12)
    theirs = []
    for p in PROMPTS:
        ids = torch.tensor([p])
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, **how)
        theirs.append(tokenizer.decode(out[0, len(p):], skip_special_tokens=True))
    assert choose_decoding(model)[0] == "sft_nb"
    for more in (dict(), dict(batch_size=2), dict(batch_tokens=60), dict(batch_size=3)):
        assert [g.text for g in continue_tokens(model, tokenizer, PROMPTS, **how, **more)] == theirs, more


def test_what_is_drawn_does_not_depend_on_the_batch(tokenizer):
    model = small_model(kind=Qwen3Config)
    how = dict(max_new_tokens=12, temperature=1., top_p=.9, seed=5)
    together = continue_tokens(model, tokenizer, PROMPTS, **how)
    assert together == continue_tokens(model, tokenizer, PROMPTS, batch_size=2, **how)
    assert together != continue_tokens(model, tokenizer, PROMPTS, **how | dict(seed=6))
    assert len({g.text for g in together}) > 1


def test_a_recurrent_model_is_answered_by_transformers_loop(tokenizer):
    model = small_model(kind=MambaConfig, state_size=4)
    assert choose_decoding(model)[0] == "transformers"
    answers = continue_tokens(model, tokenizer, PROMPTS[:2] * 2, max_new_tokens=4, batch_size=2)
    assert answers[:2] == answers[2:] and answers[0].n_tokens <= 4


def test_out_of_memory_halves_the_batches_of_transformers_loop(tokenizer):
    model, sizes, seen = small_model(kind=MambaConfig, state_size=4), [], []
    right, own = continue_tokens(model, tokenizer, PROMPTS, max_new_tokens=4), model.generate
    def tight(input_ids, **more):
        sizes.append(len(input_ids))
        if sizes[-1] > 2: raise torch.OutOfMemoryError("CUDA out of memory")
        return own(input_ids=input_ids, **more)
    with patch.object(model, "generate", tight):
        found = continue_tokens(model, tokenizer, PROMPTS, max_new_tokens=4, on_answer=lambda i, g: seen.append(i))
    assert found == right and sorted(seen) == [*range(len(PROMPTS))] and sizes.count(len(PROMPTS)) == 1
    with patch.object(model, "generate", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(torch.OutOfMemoryError): continue_tokens(model, tokenizer, PROMPTS)


def test_a_stop_text_ends_an_answer_and_is_no_part_of_it(tokenizer):
    base = load_base(load_config(), tokenizer)
    whole, = generate(base, tokenizer, ask("What colour is the sky?"), max_new_tokens=20)
    word = whole.text.split()[-1]
    cut, = generate(base, tokenizer, ask("What colour is the sky?"), max_new_tokens=20, stop=(word,))
    assert cut.text == whole.text[:whole.text.index(word)] and cut.ended and cut.n_tokens < whole.n_tokens


@pytest.mark.parametrize("at", [1, 4])
def test_out_of_memory_shrinks_the_batch_and_repeats_nothing_that_had_ended(at, tokenizer):
    model, read, calls, seen = small_model(kind=Qwen3Config), Decoder.read, [], []
    def full(self, running):
        calls.append(len(running.rows))
        if len(calls) >= at and len(running.rows) > 2: raise torch.OutOfMemoryError("CUDA out of memory")
        return read(self, running)
    right = alone(model, tokenizer, PROMPTS, max_new_tokens=9)
    with patch.object(Decoder, "read", full):
        found = continue_tokens(model, tokenizer, PROMPTS, max_new_tokens=9, on_answer=lambda i, g: seen.append(i))
    assert found == right and sorted(seen) == [*range(len(PROMPTS))]
    with patch.object(Decoder, "read", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(torch.OutOfMemoryError): continue_tokens(model, tokenizer, PROMPTS)


def test_each_prompt_is_answered_by_its_adapter(tokenizer):
    from peft import LoraConfig, get_peft_model
    model = get_peft_model(small_model(kind=Qwen3Config), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]), "one")
    model.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name: torch.nn.init.normal_(p, std=1.)
    names = ["one", "two", "__base__"] * 2
    mixed = continue_tokens(model, tokenizer, PROMPTS, max_new_tokens=8, adapters=names, batch_size=4)
    model.set_adapter("two")
    two = alone(model, tokenizer, PROMPTS, max_new_tokens=8)
    with model.disable_adapter(): base = alone(model, tokenizer, PROMPTS, max_new_tokens=8)
    assert mixed[1::3] == two[1::3] and mixed[2::3] == base[2::3] and two != base


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_model_may_call_its_cache_by_either_name(monkeypatch, tokenizer, name):
    "transformers 5.24 renamed the argument of every model; a model whose cache is not found answers in whole batches"
    base, prompts = load_base(load_config(), tokenizer), encode_prompts(ask("Add 14 to 23.", "Hello?"), tokenizer)
    want = [answer.text for answer in continue_tokens(base, tokenizer, prompts, max_new_tokens=6)]
    forward, calls, theirs = type(base).forward, [], Decoder(base, tokenizer).cache_argument

    def called(self, attention_mask, value, how):
        if how.get("use_cache") is not False: calls.append(value)
        return forward(self, attention_mask=attention_mask, **how, **{theirs: value})
    def old(self, input_ids=None, attention_mask=None, past_key_values=None, position_ids=None, logits_to_keep=0,
            **how):
        return called(self, attention_mask, past_key_values, how | dict(input_ids=input_ids, position_ids=position_ids))
    def new(self, input_ids=None, attention_mask=None, cache=None, position_ids=None, logits_to_keep=0, **how):
        return called(self, attention_mask, cache, how | dict(input_ids=input_ids, position_ids=position_ids))
    monkeypatch.setattr(type(base), "forward", new if name == "cache" else old)

    assert choose_decoding(base)[0] == "sft_nb" and Decoder(base, tokenizer).cache_argument == name
    assert [answer.text for answer in continue_tokens(base, tokenizer, prompts, max_new_tokens=6)] == want
    assert calls and None not in calls


def record_operations(step, device):
    "Record the operations of one call and replay them on the same tensors, like a CUDA graph, without Python"
    step()
    recorded = make_fx(step)()
    return lambda: recorded()


def without_recording(*args, **how):
    with patch.object(cuda_graphs, "RECORDED_ON", ()): return alone(*args, **how)


@pytest.fixture
def recorded(monkeypatch):
    "Record steps here too; returns their number"
    times = []
    monkeypatch.setattr(cuda_graphs, "RECORDED_ON", ("cpu",))
    monkeypatch.setattr(cuda_graphs, "record_graph", lambda *args: times.append(1) or record_operations(*args))
    return times


@pytest.mark.parametrize("shape", [
    dict(kind=Qwen3Config), dict(kind=LlamaConfig, num_key_value_heads=1),
    dict(kind=DeepseekV3Config, first_k_dense_replace=9, q_lora_rank=16, kv_lora_rank=16, head_dim=8,
         qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)],
    ids=["qwen3", "llama", "deepseek_v3"])
@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_recorded_step_writes_the_same_answers(shape, attention, tokenizer, recorded, monkeypatch):
    "Rows end at different times, prompts move into their places, and one recording serves them all"
    model = small_model(**shape)
    model.generation_config.eos_token_id = [*range(7, 512, 12)]   # so that answers have different lengths
    register_varlen()
    model.set_attn_implementation(attention)
    want = without_recording(model, tokenizer, PROMPTS, max_new_tokens=20)
    drawn = without_recording(model, tokenizer, PROMPTS[:1], max_new_tokens=20, temperature=1., seed=3)
    assert not recorded and len({g.n_tokens for g in want}) > 1
    for most in (2, 6):
        recorded.clear()
        decoder = Decoder(model, tokenizer, max_new_tokens=20, batch_size=most)
        with torch.no_grad(): got = dict(decoder.answers(PROMPTS))
        assert [got[i] for i in range(6)] == want and decoder.replays
        assert len(recorded) == 1
    assert alone(model, tokenizer, PROMPTS[:1], max_new_tokens=20, temperature=1., seed=3) == drawn


def test_short_rows_wait_for_a_larger_batch(tokenizer, recorded):
    "By `batch_tokens` the first prompts come one at a time; of the short ones, several fit"
    model = small_model(kind=Qwen3Config)
    prompts = [[9] * 100, *PROMPTS]
    want = without_recording(model, tokenizer, prompts, max_new_tokens=20)
    decoder = Decoder(model, tokenizer, max_new_tokens=20, batch_tokens=150)
    with torch.no_grad(): got = dict(decoder.answers(prompts))
    assert [got[i] for i in range(7)] == want and len(recorded) < 7


class Products(TorchDispatchMode):
    "The operations that compute a size in their last dimension"
    def __init__(self, size:int):
        super().__init__()
        self.size, self.names = size, set()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == self.size: self.names.add(f._opname)
        return out


@pytest.mark.parametrize("kind", [Qwen3Config, MambaConfig])   # our loop, and that of transformers
def test_the_weight_of_the_head_is_not_copied_for_each_row(kind, tokenizer):
    "PyTorch multiplies slices of several rows one by one on a CPU, each with a copy of the weight"
    model, prompts = small_model(kind=kind), [[*range(9, 29)], [*range(9, 27)], [*range(9, 29)]]
    prompts = prompts if kind is Qwen3Config else prompts[::2]
    head = model.get_output_embeddings()
    with Products(len(head.weight)) as computed, patch.object(generation, "reads_padding", lambda model: False):
        continue_tokens(model, tokenizer, prompts, max_new_tokens=2)
    assert "mm" in computed.names and "bmm" not in computed.names and not head._forward_pre_hooks


def test_a_recorded_step_is_compared_without_masked_scores(tokenizer, recorded, monkeypatch):
    "A token at -3e38 is no reason to take other scores for the same"
    model, shift = small_model(kind=Qwen3Config), [0.]
    model.get_output_embeddings().register_forward_hook(
        lambda module, args, scores: scores.index_fill(-1, torch.tensor([5]), -3e38))
    def record(step, device): return lambda: step() + shift[0] * torch.randn(512)
    monkeypatch.setattr(cuda_graphs, "record_graph", record)
    for shift[0], same in ((0., True), (1., False)):
        decoder = Decoder(model, tokenizer, max_new_tokens=20, batch_size=2)
        with torch.no_grad(): dict(decoder.answers(PROMPTS))
        assert decoder.replays is same


@pytest.mark.parametrize("why", ["waits", "differs", "out of memory"])
def test_a_step_that_cannot_be_recorded_is_run(why, tokenizer, recorded, monkeypatch):
    "And tried once"
    model, tried = small_model(kind=Qwen3Config), []
    want = without_recording(model, tokenizer, PROMPTS, max_new_tokens=20)
    def record(step, device):
        tried.append(1)
        if why == "waits": raise RuntimeError("called a synchronizing CUDA operation")
        if why == "out of memory": raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda: step() + 1
    monkeypatch.setattr(cuda_graphs, "record_graph", record)
    decoder = Decoder(model, tokenizer, max_new_tokens=20, batch_size=2)
    with torch.no_grad(): got = dict(decoder.answers(PROMPTS))
    assert [got[i] for i in range(6)] == want and tried == [1] and not decoder.replays


def test_what_is_recorded_in_part_or_not_at_all(tokenizer, recorded):
    "A window, few tokens, another thread and autocast: rows are answered as they were"
    windowed = small_model(kind=MistralConfig, sliding_window=8)
    assert alone(windowed, tokenizer, PROMPTS[:2], max_new_tokens=20) and not recorded
    model = small_model(kind=Qwen3Config)
    assert alone(model, tokenizer, PROMPTS[:2], max_new_tokens=8) and not recorded
    beside = Thread(target=alone, args=(model, tokenizer, PROMPTS[:1]), kwargs=dict(max_new_tokens=20))
    beside.start()
    beside.join()
    assert not recorded
    with torch.autocast("cpu", torch.bfloat16):
        assert alone(model, tokenizer, PROMPTS[:2], max_new_tokens=20) and not recorded
    assert alone(model, tokenizer, PROMPTS[:2], max_new_tokens=20) and len(recorded) == 2


def test_rows_in_fixed_places_survive_out_of_memory(tokenizer, recorded, monkeypatch):
    model, calls = small_model(kind=Qwen3Config), []
    want = without_recording(model, tokenizer, PROMPTS, max_new_tokens=20)
    real = cuda_graphs.StaticRows.scores
    def scores(self):
        calls.append(len(self.rows))
        if len(calls) == 9: raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self)
    monkeypatch.setattr(cuda_graphs.StaticRows, "scores", scores)
    decoder = Decoder(model, tokenizer, max_new_tokens=20, batch_size=4)
    with torch.no_grad(): got = dict(decoder.answers(PROMPTS))
    assert [got[i] for i in range(6)] == want and decoder.most < 4


def test_places_that_are_full_are_made_larger(tokenizer, recorded, monkeypatch):
    "Rows go on where they were, and those that wait move in"
    monkeypatch.setattr(cuda_graphs, "_ROOM", 6)
    monkeypatch.setattr(cuda_graphs.StaticRows, "__init__", with_exact_length(cuda_graphs.StaticRows.__init__))
    model = small_model(kind=Qwen3Config)
    model.generation_config.eos_token_id = [*range(7, 512, 12)]
    want = without_recording(model, tokenizer, PROMPTS, max_new_tokens=24)
    decoder = Decoder(model, tokenizer, max_new_tokens=24, batch_size=3)
    with torch.no_grad(): got = dict(decoder.answers(PROMPTS))
    assert [got[i] for i in range(6)] == want and len(recorded) > 2 and decoder.replays


def with_exact_length(make):
    "Use places with exactly the requested number of tokens"
    def init(self, running, length):
        make(self, running, length)
        self.length = length
    return init


@pytest.mark.parametrize("prompt", [0, 3])
def test_what_is_nan_is_compared_and_spoils_no_other_answer(prompt, tokenizer, recorded):
    "In a row that comes first or later, whose place another one takes"
    model, prompts = small_model(kind=Qwen3Config), [list(p) for p in PROMPTS]
    prompts[prompt][0] = 500
    with torch.no_grad(): model.get_input_embeddings().weight[500] = float("nan")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad(): model.lm_head.weight[500] = 0   # or all scores would be NaN
    want = without_recording(model, tokenizer, prompts, max_new_tokens=20)
    for most in (2, 4):
        decoder = Decoder(model, tokenizer, max_new_tokens=20, batch_size=most)
        with torch.no_grad(): got = dict(decoder.answers(prompts))
        assert [got[i] for i in range(6)] == want
    assert recorded


def test_answers_of_a_word_are_not_recorded(tokenizer, recorded):
    model = small_model(kind=Qwen3Config)
    model.generation_config.eos_token_id = [*range(512)]
    assert {a.n_tokens for a in continue_tokens(model, tokenizer, PROMPTS, max_new_tokens=200, batch_size=2)} == {1}
    assert not recorded


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_a_batch_has_at_least_one_row(size):
    with pytest.raises(ConfigError, match="batch_size: it is .*Fix: batch_size=32"):
        Decoder(None, None, batch_size=size)
