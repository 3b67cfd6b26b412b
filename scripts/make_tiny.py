"""Make `model="tiny"`: write its text, train its tokenizer, pretrain it, and leave the log beside the weights.

    make tiny                     # about 15 minutes on two CPU cores

The base must know words, sums and how a chat turn ends, and must *not* know the demo's task: SFT has to teach that.
So it reads stories, plain equations and short chats of other kinds. No chat in its text asks "How many".
LoRA cannot teach a token that the base never saw, so the chat tokens must be trained before fine-tuning begins.
"""
import argparse, hashlib, json, math, random, time
from pathlib import Path

from sft_nb.tasks.arithmetic import NAMES, THINGS   # the same words in different sentences

PLACES = "the park, the school, the market, the river, the garden, the beach, the library, the farm".split(", ")
OPPOSITES = dict(big="small", hot="cold", up="down", fast="slow", old="new", wet="dry", hard="soft", full="empty",
                 high="low", long="short", dark="light", early="late")
OPPOSITES |= {b: a for a, b in OPPOSITES.items()}
COLOURS = dict(sky="blue", grass="green", snow="white", coal="black", sun="yellow", blood="red")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
HOMES = dict(bird="nest", bee="hive", dog="house", fish="sea", fox="den", cow="barn")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}")


def equation(r):
    "A sum, difference or product with its value, like `14 + 23 = 37`, in the demo's range of numbers"
    kind = r.choice("++--*")
    a, b = r.randrange(100), r.randrange(100)
    if kind == "*": a, b = r.randrange(2, 13), r.randrange(2, 13)
    elif r.random() < .3: a = r.randrange(100, 200)
    if kind == "-" and b > a: a, b = b, a
    return f"{a} {kind} {b} = {dict(zip('+-*', (a + b, a - b, a * b)))[kind]}"


def facts(r): return "\n".join(equation(r) for _ in range(r.randrange(4, 12)))


def story(r):
    "Three to five sentences in which somebody goes somewhere with some things"
    who, friend = r.sample(NAMES, 2)
    thing, place, n = r.choice(THINGS), r.choice(PLACES), r.randrange(2, 100)
    boxes = r.randrange(2, 13)
    lines = [f"{who} has {n} {thing}.", f"{who} goes to {place} with {friend}.", f"{friend} gives {who} some {thing}.",
             f"{who} gives some {thing} away.", f"{who} puts the {thing} in {boxes} boxes.",
             f"{who} buys more {thing} at {place}.", f"There are {n} {thing} in each box.",
             f"{who} loses some {thing} at {place}.", f"{who} finds {n} {thing} there.",
             f"Now {who} has a lot of {thing}.", f"{friend} asks how the {thing} are.",
             f"They have {n} {thing} in all."]
    return " ".join(r.sample(lines, r.randrange(3, 6)))


def small_talk(r):
    "A question about words and its answer"
    name, friend = r.sample(NAMES, 2)
    thing = r.choice(THINGS)
    word, other = r.choice(list(OPPOSITES.items()))
    what, colour = r.choice(list(COLOURS.items()))
    animal, home = r.choice(list(HOMES.items()))
    day = r.randrange(7)
    return r.choice([
        (f"Hello, I am {name}.", f"Hello {name}, nice to meet you."),
        (f"Say hello to {name} and {friend}.", f"Hello {name} and {friend}."),
        (f"What is the opposite of {word}?", f"The opposite of {word} is {other}."),
        (f"What colour is the {what}?", f"The {what} is {colour}."),
        (f"What day comes after {DAYS[day]}?", f"{DAYS[(day + 1) % 7]} comes after {DAYS[day]}."),
        (f"Where does a {animal} live?", f"A {animal} lives in a {home}."),
        (f"Spell {thing}.", " ".join(thing)),
        (f"Say {thing} twice.", f"{thing} {thing}"),
        (f"{name} gives {thing} to {friend}. Who has the {thing} now?", f"{friend} has the {thing}."),
        (f"Tell me about {name}.", story(r)),
        (f"Write a heading about {thing}.", f"#### {thing}"),
    ])


