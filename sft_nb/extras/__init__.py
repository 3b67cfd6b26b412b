"""Optional parts. The core asks for them by `sft_nb.extensions.extension`, and works without this folder."""
from functools import partial
from importlib import import_module

# module here -> its names that are public names of `sft_nb`
PUBLIC = {"losses": "LossState LossPanel", "plan_panel": "PlanState PlanPanel", "html_report": "run_page",
          "gguf_checks": "gguf_adapter"}


def _other_tools():
    from .other_tools import OtherTools
    return OtherTools()


def _run_page():
    from .html_report import run_page
    return run_page


def _server_evaluator():
    from .openai_client import ServerEvaluator
    return ServerEvaluator


def _gguf_adapter():
    from .gguf_checks import gguf_adapter
    return gguf_adapter


def _proof_gguf():
    from .gguf_checks import GgufLink
    return GgufLink


def _proof_server():
    from .server_checks import ServerLink
    return ServerLink


# kind of extension -> a function that makes it, called when the core first asks for one
EXTENSIONS = {
    "public_names": lambda: {f"extras.{module}": names for module, names in PUBLIC.items()},
    "known_names": _other_tools, "run_page": _run_page, "server_evaluator": _server_evaluator,
    "gguf_adapter": _gguf_adapter, "proof_gguf": _proof_gguf, "proof_server": _proof_server,
    "bases": partial(import_module, ".gguf_bases", __name__),
    "kernels": partial(import_module, ".kernels", __name__),
    "loss": partial(import_module, ".cpu_cross_entropy", __name__),
    "weights": partial(import_module, ".packed_experts", __name__),
    "parallelism": partial(import_module, ".sharding", __name__),
}
