"""Near duplicates among real rows: 1% are planted, each a copy of a row with two of its words replaced, or three.

    python benchmarks/near_duplicates.py

10,000 rows of ../shared/data (GSM8K, legal texts, seed tasks, unit conversion) and 100 copies of rows of at least 30
words, shuffled. A pair that was found and not planted counts as wrong. Prints recall, precision and the seconds of
`near_duplicates`, the median of three; of datasketch too, if it is installed, on the same words and pairs of words."""
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SFT_NB_SHARED", ROOT.parent/"shared"))/"data"
ROWS, PLANTED, LEAST_WORDS = 10_000, 100, 30


def json_lines(path:str)->list[dict]: return [json.loads(line) for line in (DATA/path).open(encoding="utf-8")]


def real_rows()->list[dict]:
    found = [(r["question"], r["answer"]) for name in ("train", "test") for r in json_lines(f"gsm8k/{name}.jsonl")]
    legal = json.loads((DATA/"legal_plain_english/all_v1.json").read_text()).values()
    found += [(r["original_text"], r["reference_summary"]) for r in legal]
    for r in json_lines("self_instruct_seed/seed_tasks.jsonl"):
        found.append((f"{r['instruction']}\n{r['instances'][0]['input']}", r["instances"][0]["output"]))
    found += [(r["question"], r["answer"]) for r in json_lines("unit_conversion_deepmind/train.jsonl")]
    found = dict.fromkeys((q.strip(), a.strip()) for q, a in found if q.strip() and a.strip())
    return [dict(question=q, answer=a) for q, a in found][:ROWS]


def plant(rows:list[dict], words:int)->tuple[list[dict],dict[int,int]]:
    "Shuffled rows with copies, and number of a copy -> number of its original"
    random_ = random.Random(0)
    vocabulary = sorted({word for row in rows for word in row["question"].split()})
    long = [k for k, row in enumerate(rows) if len(" ".join(row.values()).split()) >= LEAST_WORDS]
    all_rows, originals = [*rows], {}
    for k in random_.sample(long, PLANTED):
        copy = dict(rows[k])
        for _ in range(words):
            lengths = [len(copy[side].split(" ")) for side in copy]
            side = random_.choices([*copy], lengths)[0]
            text = copy[side].split(" ")
            text[random_.randrange(len(text))] = random_.choice(vocabulary)
            copy[side] = " ".join(text)
        originals[len(all_rows)] = k
        all_rows.append(copy)
    order = random_.sample(range(len(all_rows)), len(all_rows))
    place = {k: at for at, k in enumerate(order)}
    return [all_rows[k] for k in order], {place[a]: place[b] for a, b in originals.items()}


def with_datasketch(rows:list[dict])->float|None:
    "Seconds of datasketch for signatures and candidates alone; None if it is not installed"
    try: from datasketch import MinHash, MinHashLSH
    except ImportError: return None
    began, index = time.process_time(), MinHashLSH(threshold=.8, num_perm=64)
    texts = [" ".join(row.values()).split() for row in rows]
    sets = [{w.encode() for w in (*words, *map(" ".join, zip(words, words[1:])))} for words in texts]
    for k, signature in enumerate(MinHash.bulk(sets, num_perm=64, seed=0)):
        index.query(signature)
        index.insert(k, signature)
    return time.process_time() - began


def measure(words:int)->dict:
    "What is found if this many words of each copy are replaced"
    from sft_nb.config.load import load_config
    from sft_nb.extras.near_duplicates import near_duplicates
    from sft_nb.tokens.prepare import prepare
    rows, originals = plant(real_rows(), words)
    data = prepare(load_config(task="chat", eval_samples=0, max_length=8192), train=rows)
    seconds, cpu = [], []
    for _ in range(3):
        began, began_cpu = time.monotonic(), time.process_time()
        found = near_duplicates(data.train, most=None)
        seconds.append(round(time.monotonic() - began, 2))
        cpu.append(round(time.process_time() - began_cpu, 2))
    row = data.train.stats["row"].tolist()
    pairs = {frozenset((row[k], row[int(found[k])])) for k in np.flatnonzero(found >= 0).tolist()}
    planted = {frozenset(pair) for pair in originals.items()}
    right = len(pairs & planted)
    return dict(words_replaced=words, rows=len(rows), planted=len(planted), found=len(pairs), right=right,
                recall=right / len(planted), precision=right / max(1, len(pairs)),
                seconds=statistics.median(seconds), cpu_seconds=statistics.median(cpu),
                cpu_seconds_of_datasketch=with_datasketch(rows))


def main():
    made = measure(2) | dict(three_words=measure(3), load=os.getloadavg()[0], cpus=os.cpu_count(),
                             python=platform.python_version(), numpy=np.__version__)
    print(json.dumps(made, indent=1))
    (ROOT/"benchmarks/results/near_duplicates.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__": main()
