"""What happens to real rows? Every set in the shared folder through three tokenizers, in one table.

    python benchmarks/reports.py [--json] [--max-length 40000]

Qwen3 and SmolLM2 with a chat template, Mistral as plain text. Sets whose fields match no format are made messages
here, as a task of your own would. Writes benchmarks/results/reports.json.
"""
import argparse, json

from common import save, shared, template

TOKENIZERS = dict(qwen3=("tokenizers/qwen3", "qwen3.jinja"),
                  mistral=("tokenizers/mistral-v3-hf", None),
                  smollm2=("tokenizers/smollm2", "qwen2_5.jinja"))


def lines(path): return (json.loads(line) for line in shared(path).open(encoding="utf-8"))


def whole(path): return iter(json.loads(shared(path).read_text()))


def pair(question, answer):
    return dict(messages=[dict(role="user", content=question), dict(role="assistant", content=answer)])


def med_nli():
    "Premise and hypothesis -> label"
    from sft_nb.rows.files import file_source
    for _, r in file_source(shared("data/med_nli/MED.tsv")):
        yield pair(f"Premise: {r['sentence1']}\nHypothesis: {r['sentence2']}", r["gold_label"])


def qmsum():
    "A meeting and a question about it -> the answer; long documents"
    for name in ("ALL_test", "Committee_train"):
        for m in lines(f"data/qmsum/{name}.jsonl"):
            text = "\n".join(f"{t['speaker']}: {t['content']}" for t in m["meeting_transcripts"])
            for q in m["general_query_list"] + m["specific_query_list"]:
                yield pair(f"{text}\n\n{q['query']}", q["answer"])


def legal():
    "A clause -> what it says in plain words"
    for r in json.loads(shared("data/legal_plain_english/all_v1.json").read_text()).values():
        yield pair(f"Say in plain words:\n{r['original_text']}", r["reference_summary"])


def self_instruct():
    "An instruction with its instances, as rows of the Alpaca format"
    for r in lines("data/self_instruct_seed/seed_tasks.jsonl"):
        for i in r["instances"]: yield dict(instruction=r["instruction"], input=i["input"], output=i["output"])


SETS = dict(
    gsm8k=lambda: lines("data/gsm8k/train.jsonl"),
    unit_conversion=lambda: lines("data/unit_conversion_deepmind/train.jsonl"),
    med_nli=med_nli,
    mistral_nli=lambda: lines("data/mistral_nli_sample/sample_ft.jsonl"),
    qmsum=qmsum,
    legal=legal,
    fastchat=lambda: whole("data/fastchat_chat/dummy_conversation.json"),
    glaive=lambda: whole("data/glaive_toolcall/glaive_toolcall_en_demo.json"),
    self_instruct=self_instruct)
COLUMNS = dict(set="<16", tokenizer="<9", format="<18", rows=">6,", kept=">6,", examples=">8,", tokens=">11,",
               share_supervised=">8.1%", median=">7,", p95=">6,", longest=">8,", duplicates=">6,")
HEADS = dict(share_supervised="learned", p95="95%", duplicates="twice")


def report(name:str, tokenizer, max_length:int)->dict:
    "The figures of one set"
    import numpy as np
    from sft_nb.config.load import load_config
    from sft_nb.tokens.prepare import prepare
    data = prepare(load_config(eval_samples=0, max_length=max_length), tokenizer, train=SETS[name]())
    n, s = data.train.lengths, data.train
    lost = {k: v for k, v in s.reasons.items()}
    over_128 = (n > 128).sum() + sum(lost.values())
    return dict(set=name, format=data.report.figures["rows_are"].split(" (")[0], rows=s.n_read, kept=s.n_kept,
                dropped=lost, examples=len(n), tokens=int(n.sum()),
                share_supervised=round(float(s.stats["supervised"].sum() / n.sum()), 4),
                median=int(np.median(n)), p95=int(np.percentile(n, 95)), longest=int(n.max()),
                over_128=round(float(over_128 / s.n_read), 4), duplicates=s.duplicates(),
                ends=next(f.status for f in data.report.findings if f.check == "train_ends"), fingerprint=s.fingerprint)


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--max-length", type=int, default=40_000)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    from sft_nb.config.load import load_config
    from sft_nb.tokens.tokenizer import load_tokenizer
    rows = []
    for name, (folder, chat) in TOKENIZERS.items():
        chat = str(template(chat)) if chat else None
        tokenizer = load_tokenizer(load_config(tokenizer=str(shared(folder)), chat_template=chat))
        rows += [dict(tokenizer=name, **report(s, tokenizer, a.max_length)) for s in SETS]
    plain = load_tokenizer(load_config(tokenizer=str(shared("tokenizers/qwen3"))))
    known = report("gsm8k", plain, 512) | dict(tokenizer="qwen3, no template, max_length 512")
    result = save("reports", max_length=a.max_length, gsm8k_as_plain_text=known, rows=rows)
    if a.json: return print(json.dumps(result))
    widths = {k: form.split(",")[0].split(".")[0] for k, form in COLUMNS.items()}
    print(*(format(HEADS.get(k, k), w) for k, w in widths.items()), " dropped")
    for r in sorted(rows, key=lambda r: list(SETS).index(r["set"])):
        dropped = ", ".join(f"{n} {k}" for k, n in r["dropped"].items())
        print(*(format(r[k], form) for k, form in COLUMNS.items()), f" {dropped}")
    print(f"\nGSM8K as plain text in Qwen3 tokens: {known['over_128']:.1%} of the rows over 128 tokens,",
          f"{sum(known['dropped'].values())} over 512")


if __name__ == "__main__": main()