def numbers(r):
    "A question about given numbers and its answer: reading, comparing, calculating; never a word problem"
    name, friend = r.sample(NAMES, 2)
    thing, other = r.sample(THINGS, 2)
    a, b, c = r.sample(range(2, 100), 3)
    high, low = max(a, b), min(a, b)
    x, y = r.randrange(2, 13), r.randrange(2, 13)
    less, reckoned = r.randrange(2, min(100, a + b)), equation(r)
    text = r.choice([f"{name} has {a} {thing}. {friend} has {b} {other}.", f"{name} sees {a} {thing} and {b} {other}.",
                     f"There are {a} {thing} at {r.choice(PLACES)}. {friend} has {b} of them in boxes."])
    return r.choice([
        (f"Write down the numbers. {text}", f"{a}, {b}"),
        (f"Write down the numbers. {text} {name} buys {c}.", f"{a}, {b}, {c}"),
        (f"Write the last number as a heading. {text}", f"#### {b}"),
        (f"{name} has {a} {thing}. {friend} has {b} {other}. What does {friend} have?", f"{b} {other}"),
        (f"Which is larger, {a} or {b}?", f"{high} is larger."),
        (f"Add {b} to {a}.", f"{a} + {b} = {a + b}"),
        (f"Take {low} from {high}.", f"{high} - {low} = {high - low}"),
        (f"Multiply {x} by {y}.", f"{x} * {y} = {x * y}"),
        (f"Work out {reckoned.split(' =')[0]}.", reckoned),
        (f"Add {b} to {a}, then take {less}.", f"{a} + {b} = {a + b}\n{a + b} - {less} = {a + b - less}"),
        (f"Begin with {a}. Add {b}. Take {less}.", f"{a} + {b} = {a + b}\n{a + b} - {less} = {a + b - less}"),
    ])


def turn(r):
    "One question and its answer, of a kind that the demo does not use"
    return numbers(r) if r.random() < .6 else small_talk(r)


def chat(r):
    "One to three turns, sometimes under a system message"
    messages = [dict(role="system", content="You are a kind helper.")] if r.random() < .3 else []
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        question, answer = turn(r)
        messages += [dict(role="user", content=question), dict(role="assistant", content=answer)]
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)


def documents(seed):
    "An endless stream of documents, determined by the seed"
    r = random.Random(seed)
    while True: yield r.choices((story, facts, chat), (2, 2, 6))[0](r)


def make_tokenizer(out, seed):
    "Byte-level BPE of about 700 tokens, one token a digit, trained on 20,000 documents"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    docs = documents(seed)
    text = [next(docs) for _ in range(20_000)]
    for s in SPECIALS: text = [t.replace(s, "\n") for t in text]
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(text, trainers.BpeTrainer(
        vocab_size=768, special_tokens=SPECIALS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, eos_token="<|im_end|>", pad_token="<|pad|>",
                                   extra_special_tokens=["<|im_start|>", "<|endoftext|>"], model_max_length=2048,
                                   clean_up_tokenization_spaces=False)
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out)
    return fast


def make_model(tokenizer, seed):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=768, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, rope_theta=10_000.0, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def batches(tokenizer, seed, *, batch, length):
    "Packed (batch, length) blocks of token ids: documents one after another, `<|endoftext|>` between them"
    import torch
    docs, end, ids = documents(seed), tokenizer.convert_tokens_to_ids("<|endoftext|>"), []
    while True:
        while len(ids) < batch * length:
            more = tokenizer([next(docs) for _ in range(200)], add_special_tokens=False)["input_ids"]
            for doc in more: ids += [end, *doc]
        yield torch.tensor(ids[:batch * length]).view(batch, length)
        ids = ids[batch * length:]


def pretrain(model, blocks, *, steps, peak_lr, log_every=50):
    "AdamW with warm-up and cosine decay; returns one log line for every `log_every` steps"
    import torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(.9, .95), weight_decay=.1)
    log, began = [], time.perf_counter()
    for step in range(1, steps + 1):
        x = next(blocks)
        rate = peak_lr * min(step / 100, .5 * (1 + math.cos(math.pi * step / steps)) + .01)
        for group in optimizer.param_groups: group["lr"] = rate
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % log_every == 0:
            seconds = round(time.perf_counter() - began, 1)
            log.append(dict(step=step, loss=round(loss.item(), 4), learning_rate=rate, seconds=seconds))
            print(log[-1], flush=True)
    return log


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "sft_nb/assets/tiny")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--steps", type=int, default=2200)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--length", type=int, default=256)
    p.add_argument("--peak-lr", type=float, default=3e-3)
    a = p.parse_args()
    import torch, transformers
    tokenizer = make_tokenizer(a.out, a.seed)
    model = make_model(tokenizer, a.seed).train()
    n = sum(p.numel() for p in model.parameters())
    print(f"{n:,} parameters, {len(tokenizer)} tokens in the vocabulary")
    blocks = batches(tokenizer, a.seed + 1, batch=a.batch, length=a.length)
    log = pretrain(model, blocks, steps=a.steps, peak_lr=a.peak_lr)
    model.to(torch.bfloat16).save_pretrained(a.out)
    weights = a.out / "model.safetensors"
    options = "--seed {seed} --steps {steps} --batch {batch} --length {length} --peak-lr {peak_lr}".format(**vars(a))
    record = dict(command=f"python scripts/make_tiny.py {options}",
                  seed=a.seed, parameters=n, tokens=a.steps * a.batch * a.length, torch=torch.__version__,
                  transformers=transformers.__version__, bytes=weights.stat().st_size,
                  sha256=hashlib.sha256(weights.read_bytes()).hexdigest(), log=log)
    (a.out / "pretraining.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__": main()
