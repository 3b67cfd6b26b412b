"""One run whose tokenizer has a BOS and whose template supports reasoning, with its merged folder; trained once."""
import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_nb.config.load import load_config
from sft_nb.proof import prove as proving# the module
from sft_nb.proof.merge import merge
from sft_nb.runs.directory import Run
from sft_nb.tokens.tokenizer import ASSETS
from sft_nb.training.train import train

TEMPLATE = ("{{ bos_token }}{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] }}"
            "{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
            "{%- if enable_thinking is defined and enable_thinking %}{{- '<think>\\n' }}{%- endif %}{%- endif %}")
OTHER = "{%- for m in messages %}{{- m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor %}{{- 'assistant: ' }}"
FEW = dict(prompts=2, max_new_tokens=18)


def with_bos(folder: Path) -> str:
    "The tokenizer of `tiny` with a BOS that its template writes"
    shutil.copytree(ASSETS/"tiny", folder, ignore=shutil.ignore_patterns("model.safetensors"))
    file = folder/"tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(bos_token="<|endoftext|>")))
    (folder/"chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


@dataclass
class Served:
    folder: Path      # for files that tests write
    run: Run
    merged: Path      # float32

    @cached_property
    def tokenizer(self): return AutoTokenizer.from_pretrained(self.merged)
    @cached_property
    def tuned(self): return AutoModelForCausalLM.from_pretrained(self.merged, dtype=torch.float32).eval()
    @cached_property
    def base(self): return AutoModelForCausalLM.from_pretrained(ASSETS/"tiny", dtype=torch.float32).eval()

    def copy(self, name: str, of: Path | None = None) -> Path:
        "A copy of the merged folder, in which a test can break something"
        shutil.rmtree(self.folder/name, ignore_errors=True)
        return Path(shutil.copytree(of or self.merged, self.folder/name))

    def prove(self, **how): return proving.prove(self.run, **FEW | how)


def trained(folder: Path, **how) -> Served:
    "A short run that answers differently from its base"
    own = dict(method="lora", max_steps=14, max_samples=112, eval_samples=6, save_steps=100, learning_rate=1e-2,
               per_device_train_batch_size=8, preflight=False, max_new_tokens=24)
    cfg = load_config("demo", runs_dir=str(folder/"runs"), tokenizer=with_bos(folder/"tokenizer"), **own | how)
    run = train(cfg)
    return Served(folder, run, merge(run, out=folder/"merged", dtype="float32", prompts=2))


def edited(file: Path, **settings) -> None:
    "Change settings in a JSON file; None removes one"
    said = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({k: v for k, v in said.items() if v is not None}))


def base_weights() -> Path: return ASSETS/"tiny"


def assert_named(proof, name: str, *, link: str = "server") -> None:
    "Assert that this stage is the first that failed, and has a fix"
    assert not proof.same and proof.broken.name == f"{link} {name}", str(proof)
    assert proof.fix and proof.stages[-1] is proof.broken and proof.exit_code == 1
    assert len(proof.broken.finding.says) <= 300


@contextmanager
def proofs_of(served: Served):
    "A context in which the run's reference answers and merged weights are computed once"
    told, expected = proving.answer_as_reference, proving.Expected
    bench = proving.Workbench(served.run.config, is_resolved=True)
    once = cache(lambda source, more: told(bench, served.run, source, **dict(more)))
    made = cache(lambda source, more: expected(bench, source, served.run.path, once(source, more)))
    known = []

    def asked(bench, run, source, **more):
        if run.path != served.run.path: return told(bench, run, source, **more)
        known[:] = [tuple(more.items())]
        return once(source, known[0])

    def weights(bench, source, run, reference, quantised=None):
        if run != served.run.path: return expected(bench, source, run, reference, quantised)
        found = made(source, known[0])
        found.quantised = quantised
        return found
    with pytest.MonkeyPatch.context() as m:
        m.setattr(proving, "answer_as_reference", asked)
        m.setattr(proving, "Expected", weights)
        yield served
