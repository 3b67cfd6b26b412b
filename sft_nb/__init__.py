__version__ = "0.1.0"

import logging as _logging
import sys as _sys
from types import ModuleType as _Module

# Public names are handed out when they are first asked for (PEP 562): `import sft_nb` loads no torch.
_NAMES = {
    "report": "SftError ConfigError Finding Report",
    "config": "Config load_config save_config config_names table",
    "formats": "detect to_messages",
    "tasks.core": "Task Score get_task task_names final_number",
    "rows": "open_rows read_rows",
    "labels": "Template load_tokenizer choose_pad layout encode encode_prompts end_ids spans spans_html",
    "data": "Data Split prepare conversation",
    "collate": "DataCollatorForCausalLM DataCollatorFlattening",
    "attention": "choose_attention varlen_attention",
    "loss": "add_supervised_loss chunked_cross_entropy",
    "precision": "choose_device choose_dtype audit cast_head norms_to_float32 adapters_to_float32 autocast_forward",
    "model": "load_model load_base load_adapter add_adapter guard_4bit count_parameters",
    "generate": "Generation generate",
    "memory": "Plan plan resolve DEVICES find_device",
    "preflight": "preflight collator_for",
    "run": "Run plot runs",
    "train": "train resume build_trainer",
    "launch": "launch",
    "merge": "merge probe parity",
    "evaluate": "Evaluation evaluate wilson",
    "panels.state": "BatchState GenerationState",
    "panels.views": "BatchPanel GenerationPanel",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = [*_HOME]


def __getattr__(name):
    if name not in _HOME: raise AttributeError(f"module 'sft_nb' has no attribute {name!r}")
    from importlib import import_module
    globals()[name] = getattr(import_module(f"sft_nb.{_HOME[name]}"), name)
    return globals()[name]


def __dir__(): return sorted([*globals(), *_HOME])


class _Package(_Module):
    "`sft_nb.train` is the function, whatever was imported before; the module is what `from sft_nb.train import ...` reads"
    def __setattr__(self, name, value):
        if not (name in _HOME and isinstance(value, _Module)): super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package

# Without the optional package `kernels`, bitsandbytes asks for it at each import on a CPU; nothing here uses it.
_logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(_logging.ERROR)
