"""How fast do rows become a batch? sft_nb's collators against TRL's and HF's.

    python benchmarks/collate.py [--json] [--times 5]

512 rows of log-normal length (mean about 290 tokens), batches of 16, medians. `ratio` is sft_nb / TRL in rows a second,
padded; `ratio_flat` the same flattened. Writes benchmarks/results/collate.json.
"""
import argparse, json

from common import alternating, median_rate, save


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--times", type=int, default=5)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    import numpy as np
    from transformers import DataCollatorForSeq2Seq
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from sft_nb.batches.layout import DataCollatorFlattening, DataCollatorForCausalLM
    from sft_nb.config.load import load_config
    from sft_nb.tokens.tokenizer import load_tokenizer
    tok = load_tokenizer(load_config())
    rng = np.random.default_rng(0)
    ids = [rng.integers(4, 700, int(n)).tolist() for n in np.clip(rng.lognormal(5.5, .6, 512), 8, 2000)]
    rows = [dict(input_ids=i, labels=[-100] * (len(i) // 3) + i[len(i) // 3:]) for i in ids]
    pad = tok.pad_token_id
    collators = dict(sft_nb=DataCollatorForCausalLM(tok), sft_nb_flat=DataCollatorFlattening(),
                     trl=DataCollatorForLanguageModeling(pad_token_id=pad),
                     trl_flat=DataCollatorForLanguageModeling(pad_token_id=pad, padding_free=True),
                     seq2seq=DataCollatorForSeq2Seq(tok))

    def job(collate):
        def all_rows():
            for _ in range(4):
                for i in range(0, 512, 16): collate([dict(r) for r in rows[i:i + 16]])
        return all_rows

    seconds = alternating({k: job(c) for k, c in collators.items()}, times=a.times)
    rate = {k: round(median_rate(4 * 512, s)) for k, s in seconds.items()}
    result = save("collate", ratio=round(rate["sft_nb"] / rate["trl"], 2),
                  ratio_flat=round(rate["sft_nb_flat"] / rate["trl_flat"], 2),
                  mean_tokens=round(sum(map(len, ids)) / 512), rows_per_second=rate)
    if a.json: return print(json.dumps(result))
    for k, v in rate.items(): print(f"{k:<12} {v:>9,} rows/s")
    print(f"sft_nb / trl: {result['ratio']:.1f}x padded, {result['ratio_flat']:.1f}x flattened")


if __name__ == "__main__": main()
