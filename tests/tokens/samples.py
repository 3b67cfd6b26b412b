"Rows and settings shared by the tests of tokens"
import json, random
from pathlib import Path

from sft_nb.config.load import load_config


def pairs(n, seed=0):
    "Questions and answers of various lengths"
    r, rows = random.Random(seed), []
    for k in range(n):
        question = f"{k}: {r.randint(0, 99)} and {r.randint(0, 99)}?" + " well" * r.randint(0, 30)
        rows.append(dict(question=question, answer=f"#### {r.randint(0, 99)}" + " so" * r.randint(0, 30)))
    return rows


def no_eval(**settings): return load_config(eval_samples=0, **settings)


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def trl_templates():
    "Every chat template that trl ships"
    import trl
    return sorted((Path(trl.__file__).parent/"chat_templates").glob("*.jinja"))


def trl_template(name): return str(next(t for t in trl_templates() if t.name == name))


def finding(data, check): return next(f for f in data.report.findings if f.check == check)


def supervised(tokenizer, data):
    "The supervised part of each example as text"
    return [tokenizer.decode([l for l in x["labels"] if l != -100]) for x in data.train.tokens]
