"""Optional parts. The core asks for them by `sft_nb.base.extensions.extension`, and works without this folder."""
from functools import partial
from importlib import import_module

# module here -> its names that are public names of `sft_nb`
PUBLIC = {"losses": "LossState LossPanel", "plan_panel": "PlanState PlanPanel", "eval_panel": "EvalState EvalPanel",
          "html_report": "run_page", "gguf_checks": "gguf_adapter", "search": "Search search",
          "compare": "compare", "explain": "explain", "card": "make_card write_card", "verify": "verify"}

# modules that stand here, by their names in older versions
OLDER = {f"sft_nb.{part}.{module}": module for part, modules in {
    "evaluation": "openai_client search", "panels": "html_report losses", "rows": "proposals texts tool_calls",
    "batches": "states", "model": "cpu_cross_entropy fsdp kernels own_model sequence_parallel",
    "tokens": "template_cache", "proof": "folder_checks gguf_checks server_checks"}.items()
    for module in modules.split()} | {
    "sft_nb.panels.plan": "plan_panel", "sft_nb.panels.evaluation": "eval_panel",
    "sft_nb.panels.intervals": "eval_panel"} | {
    f"sft_nb.tasks.{name}": f"tasks.{name}" for name in "nli summarize tools translate units".split()}


def _load_part(module:str, name:str=""):
    "A module here, or an object of it"
    found = import_module(f".{module}", __name__)
    return getattr(found, name) if name else found


# kind of extension -> a function that makes it, called when the core first asks for one
EXTENSIONS = {
    "public_names": lambda: {f"extras.{module}": names for module, names in PUBLIC.items()},
    "older_modules": lambda: {old: f"{__name__}.{module}" for old, module in OLDER.items()},
    "known_names": lambda: _load_part("other_tools", "OtherTools")(),
    "run_page": partial(_load_part, "html_report", "run_page"),
    "sweeps": partial(_load_part, "sweeps"),
    "few_shot": partial(_load_part, "few_shot"),
    "commands": partial(_load_part, "cli.commands"),
    "near_duplicates": partial(_load_part, "near_duplicates"),
    "nearest_rows": partial(_load_part, "nearest_rows"),
    "replay": partial(_load_part, "replay", "replay"),
    "card": partial(_load_part, "card"),
    "server_evaluator": partial(_load_part, "openai_client", "ServerEvaluator"),
    "gguf_adapter": partial(_load_part, "gguf_checks", "gguf_adapter"),
    "folder_checks": partial(_load_part, "folder_checks"),
    "proof_gguf": partial(_load_part, "gguf_checks", "GgufLink"),
    "tools": partial(_load_part, "tasks.tools", "TASK"),
    "proof_server": partial(_load_part, "server_checks", "ServerLink"),
    "bases": partial(_load_part, "gguf_bases"),
    "earlier_adapter": partial(_load_part, "earlier_adapter"),
    "own_model": partial(_load_part, "own_model"),
    "kernels": partial(_load_part, "kernels"),
    "decoding": partial(_load_part, "cuda_graphs"),
    "loss": partial(_load_part, "cpu_cross_entropy"),
    "weights": partial(_load_part, "packed_experts"),
    "deepspeed": partial(_load_part, "deepspeed"),
    "deepspeed_steps": partial(_load_part, "deepspeed_steps"),
    "parallelism": partial(_load_part, "sharding"),
    "folders": partial(_load_part, "folders"),
    "encodings": partial(_load_part, "encodings"),
    "template_fixes": partial(_load_part, "template_fixes"),
    "message_shapes": partial(_load_part, "message_shapes"),
    "row_formats": partial(_load_part, "row_formats"),
    "proposals": partial(_load_part, "proposals"),
    "rejections": partial(_load_part, "column_roles", "find_rejections"),
    "column_roles": partial(_load_part, "column_roles"),
    "kept_answers": partial(_load_part, "kept_answers", "KeptAnswers"),
    "name_proposals": partial(_load_part, "name_proposals"),
    "known_values": partial(_load_part, "known_values"),
    "offloading": partial(_load_part, "offloading"),
    "sharded_memory": partial(_load_part, "sharded_memory"),
    "skeletons": partial(_load_part, "template_cache"),
    "states": partial(_load_part, "states"),
    "tasks": partial(_load_part, "tasks"),
    "texts": partial(_load_part, "text_findings"),
    "trackers": partial(_load_part, "trackers"),
    "whole_examples": partial(_load_part, "whole_examples"),
    "windows": partial(_load_part, "windows"),
    "workbooks": partial(_load_part, "workbooks"),
    "workers": partial(_load_part, "workers"),
}
