__version__ = "0.1.0"

import logging as _logging, sys as _sys

from .base.installation import check_platform as _check_platform, set_torch_environment as _set_torch_environment
from .base.installation import pause_garbage_collection as _pause_garbage_collection
from .base.extensions import extension as _extension, note_missing as _note_missing, REINSTALL as _REINSTALL

_check_platform()
_set_torch_environment()

# Public names are handed out when they are first asked for (PEP 562): `import sft_nb` loads no torch.
_NAMES = {
    "base.report": "SftError ConfigError Finding Report",
    "config.load": "Config load_config save_config config_names table",
    "rows.readers": "detect to_messages",
    "rows.sources": "open_rows read_rows",
    "tasks.core": "Task Score get_task task task_names",
    "tasks.answers": "final_number",
    "tokens.tokenizer": "load_tokenizer choose_pad",
    "tokens.template": "Template",
    "tokens.turns": "split_conversation",
    "tokens.encode": "encode encode_prompts end_ids",
    "tokens.conversations": "conversation",
    "tokens.dataset": "Data Split",
    "tokens.prepare": "prepare",
    "tokens.display": "spans spans_html spans_text",
    "batches.layout": "DataCollatorForCausalLM DataCollatorFlattening collator_for",
    "model.hardware": "choose_device choose_dtype DEVICES find_device",
    "model.precision": "audit cast_head norms_to_float32 adapters_to_float32 autocast_forward",
    "model.attention": "choose_attention varlen_attention",
    "model.loss": "add_supervised_loss chunked_cross_entropy",
    "model.load": "load_base guard_4bit count_parameters",
    "model.adapter": "load_model load_adapter add_adapter",
    "model.generation": "Generation generate",
    "planning.plan": "Plan plan",
    "workbench": "Workbench resolve",
    "checks.preflight": "preflight",
    "runs.directory": "Run plot list_runs",
    "training.trainer": "SupervisedTrainer",
    "training.train": "train resume build_trainer",
    "training.launch": "launch",
    "evaluation.statistics": "wilson mean_interval difference rows_needed detectable",
    "evaluation.generations": "Answer Scores",
    "evaluation.perplexity": "Forgetting",
    "evaluation.evaluate": "Evaluation evaluate",
    "evaluation.sweep": "Sweep sweep",
    "evaluation.verdict": "Verdict verdict",
    "proof.merge": "merge probe parity",
    "proof.prove": "Proof prove",
    "panels.batches": "BatchState BatchPanel",
    "panels.rows": "DataState DataPanel",
    "panels.run_state": "RunState",
    "panels.run": "RunPanel",
    "panels.conversation": "GenerationState",
    "panels.generation": "GenerationPanel",
} | (_extension("public_names") or {})
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_missing = _note_missing("public_names", "other names are in")
if _missing: _missing += f". Fix: {_REINSTALL}"
# All of them but one come with `import *`: `SupervisedTrainer` is a TRL trainer, and to make it TRL is loaded.
__all__ = [name for name in _HOME if name != "SupervisedTrainer"]


def __getattr__(name):
    if name not in _HOME: raise AttributeError(f"module 'sft_nb' has no attribute {name!r}{_missing}")
    from importlib import import_module
    with _pause_garbage_collection(): module = import_module(f"sft_nb.{_HOME[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__(): return sorted({*globals(), *_HOME})


# Modules by their place in older versions, which users' task files and configs import.
_MOVED = {f"sft_nb.{name}": f"sft_nb.{folder}.{name.split('.')[-1]}" for folder, names in {
    "base": "credentials display escape extensions files installation progress report",
    "config": "settings bases", "rows": "thoughts",
    "model.finetuning": "optimizer model.optimizer model.checkpointing model.parallelism model.trl_trainer",
    }.items() for name in names.split()} | {f"sft_nb.{old}": f"sft_nb.{new}" for new, names in {
    "base.installation": "before_torch base.before_torch", "config.files": "config_files",
    "rows.readers": "rows.formats rows.column_names", "batches.layout": "batches.collate",
    "model.generation": "model.generate model.sampling", "runs.status": "runs.environment",
    "proof.folder": "proof.reference"}.items() for old in names.split()} | (_extension("older_modules") or {})


class _OldNames:
    "The last of Python's finders: it is asked for modules that no file has"
    def find_spec(self, name, path=None, target=None):
        from importlib.util import spec_from_loader
        if name in _MOVED: return spec_from_loader(name, self)
        if _missing and name.startswith("sft_nb."):   # also of `from sft_nb import name`
            raise ImportError(f"no module or public name {name}{_missing}", name=name)

    def create_module(self, spec): return None

    def exec_module(self, module):
        from importlib import import_module
        _sys.modules[module.__name__] = import_module(_MOVED[module.__name__])


_sys.meta_path.append(_OldNames())


# Without the optional package `kernels`, bitsandbytes asks for it at each import on a CPU; nothing here uses it.
_logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(_logging.ERROR)
# In 8 bits it says at each product that it computes in float16, which is what 8 bits mean there.
_logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda line: "inputs will be cast" not in str(line.msg))
