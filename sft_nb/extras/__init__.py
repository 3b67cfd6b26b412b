"""Optional parts. The core asks for them by `sft_nb.base.extensions.extension`, and works without this folder."""
from functools import partial
from importlib import import_module

# module here -> its names that are public names of `sft_nb`
PUBLIC = {"losses": "LossState LossPanel", "plan_panel": "PlanState PlanPanel", "html_report": "run_page",
          "gguf_checks": "gguf_adapter", "search": "Search search"}


def _load_part(module:str, name:str=""):
    "A module here, or an object of it"
    found = import_module(f".{module}", __name__)
    return getattr(found, name) if name else found


# kind of extension -> a function that makes it, called when the core first asks for one
EXTENSIONS = {
    "public_names": lambda: {f"extras.{module}": names for module, names in PUBLIC.items()},
    "known_names": lambda: _load_part("other_tools", "OtherTools")(),
    "run_page": partial(_load_part, "html_report", "run_page"),
    "search": partial(_load_part, "search", "search"),
    "server_evaluator": partial(_load_part, "openai_client", "ServerEvaluator"),
    "gguf_adapter": partial(_load_part, "gguf_checks", "gguf_adapter"),
    "proof_gguf": partial(_load_part, "gguf_checks", "GgufLink"),
    "proof_server": partial(_load_part, "server_checks", "ServerLink"),
    "bases": partial(_load_part, "gguf_bases"),
    "kernels": partial(_load_part, "kernels"),
    "loss": partial(_load_part, "cpu_cross_entropy"),
    "weights": partial(_load_part, "packed_experts"),
    "parallelism": partial(_load_part, "sharding"),
}
