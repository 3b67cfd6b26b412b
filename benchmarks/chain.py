"""One training on smollm2 (SmolLM2-135M-Instruct) through every format and server: are the answers the same?

    python benchmarks/chain.py [--steps 40] [--prompts 12] [--json]

LoRA in 16 bits on rows of MED (`nli` of benchmarks/real.py). It is merged in float32, bfloat16 and float16, and each
merge is compared with base and adapter on held-out rows: `noise` is the mean difference of the base's own logits in
that format, `difference` that of the merged model to the adapter, `adapter` what the adapter changes. The bfloat16
merge is then served by transformers, and as GGUF (float16, q8_0) by llama.cpp; `sft_nb prove` compares each stage.
llama.cpp's server comes from the package xllamacpp, the converter from the tests, as neither is required by sft_nb.
Writes benchmarks/results/real_chain.json.
"""
import argparse, json, os, sys, tempfile, time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from common import HERE, save
from real import config_of

sys.path += [str(HERE.parent/"tests/proof"), str(HERE.parent/"tests")]
SERVED = dict(float16="F16", q8_0="Q8_0")
FIGURES = dict(noise="noise_of_the_format", difference="mean_difference", adapter="effect_of_the_adapter",
               equal_answers="equal_answers", loss="loss", loss_merged="loss_merged", loss_of_base="loss_of_base")


def merged(run, folder:Path, dtype:str)->dict:
    "Merge in a format; its figures"
    from sft_nb.proof.merge import merge
    report = json.loads((merge(run, out=folder/dtype, dtype=dtype)/"parity.json").read_text())
    figures = {name: report["figures"].get(key) for name, key in FIGURES.items()}
    return dict(format=dtype, status=report["status"], prompts=report["figures"].get("prompts"), **figures)


def proven(run, prompts:int, **named)->dict:
    "The verdict and what each stage found"
    from sft_nb.proof.prove import prove
    began = time.perf_counter()
    proof = prove(run, prompts=prompts, max_new_tokens=12, **named)
    stages = [dict(name=s.name, status=s.finding.status, says=s.finding.says, figures=s.figures_in_words())
              for s in proof.stages]
    return dict(verdict=proof.verdict, broken=proof.broken and proof.broken.name, stages=stages,
                seconds=round(time.perf_counter() - began, 1))


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--prompts", type=int, default=12)
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    a = p.parse_args()
    import xllamacpp
    from as_gguf import convert
    from test_prove_transformers import transformers_serve
    from sft_nb.training.train import train
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        settings = dict(max_steps=a.steps, save_steps=a.steps, eval_samples=32, preflight=False,
                        per_device_train_batch_size=16, gradient_accumulation_steps=1)
        run = train(config_of("nli", 1, str(folder), settings))
        merges = [merged(run, folder, dtype) for dtype in ("float32", "bfloat16", "float16")]
        source, served = folder/"bfloat16", {}
        with transformers_serve() as url: served["transformers"] = proven(run, a.prompts, folder=source, server=url)
        for kind, name in SERVED.items():
            file = convert(source, folder/f"{name}.gguf", name)
            params = xllamacpp.CommonParams()
            params.model.path, params.n_ctx, params.n_parallel, params.port = str(file), 1024, 1, 0
            params.warmup, params.sampling.temp = False, 0
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
            server = xllamacpp.Server(params)
            served[f"llama.cpp, {kind}"] = proven(run, a.prompts, folder=source, gguf=file,
                                                  server=server.listening_address)
            del server
        result = save("real_chain", job="nli", settings=settings, prompts=a.prompts, merges=merges, served=served)
    if a.json: return print(json.dumps(result))
    for m in merges:
        print(f"{m['format']}: {m['status']}, difference {m['difference']:.4g}, noise {m['noise']}, adapter "
              f"{m['adapter']:.4g}, answers {m['equal_answers']}, loss {m['loss']:.4g} -> {m['loss_merged']:.4g}")
    for name, s in served.items():
        print(f"{name}: {s['verdict']}; {sum(stage['status'] == 'ok' for stage in s['stages'])} of {len(s['stages'])} "
              "stages ok")


if __name__ == "__main__": main()
